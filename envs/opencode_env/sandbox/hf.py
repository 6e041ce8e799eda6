"""Sandboxes of Hugging Face (`huggingface_hub.Sandbox`, machines that run as Jobs), in the narrow shape of the harness.

Loads without the package `huggingface_hub`; making a backend without it raises ImportError with what to install. The
account's token is found as that package finds it: `HF_TOKEN`, or what `hf auth login` has stored.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from openenv.errors import SandboxError, SandboxUnavailable, message_of
from openenv.sandboxes.base import ExecResult

if TYPE_CHECKING:
    from huggingface_hub import Sandbox as RemoteSandbox
    from huggingface_hub import SandboxProcess

_KILLED = 137
_FIRST_LOOK_S = 0.1
_LOOK_S = 2.0
_KILL_TRIES = 3


class HFBgJob:
    """A command in the background."""

    def __init__(self, sandbox: HFSandboxHandle, process: SandboxProcess, sleep: Callable[[float], None]) -> None:
        self._sandbox = sandbox
        self._process = process
        self._sleep = sleep

    @property
    def pid(self) -> int:
        """Its process id inside the sandbox."""
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; 137 where a signal ended it.

        Raises:
            TimeoutError: It is not there in time.
            SandboxError: The sandbox does not answer, or has forgotten the command.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause_s = _FIRST_LOOK_S
        while True:
            process = self._look()
            if not process.running:
                return _KILLED if process.exit_code is None or process.exit_code < 0 else process.exit_code
            left_s = pause_s if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    f"process {self.pid} of sandbox {self._sandbox.sandbox_id} runs on after {timeout:g} s"
                )
            self._sleep(min(pause_s, left_s))
            pause_s = min(_LOOK_S, 2 * pause_s)

    def _look(self) -> SandboxProcess:
        with self._sandbox.asking("did not list the processes of"):
            listed = self._sandbox.remote.processes()
        for process in listed:
            if process.pid == self._process.pid and process.id == self._process.id:
                return process
        raise SandboxError(f"Sandbox '{self._sandbox.sandbox_id}' no longer knows of process {self.pid}")

    def kill(self) -> None:
        """Kill the command and what it started."""
        with self._sandbox.asking("did not kill a process of"):
            self._process.kill()


class HFSandboxHandle:
    """One sandbox.

    Args:
        remote: The package's own object.
        sleep: Waits between looks at a command in the background.
    """

    def __init__(self, remote: RemoteSandbox, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.remote = remote
        self._sleep = sleep

    @property
    def sandbox_id(self) -> str:
        """The id of its Job."""
        return self.remote.id

    def exec(
        self, cmd: str, *, envs: Mapping[str, str] | None = None, cwd: str | None = None, timeout: float | None = 60
    ) -> ExecResult:
        """Run a shell line to its end; an exit code other than 0 is a result, and so is the end of its time.

        Raises:
            SandboxError: The sandbox does not answer.
        """
        with self.asking("ran no command in"):
            done = self.remote.run(cmd, env=dict(envs or {}) or None, cwd=cwd, timeout=timeout, check=False)
        code = done.exit_code
        if code is None or code < 0:
            code = 128 + (done.signal or _KILLED - 128)
        return ExecResult(code, done.stdout, done.stderr, timed_out=done.timed_out, duration_s=done.duration_ms / 1000)

    def start_bg(self, cmd: str, *, envs: Mapping[str, str] | None = None, cwd: str | None = None) -> HFBgJob:
        """Start a shell line and return at once."""
        with self.asking("started no command in"):
            process = self.remote.run(cmd, env=dict(envs or {}) or None, cwd=cwd, background=True)
        return HFBgJob(self, process, self._sleep)

    def write_text(self, path: str, content: str) -> None:
        """Write a file, with its parent folders."""
        parent = str(PurePosixPath(path).parent)
        with self.asking("wrote no file in"):
            if parent not in ("/", "."):
                self.remote.files.mkdir(parent)
            self.remote.files.write(path, content)

    def read_text(self, path: str) -> str:
        """Return a file's text.

        Raises:
            FileNotFoundError: There is none.
        """
        with self.asking("read no file of", path):
            return self.remote.files.read_text(path)

    def exists(self, path: str) -> bool:
        """Say whether there is such a file or folder."""
        with self.asking("looked for no file in"):
            return self.remote.files.exists(path)

    def kill(self) -> None:
        """End the sandbox and its Job. One that cannot be reached ends when it has been idle for its time."""
        for _ in range(_KILL_TRIES):  # the package logs a failure and tries again when it is called again
            with self.asking("did not end"):
                self.remote.kill()

    @contextlib.contextmanager
    def asking(self, problem: str, path: str | None = None) -> Iterator[None]:
        """Turn what the package raises into a `SandboxError`, or FileNotFoundError for a path that is not there."""
        try:
            yield
        except Exception as exc:  # its own errors, and those of its HTTP client
            if path is not None and getattr(exc, "status_code", None) == 404:
                raise FileNotFoundError(f"no {path} in sandbox {self.sandbox_id}") from exc
            raise SandboxError(f"Hugging Face {problem} sandbox '{self.sandbox_id}': {message_of(exc)}") from exc


class HFSandboxBackend:
    """Starts sandboxes at Hugging Face, each a Job of its own.

    Args:
        image: The image; it has OpenCode, or what installs it (`curl`, `bash`), and Python for the proxy.
        flavor: The hardware.
        forward_hf_token: Whether the account's token is in the sandbox, where the agent can read it.
        sandbox_kwargs: More arguments of `huggingface_hub.Sandbox.create`; they override ours.

    Raises:
        ImportError: The package is not installed, or is too old to have sandboxes.
    """

    def __init__(
        self,
        *,
        image: str,
        flavor: str = "cpu-basic",
        forward_hf_token: bool = False,
        sandbox_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            from huggingface_hub import Sandbox
        except ImportError as exc:
            text = "Sandboxes of Hugging Face need a `huggingface_hub` that has them. Install it: "
            raise ImportError(f"{text}pip install -U huggingface_hub") from exc
        self._class = Sandbox
        self._arguments = {"image": image, "flavor": flavor, "forward_hf_token": forward_hf_token}
        self._kwargs = dict(sandbox_kwargs or {})

    def create(
        self,
        *,
        timeout_s: int = 900,
        envs: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> HFSandboxHandle:
        """Start a sandbox and wait until it answers.

        Args:
            timeout_s: After how many seconds without a request it ends by itself.
            envs: Variables for its commands.
            metadata: Labels of its Job, where the package can set them.

        Raises:
            SandboxUnavailable: None was started; no Job is left.
        """
        arguments: dict[str, Any] = {**self._arguments, "idle_timeout": timeout_s, "env": dict(envs or {})}
        if metadata and "labels" in inspect.signature(self._class.create).parameters:
            arguments["labels"] = dict(metadata)
        try:
            return HFSandboxHandle(self._class.create(**{**arguments, **self._kwargs}))
        except Exception as exc:  # its own errors, and those of its HTTP client
            raise SandboxUnavailable(f"Hugging Face started no sandbox: {message_of(exc)}") from exc
