"""Episodes on `openenv serve --workers 3`, whose workers are killed in the middle of steps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from .books import FileBook
from .episode import client_of
from .keyed import KeyedPlayer
from .restarts import START_S, STOP_S, free_port
from .server import GRACE_S, Server, wait_until
from .web import web_client
from .workers import Killer, unclosed

WORKERS = 3
PATIENCE_S = 30.0  # all workers may be dead at once, and need a while to start
_KILLS_OF_SEEDS = 0.08  # each takes a third of the episodes under way with it
_HERE = Path(__file__).resolve().parent


def worker_player(url: str, seed: int) -> Any:
    """Return a client: half of them over a WebSocket, a quarter over HTTP, a quarter over both in turn."""
    if seed % 4 == 2:
        return web_client(url, PATIENCE_S)
    if seed % 4 == 3:
        return KeyedPlayer(url, seed)
    options = ("connect_timeout_s", "retry_refused_s", "message_timeout_s", "reconnect_timeout_s")
    return client_of(url, **dict.fromkeys(options, PATIENCE_S)).sync()


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that have not ended."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


@contextlib.contextmanager
def running_with_workers() -> Iterator[Server]:
    """Serve the counting environment with several workers, in processes of their own."""
    with tempfile.TemporaryDirectory(prefix="storm") as folder, free_port() as port:
        place = Path(folder)
        book = FileBook(place / "book")
        process = _start(place, port)
        try:
            if not wait_until(lambda: _active(port) is not None, START_S):
                raise RuntimeError(f"the server did not start: {(place / 'log').read_text('utf-8')[-2000:]}")
            killer = Killer(book, lambda: children_of(process.pid), _KILLS_OF_SEEDS)
            yield Server(port, book.deeds, lambda: _active(port) or 0, lambda: unclosed(book, killer), killer)
        finally:
            workers = children_of(process.pid)
            process.send_signal(signal.SIGTERM)
            status = process.wait(STOP_S)
        if status != 0 or any(Path(f"/proc/{pid}").exists() for pid in workers):
            raise RuntimeError(f"the server ended with {status}: {(place / 'log').read_text('utf-8')[-2000:]}")


def _start(place: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "openenv", "serve", f"{_HERE / 'served.py'}:app", "--port", str(port)]
    command += ["--workers", str(WORKERS), "--grace", str(GRACE_S), "--session-timeout", str(4 * GRACE_S)]
    command += ["--log-level", "warning", "--no-web"]
    path = os.pathsep.join([str(_HERE.parent), *(entry for entry in sys.path if entry)])
    with (place / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=place,
            env={**os.environ, "PYTHONPATH": path, "STORM_BOOK": str(place / "book")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _active(port: int) -> int | None:
    """Return how many sessions the server has, as whichever worker answers says; None where none does."""
    with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
        return int(json.load(answer)["active_sessions"])
    return None
