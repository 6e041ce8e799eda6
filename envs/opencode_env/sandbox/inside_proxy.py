"""The proxy inside a sandbox: for sandboxes that can do no more than run commands and hold files.

Uploads `interception.py` and the rules that it goes by, starts it, waits for it, reads its trace. Less safe than a
proxy on the host: agent and proxy share a machine and a user, so an agent that means harm may disturb the trace. It
does not find the key there: that is in the memory of a process that hides it, and in no file.
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
from openenv.rollout import parameters

PLACEHOLDER_KEY = "intercepted"
"""What the agent sends as a key; the proxy puts the real one in its place."""
_POLLS = 120
_POLL_S = 0.5


class InsideProxy:
    """A proxy that runs in a sandbox; it ends with it.

    Args:
        sandbox: Where.
        config: Whose model it stands before.
        port: Where it answers.
        sleep: Waits between looks.

    Raises:
        RuntimeError: It did not start; the text has its log.
    """

    def __init__(
        self, sandbox: SandboxHandle, config: OpenCodeConfig, *, port: int, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._sandbox = sandbox
        self._paths = SandboxPaths(config.sandbox_home)
        self.base_url = f"http://127.0.0.1:{port}/v1"
        self.api_key = PLACEHOLDER_KEY
        for path, module in ((self._paths.proxy_source, interception), (self._paths.proxy_rules, parameters)):
            sandbox.write_text(path, Path(module.__file__).read_text(encoding="utf-8"))
        self._job: BgJob = sandbox.start_bg(
            _command(config, self._paths, port), envs={"OPENCODE_UPSTREAM_API_KEY": config.api_key}
        )
        try:
            self._wait(port, sleep)
        except BaseException:
            self.close()
            raise

    def trace(self) -> list[dict[str, Any]]:
        """Return what it recorded."""
        if not self._sandbox.exists(self._paths.proxy_trace):
            return []
        return interception.parse_trace(self._sandbox.read_text(self._paths.proxy_trace).splitlines())

    def log(self) -> str:
        """Return what it printed."""
        return self._sandbox.read_text(self._paths.proxy_log) if self._sandbox.exists(self._paths.proxy_log) else ""

    def close(self) -> None:
        """End it."""
        self._job.kill()

    def _wait(self, port: int, sleep: Callable[[float], None]) -> None:
        probe = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/healthz', timeout=2)"
        for _ in range(_POLLS):
            if self._sandbox.exec(f"python3 -c {shlex.quote(probe)}", timeout=10).exit_code == 0:
                return
            sleep(_POLL_S)
        raise RuntimeError(f"the proxy did not start: {self.log()[-2000:]}")


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
