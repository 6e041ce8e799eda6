"""The reference environments pass `openenv validate`: what they promise in `openenv.yaml` is what they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from openenv.packaging.validate.rules import Level
from openenv.packaging.validate.runner import run_validation

ENVS = Path(__file__).resolve().parents[2] / "envs"


@pytest.mark.slow_but_for("echo_env")
@pytest.mark.parametrize("name", ["echo_env", "gridworld_env", "notes_env", "opencode_env"])
def test_a_reference_environment_keeps_what_it_promises(name: str) -> None:
    report = run_validation(ENVS / name, max_level=Level.RUNTIME)
    assert [r for r in report.results if r.status in ("fail", "error")] == []
    assert {"static.manifest", "runtime.startup", "runtime.episode_isolation"} <= {
        r.check_id for r in report.results if r.status == "pass"
    }
