"""Steps of several sessions whose code runs on one thread, done in one go.

Each session is taken as for a call of its own, and let go as soon as its step is done; but there is one hand-over to
the thread and one back, not one for each. Knows sessions and lanes; must not know the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

from ..errors import RequestCancelled, SessionClosedError
from ..runners import Dispatcher
from .operations import Operation
from .session import ObserveStep, Session, SessionCall, interrupt

_MANY = 16
_GIVE_WAY_S = 0.00005

Write = Callable[[Any, int, str], bytes]
"""Writes a reply: from an observation, the id of the request and that of the session."""


class StepGroup:
    """Runs its steps one after the other, then tells of all of them on the loop.

    Steps have no object each: what belongs to one is at the same index of several lists. Nor does anything here refer
    back to the group, so that it is gone with the last word of it and not when garbage is collected.

    Args:
        operation: What a step is.
        write: Writes the reply to a step, in the lane.
        asked: What ledgers keep of what was asked.
        hub: Whose loop is told.
        told: Takes the group when all is done.
        observe: Takes how long each step waited, ran, and was on its way back; None where nobody wants to know.
    """

    __slots__ = (
        "_cancelled",
        "_observe",
        "_times",
        "_told",
        "_write",
        "actions",
        "asked",
        "hub",
        "ids",
        "operation",
        "outcomes",
        "places",
        "sessions",
    )

    kind = "step"

    def __init__(
        self,
        operation: Operation,
        write: Write,
        asked: Any,
        hub: Dispatcher,
        told: Callable[[StepGroup], None],
        observe: ObserveStep | None = None,
    ) -> None:
        self.operation = operation
        self._write = write
        self.asked = asked
        self.hub = hub
        self._told = told
        self._observe = observe
        self._times = None if observe is None else [perf_counter()]  # of its making, then of all beginnings and ends
        self._cancelled: set[Session] = set()
        self.sessions: list[Session] = []
        self.actions: list[Any] = []
        self.ids: list[int] = []
        self.places: list[int] = []
        self.outcomes: list[bytes | BaseException] = []

    @property
    def count(self) -> int:
        """How many calls this one stands for."""
        return len(self.sessions)

    def cancel(self, session: Session) -> None:
        """Keep the step of a session from being run, or interrupt it."""
        self._cancelled.add(session)
        interrupt(session, self, self.operation, self.hub)

    def run(self) -> None:
        """Do the steps, in the lane."""
        waiting: list[tuple[Session, SessionCall]] = []
        write, outcomes, times, cancelled = self._write, self.outcomes, self._times, self._cancelled
        if times is not None:
            times.append(perf_counter())
        for session, action, request_id in zip(self.sessions, self.actions, self.ids, strict=True):
            try:
                if cancelled and session in cancelled:
                    raise _reason(session)
                outcomes.append(write(session.env.step(action), request_id, session.id))
            except BaseException as exc:
                outcomes.append(exc)
                following = session.end_step(failed=True)
            else:
                following = session.end_step(failed=False)
            if times is not None:
                times.append(perf_counter())
            if following is not None:
                waiting.append((session, following))
        if self.hub.is_at_hand:
            self.deliver()
        else:
            self.hub.post(self)
            if len(outcomes) >= _MANY:
                # Or this thread would go on with the next group while the loop waits for the interpreter: all replies
                # would go out together at the end, and whoever waits for them would have nothing to do until then.
                time.sleep(_GIVE_WAY_S)
        for session, following in waiting:
            session.start(following)

    def deliver(self) -> None:
        """Hand the outcomes over."""
        self._told(self)
        if self._observe is not None and self._times is not None:
            made, *began = self._times
            now = perf_counter()
            for start, end in pairwise(began):
                self._observe(start - made, end - start, now - end)


def _reason(session: Session) -> BaseException:
    """Say why a step that was cancelled is not run."""
    reason = session.close_reason
    return RequestCancelled() if reason is None else SessionClosedError(session.id, reason)
