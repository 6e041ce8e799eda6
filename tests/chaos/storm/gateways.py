"""Episodes on two servers behind `openenv gateway`, which is stopped or killed and started again meanwhile."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .environment import Book, Deed, counting
from .episode import client_of
from .keyed import KeyedPlayer
from .restarts import START_S, Generations, free_port
from .server import Server, ours, serving
from .web import web_client

GRACE_S = 20.0  # a gateway is not there for as long as it takes to start


def gateway_player(url: str, seed: int) -> Any:
    """Return a client that waits for the next gateway: half of them over a WebSocket, the others over HTTP too."""
    if seed % 4 == 2:
        return web_client(url, START_S)
    if seed % 4 == 3:
        return KeyedPlayer(url, seed)
    options = ("connect_timeout_s", "retry_refused_s", "message_timeout_s", "reconnect_timeout_s")
    return client_of(url, **dict.fromkeys(options, START_S)).sync()


class GatewayGenerations(Generations):
    """One gateway after the other on the same port.

    Args:
        folder: Where the log is.
        port: The port.
        urls: The servers.
    """

    def __init__(self, folder: Path, port: int, urls: Sequence[str]) -> None:
        self._urls = urls
        super().__init__(folder, port)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "openenv", "gateway", *self._urls, "--port", str(self._port)]
        path = os.pathsep.join(place for place in sys.path if place)
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--log-level", "error"],
                cwd=self._folder,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


@contextlib.contextmanager
def running_behind_gateways() -> Iterator[Server]:
    """Serve the counting environment from two servers in threads of this process, behind gateways that are replaced."""
    books = [Book(), Book()]
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="storm")))
        port = stack.enter_context(free_port())
        classes = [counting(book, coroutine=bool(number)) for number, book in enumerate(books)]
        prepared = [ours(env_cls, idle_s=GRACE_S, grace_s=GRACE_S) for env_cls in classes]
        servers = [stack.enter_context(serving(*one)) for one in prepared]
        for book in books:
            book.forget_trials()
        gateways = GatewayGenerations(place, port, [f"http://127.0.0.1:{own}" for own, _ in servers])

        def deeds(owner: int) -> dict[str, list[Deed]]:
            return {f"{n}.{serial}": done for n, book in enumerate(books) for serial, done in book.deeds(owner).items()}

        def sessions() -> int:
            return sum(count() for _, count in servers)

        try:
            yield Server(port, deeds, sessions, lambda: sum(book.alive for book in books), gateways)
        finally:
            gateways.close()
            if gateways.problems:
                raise RuntimeError("; ".join(gateways.problems))
