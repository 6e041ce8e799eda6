"""The proxy inside a sandbox: for sandboxes that can do no more than run commands and hold files.

`start` uploads `interception.py` and starts it; `InsideProxy` reads what it records. Less safe than a proxy on the
host: agent and proxy share a machine and a user, so an agent that means harm may disturb the trace. It does not find
the key there: that is in the memory of a process that hides it, and in no file.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opencode_env.config import OpenCodeConfig
from opencode_env.opencode_runtime import SandboxPaths, model_id
from opencode_env.sandbox import interception
from opencode_env.sandbox.base import BgJob, SandboxHandle
from openenv.rollout.capture import Call, Recording, export
from openenv.rollout.capture.dialects.dialect import Completion, Sampled
from openenv.rollout.capture.training_trace import TrainingTrace

PLACEHOLDER_KEY = "intercepted"
"""What the agent sends as a key; the proxy puts the real one in its place."""
_POLLS = 120
_POLL_S = 0.5


class InsideProxy:
    """A proxy that runs in a sandbox; it ends with it.

    Args:
        sandbox: Where.
        job: Its process; None where something else ends it.
        base_url: Where it answers.
        trace_path: Where it records calls.
    """

    api_key = PLACEHOLDER_KEY

    def __init__(self, sandbox: SandboxHandle, job: BgJob | None, base_url: str, trace_path: str) -> None:
        self._sandbox = sandbox
        self._job = job
        self.base_url = base_url
        self._trace_path = trace_path

    def trace(self) -> list[dict[str, Any]]:
        """Return what it recorded."""
        if not self._sandbox.exists(self._trace_path):
            return []
        return interception.parse_trace(self._sandbox.read_text(self._trace_path).splitlines())

    def training_trace(self) -> TrainingTrace:
        """Return the agent's calls for a trainer; raises ValueError where they are not to be trained on."""
        calls = [_call(record) for record in self.trace()]
        return export.training_trace(Recording(self._sandbox.sandbox_id, Path(self._trace_path), calls=calls))

    def close(self) -> None:
        """End it."""
        if self._job is not None:
            self._job.kill()


def start(
    sandbox: SandboxHandle, config: OpenCodeConfig, *, port: int, sleep: Callable[[float], None] = time.sleep
) -> BgJob:
    """Start a proxy in a sandbox, and wait until it answers.

    Args:
        sandbox: Where.
        config: Whose model it stands before.
        port: Where it answers.
        sleep: Waits between looks.

    Raises:
        RuntimeError: It did not start; the text has its log.
    """
    paths = SandboxPaths(config.sandbox_home)
    sandbox.write_text(paths.proxy_source, interception.SOURCE.read_text())
    job = sandbox.start_bg(_command(config, paths, port), envs={"OPENCODE_UPSTREAM_API_KEY": config.api_key})
    probe = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/healthz', timeout=2)"
    try:
        for _ in range(_POLLS):
            if sandbox.exec(f"python3 -c {shlex.quote(probe)}", timeout=10).exit_code == 0:
                return job
            sleep(_POLL_S)
        log = sandbox.read_text(paths.proxy_log) if sandbox.exists(paths.proxy_log) else ""
        raise RuntimeError(f"the proxy did not start: {log[-2000:]}")
    except BaseException:
        job.kill()
        raise


def _command(config: OpenCodeConfig, paths: SandboxPaths, port: int) -> str:
    options = [
        "--upstream-url", config.base_url,
        "--trace", paths.proxy_trace,
        "--port", str(port),
        "--top-logprobs", str(config.proxy_top_logprobs),
        "--request-timeout", str(config.request_timeout_ms / 1000),
        "--model-override", model_id(config.model),
    ]  # fmt: skip
    if config.proxy_max_tokens_cap is not None:
        options += ["--max-tokens-cap", str(config.proxy_max_tokens_cap)]
    if config.proxy_disable_thinking:
        options.append("--disable-thinking")
    if config.proxy_sampling:
        options += ["--sampling", json.dumps(config.proxy_sampling)]
    folder = shlex.quote(str(Path(paths.proxy_log).parent))
    run = shlex.join(["python3", paths.proxy_source, *options])
    return f"mkdir -p {folder} && exec {run} > {shlex.quote(paths.proxy_log)} 2>&1"


def _call(record: dict[str, Any]) -> Call:
    """Return a record of the trace as a captured call."""
    request, response = record.get("request") or {}, record.get("response") or {}
    logprobs, ids = record.get("per_token_logps") or [], record.get("completion_token_ids") or []
    texts = record.get("completion_tokens") or []
    count = max(len(logprobs), len(ids))
    prompt_ids = record.get("prompt_token_ids")
    error = record.get("upstream_error")
    return Call(
        number=record.get("turn", 0),
        dialect="openai_chat",
        endpoint_dialect="openai_chat",
        path="/v1/chat/completions",
        streamed=bool(request.get("stream")),
        packed_request=request,
        packed_sent=request,
        started_at=record.get("timestamp") or 0.0,
        answer=response,
        status=record.get("upstream_status"),
        error=error,
        ended="complete" if error is None else "broken",
        completion=Completion(
            finish_reason=record.get("finish_reason"),
            sampled=Sampled(
                ids=tuple(ids) or (None,) * count,
                logprobs=tuple(logprobs) or (None,) * count,
                texts=tuple(texts) if len(texts) == count else ("",) * count,
            ),
            prompt_ids=tuple(prompt_ids) if prompt_ids else None,
            usage=response.get("usage"),
        ),
        not_trainable=tuple(record.get("not_trainable") or ()),
    )
