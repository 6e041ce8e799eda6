"""Many more clients than slots, on two servers, and some of them vanish while they wait in line.

Those who stay must all be served, in the order in which they came, with never more sessions than slots; and no slot
may be lost, whichever way the others went.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from .environment import Book, counting
from .faults import Plan
from .runner import Result, Storm
from .server import Server, ours, serving, wait_until
from .verdict import Outcome, Verdict

SLOTS = 4
ROUND = 20  # clients of each server that wait at the same time
LONG_S = 60.0
SHORT_S = 0.05
FIRST_OWNER = 50_000_000


class Manner(Enum):
    """What a client does while it waits; most stay."""

    STAYS = "stays"
    STAYS_HTTP = "stays (`POST /sessions`)"
    RETURNS = "connection killed, comes back with its nonce"
    KILLED = "connection killed"
    CLOSES = "closes its connection"
    CANCELS = "cancels its request"
    SILENT = "falls silent"
    HTTP_GONE = "hangs up (`POST /sessions`)"
    IMPATIENT = "waits only for a moment"


_CHOICES = (*[Manner.STAYS] * 8, *[Manner.STAYS_HTTP] * 3, *Manner)
_LASTING = (Manner.STAYS, Manner.STAYS_HTTP, Manner.RETURNS)


@dataclass
class Client:
    """One who comes to a server."""

    number: int
    url: str
    manner: Manner
    problem: str = ""
    socket: ClientConnection | None = None
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    opened: dict[str, Any] | None = None
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_http(self) -> bool:
        """Whether it comes without a WebSocket."""
        return self.manner in (Manner.STAYS_HTTP, Manner.HTTP_GONE)

    async def come(self, joined: Callable[[], int]) -> None:
        """Ask for a session; return when that is there, or this one's place in line."""
        wait_s = SHORT_S if self.manner is Manner.IMPATIENT else LONG_S
        if self.is_http:  # it gets no message while it waits; there is no free slot when it comes
            before = joined()
            await self._post("/sessions", {"wait_s": wait_s}, {"Idempotency-Key": self.nonce})
            deadline = time.monotonic() + LONG_S
            while joined() == before and time.monotonic() < deadline:  # noqa: ASYNC110 - another thread counts
                await asyncio.sleep(0.002)
            return
        self.socket = await connect(
            f"{self.url.replace('http', 'ws')}/ws",
            subprotocols=["openenv.v2.json"],  # type: ignore[list-item]
            proxy=None,
            ping_interval=None,
        )
        await self.send(type="open", id=1, wait_s=wait_s, nonce=self.nonce)
        message = await self.receive()
        self.opened = message if message["type"] == "opened" else None

    async def send(self, **message: Any) -> None:
        """Send a message."""
        assert self.socket is not None
        await self.socket.send(json.dumps(message))

    async def receive(self) -> dict[str, Any]:
        """Wait for a message."""
        assert self.socket is not None
        message: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.recv(), LONG_S))
        return message

    async def vanish(self) -> None:
        """Go, in one's own manner."""
        if self.manner is Manner.HTTP_GONE:
            assert self.streams is not None
            self.streams[1].close()
            return
        assert self.socket is not None
        if self.manner is Manner.CANCELS:
            await self.send(type="cancel", id=2, request=1)
        elif self.manner is Manner.CLOSES:
            await self.socket.close()
        elif self.manner is Manner.SILENT:
            self.socket.transport.pause_reading()  # and never a word again
        else:
            sock = self.socket.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.transport.abort()

    async def be_served(self, pause_s: float) -> None:
        """Wait for the session, play, and end it."""
        if self.is_http:
            await self._be_served_over_http(pause_s)
            return
        while self.opened is None:
            message = await self.receive()
            if message["type"] == "error":
                self.problem = message["data"]["code"]
                return
            self.opened = message if message["type"] == "opened" else None
        await self.send(type="reset", id=1, data={"owner": FIRST_OWNER + self.number, "number": 0})
        seen = (await self.receive())["data"]["observation"]
        await asyncio.sleep(pause_s)
        if seen["owner"] != FIRST_OWNER + self.number:
            self.problem = f"another's observation: {seen}"
        await self.send(type="close", id=2)
        await self.receive()

    async def _be_served_over_http(self, pause_s: float) -> None:
        opened = await self._answer()
        if "session_id" not in opened:
            self.problem = str(opened)
            return
        named = {"X-OpenEnv-Session": opened["session_id"]}
        await self._post("/reset", {"owner": FIRST_OWNER + self.number, "number": 0}, named)
        await self._answer()
        await asyncio.sleep(pause_s)
        await self._post(f"/sessions/{opened['session_id']}", None, {}, method="DELETE")
        await self._answer()

    async def _post(self, path: str, body: Any, headers: dict[str, str], method: str = "POST") -> None:
        host, _, port = self.url.removeprefix("http://").partition(":")
        if self.streams is None:
            self.streams = await asyncio.open_connection(host, int(port))
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.streams[1].write("\r\n".join([*lines, "", ""]).encode() + content)
        await self.streams[1].drain()

    async def _answer(self) -> dict[str, Any]:
        assert self.streams is not None
        head = await asyncio.wait_for(self.streams[0].readuntil(b"\r\n\r\n"), LONG_S)
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = await self.streams[0].readexactly(int(length.partition(b":")[2]))
        answer: dict[str, Any] = json.loads(body)
        return answer

    def hang_up(self) -> None:
        """Leave nothing open."""
        if self.socket is not None:
            self.socket.transport.abort()
        if self.streams is not None:
            self.streams[1].close()


