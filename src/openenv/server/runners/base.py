"""The contract between sessions and the runners of their code: runners, lanes and calls.

Knows calls, not environments; must not know sessions, the wire or the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from openenv.env.copies import EnvironmentCopy
from openenv.errors import OpenEnvError

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

RunnerName = Literal["auto", "thread", "inline", "process"]

WORKER_CRASHED: Final = "worker crashed"
"""The close reason of a session after its process has died."""


class NotSendable(OpenEnvError, TypeError):
    """A value cannot be sent to or by a worker process; the text says why."""

    code = "NOT_SENDABLE"


class LaneCall(Protocol):
    """A piece of work. `run` must not raise: it keeps its own outcome and delivers it."""

    kind: str

    @property
    def count(self) -> int:
        """The number of steps in this call."""
        ...

    def run(self) -> None:
        """Do the work, in the lane."""
        ...


class LaneExecutor(Protocol):
    """Runs calls, one at a time."""

    def submit(self, call: LaneCall, dispatcher: Dispatcher | None = None) -> None:
        """Queue a call, as `Lane.submit` does."""
        ...


class Lane:
    """Runs all code of one session. A runner implements `host` and `submit`, and overrides other methods as needed."""

    __slots__ = ()

    @property
    def host(self) -> LaneExecutor:
        """The executor of the calls; calls of several lanes with the same host can be submitted together."""
        raise NotImplementedError

    def submit(self, call: LaneCall, dispatcher: Dispatcher | None = None) -> None:
        """Queue a call; may be called from any thread.

        Args:
            call: The call.
            dispatcher: Of the loop that gets the result. If its loop is at hand, a thread gets all calls of a pass
                together; so the caller must return to the loop.
        """
        raise NotImplementedError

    def submit_close(self, call: LaneCall) -> None:
        """Run the environment's `close`, which may hang, without blocking the caller."""
        self.submit(call)

    def make_way(self, call: object) -> None:
        """Let calls of other sessions on the same thread pass the running call."""

    def abandon(self, call: object) -> None:
        """Free the lane of a session with a hanging last call; kill its process if no other session is there."""

    def construct(self, factory: Callable[[], Any]) -> Any:
        """Build the environment, or a stub of it; called in the lane."""
        return factory()

    async def fork(self, lanes: Sequence[Lane]) -> list[EnvironmentCopy]:
        """Copy the environment that runs in this lane for others; only where `construct` returns stubs.

        Raises:
            NotForkable: The environment cannot be copied.
        """
        raise NotImplementedError

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call back with the reason if the environment's process dies; from any thread."""

    def ending(self) -> None:
        """Record that the session is closing: its process may be killed if the code does not end."""

    def release(self) -> None:
        """Free the lane after its last call."""


class Runner(Protocol):
    """Hands out lanes."""

    name: str

    @property
    def placement(self) -> str:
        """Where the next session will run, for metrics."""
        ...

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
        processes: The number of processes; None for one per core.
        sessions_each: The most sessions in one process; if all are full, more processes are started.
        hang_s: How long closing sessions may hang before their process is killed, in seconds.
        models: Classes that the workers must be able to import, beside the factory.
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
        name: The runner.
        max_threads: For `thread`: the most threads.
        single_thread: Whether all sessions need the same thread.
        server_processes: For `thread`: the number of processes that share the sessions of the server.
        factory: For `process`: makes environments.
        processes: For `process`: its options.

    Raises:
        ValueError: The name is unknown.
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


def allowed_cores(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores this process may use all the time: `cores`, or fewer if a container has a quota."""
    allowed = cores()
    try:
        own = next(line for line in groups.read_text().splitlines() if line.startswith("0::"))
        folder = root / own[3:].lstrip("/")
    except (OSError, StopIteration):  # version 2 of control groups is missing
        return allowed
    for place in (folder, *folder.parents):
        try:
            quota, period = (place / "cpu.max").read_text().split()
            allowed = min(allowed, max(1, int(quota) // int(period)))
        except (OSError, ValueError):  # no file, or "max"
            continue
    return allowed


def has_affinity() -> bool:
    """Return whether this system binds processes to cores."""
    return hasattr(os, "sched_setaffinity")


def cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1
