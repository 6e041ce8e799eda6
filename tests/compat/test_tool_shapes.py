"""Observations of tools have the published shape: the same server in both packages."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tool_shapes import CALLS

from program_interpreters import Interpreter

pytestmark = [pytest.mark.slow, pytest.mark.published, pytest.mark.timeout(900)]

FOLDER = Path(__file__).parent
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(CALLS)]


def ask(which: Any) -> Any:
    command = [which.python, str(FOLDER / "tool_shapes.py")]
    environment = which.environment(FOLDER)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def printed(ours: Interpreter, published: Interpreter) -> tuple[Any, Any]:
    """What this package prints, and what the published one does."""
    return ask(ours), ask(published)


def without_words(observation: Any) -> Any:
    """Leave out the text of an error, which is anybody's own, and what this package adds to tools of one mode."""
    shown = json.loads(json.dumps(observation))
    if shown["observation"].get("error"):
        shown["observation"]["error"]["message"] = ""
    if shown["observation"].get("tool_name") == "practice":
        shown["observation"]["result"]["meta"] = None
    return shown


@pytest.mark.parametrize("number", range(len(CALLS)), ids=IDS)
def test_a_call_leads_to_the_same_observation(printed: tuple[Any, Any], number: int) -> None:
    mine, theirs = (without_words(which["called"][number]) for which in printed)
    assert mine == theirs


def test_the_list_has_the_same_tools(printed: tuple[Any, Any]) -> None:
    mine, theirs = (which["listed"] for which in printed)
    assert mine.keys() == theirs.keys()
    assert mine["observation"].keys() == theirs["observation"].keys()
    *my_tools, my_practice = mine["observation"]["tools"]
    *their_tools, their_practice = theirs["observation"]["tools"]
    assert my_tools == their_tools
    assert my_practice.keys() == their_practice.keys()
    assert my_practice["input_schema"]["required"] == their_practice["input_schema"]["required"] == ["times"]


@pytest.mark.parametrize("what", ["callables", "code", "syntax", "closed"])
def test_code_mode_and_the_end_are_the_same(printed: tuple[Any, Any], what: str) -> None:
    assert printed[0][what] == printed[1][what]
