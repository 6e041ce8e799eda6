"""What a runner is: the contract between sessions and the place where their code runs.

Knows calls, not environments; must not know sessions, the wire or the server.
"""

from __future__ import annotations

from typing import Literal, Protocol

RunnerName = Literal["auto", "thread", "inline"]


class LaneCall(Protocol):
    """A piece of work. `run` must not raise: it keeps its own outcome and tells whoever waits."""

    kind: str

    @property
    def count(self) -> int:
        """How many calls this one stands for."""
        ...

    def run(self) -> None:
        """Do the work, in the lane."""
        ...


class Host(Protocol):
    """Runs calls, one at a time."""

    def submit(self, call: LaneCall) -> None:
        """Run a call after those submitted before it."""
        ...


class Lane(Protocol):
    """Where all code of one session runs."""

    @property
    def is_shared(self) -> bool:
        """Whether calls of other sessions run on the same thread: then calls are best handed over many at a time."""
        ...

    @property
    def host(self) -> Host:
        """What runs the calls; those of several lanes with the same host can be submitted to it together."""
        ...

    def submit(self, call: LaneCall) -> None:
        """Run a call after those submitted before it; may be called from any thread."""
        ...

    def release(self) -> None:
        """Say that no further call will come."""
        ...


class Runner(Protocol):
    """Hands out lanes."""

    name: str

    def lane(self) -> Lane:
        """Reserve a lane for one session."""
        ...

    def pin(self, lane: Lane) -> None:
        """Let every later lane share the thread of this one."""
        ...

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop all threads; calls that still run are waited for up to the limit."""
        ...


def make_runner(name: RunnerName | str, *, max_threads: int, single_thread: bool = False) -> Runner:
    """Build a runner by name. `auto` runs synchronous methods in threads; asynchronous ones always run on the loop.

    Raises:
        ValueError: There is no runner of that name.
    """
    from .inline import InlineRunner
    from .thread import ThreadRunner

    if name in ("auto", "thread"):
        return ThreadRunner(max_threads=max_threads, single_thread=single_thread)
    if name == "inline":
        return InlineRunner()
    raise ValueError(f"unknown runner {name!r}: choose auto, thread or inline")
