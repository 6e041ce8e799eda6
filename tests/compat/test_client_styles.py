"""Clients can be used in every way in which those of the published package can, with the same outcome."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from client_styles import STYLES
from sample_echo import echo_app

from program_interpreters import Interpreter
from servers import Serve

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent


def play(interpreter: Any, url: str) -> dict[str, Any]:
    command = [interpreter.python, "-W", "ignore", str(FOLDER / "client_styles.py"), url]
    environment = interpreter.environment(FOLDER)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, Any] = json.loads(done.stdout)
    return outcomes


@pytest.fixture(scope="module")
def mine(ours: Interpreter, serve_once: Serve) -> dict[str, Any]:
    """What this package's client does."""
    return play(ours, serve_once(echo_app(max_concurrent_envs=64)).url)


@pytest.fixture(scope="module")
def theirs(published: Interpreter, serve_once: Serve) -> dict[str, Any]:
    """What the published client does, on the same server."""
    return play(published, serve_once(echo_app(max_concurrent_envs=64)).url)


@pytest.mark.parametrize("style", STYLES)
def test_a_style_works(mine: dict[str, Any], style: str) -> None:
    assert not isinstance(mine[style], str), mine[style]


@pytest.mark.published
@pytest.mark.parametrize("style", STYLES)
def test_a_style_has_the_same_outcome_in_both_packages(
    mine: dict[str, Any], theirs: dict[str, Any], style: str
) -> None:
    assert mine[style] == theirs[style]
