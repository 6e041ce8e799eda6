"""The gateway itself: its routes, its port and its shutdown.

It has no environment and keeps no sessions. It answers `/health` and `/ready`, and merges `/metrics` and the page's
session list from all servers. If it has tokens, it answers the page's login. Everything else goes to a server
(`client_connections`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2

from openenv.protocol.json_values import decode, encode

from ..process_tuning import FileWatch
from ..request_head import AUTHORIZATION, COOKIE, RequestHead, field_pattern, value_of
from ..telemetry.prometheus import CONTENT_TYPE, Family, merge, render
from ..telemetry.server_metrics import MERGED_BY
from .backends import Backends, BackendSource
from .client_connections import JoinedSocket, RelayedConnection, refusal, response
from .guard import GatewayGuard

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.05
_MERGED_BY: Final = {name: how for name, how in MERGED_BY.items() if name != "openenv_session_slots"}
SESSIONS_PATH: Final = "/web/sessions"
# Fields that servers need to check a request: the page's cookie is named after the port in `Host`.
_PASSED: Final = {
    "authorization": AUTHORIZATION,
    "cookie": COOKIE,
    **{name: field_pattern(name.encode()) for name in ("host", "via", "x-forwarded-for", "accept-language")},
    **{name: field_pattern(name.encode()) for name in ("sec-fetch-site", "x-forwarded-proto")},
}


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """How to run a gateway.

    Args:
        host: The address to listen on.
        port: The port; 0 for a free one.
        drain_s: How long connections that cannot resume may continue after the first signal.
        guard: Checks requests.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 15.0
    guard: GatewayGuard = field(default_factory=GatewayGuard)


class Gateway:
    """One address in front of many servers.

    Args:
        backends: The servers.
        guard: Checks requests.
    """

    def __init__(self, backends: Backends, guard: GatewayGuard) -> None:
        self.backends = backends
        self.guard = guard
        self.relays: set[RelayedConnection] = set()
        self.sockets: set[JoinedSocket] = set()
        self.is_closing = False

    def connection(self) -> RelayedConnection:
        """Return the protocol of a new connection."""
        return RelayedConnection(self)

    async def drain(self, limit_s: float) -> None:
        """End all connections.

        Clients of protocol v2 resume through another gateway, so their connections end at once. Requests that wait for
        a response, and v1 WebSockets, which would lose their sessions, may continue for a while.

        Args:
            limit_s: How long they may continue.
        """
        self.is_closing = True
        for relay in list(self.relays):
            relay.shut_down()
        for joined in [one for one in self.sockets if one.is_resumable]:
            joined.transport.close()
        clock = asyncio.get_running_loop().time
        began = clock()
        while (self.relays or self.sockets) and clock() - began < limit_s:  # noqa: ASYNC110 - plain sets
            await asyncio.sleep(_LOOK_S)
        for transport in [*(one.transport for one in self.relays), *(one.transport for one in self.sockets)]:
            transport.abort()

    # -- its own routes -------------------------------------------------------------------------------------------

    def answer(self, head: RequestHead, client: RelayedConnection) -> Awaitable[bytes] | None:
        """Return the response to a client's request for the gateway itself; None if a server has to answer."""
        if head.method not in (b"GET", b"HEAD") or head.body_bytes != 0:
            return None
        route = _ROUTES.get(head.path)
        return None if route is None else _respond(route(self, client.outgoing), head)

    async def _health(self, outgoing: bytes) -> bytes:
        return response(200, encode({"status": "healthy"}))

    async def _ready(self, outgoing: bytes) -> bytes:
        admitting = self.backends.admitting()
        status = "ready" if admitting else "no server takes new sessions"
        if self.is_closing:
            status = "draining"
        shown = {
            "status": status,
            "active_sessions": sum(one.load for one in self.backends.all()),
            "max_sessions": sum(one.most for one in admitting),
            "servers": self._states(),
        }
        return response(200 if admitting and not self.is_closing else 503, encode(shown))

    def _states(self) -> dict[str, int]:
        counts = {"ready": 0, "draining": 0, "unreachable": 0}
        for one in self.backends.all():
            state = "ready" if one.admits else "draining"
            counts[state if one.failing_since is None else "unreachable"] += 1
        return counts

    async def _metrics(self, outgoing: bytes) -> bytes:
        answers = await self._ask_all("/metrics", outgoing)
        if isinstance(answers, bytes):
            return answers
        states = Family("openenv_gateway_servers", "gauge", "Servers behind the gateway, by state.")
        states.add_all("state", self._states().items())
        sockets = Family("openenv_gateway_sockets", "gauge", "WebSockets that lead to a server.").add(len(self.sockets))
        connections = Family("openenv_gateway_connections", "gauge", "HTTP connections.").add(len(self.relays))
        texts = [answer.content for answer in answers]
        return response(200, merge([*texts, render([states, sockets, connections])], _MERGED_BY), CONTENT_TYPE)

    async def _sessions(self, outgoing: bytes) -> bytes:
        answers = await self._ask_all(SESSIONS_PATH, outgoing)
        if isinstance(answers, bytes):
            return answers
        capacity: dict[str, Any] = {"max": 0, "active": 0, "queued": 0, "draining": self.is_closing}
        sessions: list[Any] = []
        for answer in answers:
            shown = decode(answer.content)
            sessions += shown["sessions"]
            for key in ("max", "active", "queued"):
                capacity[key] += shown["capacity"][key]
        return response(200, encode({"capacity": capacity, "sessions": sessions}))

    async def _ask_all(self, path: str, outgoing: bytes) -> list[httpx2.Response] | bytes:
        """Return the answers of all reachable servers, or the first refusal in their place."""
        headers = {
            name: value for name, pattern in _PASSED.items() if (value := value_of(pattern, outgoing)) is not None
        }
        asked = (self.backends.fetch(one, path, headers) for one in self.backends.all() if one.failing_since is None)
        answers = [
            one for one in await asyncio.gather(*asked, return_exceptions=True) if isinstance(one, httpx2.Response)
        ]
        if not answers:
            return refusal(503, "NO_BACKEND", "No server behind this gateway answers.")
        for answer in answers:
            if answer.status_code != 200:
                return response(answer.status_code, answer.content, answer.headers.get("content-type", "text/plain"))
        return answers


