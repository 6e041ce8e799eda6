"""Callables take what those of the published package take, and return what those return."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from interface import NAMES, VALUES

from program_interpreters import Interpreter

pytestmark = pytest.mark.published

FOLDER = Path(__file__).parent
ADDED = {"terminated", "truncated"}  # fields that only our observations have


def ask(interpreter: Any) -> Any:
    command = [interpreter.python, "-W", "ignore", str(FOLDER / "interface.py")]
    environment = interpreter.environment(FOLDER)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def mine(ours: Interpreter) -> Any:
    """What this package prints."""
    return ask(ours)


@pytest.fixture(scope="module")
def theirs(published: Interpreter) -> Any:
    """What the published one prints."""
    return ask(published)


@pytest.mark.parametrize("name", NAMES)
def test_a_callable_can_be_called_as_before(mine: Any, theirs: Any, name: str) -> None:
    known = theirs["parameters"][name]
    own = [each for each in mine["parameters"][name] if each[0] not in ADDED]
    names = {each[0] for each in known}
    # What was required may have a default.
    required = {each[0] for each in known if not each[2]}
    assert [each if each[0] not in required else [*each[:2], ""] for each in own if each[0] in names] == known
    assert all(each[1] == "KEYWORD_ONLY" and each[2] for each in own if each[0] not in names)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_the_same(mine: Any, theirs: Any, name: str) -> None:
    assert mine["values"][name] == theirs["values"][name]
