"""Episodes on a server that is stopped and started again in the middle of them, on the same port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from openenv.errors import SessionCapacityError

from .books import FileBook
from .episode import client_of
from .server import GRACE_S, Mishaps, Server, wait_until
from .web import web_client

STOPPED = "server asked to stop (SIGTERM), another one started"
KILLED = "server killed (SIGKILL), another one started"
START_S = 100.0
CONNECT_S = 8.0
STOP_S = 40.0
_EVERY = 6  # episodes that end between one restart and the next
_PAUSE_S = 0.2
_HERE = Path(__file__).resolve().parent


def patient_client(url: str, seed: int) -> Any:
    """Return a client that waits for a server that is being replaced; half of them start a new episode by themselves.

    A quarter goes over HTTP.
    """
    if seed % 4 == 2:
        return _Patient(web_client(url, START_S))
    client = client_of(
        url,
        connect_timeout_s=CONNECT_S,
        retry_refused_s=CONNECT_S,
        message_timeout_s=START_S,
        reconnect_timeout_s=START_S,
        on_session_lost="reset" if seed % 2 else "raise",
    )
    return _Patient(client.sync())


class _Patient:
    """Comes again where a server that is about to stop opens no more sessions: nothing is lost by that."""

    def __init__(self, player: Any) -> None:
        self._player = player

    def __getattr__(self, name: str) -> Any:
        return getattr(self._player, name)

    def reset(self, **kwargs: Any) -> Any:
        """Begin an episode."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return self._player.reset(**kwargs)
            except SessionCapacityError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)


class Generations(Mishaps):
    """One server after the other on the same port: each ends once some episodes have, while others are under way.

    Args:
        folder: Where the book is.
        port: The port.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.book = FileBook(folder / "book")
        self._folder = folder
        self._port = port
        self._lock = threading.Lock()
        self._ended = 0
        self._endings: list[str] = []
        self._replaced = 0
        self._begun: dict[int, int] = {}
        self.problems: list[str] = []
        self._killed: set[int] = set()
        self._is_wanted = threading.Condition(self._lock)
        self._is_over = False
        self._process = self._start()
        self._wait_until_healthy()
        self._thread = threading.Thread(target=self._replace_now_and_then, name="generations", daemon=True)
        self._thread.start()

    def begin(self, seed: int) -> None:
        """Remember which server an episode begins with."""
        with self._lock:
            self._begun[seed] = self._replaced

    def end(self, seed: int) -> list[str]:
        """Say which servers have ended during the episode."""
        with self._is_wanted:
            self._ended += 1
            self._is_wanted.notify_all()
            return sorted(set(self._endings[self._begun.pop(seed) :]))

    def close(self) -> None:
        """Stop the last one, and say what it has left."""
        with self._is_wanted:
            self._is_over = True
            self._is_wanted.notify_all()
        self._thread.join(START_S + STOP_S)
        self._stop(signal.SIGTERM)

    def unclosed(self) -> int:
        """Count environments that have not been closed, but for those of servers that were killed."""
        return sum(pid not in self._killed for pid in self.book.unclosed()) + len(self.problems)

    def _replace_now_and_then(self) -> None:
        while True:
            with self._is_wanted:
                wanted = (len(self._endings) + 1) * _EVERY
                while self._ended < wanted and not self._is_over:
                    self._is_wanted.wait()
                if self._is_over:
                    return
                how = signal.SIGKILL if len(self._endings) % 4 == 3 else signal.SIGTERM
                self._endings.append(KILLED if how is signal.SIGKILL else STOPPED)
            self._stop(how)
            self._process = self._start()
            self._wait_until_healthy()
            with self._lock:
                self._replaced += 1

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "openenv", "serve", f"{_HERE / 'served.py'}:app", "--port", str(self._port)]
        path = os.pathsep.join([str(_HERE.parent), *(place for place in sys.path if place)])
        environment = {**os.environ, "PYTHONPATH": path, "STORM_BOOK": str(self._folder / "book")}
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--grace", str(GRACE_S), "--log-level", "warning"],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait_until_healthy(self) -> None:
        if not wait_until(self._is_healthy, START_S):
            log = (self._folder / "log").read_text(encoding="utf-8", errors="replace")
            self.problems.append(f"the server did not start: {log[-2000:]}")

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def _stop(self, how: signal.Signals) -> None:
        process = self._process
        process.send_signal(how)
        try:
            status = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.problems.append("the server did not stop")
            process.kill()
            process.wait(STOP_S)
            return
        if how is signal.SIGKILL:
            self._killed.add(process.pid)
        elif status != 0:
            self.problems.append(f"the server ended with {status}")


@contextlib.contextmanager
def restarting() -> Iterator[Server]:
    """Serve the counting environment from processes that follow each other."""
    with tempfile.TemporaryDirectory(prefix="storm") as folder, free_port() as port:
        generations = Generations(Path(folder), port)
        server = Server(port, generations.book.deeds, lambda: 0, generations.unclosed, generations)
        try:
            yield server
        finally:
            generations.close()
            if generations.unclosed():
                left = [*generations.problems, f"{len(generations.book.unclosed())} environments were not closed"]
                raise RuntimeError("; ".join(left))


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Choose a port that nothing listens on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    yield port
