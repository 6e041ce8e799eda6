"""A gateway in a thread of the test process, and servers for it that say which one they are."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from counting_app import Count, Counted, Counting
from openenv import create_app
from openenv.server.app import PageArguments
from openenv.server.gateway.backends import BackendSource
from openenv.server.gateway.gateway import Gateway, GatewayOptions, run_gateway
from openenv.server.gateway.guard import GatewayGuard
from openenv.server.web.web_page import add_page

PATIENCE_S = 60.0


def counting_app(name: str, **options: Any) -> Any:
    """Return the application of a server of that name, with a web page."""
    env_cls = type(f"Counting{name.title()}", (Counting,), {"server": name})
    app = create_app(env_cls, Count, Counted, env_name="counting", **{"max_concurrent_envs": 8, **options})
    add_page(app, PageArguments())
    return app


class ChangingBackends:
    """A source whose list the test changes."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.listed = list(urls)

    async def urls(self) -> list[str]:
        """Return it."""
        return list(self.listed)

    def close(self) -> None:
        """Do nothing."""


class RunningGateway:
    """A gateway on a loopback port.

    Args:
        source: Knows its servers.
        port: The port; 0 for a free one.
        drain_s: How long it waits at its end.
        guard: Checks requests.
    """

    def __init__(
        self, source: BackendSource, *, port: int = 0, drain_s: float = 5.0, guard: GatewayGuard | None = None
    ) -> None:
        self.gateway: Gateway
        self.port = port
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(source, drain_s, guard or GatewayGuard()), name="test-gateway", daemon=True
        )
        self._thread.start()
        assert self._started.wait(PATIENCE_S), "the gateway did not start"
        if self._failure is not None:
            raise self._failure

    def _run(self, source: BackendSource, drain_s: float, guard: GatewayGuard) -> None:
        try:
            import uvloop

            self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        except ImportError:
            self.loop = asyncio.new_event_loop()
        try:
            self.loop.run_until_complete(self._serve(source, GatewayOptions("127.0.0.1", self.port, drain_s, guard)))
        except BaseException as exc:
            self._failure = exc
        finally:
            self._started.set()
            self.loop.close()

    async def _serve(self, source: BackendSource, options: GatewayOptions) -> None:
        self._stop = asyncio.Event()
        await run_gateway(source, options, self._note_started, stop=self._stop)

    def _note_started(self, gateway: Gateway, port: int) -> None:
        self.gateway, self.port = gateway, port
        self._started.set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def call(self, work: Any) -> Any:
        """Run a coroutine on its loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def refresh(self) -> None:
        """Have it ask all servers."""
        self.call(self.gateway.backends.refresh())

    def stop(self) -> None:
        """End it as SIGTERM does; it must not fail."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the gateway did not stop"
        assert self._failure is None, self._failure


class CuttableLink:
    """A port that leads to a server, and can be cut as a network is: nothing is said to either side.

    Args:
        url: The server.
    """

    def __init__(self, url: str) -> None:
        self._server = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.mend()

    def mend(self) -> None:
        """Lead to the server (again)."""
        if self._listener.fileno() < 0:
            self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = (listener.accept()[0], socket.create_connection(self._server))
                self._ends += ends
                for here, there in (ends, ends[::-1]):
                    threading.Thread(target=self._copy, args=(here, there), daemon=True).start()

    @staticmethod
    def _copy(here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(65536):
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Refuse new connections, and break all there are."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends.clear()
