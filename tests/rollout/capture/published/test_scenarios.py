"""The published names do here what they do in the published package, scenario by scenario."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from program_interpreters import Interpreter

FOLDER = Path(__file__).parent
SCENARIOS = re.findall(r"@scenario\ndef (\w+)", (FOLDER / "scenarios.py").read_text())


def results(interpreter: Any) -> dict[str, Any]:
    """What each scenario comes to with one package."""
    done = subprocess.run(
        [interpreter.python, str(FOLDER / "scenarios.py")],
        env=interpreter.environment(FOLDER),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    values: dict[str, Any] = json.loads(done.stdout)
    return values


@pytest.fixture(scope="module")
def both(ours: Interpreter, published: Interpreter) -> tuple[dict[str, Any], dict[str, Any]]:
    return results(ours), results(published)


@pytest.mark.slow
@pytest.mark.published
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_comes_to_the_same(both: tuple[dict[str, Any], dict[str, Any]], name: str) -> None:
    mine, theirs = both
    assert mine[name] == theirs[name]
