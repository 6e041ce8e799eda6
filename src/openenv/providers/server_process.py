"""Servers as child processes: `ProcessProvider` (`openenv serve TARGET`, or any command), and what `UVProvider` shares.

A server runs in a separate process group, is ended with all its descendants, and leaves the end of its log. A
`guardian` process ends it when its owner dies, even if the owner is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import Self

from openenv import settings
from openenv.errors import ProviderError, ProviderUnavailable
from openenv.providers import guardian
from openenv.providers.health import wait_for_ready
from openenv.providers.provider import READY_S, RuntimeProvider, refuse_unknown
from openenv.sandboxes.host import ProcessOwner

GRACE_S = 10.0
OWNER_VARIABLE = "OPENENV_OWNER"
"""Set in every server and its descendants: the owner, in the form of a container's label."""
_KILL_S = 10.0
_TAIL_BYTES = 16_384
_TAIL_LINES = 40
_CAN_KEEP = sys.platform == "linux"


class ServerProcess:
    """A running command with its log.

    Args:
        command: The command; the program comes first.
        environ: All of its variables.
        cwd: The folder to run it in.
        log_path: The file that its output is appended to; by default a temporary one.
        folder: A temporary folder that is removed with it.

    Raises:
        ProviderError: The start failed; everything it created was removed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        cwd: Path | None = None,
        log_path: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        program = shutil.which(command[0], path=environ.get("PATH"))
        if program is None:
            raise ProviderUnavailable(f"`{command[0]}` cannot be started: install it, or put it on PATH")
        self.folder = folder or Path(tempfile.mkdtemp(prefix="openenv-server-"))
        self.log_path = log_path or self.folder / "log"
        self._final_log = ""
        self._owner = os.getpid()
        self._lifeline: int | None = None
        try:
            self._process = self._start([program, *command[1:]], environ, cwd)
        except BaseException as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise ProviderError(f"`{command[0]}` cannot be started: {error}") from error
            raise

    def _start(self, command: list[str], environ: Mapping[str, str], cwd: Path | None) -> subprocess.Popen[bytes]:
        end: int | None = None
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            try:
                if os.name == "posix" and sys.executable:
                    end, self._lifeline = os.pipe()
                    remove = str(self.folder)
                    guard = [sys.executable, "-I", "-S", guardian.__file__, str(end), str(GRACE_S), remove]
                    command = [*guard, *command]
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**environ, OWNER_VARIABLE: str(ProcessOwner.current())},
                    cwd=cwd,
                    pass_fds=() if end is None else (end,),
                    start_new_session=True,
                )
            except BaseException:
                self._close_lifeline()
                raise
            finally:
                if end is not None:
                    os.close(end)

    @property
    def pid(self) -> int:
        """The id of the process, and of its group."""
        return self._process.pid

    def ended(self, within_s: float) -> str | None:
        """Wait at most that long for its end; return how it ended, or None while it runs."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        return f"exited prematurely with code {code}"

    def log(self) -> str:
        """Return the end of its output, also after it was stopped."""
        if self._final_log:
            return self._final_log
        try:
            with self.log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def stop(self) -> None:
        """End it and everything it started: gently, then by force. Do nothing if it has ended."""
        if self._owner != os.getpid():  # a forked process leaves it to its parent
            return
        try:
            if self._process.poll() is None:
                self._signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_S)
        finally:
            self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_S)
            self._close_lifeline()
            self._final_log = self.log()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(self._process.pid, number)
            else:
                self._process.terminate()

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


