"""An environment that counts its own steps and hashes its own history, and the book that its server keeps of it.

A step that ran twice, was left out, or ran in another environment shows in the observation, and in the book.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Move(Action):
    """A step: whose it is, which one, and something to be hashed."""

    owner: int
    number: int
    word: str = ""
    pause_s: float = 0.0


class Seen(Observation):
    """What became of a request, told by the environment itself."""

    owner: int = -1
    number: int = -1
    count: int = 0
    digest: str = ""


class Inner(State):
    """The same for `state`."""

    owner: int = -1
    digest: str = ""


@dataclass(frozen=True)
class Deed:
    """Something that an environment did."""

    kind: str
    number: int


@dataclass
class Book:
    """What the environments of one server did: the truth to which clients are held."""

    built: int = 0
    closed: int = 0
    deeds: dict[int, dict[int, list[Deed]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    serials: Any = field(default_factory=lambda: itertools.count(1))

    def note(self, serial: int, owner: int, deed: Deed) -> None:
        """Write down what an environment did for whom."""
        self.deeds[owner][serial].append(deed)

    @property
    def alive(self) -> int:
        """How many environments have not been closed."""
        return self.built - self.closed


class Counting(Environment[Move, Seen, Inner]):
    """Counts and hashes."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    book: Book

    def __init__(self) -> None:
        super().__init__()
        self._serial = next(self.book.serials)
        self.book.built += 1
        self._owner = -1
        self._digest = "new"
        self._state = Inner()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self._owner, number = kwargs.get("owner", seed), kwargs.get("number", -1)
        self.book.note(self._serial, self._owner, Deed("reset", number))
        self._digest = _hash("reset", seed, number)
        self._state = Inner(episode_id=episode_id, owner=self._owner, digest=self._digest)
        return Seen(owner=self._owner, number=number, count=0, digest=self._digest)

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        time.sleep(action.pause_s)
        return self._move(action)

    def _move(self, action: Move) -> Seen:
        self.book.note(self._serial, action.owner, Deed("step", action.number))
        self._digest = _hash(self._digest, action.number, action.word)
        self._state.step_count += 1
        self._state.digest = self._digest
        count = self._state.step_count
        return Seen(
            owner=self._owner, number=action.number, count=count, digest=self._digest, reward=float(count), done=False
        )

    @property
    def state(self) -> Inner:
        return self._state

    def close(self) -> None:
        self.book.closed += 1


class CountingAsync(Counting):
    """The same in a coroutine, which a server may interrupt."""

    async def step_async(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        await asyncio.sleep(action.pause_s)
        return self._move(action)


def counting(book: Book, *, coroutine: bool) -> type[Counting]:
    """Return an environment class that writes into a book."""
    base = CountingAsync if coroutine else Counting
    return type(base.__name__, (base,), {"book": book})


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
