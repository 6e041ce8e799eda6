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
    """What became of a request, reported by the environment itself."""

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
    """What the environments of one server did: the truth to which clients are held. `FileBook` is its like on disk."""

    built: int = 0
    closed: int = 0
    _deeds: dict[int, dict[str, list[Deed]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    _serials: Any = field(default_factory=lambda: itertools.count(1))

    def open(self) -> str:
        """Count an environment and name it."""
        self.built += 1
        return str(next(self._serials))

    def note(self, serial: str, owner: int, deed: Deed) -> None:
        """Write down what an environment did for whom."""
        self._deeds[owner][serial].append(deed)

    def close(self, serial: str) -> None:
        """Count an environment that has been closed."""
        self.closed += 1

    @property
    def alive(self) -> int:
        """How many environments have not been closed."""
        return self.built - self.closed

    def forget_trials(self) -> None:
        """Begin to count: some servers build an environment to look at it."""
        self.built = self.closed = 0

    def deeds(self, owner: int) -> dict[str, list[Deed]]:
        """What was done for one client, by environment."""
        return {serial: list(done) for serial, done in list(self._deeds.get(owner, {}).items())}


class Counting(Environment[Move, Seen, Inner]):
    """Counts and hashes."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    book: Any  # a Book, or a FileBook

    def __init__(self) -> None:
        super().__init__()
        self._serial = self.book.open()
        self._owner: int | None = -1
        self._digest = "new"
        self._begun_by = -1
        self._state = Inner()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self._owner, number = kwargs.get("owner", seed), kwargs.get("number", -1)
        self._begun_by = number
        if self._owner is not None:
            self.book.note(self._serial, self._owner, Deed("reset", number))
        self._digest = hashed("reset", seed, number)
        owner = -1 if self._owner is None else self._owner
        self._state = Inner(episode_id=episode_id, owner=owner, digest=self._digest)
        return Seen(owner=owner, number=number, count=0, digest=self._digest)

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        time.sleep(action.pause_s)
        return self._move(action)

    def _move(self, action: Move) -> Seen:
        if self._owner is None:  # an episode that was begun without an owner belongs to the first client that steps
            self._owner = action.owner
            self.book.note(self._serial, action.owner, Deed("reset", self._begun_by))
        self.book.note(self._serial, action.owner, Deed("step", action.number))
        self._digest = hashed(self._digest, action.number, action.word)
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
        self.book.close(self._serial)


class CountingAsync(Counting):
    """The same in a coroutine, which a server may interrupt."""

    async def step_async(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        await asyncio.sleep(action.pause_s)
        return self._move(action)


def counting(book: Book, *, coroutine: bool) -> type[Counting]:
    """Return an environment class that writes into a book."""
    base = CountingAsync if coroutine else Counting
    return type(base.__name__, (base,), {"book": book})


def hashed(*parts: Any) -> str:
    """What an environment knows of its history."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
