"""Many more sessions than slots: all are served, in the order in which they came, and the server does not swell."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

pytestmark = pytest.mark.anyio

CONNECTIONS = 4
SERVED = """
import itertools
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

BUILT = itertools.count()
ALIVE = set()

class Add(Action):
    amount: int = 1

class Sum(Observation):
    total: int = 0
    serial: int = 0
    alive: int = 0

class Adder(Environment[Add, Sum, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.serial, self.total = next(BUILT), 0
        ALIVE.add(self.serial)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.total = seed or 0
        return Sum(total=self.total, serial=self.serial, alive=len(ALIVE))

    def step(self, action, timeout_s=None, **kwargs):
        self.total += action.amount
        return Sum(total=self.total, serial=self.serial, alive=len(ALIVE))

    @property
    def state(self):
        return State()

    def close(self):
        ALIVE.discard(self.serial)
"""


@dataclass
class Crowd:
    """Sessions that are opened over one connection, each for a short episode."""

    connection: ClientConnection
    first: int
    count: int
    queued: set[int] = field(default_factory=set)
    served: dict[int, int] = field(
        default_factory=dict
    )  # by their order of arrival, the order in which they were built
    most_alive: int = 0
    _opened: dict[str, int] = field(default_factory=dict)
    _line_is_formed: asyncio.Event = field(default_factory=asyncio.Event)

    async def come(self) -> None:
        """Ask for all sessions; return when the last of them is in line or served."""
        for number in range(self.first, self.first + self.count):
            await self._send(type="open", id=number + 1, wait_s=300)
        await self._line_is_formed.wait()

    async def play(self, start: asyncio.Event) -> None:
        """Play each episode when its session is opened, but none before the start."""
        held: list[dict[str, Any]] = []
        while len(self.served) < self.count:
            message = json.loads(await self.connection.recv())
            assert message["type"] != "error", message
            if message.get("id") == self.first + self.count:
                self._line_is_formed.set()
            if message["type"] == "event":
                self.queued.add(message["id"])
            elif message["type"] == "opened":
                held.append(message)
            elif message["type"] == "observation":
                await self._go_on(message)
            if start.is_set() or message["type"] == "opened":
                held = await self._begin(held, start)

    async def _begin(self, held: list[dict[str, Any]], start: asyncio.Event) -> list[dict[str, Any]]:
        if len(held) == self.count:  # nothing else would come
            await start.wait()
        if not start.is_set():
            return held
        for message in held:
            self._opened[message["session"]] = number = message["id"] - 1
            await self._send(type="reset", id=1, session=message["session"], data={"seed": number})
        return []

    async def _go_on(self, message: dict[str, Any]) -> None:
        session, seen = message["session"], message["data"]["observation"]
        number = self._opened[session]
        self.most_alive = max(self.most_alive, seen["alive"])
        assert seen["total"] == number + message["id"] - 1
        if message["id"] == 1:
            await self._send(type="step", id=2, session=session, data={"amount": 1})
        else:
            self.served[number] = seen["serial"]
            await self._send(type="close", id=3, session=session)

    async def _send(self, **message: Any) -> None:
        await self.connection.send(json.dumps(message))


async def serve_a_crowd(server: Any, sessions: int, slots: int) -> list[Crowd]:
    """Let sessions come over a few connections, one crowd after the other, then play."""
    share = sessions // CONNECTIONS
    url = f"ws://127.0.0.1:{server.port}/ws"
    crowds: list[Crowd] = []
    players: list[asyncio.Task[None]] = []
    start = asyncio.Event()
    try:
        for number in range(CONNECTIONS):
            connection = await connect(url, subprotocols=["openenv.v2.json"], proxy=None, max_queue=None)  # type: ignore[list-item]
            crowd = Crowd(connection, number * share, share)
            crowds.append(crowd)
            players.append(asyncio.ensure_future(crowd.play(start)))
            await asyncio.wait_for(crowd.come(), 60)
        start.set()
        for crowd in crowds:
            await crowd.connection.send('{"type": "ping", "id": 1000000}')  # wakes those who hold all they get
        await asyncio.wait_for(asyncio.gather(*players), 100)
    finally:
        for player in players:
            player.cancel()
        for crowd in crowds:
            await crowd.connection.close()
    return crowds


async def check_a_crowd(start_server: Any, sessions: int, slots: int, limit_mb: float) -> None:
    """All are served, in order, within the slots and the memory."""
    server = start_server(SERVED, "--max-sessions", str(slots), "--runner", "inline")
    before = server.memory_mb
    crowds = await serve_a_crowd(server, sessions, slots)
    grown = server.memory_mb - before
    served = {number: serial for crowd in crowds for number, serial in crowd.served.items()}
    assert sorted(served) == list(range(sessions))
    assert [number for number, _ in sorted(served.items(), key=lambda item: item[1])] == list(range(sessions))
    assert sum(len(crowd.queued) for crowd in crowds) == sessions - slots
    assert max(crowd.most_alive for crowd in crowds) <= slots
    assert grown < limit_mb, f"{grown:.0f} MB"


async def test_four_hundred_sessions_take_turns_on_a_hundred_slots(start_server: Any) -> None:
    await check_a_crowd(start_server, 400, 100, limit_mb=40)


@pytest.mark.slow
async def test_four_thousand_sessions_take_turns_on_a_thousand_slots(start_server: Any) -> None:
    await check_a_crowd(start_server, 4000, 1000, limit_mb=120)
