"""The bar of `run_rollout(progress=True)` and `run_many(progress=True)`."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from openenv.rollout import Agent, AgentRun, Installation, Launch, Outcome, Progress, Task, run_many, run_rollout
from openenv.rollout.run.engine import ProgressBar
from openenv.sandboxes.base import Sandbox, Sandboxes

TASK = Task(instruction="x", verify=("test -f x",), solution=("touch x",))


class Fetched(Agent):
    """An agent that has to be installed first, and does nothing."""

    name = "fetched"
    dialect = None

    def install(self, cache: Path, report: Callable[[str], None]) -> Installation:
        report("downloading it")
        return Installation()

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        return Launch(argv=("true",))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let standard error look like a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.usefixtures("terminal")
def test_a_bar_shows_the_download_and_counts_rollouts(local: Sandboxes, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Progress] = []
    outcomes = run_many([TASK, TASK], agent="oracle", sandbox=local, progress=True, on_progress=events.append)
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0]
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "mean reward 1.00" in shown
    assert events  # the caller's own callback is called as well
    messages: list[str] = []
    run_rollout(TASK, agent=Fetched(), sandbox=local, progress=True, on_install=messages.append)
    assert messages == ["downloading it"]
    assert "1/1" in capsys.readouterr().err


def test_nothing_is_shown_where_nobody_looks(local: Sandboxes, capsys: pytest.CaptureFixture[str]) -> None:
    run_many([TASK], agent="oracle", sandbox=local, progress=True)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_obeys_nothing_of_what_a_bar_shows() -> None:
    screen = io.StringIO()
    with ProgressBar(2, console=Console(file=screen, force_terminal=True, color_system=None, width=120)) as bar:
        bar.on_install("downloading it")
        assert bar._bar.tasks[0].description == "downloading it"
        bar.on_progress(Progress(rollout_id="x", phase="agent", message="\x1b]0;mine\x07 [red]"))
        assert bar._bar.tasks[0].description == "agent:  ]0;mine  [red]"
        bar.on_outcome(0, Outcome(rollout_id="x", status="ok", reward=0.5))
    assert "\x1b]0;" not in screen.getvalue()
    assert "1/2" in screen.getvalue()
    assert "mean reward 0.50, ok" in screen.getvalue()