class PortReservation:
    """A free port for a server that is yet to start, kept until `release`.

    The kernel chooses it. A socket that is bound but does not listen reserves the port, except against a server that
    sets SO_REUSEADDR, as servers do. Only Linux supports that; on other systems the port is free for a moment.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, 0))
            self.port: int = self._socket.getsockname()[1]
        except BaseException:
            self._socket.close()
            raise
        if not _CAN_KEEP:
            self._socket.close()

    def release(self) -> None:
        """Free the port."""
        self._socket.close()


def local_url(host: str, port: int) -> str:
    """Return the URL of a server that listens there, for programs on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ChildProcessProvider(RuntimeProvider):
    """The base of providers that run a server as a child process."""

    def __init__(self, *, host: str, log_path: str | Path | None = None) -> None:
        self.host = host
        self._log_path = Path(log_path) if log_path is not None else None
        self._server: ServerProcess | None = None
        self._base_url: str | None = None
        self._reservation: PortReservation | None = None
        self._last_log = ""

    @property
    def base_url(self) -> str:
        """The address of the server.

        Raises:
            RuntimeError: It has not been started.
        """
        if self._base_url is None:
            raise ProviderError(f"{type(self).__name__} has not been started")
        return self._base_url

    @property
    def log_path(self) -> Path | None:
        """The file that the server's output goes to while it runs."""
        return self._log_path if self._server is None else self._server.log_path

    def log(self) -> str:
        """Return the end of the server's output, even after it was stopped."""
        return self._last_log if self._server is None else self._server.log()

    def ended(self, within_s: float) -> str | None:
        """Wait at most that long for the server's end; return how it ended, or None while it runs.

        Raises:
            RuntimeError: None runs.
        """
        if self._server is None:
            raise ProviderError(f"{type(self).__name__} has not been started")
        return self._server.ended(within_s)

    def stop(self) -> None:
        """Stop the server and everything it started; do nothing if none runs."""
        server, self._server, self._base_url = self._server, None, None
        self._release()
        if server is not None:
            try:
                server.stop()
            finally:
                self._last_log = server.log()

    def _launch(self, port: int | None, start: Callable[[int], ServerProcess]) -> str:
        """Start a server on a port, by default any free one."""
        if self._server is not None and self._server.ended(0) is None:
            raise ProviderError(f"{type(self).__name__} is already running at {self._base_url}; stop() it first")
        self.stop()  # an ended server left its log and its folder
        try:
            if port is None:
                self._reservation = PortReservation(self.host)
                port = self._reservation.port
            self._server = start(port)
        except BaseException as error:
            self.stop()
            if isinstance(error, OSError):
                raise ProviderError(f"No port is free on {self.host}: {error}") from error
            raise
        self._base_url = local_url(self.host, port)
        return self._base_url

    def _await(self, timeout_s: float, what: str) -> None:
        """Wait for the server; stop it if it ends or does not answer."""
        if self._server is None:
            raise ProviderError(f"{type(self).__name__} has not been started")
        try:
            wait_for_ready(self.base_url, timeout_s, what=what, watch=self._server)
        except BaseException:
            self.stop()
            raise
        self._release()

    def _release(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None


class ProcessProvider(ChildProcessProvider):
    """Serves an environment from a child process on loopback; as a context manager it waits until it answers.

    The process ends with this process, even if this process is killed.

    Args:
        target: What `openenv serve` serves: a folder, a file, a module.
        command: A command to run instead. `{port}` and `{host}` in its words are replaced, and `PORT` is set. It must
            set SO_REUSEADDR, as servers do, because another socket reserves the port until then.
        host: The address to listen on.
        cwd: The folder to run in; by default the current one.
        env_vars: Variables to add to those of this process.
        log_path: Where its output is kept; by default a temporary file that is removed with it.
        ready_timeout_s: The longest time until it answers.

    Raises:
        ValueError: Neither a target nor a command is given, or both are.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        command: Sequence[str] | None = None,
        host: str = "127.0.0.1",
        cwd: str | Path | None = None,
        env_vars: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        ready_timeout_s: float = READY_S,
    ) -> None:
        super().__init__(host=host, log_path=log_path)
        if (target is None) == (command is None) or isinstance(command, str) or command == ():
            raise ValueError("Give either target, which `openenv serve` serves, or command, a list of words")
        self._target = None if target is None else str(target)
        self._command = None if command is None else list(command)
        self._cwd = None if cwd is None else Path(cwd)
        self._env_vars = dict(env_vars or {})
        self.ready_timeout_s = ready_timeout_s

    def start(self, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any) -> str:
        """Start the server and return its address.

        Raises:
            ValueError: An option is unknown.
            RuntimeError: It already runs, or cannot be started.
        """
        refuse_unknown(self, kwargs, ProcessProvider.start)
        return self._launch(port, lambda chosen: self._process(chosen, env_vars or {}))

    def wait_for_ready(self, timeout_s: float | None = None) -> None:
        """Return as soon as the server answers; stop it if it ends or does not answer.

        Raises:
            ServerDied: It ended; the text has the end of its log.
            ServerNotReady: It did not answer in time, by default `ready_timeout_s`.
        """
        self._await(self.ready_timeout_s if timeout_s is None else timeout_s, "The server process")

    def __enter__(self) -> Self:
        super().__enter__()
        self.wait_for_ready()
        return self

    def _process(self, port: int, env_vars: Mapping[str, str]) -> ServerProcess:
        command = self._command
        if command is None:
            assert self._target is not None
            command = [sys.executable, "-m", "openenv", "serve", self._target, "--host", "{host}", "--port", "{port}"]
        words = [word.replace("{port}", str(port)).replace("{host}", self.host) for word in command]
        environ = settings.child_environment({"PORT": str(port), "PYTHONUNBUFFERED": "1", **self._env_vars, **env_vars})
        return ServerProcess(words, environ=environ, cwd=self._cwd, log_path=self._log_path)
