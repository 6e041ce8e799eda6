"""TRL's `GRPOTrainer` as it is on PyPI teaches a tiny model to call a tool of a served environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trainers")

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "trl_tools" / "train.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_example_learns_to_press_the_right_button(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    command = [sys.executable, str(SCRIPT), "--log", str(log), "--output", str(tmp_path / "outputs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rewards = [json.loads(line)["reward"] for line in log.read_text().splitlines()]
    assert sum(rewards[:5]) / 5 < 0.35
    assert sum(rewards[-10:]) / 10 > 0.75
