"""Agents of other packages, registered by an entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from openenv.errors import AgentUnavailable
from openenv.rollout import Task, run_rollout
from openenv.rollout.agents import agent, agent_names

WRITER = """
from openenv.rollout.agents import Agent, Launch

class Writer(Agent):
    name = "writer"
    dialect = None

    def __init__(self, *, text="4"):
        self.text = text

    def prepare(self, sandbox, run):
        return Launch(argv=("/bin/sh", "-c", f"echo {self.text} > answer.txt"), cwd=run.workdir)

def make_something_else():
    return object()
"""
ENTRY_POINTS = """
[openenv.agents]
writer = agent_writer:Writer
noop = agent_writer:Writer
broken = agent_writer_missing:Writer
no-agent = agent_writer:make_something_else
"""


@pytest.fixture
def writer_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that registers agents, as pip installs it."""
    folder = tmp_path / "site"
    info = folder / "agent_writer-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "agent_writer.py").write_text(WRITER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: agent-writer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_another_package_adds_an_agent_that_runs_by_name(writer_package: Path) -> None:
    assert "writer" in agent_names()
    task = Task(instruction="Write 4 into answer.txt.", verify=["grep -qx 4 answer.txt"])
    outcome = run_rollout(task, agent="writer")
    assert (outcome.status, outcome.reward, outcome.agent) == ("ok", 1.0, "writer")
    assert run_rollout(task, agent=agent("writer", text="5")).reward == 0.0


def test_another_package_cannot_replace_a_built_in_agent(writer_package: Path) -> None:
    assert type(agent("noop")).__module__ == "openenv.rollout.agents.builtin"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody", "choose from .*noop.*writer"),
        ("broken", "cannot be imported"),
        ("no-agent", "returns object, not an Agent"),
        ("writer@2", "unexpected keyword argument 'version'"),
        ("shell", "missing 1 required positional argument: 'lines'"),
    ],
)
def test_an_agent_that_cannot_be_created_is_refused(writer_package: Path, name: str, message: str) -> None:
    with pytest.raises(AgentUnavailable, match=message):
        agent(name)
