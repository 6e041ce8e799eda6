"""The contract between sessions and the place where their code runs: runners, lanes and calls.

Knows calls, not environments; must not know sessions, the wire or the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from openenv.env.copies import EnvironmentCopy
from openenv.errors import OpenEnvError

RunnerName = Literal["auto", "thread", "inline", "process"]

WORKER_CRASHED: Final = "worker crashed"
"""Why a session is lost whose process has died."""


class NotSendable(OpenEnvError, TypeError):
    """A value cannot be sent to or by a worker process; the text says why."""

    code = "NOT_SENDABLE"


class LaneCall(Protocol):
    """A piece of work. `run` must not raise: it keeps its own outcome and delivers it."""

    kind: str

    @property
    def count(self) -> int:
        """How many calls this one stands for."""
        ...

    def run(self) -> None:
        """Do the work, in the lane."""
        ...


class LaneExecutor(Protocol):
    """Runs calls, one at a time."""

    def submit(self, call: LaneCall) -> None:
        """Run a call after those submitted before it."""
        ...


class Lane:
    """Where all code of one session runs. A runner implements `host` and `submit`, and what else differs there."""

    __slots__ = ()

    @property
    def is_shared(self) -> bool:
        """Whether calls of other sessions run on the same thread: then calls are best handed over many at a time."""
        return False

    @property
    def host(self) -> LaneExecutor:
        """What runs the calls; those of several lanes with the same host can be submitted to it together."""
        raise NotImplementedError

    def submit(self, call: LaneCall) -> None:
        """Run a call after those submitted before it; may be called from any thread."""
        raise NotImplementedError

    def submit_close(self, call: LaneCall) -> None:
        """Run the environment's own `close`, which may hang, so that its caller does not hang with it."""
        self.submit(call)

    def make_way(self, call: object) -> None:
        """Let calls of other sessions pass the one that runs, where it keeps a thread that they share."""

    def abandon(self, call: object) -> None:
        """Free the lane of a session whose last call hangs; where it runs in a process of its own, that is killed."""

    def construct(self, factory: Callable[[], Any]) -> Any:
        """Build the environment, or a stub of it; called in the lane."""
        return factory()

    async def fork(self, lanes: Sequence[Lane]) -> list[EnvironmentCopy]:
        """Copy the environment that runs in this lane for others; only where `construct` returns stubs.

        Raises:
            NotForkable: It cannot be copied.
        """
        raise NotImplementedError

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call back with the reason if the environment dies with the process that it runs in; from any thread."""

    def ending(self) -> None:
        """Note that the session is closing: a process whose code does not end may be killed."""

    def release(self) -> None:
        """Free the lane: no further call comes."""


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
        """Stop all threads; running calls are waited for up to the limit."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Options of the process runner.

    Args:
        processes: Over how many processes sessions are spread; None for as many as there are cores.
        sessions_each: How many sessions one process may hold; where all are full, more processes are started.
        hang_s: After how many seconds a process is killed whose sessions are all closing and do not end.
        models: Classes that the workers have to find, beside the factory.
    """

    processes: int | None = None
    sessions_each: int | None = None
    hang_s: float = 30.0
    models: tuple[type[Any], ...] = ()

    def __post_init__(self) -> None:
        for value in (self.processes, self.sessions_each):
            if value is not None and value < 1:
                raise ValueError("the process runner needs at least one process, and one session in each")


def make_runner(
    name: RunnerName | str,
    *,
    max_threads: int,
    single_thread: bool = False,
    server_processes: int = 1,
    factory: Callable[[], Any] | None = None,
    processes: ProcessOptions | None = None,
) -> Runner:
    """Build a runner by name. `auto` runs synchronous methods in threads; asynchronous ones always run on the loop.

    Args:
        name: Which.
        max_threads: For `thread`: how many there may be.
        single_thread: Whether all sessions need one and the same thread.
        server_processes: For `thread`: how many processes share the sessions of the server.
        factory: For `process`: what makes environments.
        processes: For `process`: how many, and more.

    Raises:
        ValueError: There is no runner of that name.
        NotSendable: The factory cannot be sent to another process.
    """
    from .inline import InlineRunner
    from .thread import SPREAD, ThreadRunner

    if name in ("auto", "thread"):
        spread = max(1, SPREAD // server_processes)
        return ThreadRunner(max_threads=max_threads, spread=spread, single_thread=single_thread)
    if name == "inline":
        return InlineRunner(closes_apart=not single_thread)
    if name == "process" and factory is not None:
        from .process import ProcessRunner

        return ProcessRunner(factory, options=processes, single_thread=single_thread)
    raise ValueError(f"unknown runner {name!r}: choose auto, thread, inline or process")


def has_affinity() -> bool:
    """Return whether this system binds processes to cores."""
    return hasattr(os, "sched_setaffinity")


def cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1
