"""The ledger against a model, whatever the order in which requests begin, end and are repeated.

Each repeat is answered once and with the same reply, the last reply is kept, and all kept replies stay within bounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from openenv.errors import StaleRequest
from openenv.server.sessions.ledger import KEPT, KEPT_BYTES, Ledger, LedgerEntry


class Book:
    """A ledger, and what it must know."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ledger = Ledger()
        self.running: dict[int | str, LedgerEntry | None] = {}  # None for a step of a group
        self.answered: list[int | str] = []
        self.replies: list[tuple[int | str, list[Any]]] = []

    def listener(self, key: int | str) -> Callable[[Any], None]:
        self.replies.append((key, []))
        return self.replies[-1][1].append

    def begin(self) -> None:
        if self.rng.random() < 0.2:
            key: int | str = f"key {len(self.running) + len(self.answered)}"
        else:
            key = self.ledger.last_id + self.rng.choice([1, 1, 3])
        assert self.ledger.find(key) is None
        if isinstance(key, int) and self.rng.random() < 0.6:
            self.ledger.begin_step(key, key)
            self.running[key] = None
        else:
            entry = self.running[key] = self.ledger.begin(key, key)
            entry.on_reply(self.listener(key))

    def finish(self, key: int | str) -> None:
        entry, size = self.running.pop(key), self.rng.choice([10, 10, 1000, 60_000, 300_000])
        if entry is None:
            assert isinstance(key, int)
            self.ledger.finish_step(key, key, ("reply", key), size)
        else:
            self.ledger.finish(entry, ("reply", key), size)
        self.answered.append(key)

    def repeat(self, key: int | str) -> None:
        try:
            entry = self.ledger.find(key)
        except StaleRequest:
            assert key in self.answered, "a request that runs is known"
            assert key != self.ledger.last_id, "the reply to the last one is kept"
            return
        assert entry is not None, "it would be run twice"
        assert entry.request == key
        entry.on_reply(self.listener(key))

    def move(self) -> None:
        move, known = self.rng.random(), [*self.running, *self.answered]
        if move < 0.4 or not known:
            self.begin()
        elif move < 0.7 and self.running:
            self.finish(self.rng.choice(list(self.running)))
        else:
            self.repeat(self.rng.choice(known))
        sizes = [kept[3] for kept in self.ledger._kept]
        assert len(sizes) <= KEPT
        assert sum(sizes) <= KEPT_BYTES or len(sizes) <= 2


def test_every_repeat_is_answered_once_and_no_request_runs_twice() -> None:
    for seed in range(500):
        book = Book(random.Random(seed))
        for _ in range(60):
            book.move()
        for key in list(book.running):
            book.finish(key)
        assert all(replies == [("reply", key)] for key, replies in book.replies), seed
        assert not book.ledger._under_way, seed
