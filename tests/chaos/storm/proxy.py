"""A TCP proxy that breaks connections as a plan says. It has a thread and an event loop of its own.

Knows where HTTP and WebSocket messages begin and end, so that it can strike between them and in their middle; must not
know what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from .faults import DOWN, UP, Fault, Kind, Plan

_LONGEST_DELAY_S = 0.25
_LONGEST_REFUSAL_S = 0.5
_LATEST_S = 0.8
_CONTROL = 0x8


@dataclass
class Route:
    """A port of its own that leads one episode to its server."""

    port: int
    target: int
    plan: Plan
    outage_s: float
    _holder: socket.socket
    _server: asyncio.AbstractServer | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _silent: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Where the client is sent to."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_silent(self) -> bool:
        """Whether there are connections that no client knows of."""
        return bool(self._silent)

    async def listen(self) -> None:
        """Accept connections."""
        sock = bound(self.port)
        # Known before it begins, so that a route that is closed meanwhile ends it too.
        self._server = await asyncio.start_server(self._accept, sock=sock, limit=1 << 22, start_serving=False)
        await self._server.start_serving()

    async def refuse(self, seconds: float) -> None:
        """Accept none for a while; the port stays taken."""
        if self._server is None:
            return
        self._end_listening()
        await asyncio.sleep(seconds)
        await self.listen()

    def _end_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def deliver(self, unit: bytes, delay_s: float) -> None:
        """Send a request on a connection of its own, as one that the net had kept; the answer is dropped."""
        await asyncio.sleep(delay_s)
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.target)
            try:
                writer.write(unit)
                await writer.drain()
                await asyncio.wait_for(reader.read(1), 5)
            except asyncio.TimeoutError:
                pass
            finally:
                writer.close()

    def run(self, work: object) -> asyncio.Task[None]:
        """Do something beside, to be ended with the route."""
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task  # type: ignore[no-any-return]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = _this_task()
        self._tasks.add(task)
        try:
            server = await asyncio.open_connection("127.0.0.1", self.target, limit=1 << 22)
            await _Connection(self, (reader, writer), server, on_silence=lambda: self._silent.add(task)).run()
        except (OSError, asyncio.CancelledError):  # no client is left to inform
            writer.close()
        finally:
            self._tasks.discard(task)
            self._silent.discard(task)

    async def close(self) -> None:
        """End everything but silent connections: their servers have to find out by themselves."""
        self._end_listening()
        await _cancel(self._tasks - self._silent)
        self._end_listening()  # a connection may just have begun
        self._holder.close()

    async def end_silence(self) -> None:
        """End those too."""
        await _cancel(self._tasks)


class _Connection:
    """One connection through the proxy."""

    def __init__(
        self,
        route: Route,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        *,
        on_silence: Callable[[], None],
    ) -> None:
        self._route = route
        self._client_reader, self._client_writer = client
        self._server_reader, self._server_writer = server
        self._on_silence = on_silence
        self._silent: set[str] = set()
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Forward until the connection is dead; where there is silence, neither side learns of the other's end."""
        pumps = [
            asyncio.ensure_future(self._pump(self._client_reader, self._server_writer, UP)),
            asyncio.ensure_future(self._pump(self._server_reader, self._client_writer, DOWN)),
        ]
        try:
            both = asyncio.gather(*pumps, return_exceptions=True)
            await asyncio.wait([self._dead, both], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            self.kill(hard=False)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async for unit, counts in _units(reader):
                fault = self._route.plan.next(direction) if counts and direction not in self._silent else None
                if fault is not None:
                    await self._strike(fault, unit, writer, direction)
                elif direction not in self._silent:
                    writer.write(unit)
                    await writer.drain()
        if not self._silent:
            self._end()

    async def _strike(self, fault: Fault, unit: bytes, writer: asyncio.StreamWriter, direction: str) -> None:
        kind, part = fault.kind, 1 + int(fault.amount * (len(unit) - 1))
        if kind is Kind.DELAY:
            await asyncio.sleep(fault.amount * _LONGEST_DELAY_S)
            writer.write(unit)
        elif kind is Kind.STALL:
            writer.write(unit[:part])
            await asyncio.sleep(fault.amount * _LONGEST_DELAY_S)
            writer.write(unit[part:])
        elif kind is Kind.DUPLICATE:
            writer.write(unit if _is_handshake(unit) else unit + unit)
        elif kind is Kind.LATE:
            writer.write(unit)
            if not _is_handshake(unit):
                self._route.run(self._route.deliver(unit, fault.amount * _LATEST_S))
        elif kind in (Kind.HALF_OPEN, Kind.DEAF):
            self._silent |= {UP, DOWN} if kind is Kind.HALF_OPEN else {direction}
            self._on_silence()
        else:
            if kind is Kind.KILL_AFTER:
                writer.write(unit)
            elif kind is Kind.TRUNCATE:
                writer.write(unit[: min(part, len(unit) - 1)])
            with contextlib.suppress(OSError):
                await writer.drain()
            if kind in (Kind.REFUSE, Kind.OUTAGE):
                long = kind is Kind.OUTAGE
                self._route.run(
                    self._route.refuse(self._route.outage_s if long else 0.1 + fault.amount * _LONGEST_REFUSAL_S)
                )
                await asyncio.sleep(0)  # the port is closed before the client learns of it
            self.kill(hard=fault.hard)
            self._end()

    def _end(self) -> None:
        if not self._dead.done():
            self._dead.set_result(None)

    def kill(self, *, hard: bool) -> None:
        """End both sides."""
        for writer in (self._client_writer, self._server_writer):
            if hard:
                with contextlib.suppress(OSError):
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort() if hard else writer.close()


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _units(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bool]]:
    """Cut a stream into messages of HTTP, and frames once it is a WebSocket's.

    Say of each whether it is more than a ping, pong or close.
    """
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"upgrade: websocket" in head.lower():
            yield head, True
            break
        yield head + await reader.readexactly(_body_length(head)), True
    while True:
        head = await reader.readexactly(2)
        length, rest = head[1] & 0x7F, b""
        if length == 126:
            rest = await reader.readexactly(2)
            length = int.from_bytes(rest, "big")
        elif length == 127:
            rest = await reader.readexactly(8)
            length = int.from_bytes(rest, "big")
        body = await reader.readexactly(length + (4 if head[1] & 0x80 else 0))
        yield head + rest + body, head[0] & 0x0F < _CONTROL


