"""`StepGroup`: steps of several sessions on one thread, with one hand-over there and one back.

Each session is reserved as for a separate call, and released as soon as its step is done. Knows sessions and lanes;
must not know the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, Final

from openenv.errors import RequestCancelled

from ..runners import Dispatcher
from .operations import Operation
from .session import ObserveStep, Session, SessionCall, has_stepped, interrupt

_LARGE: Final = 16
_YIELD_S: Final = 0.00005

Write = Callable[[Any, int, str], bytes]
"""Writes a reply from an observation, the request id and the session id."""


ObserveGroup = Callable[["StepGroup"], None]
"""Receives a group after its outcomes are delivered, on the loop."""


@dataclass(slots=True)
class StepObservers:
    """The observers of grouped steps; None for none.

    Args:
        step: Receives the seconds that each step waited, ran, and took to return; for telemetry.
        group: Receives each group once its outcomes are delivered; for recordings.
    """

    step: ObserveStep | None = None
    group: ObserveGroup | None = None


class StepGroup:
    """Runs its steps one after the other, then delivers all outcomes on the loop.

    A step is no object: its parts are at the same index of several lists. Steps do not refer back to the group, so it
    is freed without the garbage collector.

    Args:
        operation: The step operation.
        write: Writes the reply to a step, in the lane.
        request: The request as stored in ledgers.
        dispatcher: Delivers the outcomes on its loop.
        done: Called with the group when all steps are done.
        observers: Telemetry and recordings.
    """

    __slots__ = (
        "_cancelled",
        "_dispatcher",
        "_done",
        "_observe",
        "_observe_group",
        "_times",
        "_write",
        "actions",
        "ids",
        "operation",
        "outcomes",
        "places",
        "request",
        "sessions",
    )

    kind = "step"

    def __init__(
        self,
        operation: Operation,
        write: Write,
        request: Any,
        dispatcher: Dispatcher,
        done: Callable[[StepGroup], None],
        observers: StepObservers,
    ) -> None:
        self.operation = operation
        self._write = write
        self.request = request
        self._dispatcher = dispatcher
        self._done = done
        self._observe = observers.step
        self._observe_group = observers.group
        self._times = (
            None if observers.step is None else [perf_counter()]
        )  # when it was made, began, and ended each step
        self._cancelled: set[Session] = set()
        self.sessions: list[Session] = []
        self.actions: list[Any] = []
        self.ids: list[int] = []
        self.places: list[int] = []
        self.outcomes: list[bytes | BaseException] = []

    @property
    def count(self) -> int:
        """The number of steps."""
        return len(self.sessions)

    def cancel(self, session: Session) -> None:
        """Keep the step of a session from being run, or interrupt it."""
        self._cancelled.add(session)
        interrupt(session, self, self.operation, self._dispatcher)

    def run(self) -> None:
        """Do the steps, in the lane."""
        if self._times is not None:
            self._times.append(perf_counter())
        waiting = self._run_steps()
        if not self._dispatcher.hand_over(self) and len(self.outcomes) >= _LARGE:
            # Give the interpreter to the loop. Otherwise this thread continues with the next group, all replies go out
            # together at the end, and their clients idle until then.
            time.sleep(_YIELD_S)
        for session, following in waiting:
            session.start(following)

    def _run_steps(self) -> list[tuple[Session, SessionCall]]:
        """Do the steps; return the sessions with a call that waits, and these calls."""
        waiting: list[tuple[Session, SessionCall]] = []
        write, outcomes, times, cancelled = self._write, self.outcomes, self._times, self._cancelled
        for session, action, request_id in zip(self.sessions, self.actions, self.ids, strict=True):
            try:
                if cancelled and session in cancelled:
                    raise RequestCancelled() if session.close_reason is None else session.closed_error()
                outcomes.append(write(session.env.step(action), request_id, session.id))
            except BaseException as exc:
                outcomes.append(exc)
                following = session.end_step(failed=not has_stepped(exc))
            else:
                following = session.end_step(failed=False)
            if times is not None:
                times.append(perf_counter())
            if following is not None:
                waiting.append((session, following))
        return waiting

    def deliver(self) -> None:
        """Hand the outcomes over; called on the loop."""
        self._done(self)
        if self._observe_group is not None:
            self._observe_group(self)
        if self._observe is not None and self._times is not None:
            made, *began = self._times
            now = perf_counter()
            for start, end in pairwise(began):
                self._observe(start - made, end - start, now - end)
