"""A session's place in a worker: the lane that the session has here, and the way to its environment there.

Knows workers and stand-ins; must not know how workers are chosen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ...env.binding import Encoder
from ...env.tools.source import ToolEvents
from ...errors import SessionLost, message_of
from ..base import WORKER_CRASHED, LaneCall, NotSendable, PerishableLane
from ..dispatch import current_dispatcher
from .crew import Crew
from .messages import MessageKind, pack
from .stub import EnvironmentStub
from .worker import AwaitedReply, BlockingReply, PendingReply, WorkerGone, WorkerProcess


class WorkerDied(RuntimeError):
    """The worker process died while it built an environment."""


class Placer(Protocol):
    """Whoever hands out lanes."""

    crew: Crew
    single_thread: bool

    def start(self, worker: WorkerProcess) -> None:
        """Start a worker, unless it runs."""
        ...

    def encoder(self, encode: Encoder) -> tuple[int, bytes] | None:
        """Return an encoder's number and parcel; None where it cannot be sent."""
        ...

    def leave(self, lane: ProcessLane) -> None:
        """Take a lane back."""
        ...


class ProcessLane(PerishableLane):
    """A place in a worker. Calls of the session that cannot be awaited run in a thread here, and wait."""

    is_shared = False

    def __init__(self, placer: Placer, worker: WorkerProcess, number: int) -> None:
        self.worker = worker
        self.number = number
        self.on_lost: Callable[[str], None] = _nobody_told
        self.ending_since: float | None = None
        self._placer = placer
        self._lock = threading.Lock()
        self._is_built = False
        self._is_lost = False

    @property
    def host(self) -> ProcessLane:
        """Nothing is shared."""
        return self

    def submit(self, call: LaneCall) -> None:
        """Run a call in a thread; a session submits one at a time."""
        self._placer.crew.run(call.run)

    def release(self) -> None:
        """Leave the worker."""
        self._placer.leave(self)

    def ending(self) -> None:
        """Take note that the session is to end."""
        self.ending_since = time.monotonic()

    # -- the environment ------------------------------------------------------------------------------------------

    def construct(self) -> EnvironmentStub:
        """Build the environment there, and return what stands for it here.

        Raises:
            WorkerDied: The process has died meanwhile.
            WorkersKeepDying: It is not started, since others have died too soon.
            BaseException: What the constructor has raised.
        """
        waiter = BlockingReply()
        try:
            self._placer.start(self.worker)
            self.worker.request(MessageKind.OPEN, pack((self.number, self._placer.single_thread)), waiter)
            description = waiter.wait()
        except (WorkerGone, SessionLost):
            raise self._died() from None
        with self._lock:
            self._is_built = not self._is_lost
        if not self._is_built:
            raise self._died()
        return EnvironmentStub(self, description)

    def _died(self) -> BaseException:
        return self.worker.failure or WorkerDied(
            f"its worker process died while the environment was built ({self.worker.how})"
        )

    def lose(self) -> None:
        """Take note that the process is gone; whoever builds in it is told by the failure."""
        with self._lock:
            self._is_lost = True
            is_built = self._is_built
        if is_built:
            self.on_lost(WORKER_CRASHED)

    async def ask(
        self, name: str, argument: Any, *, encode: Encoder | None = None, events: ToolEvents | None = None
    ) -> Any:
        """Ask for something and wait, on the event loop.

        Raises:
            SessionLost: The process is gone.
        """
        waiter = AwaitedReply(current_dispatcher(), events)
        sent = None if encode is None else self._placer.encoder(encode)
        number = self._request(name, argument, waiter, sent)
        result = await waiter.wait(partial(self.worker.cancel, number, self.number))
        return result if encode is None or sent is not None else encode(result)

    def ask_blocking(self, name: str, argument: Any) -> Any:
        """Ask for something and wait, in this thread; raises as `ask` does."""
        waiter = BlockingReply()
        self._request(name, argument, waiter, None)
        return waiter.wait()

    def _request(self, name: str, argument: Any, waiter: PendingReply, encoder: tuple[int, bytes] | None) -> int:
        if encoder is not None:
            self.worker.tell_encoder(*encoder)
        asked = (self.number, name, 0 if encoder is None else encoder[0], argument, waiter.events is not None)
        try:
            payload = pack(asked)
        except Exception as exc:
            raise NotSendable(f"the argument of {name} cannot be sent to a worker process: {message_of(exc)}") from exc
        try:
            return self.worker.request(MessageKind.ASK, payload, waiter)
        except WorkerGone:
            raise SessionLost(WORKER_CRASHED) from None

    async def close(self) -> None:
        """Have the environment closed; one that is lost is closed."""
        waiter = AwaitedReply(current_dispatcher())
        try:
            number = self.worker.request(MessageKind.CLOSE, pack(self.number), waiter)
            await waiter.wait(partial(self.worker.cancel, number, self.number))
        except (WorkerGone, SessionLost):
            return


def _nobody_told(reason: str) -> None:
    """Until a session has the lane, there is nobody to tell."""
