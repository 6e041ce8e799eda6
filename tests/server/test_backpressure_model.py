"""What waits on a connection, against a model: whatever is paused, full, lost or done in between, each message of a
connection that holds is taken once and in order, and it is read from again."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from openenv.server.backpressure import Backpressure, LoopTurns

MOST = 8


class Connection:
    """A connection whose messages lead to calls; some are done at once, others when a test ends them."""

    def __init__(self, turns: LoopTurns, rng: random.Random) -> None:
        self.rng = rng
        self.is_full = self.is_paused = self.is_lost = False
        self.under_way = self.sent = 0
        self.seen: list[int] = []
        wire: Any = self
        self.queue = Backpressure(
            wire, self.take, self.is_loaded, is_long=lambda payload: payload.startswith(b"large"), turns=turns
        )

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def is_loaded(self) -> bool:
        return self.under_way >= MOST

    def take(self, payload: bytes, binary: bool) -> None:
        assert not self.is_lost
        self.seen.append(int(payload.split()[1]))
        count = self.rng.choice([0, 1, 1, 5, 12])
        self.under_way += count
        if self.is_loaded():
            self.queue.pause()
        if self.rng.random() < 0.3:
            self.finish(count)

    def finish(self, count: int) -> None:
        self.under_way -= count
        if self.queue.is_paused and self.under_way < MOST // 2:
            self.queue.resume()

    def send(self) -> None:
        if not self.is_paused or self.rng.random() < 0.1:  # a socket that is paused may have read some already
            kind = self.rng.choice(["large", "small"])
            self.queue.receive(f"{kind} {self.sent}".encode(), False)
            self.sent += 1

    def relieve(self) -> None:
        if self.is_full:
            self.is_full = False
            self.queue.resume()

    def lose(self) -> None:
        self.is_lost = True
        self.queue.drop()

    def move(self) -> None:
        move = self.rng.random()
        if move < 0.55:
            for _ in range(self.rng.randint(1, 3)):
                self.send()
        elif move < 0.65:
            self.is_full = True
        elif move < 0.8:
            self.relieve()
        elif move < 0.995:
            self.finish(self.rng.randint(0, self.under_way))
        else:
            self.lose()


async def play(seed: int) -> None:
    rng = random.Random(seed)
    turns = LoopTurns(asyncio.get_running_loop())
    connections = [Connection(turns, rng) for _ in range(rng.randint(1, 4))]
    for _ in range(300):
        connection = rng.choice(connections)
        if connection.is_lost or rng.random() < 0.1:
            await asyncio.sleep(0)
        else:
            connection.move()
    for _ in range(200):
        for connection in connections:
            if not connection.is_lost:
                connection.relieve()
                connection.finish(connection.under_way)
        await asyncio.sleep(0)
    for connection in connections:
        assert connection.seen == list(range(len(connection.seen))), seed
        if not connection.is_lost:
            assert (len(connection.seen), connection.is_paused) == (connection.sent, False), seed


def test_messages_are_taken_once_and_in_order() -> None:
    for seed in range(300):
        asyncio.run(play(seed))


def test_a_message_that_is_done_in_its_turn_leaves_the_connection_open() -> None:
    class Always(random.Random):
        def choice(self, seq: Any) -> Any:
            return seq[-1]

        def random(self) -> float:
            return 0.0

    async def scenario() -> None:
        turns = LoopTurns(asyncio.get_running_loop())
        assert turns.take()
        connection = Connection(turns, Always())
        connection.queue.receive(b"large 0", False)
        for _ in range(3):
            await asyncio.sleep(0)
        assert (connection.seen, connection.under_way, connection.is_paused) == ([0], 0, False)

    asyncio.run(scenario())
