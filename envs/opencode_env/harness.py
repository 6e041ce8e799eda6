"""OpenCode as a harness: sessions in which the real agent works in a sandbox, made and judged in this process.

Works with any backend of the narrow shape. With ours, OpenCode is mounted read-only and the model is reached through
the capture proxy of the host; with others, both are put into the sandbox. Knows the order of a session; the environment
itself, whose verifier has a sandbox of its own, is built on `openenv.rollout`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args

from opencode_env.config import OpenCodeConfig
from opencode_env.opencode_runtime import (
    PROXY_PORT,
    SandboxPaths,
    build_envs,
    build_install_command,
    build_opencode_json,
    build_run_command,
    render,
)
from opencode_env.opencode_runtime import proxy_log_path as proxy_log_path
from opencode_env.opencode_runtime import proxy_trace_path as proxy_trace_path
from opencode_env.sandbox import inside_proxy, interception
from opencode_env.sandbox.base import BgJob, ExecResult, SandboxBackend, SandboxHandle
from opencode_env.sandbox.host_proxy import HostProxy, model_of
from opencode_env.task import OpenCodeTask
from openenv.errors import SandboxUnsupported
from openenv.protocol.tool_messages import Tool
from openenv.rollout.agents.opencode import OpenCode
from openenv.rollout.capture.training_trace import TrainingTrace
from openenv.rollout.run.agent_sessions import (
    Message,
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    VerifyResult,
)
from openenv.sandboxes.base import HOME, Sandbox, Sandboxes, SandboxSpec
from openenv.settings import cache_dir

logger = logging.getLogger(__name__)

Mode = Literal["black_box", "transparent_proxy"]
MODES: tuple[str, ...] = get_args(Mode)
Verifier = Callable[[SandboxHandle, OpenCodeTask], VerifyResult]
"""Judges what the agent left in its sandbox, when the agent has ended."""

# What subclasses of the factory use that start the proxy themselves, such as those of TRL's examples.
_PROXY_SOURCE_PATH = interception.SOURCE
_PROXY_PORT = PROXY_PORT
_PROXY_TRACE_PATH = SandboxPaths(HOME).proxy_trace
_PROXY_LOG_PATH = SandboxPaths(HOME).proxy_log

_PROBES = 15
_PROBE_TIMEOUT_S = 5.0
_INSTALL_TRIES = 3
_INSTALL_PAUSE_S = 3.0
_SPARE_S = 300


class Proxy(Protocol):
    """What stands between the agent and its model."""

    base_url: str
    api_key: str

    def trace(self) -> list[dict[str, Any]]:
        """Return a record of each call."""
        ...

    def training_trace(self) -> TrainingTrace:
        """Return the agent's calls for a trainer."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class OpenCodeSession(ResourceSession):
    """One agent in one sandbox: a `TrainableSession`.

    Args:
        sandbox: Where it works.
        task: Its instruction, setup and checks.
        config: How it is set up.
        executable: What is run; by default where OpenCode's installer puts it.
        proxy: What stands before its model; None where it asks the model itself.
        is_traced: Whether the calls that the proxy records are shown.
        verifier: Judges the work.
        proxy_trace_path: Where a proxy records that was started inside of the sandbox by other means.
    """

    def __init__(
        self,
        *,
        sandbox: SandboxHandle,
        task: OpenCodeTask,
        config: OpenCodeConfig,
        executable: str | None = None,
        proxy: Proxy | None = None,
        is_traced: bool = False,
        verifier: Verifier | None = None,
        proxy_trace_path: str | None = None,
    ) -> None:
        if proxy is None and proxy_trace_path is not None:
            proxy, is_traced = inside_proxy.InsideProxy(sandbox, None, config.base_url, proxy_trace_path), True
        self.sandbox = sandbox
        self.task = task
        self.config = config
        self._executable = executable or SandboxPaths(config.sandbox_home).opencode
        self._proxy = proxy
        self._is_traced = is_traced
        self._verifier = verifier
        self._agent: BgJob | None = None
        self._exit_code: int | None = None
        self._is_closed = False

    # -- ResourceSession --------------------------------------------------------------------------------------------

    def initial_messages(self) -> list[Message]:
        """Return the instruction."""
        return [{"role": "user", "content": self.task.instruction}]

    def list_tools(self) -> list[Tool]:
        """Return nothing: the agent brings its own tools."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Return an error: the agent calls its tools itself."""
        return ToolResult(error=f"OpenCode runs its own tools; '{name}' cannot be called from here")

    def verify(self, transcript: list[Message], final_state: Any | None = None) -> VerifyResult:
        """Return the verifier's verdict, or none; the agent is ended first."""
        self._end_agent()
        if self._verifier is None:
            return VerifyResult(env_reward=None, done=True)
        folder = _folder(SandboxPaths(self.config.sandbox_home).reward)  # what lies there, the agent wrote
        _succeed(self.sandbox.exec(f"rm -rf {folder} && mkdir -p {folder}", timeout=30), "no place for the reward")
        return self._verifier(self.sandbox, self.task)

    def close(self) -> None:
        """End agent, proxy and sandbox; one that cannot be ended does not keep the others."""
        self._is_closed = True
        proxy, self._proxy = self._proxy, None
        ends = (self._end_agent, proxy.close if proxy is not None else None, _closing(self.sandbox))
        for end in ends:
            if end is not None:
                _quietly(end)

    # -- the agent --------------------------------------------------------------------------------------------------

    def start_agent(self) -> None:
        """Start the agent, once."""
        if self._agent is not None:
            return
        url, key = self.config.base_url, self.config.api_key
        if self._proxy is not None:
            url, key = self._proxy.base_url, self._proxy.api_key
        self._agent = self.sandbox.start_bg(
            build_run_command(self.config, self._executable), envs=build_envs(self.config, base_url=url, api_key=key)
        )

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Wait for the agent and return its exit code.

        Args:
            timeout_s: How long; by default what the configuration says.

        Raises:
            TimeoutError: It has not ended; it goes on until `verify` or `close` ends it.
            RuntimeError: It has not been started.
        """
        if self._agent is None:
            raise RuntimeError("the agent has not been started")
        if self._exit_code is None:
            self._exit_code = self._agent.wait(self.config.agent_timeout_s if timeout_s is None else timeout_s)
        return self._exit_code

    def fetch_trace(self) -> str:
        """Return what the agent printed."""
        path = SandboxPaths(self.config.sandbox_home).agent_log
        return self.sandbox.read_text(path) if self.sandbox.exists(path) else ""

    def fetch_proxy_trace(self) -> list[dict[str, Any]]:
        """Return a record of each model call; none where the agent is a black box."""
        return self._proxy.trace() if self._proxy is not None and self._is_traced else []

    def fetch_training_trace(self) -> TrainingTrace:
        """Return the agent's own calls for a trainer: exact tokens, log-probabilities and masks.

        Raises:
            ValueError: They are not to be trained on, or the agent is a black box; the text says why.
            RuntimeError: The session is closed.
        """
        if self._is_closed:  # not a ValueError: TRL's worker closes sessions when it stops, and takes those for defects
            raise RuntimeError("the session is closed, and what its proxy recorded is gone")
        if self._proxy is None or not self._is_traced:
            raise ValueError("a black box has no trace: make the factory with mode='transparent_proxy'")
        return self._proxy.training_trace()

    def _end_agent(self) -> None:
        if self._agent is not None and self._exit_code is None:
            self._agent.kill()
        if isinstance(self.sandbox, Sandbox) and self._agent is not None:
            _quietly(self.sandbox.stop_processes)  # daemons that outlive the agent


class OpenCodeSessionFactory(ResourceSessionFactory[OpenCodeSession]):
    """Makes sessions: a sandbox with everything set up, and the agent started in it.

    Args:
        config: How agents are set up.
        sandbox_backend: Where sandboxes come from: one of ours, or any class of the narrow shape.
        mode: `black_box`, or `transparent_proxy` to record every model call.
        verifier: Judges the work.
        install_timeout_s: How long installing OpenCode may take, where it has to be.
        setup_timeout_s: How long each setup may take.
        starts_agent: Whether `create` starts the agent; otherwise the caller does.
        proxy_port: Where the proxy answers in the sandbox.
        cache: Where OpenCode is kept for sandboxes that mount it; by default the user's cache folder.
        sleep: Waits between tries.
        sampling: How answers are sampled, by the endpoint's names; overrides parameters of the configuration's
            `proxy_sampling`. The agent does not decide it.

    Raises:
        ValueError: There is no such mode, or a parameter that cannot be set.
    """

    def __init__(
        self,
        *,
        config: OpenCodeConfig,
        sandbox_backend: SandboxBackend,
        mode: str = "black_box",
        verifier: Verifier | None = None,
        install_timeout_s: float = 240,
        setup_timeout_s: float = 300,
        starts_agent: bool = True,
        proxy_port: int = PROXY_PORT,
        cache: Path | None = None,
        sleep: Callable[[float], None] = time.sleep,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
        given = config.proxy_sampling if sampling is None else {**(config.proxy_sampling or {}), **sampling}
        self._needs_proxy = bool(given)
        self.sampling = dict(model_of(config.model_copy(update={"proxy_sampling": given})).sampling)
        """How answers are sampled: all parameters of the distribution."""
        self._config = config.model_copy(update={"proxy_sampling": self.sampling})
        self._backend = sandbox_backend
        self._mode = mode
        self._verifier = verifier
        self._install_timeout_s = install_timeout_s
        self._setup_timeout_s = setup_timeout_s
        self._starts_agent = starts_agent
        self._proxy_port = proxy_port
        self._cache = cache
        self._sleep = sleep

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> OpenCodeSession:
        """Make a session; whatever fails, its sandbox is ended.

        Args:
            task: An `OpenCodeTask`, its fields, or an instruction.
            seed: Not used; agents have none.
            episode_id: A name for the sandbox's metadata.

        Raises:
            TypeError: The task is none.
            RuntimeError: Sandbox, installation, setup or proxy failed.
        """
        checked_task = OpenCodeTask.coerce(task)
        sandbox, executable = self._open(episode_id)
        proxy: Proxy | None = None
        try:
            self._prepare(sandbox, checked_task)
            proxy = self._open_proxy(sandbox)
            self._configure(sandbox, proxy)
            session = OpenCodeSession(
                sandbox=sandbox,
                task=checked_task,
                config=self._config,
                executable=executable,
                proxy=proxy,
                is_traced=self._mode == "transparent_proxy",
                verifier=self._verifier,
            )
            if self._starts_agent:
                session.start_agent()
        except BaseException:
            if proxy is not None:
                _quietly(proxy.close)
            _quietly(_closing(sandbox))
            raise
        return session

    # -- the sandbox ------------------------------------------------------------------------------------------------

    def _open(self, episode_id: str | None) -> tuple[SandboxHandle, str]:
        """Start a sandbox that has OpenCode; return it, and how OpenCode is called in it."""
        lifetime = int(self._config.agent_timeout_s + self._install_timeout_s + self._setup_timeout_s) + _SPARE_S
        metadata = {"episode_id": episode_id} if episode_id else {}
        if isinstance(self._backend, Sandboxes) and "mounts" in self._backend.features:
            return self._open_mounted(self._backend, lifetime, metadata)
        sandbox = self._backend.create(timeout_s=lifetime, envs={}, metadata=metadata)
        try:
            self._probe(sandbox)
            return sandbox, self._install(sandbox)
        except BaseException:
            _quietly(_closing(sandbox))
            raise

    def _open_mounted(self, backend: Sandboxes, lifetime: float, metadata: dict[str, str]) -> tuple[Sandbox, str]:
        version = self._config.opencode_version
        agent = OpenCode(version=None if version == "latest" else version)
        installation = agent.install(self._cache or cache_dir(), logger.info)
        spec = SandboxSpec(
            mounts=installation.mounts, home=self._config.sandbox_home, timeout_s=lifetime, metadata=metadata
        )
        return backend.open(spec), installation.executable

    def _probe(self, sandbox: SandboxHandle) -> None:
        for _ in range(_PROBES):
            try:
                if sandbox.exec("echo ok", timeout=_PROBE_TIMEOUT_S).exit_code == 0:
                    return
            except Exception as exc:  # a sandbox that is still coming up may fail in any way
                logger.info("the sandbox does not answer yet: %s", exc)
            self._sleep(1.0)
        raise RuntimeError(f"sandbox {sandbox.sandbox_id} did not answer")

    def _install(self, sandbox: SandboxHandle) -> str:
        program = SandboxPaths(self._config.sandbox_home).opencode
        if sandbox.exec(f"{program} --version", timeout=30).exit_code == 0:
            return program
        self._exec_with_retry(
            sandbox,
            build_install_command(self._config),
            timeout=self._install_timeout_s,
            attempts=_INSTALL_TRIES,
            backoff_s=_INSTALL_PAUSE_S,
            label="OpenCode could not be installed",
        )
        return program

    def _exec_with_retry(
        self, sandbox: SandboxHandle, cmd: str, *, timeout: float, attempts: int, backoff_s: float, label: str
    ) -> ExecResult:
        """Run a command; try again where it failed without a word, or where the way to the sandbox broke.

        Raises:
            RuntimeError: It failed; the text begins with the label.
        """
        problem = ""
        for attempt in range(attempts):
            if attempt:
                self._sleep(backoff_s * 2 ** (attempt - 1))
            try:
                done = sandbox.exec(cmd, timeout=timeout)
            except Exception as exc:  # the way to the sandbox broke, not the command
                problem = f"{type(exc).__name__}: {exc}"
                continue
            if done.exit_code == 0:
                return done
            problem = done.stderr.strip() or f"exit code {done.exit_code}"
            if done.stderr.strip():
                break  # the command said why: it would say so again
        raise RuntimeError(f"{label}: {problem[-2000:]}")

    def _prepare(self, sandbox: SandboxHandle, task: OpenCodeTask) -> None:
        """Write the files and run every setup, all of it before the agent starts."""
        paths = SandboxPaths(self._config.sandbox_home)
        folders = " ".join((paths.workdir, _folder(paths.agent_log), _folder(paths.reward)))
        _succeed(sandbox.exec(f"mkdir -p {folders}", timeout=30), "the folders could not be made")
        sandbox.write_text(paths.instruction, task.instruction)
        if self._config.system_prompt is not None:
            sandbox.write_text(paths.system_prompt, self._config.system_prompt)
        for path, text in task.upload_files.items():
            sandbox.write_text(path, text)
        if self._config.extra_setup_shell:
            self._set_up(sandbox, self._config.extra_setup_shell, "extra_setup_shell", tries=2)
        if task.setup_shell:
            self._set_up(sandbox, task.setup_shell, "setup_shell", tries=1)

    def _set_up(self, sandbox: SandboxHandle, line: str, name: str, *, tries: int) -> None:
        done = ExecResult(1, "", "")
        for _ in range(tries):
            workdir = SandboxPaths(self._config.sandbox_home).workdir
            done = sandbox.exec(line, cwd=workdir, timeout=self._setup_timeout_s)
            if done.exit_code == 0:
                return
        _succeed(done, f"{name} failed")

    # -- the model --------------------------------------------------------------------------------------------------

    def _open_proxy(self, sandbox: SandboxHandle) -> Proxy | None:
        """Open a proxy: on the host where the sandbox can reach it, else inside where one is asked for.

        A sandbox that reaches its host has no other way out, so a black box needs the proxy too; it is not traced.
        """
        is_own = type(self)._start_proxy is not OpenCodeSessionFactory._start_proxy
        if isinstance(sandbox, Sandbox) and not is_own:
            try:
                return HostProxy(sandbox, self._config, port=self._proxy_port)
            except SandboxUnsupported:
                logger.info("sandbox %s cannot reach its host; the proxy runs inside", sandbox.sandbox_id)
        if self._mode == "black_box":
            if self._needs_proxy:
                raise RuntimeError("nothing enforces the sampling of a black box here: use mode='transparent_proxy'")
            return None
        job, url, trace_path = self._start_proxy(sandbox)
        return inside_proxy.InsideProxy(sandbox, job, url, trace_path)

    def _start_proxy(self, sandbox: SandboxHandle) -> tuple[BgJob, str, str]:
        """Start a proxy inside a sandbox; return its process, its address and the path of its trace.

        Subclasses may start another one, or this one in another way.
        """
        job = inside_proxy.start(sandbox, self._config, port=self._proxy_port, sleep=self._sleep)
        return job, f"http://127.0.0.1:{self._proxy_port}/v1", SandboxPaths(self._config.sandbox_home).proxy_trace

    def _configure(self, sandbox: SandboxHandle, proxy: Proxy | None) -> None:
        made = build_opencode_json(self._config)
        if proxy is not None:
            npm = None if self._config.provider == "anthropic" else "@ai-sdk/openai-compatible"
            made = build_opencode_json(self._config, base_url=proxy.base_url, api_key=proxy.api_key, npm=npm)
        sandbox.write_text(SandboxPaths(self._config.sandbox_home).config, render(made))


def _succeed(done: ExecResult, what: str) -> None:
    if done.exit_code != 0:
        output = (done.stderr or done.stdout).strip()[-2000:]
        raise RuntimeError(f"{what} (exit code {done.exit_code}): {output}")


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _closing(sandbox: SandboxHandle) -> Callable[[], None]:
    """Return what ends a sandbox and frees what it took."""
    close = getattr(sandbox, "close", None)
    return cast("Callable[[], None]", close) if callable(close) else sandbox.kill


def _quietly(end: Callable[[], None]) -> None:
    """End something; a failure is logged and keeps nothing else from being ended."""
    try:
        end()
    except Exception:
        logger.exception("could not end %r", end)
