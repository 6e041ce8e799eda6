"""Server processes: started as our own children on free loopback ports, waited for, stopped by pid."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from types import TracebackType
from typing import IO, TYPE_CHECKING

from configurations import APPS, Runnable
from procfs import process_stats
from samples import without_directories

if TYPE_CHECKING:
    from typing_extensions import Self

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.005


class ServerError(RuntimeError):
    """A server did not start or did not stay."""


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


class Server:
    """One server process; a context manager that is entered healthy and left stopped."""

    def __init__(self, runnable: Runnable) -> None:
        self.runnable = runnable
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_wall_s = self.start_cpu_s = 0.0
        self.fresh_rss_kb = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def pid(self) -> int:
        """Return the process id."""
        assert self._process
        return self._process.pid

    def __enter__(self) -> Self:
        """Start the process and wait until /health answers.

        Raises:
            ServerError: it ended or stayed silent.
        """
        if self.runnable.interpreter is None:
            raise ServerError(f"not available: {self.runnable.missing}")
        self._log = tempfile.TemporaryFile()
        start = time.perf_counter()
        self._process = subprocess.Popen(
            self.runnable.command(self.port),
            cwd=APPS,
            env=self.runnable.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        if self.runnable.cores:
            os.sched_setaffinity(self.pid, self.runnable.cores)  # its threads start later, and inherit it
        try:
            self._wait_healthy(start + START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        self.start_wall_s = time.perf_counter() - start
        stats = process_stats(self.pid)
        self.start_cpu_s, self.fresh_rss_kb = stats.cpu_s, stats.rss_kb
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the process."""
        self.stop()

    def stop(self) -> None:
        """End the process with SIGTERM, and with SIGKILL if it does not go."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._log:
            self._log.close()

    def kill(self) -> None:
        """End the process with SIGKILL: a server whose step never returns would use up its time to drain."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def last_line(self) -> str:
        """Return the last line of text the process wrote."""
        assert self._log
        self._log.seek(0)
        lines = [line.strip(" │|") for line in self._log.read().decode("utf-8", "replace").splitlines()]
        written = [line for line in lines if any(map(str.isalnum, line))]  # not the frames that CLIs draw
        return without_directories(written[-1])[:200] if written else "no output"

    def running(self) -> bool:
        """Say whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    def _wait_healthy(self, limit: float) -> None:
        while time.perf_counter() < limit:
            if not self.running():
                assert self._process
                raise ServerError(f"exit code {self._process.returncode} at start: {self.last_line()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                try:
                    connection.request("GET", "/health")
                    if connection.getresponse().status == 200:
                        return
                finally:
                    connection.close()
            time.sleep(POLL_S)
        raise ServerError(f"not healthy after {START_TIMEOUT_S:.0f} s: {self.last_line()}")
