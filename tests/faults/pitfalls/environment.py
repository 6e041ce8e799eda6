"""An environment that can be watched and held up, written against the documented interface alone."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

from pydantic import field_validator

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Move(Action):
    """An action with a validator of its own."""

    number: int = 0
    word: str = ""

    @field_validator("word")
    @classmethod
    def _allowed(cls, value: str) -> str:
        if value == "bad":
            raise ValueError("that word is not allowed")
        return value


class Seen(Observation):
    """The steps so far, and anything else."""

    count: int = 0
    number: int = 0
    payload: Any = None


class Inside(State):
    """A state with a field of its own."""

    secret: int = 42


class Watch:
    """What happened to environments, where, and what holds them up."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._gates: dict[str, threading.Event] = {}
        self._numbers = itertools.count(1)

    def hold(self, name: str) -> None:
        """Let calls of that name wait until `release`."""
        self._gates[name] = threading.Event()

    def release(self) -> None:
        """Let everything go on."""
        while self._gates:
            self._gates.popitem()[1].set()

    def note(self, name: str) -> None:
        """Record that something happened on this thread."""
        self.events.append((name, threading.get_ident()))

    def visit(self, name: str) -> None:
        """Record a call and wait where the scenario says so."""
        self.note(name)
        gate = self._gates.get(name)
        if gate is not None:
            gate.wait(20)

    def count(self, name: str) -> int:
        """How often something happened."""
        return sum(event == name for event, _ in self.events)

    def threads(self, *names: str) -> set[int]:
        """The threads on which such things happened."""
        return {thread for event, thread in self.events if event in names}

    @property
    def alive(self) -> int:
        """Environments that are built and not closed."""
        return self.count("built") - self.count("close")


class Watched(Environment[Move, Seen, Inside]):
    """Counts its steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.count = 0
        self.closed = False
        watch.visit("construct")
        watch.note("built")

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self.watch.visit("reset")
        self.count = 0
        return Seen()

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        self.watch.visit("step")
        self.count += 1
        if self.closed:
            self.watch.note("step after close")
        return Seen(count=self.count, number=action.number, reward=1.0)

    @property
    def state(self) -> Inside:
        self.watch.visit("state")
        return Inside(step_count=self.count)

    def close(self) -> None:
        self.closed = True
        self.watch.note("close")


class WatchedAsync(Watched):
    """The same with a coroutine that takes its time; notes how it ends."""

    async def step_async(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        self.watch.note("step_async")
        try:
            for _ in range(action.number):
                await asyncio.sleep(0.05)
                if self.closed:
                    self.watch.note("closed during a step")
                    break
        except asyncio.CancelledError:
            self.watch.note("cancelled")
            raise
        self.watch.note("finished")
        return self.step(action)
