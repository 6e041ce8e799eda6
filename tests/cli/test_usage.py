"""What every command does alike: short help, wrong options, tables that are read by programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from openenv.cli.__main__ import build
from openenv.cli.rollouts import rollouts
from openenv.rollout import Outcome, RolloutStore, Task


def commands(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


@pytest.mark.parametrize("path", sorted(commands(typer.main.get_command(build()))), ids=" ".join)
def test_every_command_has_help_by_its_short_name_too(path: tuple[str, ...]) -> None:
    runner = CliRunner()
    short, long = (runner.invoke(build(), [*path, option]) for option in ("-h", "--help"))
    assert (short.exit_code, long.exit_code) == (0, 0)
    assert short.output == long.output
    assert "Usage:" in short.output


@pytest.mark.parametrize(("option", "choices"), [("--mode", "production"), ("--log-level", "warning")])
def test_a_wrong_choice_for_mcp_is_a_wrong_option(option: str, choices: str) -> None:
    done = CliRunner().invoke(build(["mcp"]), ["mcp", "nowhere.py", option, "nonsense"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "'nonsense' is not one of" in done.stderr
    assert choices in done.stderr


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one rollout whose names are long."""
    task = Task(instruction="x", task_id="a-task-with-a-name-that-fills-half-a-line")
    outcome = Outcome(
        rollout_id="0123456789abcdef",
        task_id=task.task_id,
        agent="an-agent-with-a-long-name",
        sandbox="local",
        status="ok",
    )
    with RolloutStore(tmp_path / "store") as opened:
        opened.add(outcome, task)
    return tmp_path / "store"


def test_a_list_that_is_not_read_on_a_terminal_is_not_shortened(store: Path) -> None:
    done = CliRunner().invoke(rollouts, ["ls", "--store", str(store)], env={"COLUMNS": "60"})
    assert done.exit_code == 0, done.output
    for word in ("0123456789abcdef", "a-task-with-a-name-that-fills-half-a-line", "an-agent-with-a-long-name"):
        assert word in done.output


def test_an_empty_list_says_what_was_asked_for(store: Path) -> None:
    done = CliRunner().invoke(rollouts, ["ls", "--store", str(store), "--status", "oops", "--agent", "noop"])
    assert done.exit_code == 0
    assert done.output.strip().endswith("status 'oops', agent 'noop'.")
