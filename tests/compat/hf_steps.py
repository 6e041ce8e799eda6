"""What `test_hf_sandboxes.py` does with the real `huggingface_hub`, in an interpreter that has it; prints JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from opencode_env.sandbox import HFBgJob, HFSandboxBackend, HFSandboxHandle, SandboxBackend, SandboxHandle
from opencode_env.sandbox.base import BgJob
from openenv.errors import SandboxError, SandboxUnavailable


def use(folder: Path) -> Any:
    """Use everything that a sandbox offers."""
    backend = HFSandboxBackend(image="python:3.12", flavor="cpu-upgrade")
    sandbox = backend.create(timeout_s=120, envs={"COLOUR": "green"}, metadata={"episode_id": "e-1"})
    result = sandbox.exec("echo out; echo err >&2; exit 3")
    job = sandbox.start_bg("sleep 0.2; exit 7")
    endless = sandbox.start_bg("sleep 600")
    done: dict[str, Any] = {
        "shapes": [
            isinstance(backend, SandboxBackend),
            isinstance(sandbox, SandboxHandle) and isinstance(sandbox, HFSandboxHandle),
            isinstance(job, BgJob) and isinstance(job, HFBgJob),
        ],
        "exit": [result.exit_code, result.stdout, result.stderr],
        "env": sandbox.exec("echo $COLOUR $SIZE; pwd", envs={"SIZE": "xl"}, cwd=str(folder)).stdout,
        "late": sandbox.exec("sleep 60", timeout=0.2).timed_out,
        "job": job.wait(20),
        "pid": job.pid > 0,
    }
    try:
        endless.wait(0.2)
    except TimeoutError as exc:
        done["waiting"] = str(exc)
    endless.kill()
    done["killed"] = endless.wait(20)
    path = str(folder / "deep" / "er" / "note.txt")
    sandbox.write_text(path, "für Ada")
    done["text"] = sandbox.read_text(path)
    done["exists"] = [sandbox.exists(path), sandbox.exists(f"{path}.no")]
    try:
        sandbox.read_text(f"{path}.no")
    except FileNotFoundError as exc:
        done["missing"] = type(exc).__name__
    sandbox.kill()
    sandbox.kill()
    try:
        sandbox.exec("true")
    except SandboxError as exc:
        done["dead"] = exc.code
    return done


def refused(folder: Path) -> Any:
    """Ask for what there is none of."""
    try:
        HFSandboxBackend(image="python:3.12").create()
    except SandboxUnavailable as exc:
        return str(exc)


def session(folder: Path) -> Any:
    """Let OpenCode work in a sandbox; its model is behind the proxy inside."""
    from opencode_env import OpenCodeConfig, OpenCodeSessionFactory

    config = OpenCodeConfig(
        base_url=os.environ["MODEL_URL"],
        model=os.environ["MODEL_NAME"],
        sandbox_home=str(folder / "home"),
        agent_timeout_s=200,
        proxy_sampling={"temperature": 1.0},
    )
    factory = OpenCodeSessionFactory(
        config=config,
        sandbox_backend=HFSandboxBackend(image="python:3.12"),
        mode="transparent_proxy",
        proxy_port=int(os.environ["PROXY_PORT"]),
    )
    made = factory.create("Write hello.txt.")
    try:
        code = made.wait_for_completion()
        turns = made.fetch_training_trace().turns
        return code, [turn.completion_token_ids for turn in turns], made.fetch_trace()[-2000:] if code else ""
    finally:
        made.close()


if __name__ == "__main__":
    json.dump(globals()[sys.argv[1]](Path(sys.argv[2])), sys.stdout)
