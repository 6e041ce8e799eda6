"""A server as a child process on this machine: `openenv serve TARGET`, or any command that serves.

Knows how such a command is told its address. How the process is run and ended is `server_process`'s.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import Self

from openenv import settings
from openenv.errors import ProviderError
from openenv.providers.base import READY_S, RuntimeProvider, refuse_unknown
from openenv.providers.ports import Reservation, local_url
from openenv.providers.readiness import wait_for_ready
from openenv.providers.server_process import ServerProcess


class ChildProvider(RuntimeProvider):
    """What providers have in common whose server is a child process: it, its address and its log."""

    def __init__(self, *, host: str, log_path: str | Path | None = None) -> None:
        self.host = host
        self._log_path = Path(log_path) if log_path is not None else None
        self._server: ServerProcess | None = None
        self._base_url: str | None = None
        self._reservation: Reservation | None = None
        self._last_log = ""

    @property
    def base_url(self) -> str:
        """Where the server is.

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
        """Return the end of what the server has written, also after it was stopped."""
        return self._last_log if self._server is None else self._server.log()

    def stop(self) -> None:
        """Stop the server and all that it has started; harmless when none runs."""
        server, self._server, self._base_url = self._server, None, None
        self._release()
        if server is not None:
            try:
                server.stop()
            finally:
                self._last_log = server.log()

    def _launch(self, port: int | None, start: Callable[[int], ServerProcess]) -> str:
        """Start a server on a port, by default any free one."""
        self._require_stopped()
        self.stop()  # one that has ended by itself left its log and its folder
        try:
            if port is None:
                self._reservation = Reservation(self.host)
                port = self._reservation.port
            self._server = start(port)
        except BaseException as error:
            self.stop()
            if isinstance(error, OSError):
                raise ProviderError(f"No port is free on {self.host}: {error}") from error
            raise
        self._base_url = local_url(self.host, port)
        return self._base_url

    def _require_stopped(self) -> None:
        if self._server is not None and self._server.ended(0) is None:
            raise ProviderError(f"{type(self).__name__} is already running at {self._base_url}; stop() it first")

    def _await(self, timeout_s: float, what: str) -> None:
        """Wait for the server; one that ends or does not answer is stopped."""
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

    @abstractmethod
    def start(self, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any) -> str:
        """Start the server and return its address."""


class ProcessProvider(ChildProvider):
    """Serves an environment from a child process on loopback; as a context manager it waits until it answers.

    The process ends with this one, however that ends.

    Args:
        target: What `openenv serve` is to serve: a folder, a file, a module.
        command: What to run instead. `{port}` and `{host}` in its words are replaced, and `PORT` is set; it must take a
            port of which another socket is bound, as every server does that sets SO_REUSEADDR.
        host: Where it listens.
        cwd: Where it runs; by default here.
        env_vars: Variables beside those of this process.
        log_path: Where its output is kept; by default a temporary file that ends with it.
        ready_timeout_s: How long it may take to answer.

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
            ValueError: An option is none.
            RuntimeError: It already runs, or cannot be started.
        """
        refuse_unknown(type(self).__name__, kwargs, ("port", "env_vars"))
        return self._launch(port, lambda chosen: self._process(chosen, env_vars or {}))

    def wait_for_ready(self, timeout_s: float | None = None) -> None:
        """Return as soon as the server answers; one that ends or does not answer is stopped.

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
