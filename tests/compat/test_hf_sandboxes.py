"""Sandboxes of Hugging Face: the real `huggingface_hub` against a double of its service, whose commands run for real.

That package is not among ours; the environment of the published `openenv` has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_double import TOKEN, HuggingFaceDouble

from openenv.errors import AgentUnavailable
from openenv.rollout.agents.opencode import OpenCode
from openenv.settings import cache_dir
from openenv.testing import ScriptedModel
from openenv.testing.scripted.agent_scripts import write_file
from program_interpreters import Interpreter

ENVS = Path(__file__).parents[2] / "envs"
STEPS = Path(__file__).with_name("hf_steps.py")


def run(published: Any, double: HuggingFaceDouble, step: str, folder: Path) -> Any:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ENVS.parent / "src"), str(ENVS)]),
        "HF_ENDPOINT": double.url,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(folder / "hf"),
    }
    done = subprocess.run(
        [published.python, str(STEPS), step, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_names_are_there_without_the_package() -> None:
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from opencode_env.sandbox import HFBgJob, HFSandboxBackend, HFSandboxHandle\n"
        "try:\n"
        "    HFSandboxBackend(image='python:3.12')\n"
        "except ImportError as exc:\n"
        "    print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ENVS, capture_output=True, text=True, check=False)
    assert "pip install" in done.stdout, done.stderr


@pytest.mark.published
def test_a_sandbox_does_what_the_harness_needs(published: Interpreter, tmp_path: Path) -> None:
    with HuggingFaceDouble() as double:
        double.fails_cancel = 1
        done = run(published, double, "use", tmp_path)
        [job] = double.jobs.values()
    assert done.pop("waiting").endswith("runs on after 0.2 s")
    assert done == {
        "shapes": [True, True, True],
        "exit": [3, "out\n", "err\n"],
        "env": f"green xl\n{tmp_path}\n",
        "late": True,
        "job": 7,
        "pid": True,
        "killed": 137,
        "text": "für Ada",
        "exists": [True, False],
        "missing": "FileNotFoundError",
        "dead": "SANDBOX_ERROR",
    }
    assert job.stage == "CANCELED"  # the first try to cancel it failed
    assert (job.spec["dockerImage"], job.spec["flavor"]) == ("python:3.12", "cpu-upgrade")
    assert job.spec["labels"]["episode_id"] == "e-1"
    assert job.spec["environment"]["SBX_IDLE_TIMEOUT"] == "120"
    assert "HF_TOKEN" not in job.spec["secrets"]


@pytest.mark.published
def test_an_account_that_may_not_start_jobs_gets_a_typed_error(published: Interpreter, tmp_path: Path) -> None:
    with HuggingFaceDouble() as double:
        double.refuses_jobs = True
        text = run(published, double, "refused", tmp_path)
        assert double.jobs == {}
    assert text.startswith("Hugging Face started no sandbox")


@pytest.mark.slow
@pytest.mark.published
def test_opencode_works_in_such_a_sandbox_and_its_tokens_are_exact(
    published: Interpreter, tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        [mount] = OpenCode().install(cache_dir(), lambda message: None).mounts
    except AgentUnavailable as exc:
        pytest.skip(f"no npm and no opencode here: {exc}")
    folder = tmp_path / "home" / ".opencode" / "bin"
    folder.mkdir(parents=True)
    (folder / "opencode").symlink_to(mount.source)
    script = write_file("opencode", "hello.txt", "hello\n")
    with ScriptedModel(script) as model, HuggingFaceDouble() as double:
        for name, value in {"MODEL_URL": model.url, "MODEL_NAME": model.name, "PROXY_PORT": free_port()}.items():
            monkeypatch.setenv(name, str(value))
        code, ids, log = run(published, double, "session", tmp_path)
        assert code == 0, log
        assert ids == [played.token_ids for played in model.played()]
        [job] = double.jobs.values()
        assert job.stage == "CANCELED"
    assert (tmp_path / "home" / "workdir" / "hello.txt").read_text() == "hello\n"
