"""`openenv sandboxes`: what it lists and how checks are shown."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from openenv.cli.sandboxes import sandboxes


def call(*arguments: str) -> Result:
    return CliRunner().invoke(sandboxes, list(arguments), env={"COLUMNS": "200"})


def test_every_backend_is_listed_with_what_it_offers_and_what_is_missing() -> None:
    result = call("ls")
    assert result.exit_code == 0
    for name in ("local", "docker", "kubernetes", "e2b", "daytona", "process"):
        assert name in result.output
    assert "i_know_there_is_no_isolation=True" in result.output


def test_checks_are_shown_one_by_one_with_a_summary() -> None:
    result = call("check", "process", "--only", "exec.exit-code", "--only", "isolation.tcp")
    assert result.exit_code == 0
    assert "The exit code is the command's." in result.output
    assert "process does not offer isolation" in result.output
    assert "1 passed, 1 not offered" in result.output


def test_a_check_that_does_not_exist_is_a_failure() -> None:
    result = call("check", "process", "--only", "nothing.like.this")
    assert result.exit_code == 1
    assert "no such check" in result.output


def test_an_unknown_backend_is_a_failure() -> None:
    result = call("check", "vm")
    assert result.exit_code != 0
