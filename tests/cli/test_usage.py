"""What every command does alike: help that fits and teaches, wrong options, tables that are read by programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest
import typer
from typer.testing import CliRunner

from openenv import settings
from openenv.cli.__main__ import build
from openenv.cli.model_flags import DIALECTS, ModelFlags
from openenv.cli.rollouts import rollouts
from openenv.cli.rollouts.selection import STATUSES
from openenv.rollout import Outcome, RolloutStore, Task
from openenv.rollout.store.outcome import Status
from openenv.rollout.tasks.task import Dialect


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


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("path", sorted(commands(typer.main.get_command(build()))), ids=" ".join)
def test_help_fits_the_terminal_and_shows_an_example(path: tuple[str, ...], columns: int) -> None:
    shown = CliRunner().invoke(build(), [*path, "--help"], env={"COLUMNS": str(columns)}).output
    lines = shown.splitlines()
    assert max(len(line) for line in lines) <= columns
    if path != ("sandboxes",):
        assert any(line.startswith(("  openenv", '  {"mcp')) for line in lines) or "openenv serve" in shown
    explained = [line for line in lines if line.startswith("  --")]
    assert explained
    begin = {len(line) - len(line.split("  ", 2)[-1].lstrip()) for line in explained if "  " in line.strip()}
    assert len(begin) == 1, "explanations stand in one column"


# Each command, with the names that its options had before.
OLD_NAMES = {
    ("play",): {"--base-url": "--llm-url", "--system": "--system-prompt"},
    ("collect",): {
        "--base-url": "--url", "--llm-endpoint": "--llm-url", "--output-dir": "--output", "--num-episodes": "--episodes"
    },
    ("rollouts", "run"): {"--base-url": "--llm-url", "--repeat": "--samples"},
    ("harbor", "rollout"): {"--out": "--output"},
    ("init",): {"--output-dir": "--output"},
    ("import",): {"--output-dir": "--output"},
    ("fork",): {"--set-env": "--env-var", "--set-secret": "--secret"},
    ("deploy", "k8s"): {"--env": "--env-var"},
}  # fmt: skip


@pytest.mark.parametrize("path", OLD_NAMES, ids=" ".join)
def test_an_earlier_name_of_an_option_is_accepted_but_not_shown(path: tuple[str, ...]) -> None:
    command: click.Command = typer.main.get_command(build())
    for name in path:
        command = command.commands[name]  # type: ignore[attr-defined]
    shown = CliRunner().invoke(build(), [*path, "--help"], env={"COLUMNS": "120"}).output
    for old, new in OLD_NAMES[path].items():
        named = [one for one in command.params if old in one.opts]
        assert [new in one.opts for one in named] == [True]
        assert f"{new}," in shown or f"{new} " in shown
        assert f"{old} " not in shown
        assert f"{old}," not in shown


def test_the_help_of_the_program_lists_every_command_below_its_panel() -> None:
    shown = CliRunner().invoke(build(), ["--help"], env={"COLUMNS": "100"}).output
    titles = [line.removesuffix(":") for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == ["Write", "Serve", "Run and train", "Look", "Operate", "Options"]
    for name in typer.main.get_command(build()).commands:  # type: ignore[attr-defined]
        assert f"\n  {name} " in shown


def test_options_say_what_they_take_in_words() -> None:
    shown = CliRunner().invoke(build(), ["serve", "--help"], env={"COLUMNS": "80"}).output
    for words in ("--max-sessions N ", "--grace SECONDS ", "--port, -p PORT ", "[127.0.0.1]", "Sessions:", "Access:"):
        assert words in shown
    assert "<" not in shown


def test_a_mistake_is_a_plain_line_that_names_the_option() -> None:
    done = CliRunner().invoke(build(["serve"]), ["serve", "x.py", "--runner", "warp"])
    assert done.exit_code == 2
    assert "Error: Invalid value for --runner: 'warp' is not one of auto, thread, inline, process" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "variable", "status", "expected"),
    [
        (["--workers", "0"], "", 2, "--workers: expected a number of processes above 0, or auto, not '0'"),
        (["--workers", "many"], "", 2, "or auto, not 'many'"),
        (["--workers", "2", "--reload"], "", 2, "--reload serves with one process"),
        ([], "-3", 2, "OPENENV_WORKERS: expected a number"),
        (["--workers", "1000"], "", 1, "--workers 1000 is too many: 255 at most"),
    ],
)
def test_wrong_numbers_of_workers_are_refused_with_what_to_do(
    arguments: list[str], variable: str, status: int, expected: str
) -> None:
    variables = {"OPENENV_WORKERS": variable or None, "COLUMNS": "200"}
    done = CliRunner().invoke(build(["serve"]), ["serve", "x.py", "--port", "0", *arguments], env=variables)
    assert done.exit_code == status
    assert expected in done.stderr


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
    done = CliRunner().invoke(rollouts, ["ls", "--store", str(store), "--status", "cancelled", "--agent", "noop"])
    assert done.exit_code == 0
    assert done.output.strip().endswith("status 'cancelled', agent 'noop'.")


@pytest.mark.parametrize("command", [["ls"], ["export", "out.jsonl"]])
def test_a_status_that_does_not_exist_is_refused_with_those_that_do(store: Path, command: list[str]) -> None:
    done = CliRunner().invoke(rollouts, [*command, "--store", str(store), "--status", "oops"])
    assert done.exit_code == 2
    assert "'oops' is not one of ok, policy_failed" in done.stderr
    assert get_args(Status) == STATUSES
    assert get_args(Dialect) == DIALECTS


@pytest.mark.parametrize("command", [["ls"], ["show", "abc"], ["export", "out.jsonl"], ["reverify", "abc"]])
def test_looking_never_makes_a_store(tmp_path: Path, command: list[str]) -> None:
    missing = tmp_path / "typo"
    done = CliRunner().invoke(rollouts, [*command, "--store", str(missing)])
    assert done.exit_code == 1
    assert f"There are no rollouts in {missing}: it does not exist" in done.stderr
    assert not missing.exists()
    other = CliRunner().invoke(rollouts, [*command, "--store", str(tmp_path)])
    assert other.exit_code == 1
    assert "it is no store of rollouts" in other.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_empty_store_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_ROLLOUTS", str(tmp_path / "later"))
    done = CliRunner().invoke(rollouts, ["ls"])
    assert (done.exit_code, done.output) == (0, f"No rollouts yet in {tmp_path / 'later'}.\n")
    as_json = CliRunner().invoke(rollouts, ["ls", "--json"])
    assert json.loads(as_json.output) == {"rollouts": [], "interrupted": []}
    assert not (tmp_path / "later").exists()


def test_a_task_that_cannot_be_read_leaves_no_store_behind(tmp_path: Path) -> None:
    done = CliRunner().invoke(rollouts, ["run", "nowhere.yaml", "--store", str(tmp_path / "store")])
    assert done.exit_code == 1
    assert "nowhere.yaml" in done.stderr
    assert not (tmp_path / "store").exists()


def test_the_whole_command_line_can_be_imported() -> None:
    from openenv.cli.__main__ import app

    assert "serve" in {command.name for command in app.registered_commands}


@pytest.mark.parametrize(
    ("line", "place", "expected"),
    [("openenv va", 1, "validate"), ("openenv serve --run", 2, "--runner"), ("openenv rollouts sh", 2, "show")],
)
def test_a_shell_completes_commands_and_options(line: str, place: int, expected: str) -> None:
    program = "import sys; sys.argv[0] = 'openenv'; from openenv.cli.__main__ import main; sys.exit(main())"
    variables = {"_OPENENV_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [expected], done.stderr


def test_a_completed_command_line_loads_only_its_command() -> None:
    variables = {"_OPENENV_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "openenv serve --po"}
    assert settings.completion_words(variables) == ["serve", "--po"]
    assert settings.completion_words({"COMP_WORDS": "openenv serve"}) == []


def test_the_api_of_an_endpoint_follows_from_its_address_or_an_option() -> None:
    def dialect(url: str, **flags: str) -> object:
        model = ModelFlags(llm_url=url, model="m", **flags).endpoint()
        return None if model is None else model.dialect

    assert dialect("https://api.anthropic.com/v1") == "anthropic"
    assert dialect("http://localhost:8000/v1") == "openai_chat"
    assert dialect("http://localhost:8000/v1", dialect="anthropic") == "anthropic"
    assert dialect("https://api.anthropic.com/v1", dialect="openai_chat") == "openai_chat"
