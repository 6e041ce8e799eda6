"""Collecting, and the helpers of clients of models, do the same here and in the published package."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from program_interpreters import Interpreter

SCRIPT = Path(__file__).with_name("collected.py")


def printed(interpreter: Any, folder: Path) -> Any:
    done = subprocess.run(
        [interpreter.python, str(SCRIPT)],
        env=interpreter.environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # the published one prints its bar before


@pytest.mark.published
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_packages_collect_alike(ours: Interpreter, published: Interpreter, tmp_path: Path) -> None:
    here, there = printed(ours, tmp_path), printed(published, tmp_path)
    for part in here["collected"]:
        assert here["collected"][part] == there["collected"][part], part
    assert here["converted"] == there["converted"]