class Crowds:
    """Rounds of clients that come to two servers.

    Args:
        storm: How many clients there are.
        result: Where they are counted.
        on_verdict: Called after each.
    """

    def __init__(self, storm: Storm, result: Result, on_verdict: Callable[[], None]) -> None:
        self._storm = storm
        self._result = result
        self._on_verdict = on_verdict
        self._servers: list[Served] = []

    def run(self, stack: contextlib.ExitStack) -> None:
        """Let them come, round after round, and look whether all slots are there in the end."""
        self._servers = [stack.enter_context(_running()) for _ in range(2)]
        seeds = list(self._storm.seeds)
        for start in range(0, len(seeds), 2 * ROUND):
            asyncio.run(self._round(seeds[start : start + 2 * ROUND]))
        servers = [served.server for served in self._servers]
        wait_until(lambda: all(server.is_empty for server in servers), self._storm.quiet_s)
        self._result.sessions_left = sum(server.sessions() for server in servers)
        self._result.environments_left = sum(server.alive() for server in servers)
        for served in self._servers:
            asyncio.run(self._count_slots(served))

    async def _round(self, seeds: list[int]) -> None:
        halves = [seeds[which::2] for which in range(len(self._servers))]
        await asyncio.gather(*(self._crowd(served, half) for served, half in zip(self._servers, halves, strict=True)))

    async def _crowd(self, served: Served, seeds: list[int]) -> None:
        holders = [Client(-1 - slot, served.server.url, Manner.STAYS) for slot in range(SLOTS)]
        clients = [Client(seed, served.server.url, _CHOICES[_dice(seed).randrange(len(_CHOICES))]) for seed in seeds]
        try:
            # One after the other: who came when is known.
            for client in (*holders, *clients):
                await client.come(served.joined)
            going = [client for client in clients if client.manner not in (*_LASTING, Manner.IMPATIENT)]
            for client in _dice(seeds[0]).sample(going, len(going)):
                await client.vanish()
            returning = [client for client in clients if client.manner is Manner.RETURNS]
            line = [client for client in clients if client.manner in (Manner.STAYS, Manner.STAYS_HTTP)]
            for client in returning:
                await client.vanish()
                await client.come(served.joined)  # at the end of the line, unless the server has noticed nothing
            waiting = [*line, *(client for client in clients if client.manner in (Manner.IMPATIENT, Manner.RETURNS))]
            playing = [client.be_served(_dice(client.number).random() * 0.03) for client in (*holders, *waiting)]
            await asyncio.wait_for(asyncio.gather(*playing), 2 * LONG_S)
            self._judge(served, clients, line)
        finally:
            for client in (*holders, *clients):
                client.hang_up()

    def _judge(self, served: Served, clients: list[Client], line: list[Client]) -> None:
        serials = [served.serial_of(client) for client in line]
        for client in clients:
            verdict = Verdict(Outcome.GONE)
            if client in line:
                place = line.index(client)
                before = [serial for serial in serials[:place] if serial is not None]
                verdict = _verdict(client, serials[place], max(before, default=0))
            elif client.manner is Manner.RETURNS:
                verdict = _verdict(client, served.serial_of(client), 0)
            elif client.problem:
                verdict = Verdict(Outcome.TYPED_ERROR, client.problem)
            elif client.manner is Manner.IMPATIENT:  # its turn came at once
                verdict = _verdict(client, served.serial_of(client), 0)
            if served.most_alive() > SLOTS:
                verdict = Verdict(Outcome.TOO_MANY, f"{served.most_alive()} sessions in {SLOTS} slots")
            self._result.add(f"client {client.number}", Plan(client.number, {}), verdict, [client.manner.value])
            self._on_verdict()

    async def _count_slots(self, served: Served) -> None:
        """See whether as many sessions as there are slots can be had at once."""
        clients = [Client(slot, served.server.url, Manner.IMPATIENT) for slot in range(SLOTS)]
        try:
            for client in clients:
                await client.come(served.joined)
            missing = sum(client.opened is None for client in clients)
            if missing:
                self._result.violations.append(f"{missing} of {SLOTS} slots are lost")
        finally:
            for client in clients:
                if client.socket is not None:
                    await client.socket.close()  # which ends the session at once