_ROUTES: Final[dict[str, Callable[[Gateway, bytes], Awaitable[bytes]]]] = {
    "/health": Gateway._health,
    "/ready": Gateway._ready,
    "/metrics": Gateway._metrics,
    SESSIONS_PATH: Gateway._sessions,
}


async def _respond(answer: Awaitable[bytes], head: RequestHead) -> bytes:
    whole = await answer
    return whole[: whole.index(b"\r\n\r\n") + 4] if head.method == b"HEAD" else whole


def serve_gateway(source: BackendSource, options: GatewayOptions, on_started: Callable[[Gateway, int], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, on a new event loop; see `run_gateway`."""
    try:
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    except ImportError:  # Windows, PyPy
        loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(run_gateway(source, options, on_started))
    finally:
        loop.close()


async def run_gateway(
    source: BackendSource,
    options: GatewayOptions,
    on_started: Callable[[Gateway, int], None],
    *,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        source: Lists the servers.
        options: The options; a second signal ends `drain_s`.
        on_started: Called with the gateway and its port once the port is open.
        stop: Set this event to stop the gateway without a signal.

    Raises:
        OSError: The port is taken.
    """
    loop, stop, hurry = asyncio.get_running_loop(), stop or asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread, or Windows
            loop.add_signal_handler(number, signalled)
    guard = options.guard
    async with Backends(source, probes_tokens=guard.has_roles) as backends:
        gateway = Gateway(backends, guard)
        server = await loop.create_server(gateway.connection, options.host, options.port, backlog=2048)
        try:
            on_started(gateway, server.sockets[0].getsockname()[1])
            with FileWatch(loop).running():
                await stop.wait()
        finally:
            server.close()
            draining = asyncio.ensure_future(gateway.drain(options.drain_s))
            hurrying = asyncio.ensure_future(hurry.wait())
            await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
            hurrying.cancel()
            if not draining.done():
                draining.cancel()
                await gateway.drain(0.0)
