"""TRL itself on our interface: its OpenEnv harness is imported and driven as it is on PyPI.

It needs an environment of its own: `OPENENV_TRL_PYTHON` names its Python, else `.clients/trl/bin/python` is tried.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from openenv.errors import SandboxUnavailable
from openenv.sandboxes import LocalSandboxes

ROOT = Path(__file__).resolve().parents[2]


def run(python: Path, *arguments: str, timeout: float) -> str:
    """Run something with TRL's Python and this working tree."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("src", "envs"))
    environ = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [str(python), *arguments], capture_output=True, text=True, env=environ, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def trl() -> Path:
    """The Python of an environment with TRL."""
    python = Path(os.environ.get("OPENENV_TRL_PYTHON") or ROOT / ".clients" / "trl" / "bin" / "python")
    if not python.exists():
        pytest.skip(f"no TRL: {python} is not there; make a virtual environment with trl and aiohttp there")
    return python


@pytest.fixture
def local_sandboxes() -> None:
    """Skip where there is no local sandbox."""
    try:
        LocalSandboxes().check()
    except SandboxUnavailable as exc:
        pytest.skip(str(exc))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_openenv_harness_of_trl_is_imported(trl: Path) -> None:
    code = "import trl.experimental.async_grpo.openenv_harness as h; print(h.HarnessRolloutWorker.__name__)"
    assert run(trl, "-c", code, timeout=280) == "HarnessRolloutWorker\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("local_sandboxes")
def test_the_worker_of_trl_gets_the_tokens_that_the_engine_sampled(trl: Path) -> None:
    script = str(Path(__file__).with_name("trl_worker.py"))
    result: dict[str, Any] = json.loads(run(trl, script, timeout=580).splitlines()[-1])
    assert (result["failure"], result["ended"]) == (None, True)
    played = result["played"]
    by_first = {tuple(ids): (prompt, logprobs) for prompt, ids, logprobs in played}
    for sample in result["samples"]:
        assert len(sample["input_ids"]) == len(sample["completion_mask"]) == len(sample["old_log_probs"])
        turns = spans(sample["completion_mask"])
        assert len(turns) == 2  # a tool call, and the end
        for first, end in turns:
            prompt, logprobs = by_first[tuple(sample["input_ids"][first:end])]
            assert sample["input_ids"][:first] == prompt
            assert sample["old_log_probs"][first:end] == pytest.approx(logprobs)
        context = [
            value for value, mask in zip(sample["old_log_probs"], sample["completion_mask"], strict=True) if not mask
        ]
        assert set(context) == {0.0}
        assert sample["version"] == 7
        assert sample["last"]["role"] == "assistant"
    assert sorted(sample["reward"] for sample in result["samples"]) == [0.5, 1.0]
    low, high = sorted(sample["advantage"] for sample in result["samples"])
    assert low < 0 < high


def spans(mask: list[int]) -> list[tuple[int, int]]:
    """Return where the runs of ones in a mask begin and end."""
    edges = [0, *mask, 0]
    marks = [index for index in range(len(mask) + 1) if edges[index] != edges[index + 1]]
    return list(zip(marks[::2], marks[1::2], strict=True))