def _verdict(client: Client, serial: int | None, latest_before: int) -> Verdict:
    if client.problem or serial is None:
        return Verdict(Outcome.NEVER_SERVED, client.problem)
    if serial < latest_before:
        return Verdict(Outcome.OUT_OF_ORDER, f"served as number {serial}, after number {latest_before}")
    return Verdict(Outcome.IDENTICAL)


def _dice(seed: int) -> random.Random:
    return random.Random(f"crowd {seed}")


class Tally(Book):
    """A book that knows how many environments there were at the same time."""

    most: int = 0

    def open(self) -> str:
        """Count an environment."""
        serial = super().open()
        self.most = max(self.most, self.alive)
        return serial


@dataclass
class Served:
    """A server and what it tells about its line."""

    server: Server
    joined: Callable[[], int]
    most_alive: Callable[[], int]

    def serial_of(self, client: Client) -> int | None:
        """The number of the environment that a client was served with."""
        serials = [int(serial) for serial in self.server.deeds(FIRST_OWNER + client.number)]
        return max(serials, default=None)


@contextlib.contextmanager
def _running() -> Any:
    book = Tally()
    prepared = ours(counting(book, coroutine=False), slots=SLOTS, runner="inline")
    slots = prepared[0].state.openenv_server.manager.slots
    with serving(*prepared) as (port, sessions):
        book.forget_trials()
        book.most = 0
        server = Server(port, book.deeds, sessions, lambda: book.alive)
        yield Served(server, _counted(slots.queue), lambda: book.most)


def _counted(queue: Any) -> Callable[[], int]:
    """Count those who join a line; returns what tells how many that were."""
    join, joined = queue.join, []

    def counting_join() -> Any:
        ticket = join()
        joined.append(ticket is not None)
        return ticket

    queue.join = counting_join
    return lambda: len(joined)