def _body_length(head: bytes) -> int:
    found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return 0 if found is None else int(found.group(1))


def _is_handshake(unit: bytes) -> bool:
    return b"upgrade: websocket" in unit.lower()


def bound(port: int) -> socket.socket:
    """A socket on a port that others of this kind share: one that does not listen keeps the port while it is closed."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    return sock


class FaultProxy:
    """Routes in a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._routes: list[Route] = []
        self._silent: list[Route] = []

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for route in list(self._routes):
            self.close(route)
        for route in self._silent:
            asyncio.run_coroutine_threadsafe(route.end_silence(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def open(self, target: int, plan: Plan, *, outage_s: float) -> Route:
        """Make a way to a server's port, through a plan."""
        holder = bound(0)
        route = Route(holder.getsockname()[1], target, plan, outage_s, holder)
        asyncio.run_coroutine_threadsafe(route.listen(), self._loop).result(10)
        self._routes.append(route)
        return route

    def close(self, route: Route) -> None:
        """End a route and its connections."""
        self._routes.remove(route)
        asyncio.run_coroutine_threadsafe(route.close(), self._loop).result(10)
        if route.is_silent:
            self._silent.append(route)

    @contextlib.contextmanager
    def route(self, target: int, plan: Plan, *, outage_s: float) -> Iterator[Route]:
        """Make a way for as long as it is needed."""
        route = self.open(target, plan, outage_s=outage_s)
        try:
            yield route
        finally:
            self.close(route)
