"""Steps of several sessions whose code runs on one thread, done in one go.

Each session is taken as for a call of its own, and let go as soon as its step is done; but there is one hand-over to
the thread and one back, not one for each. Knows sessions and lanes; must not know the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..errors import RequestCancelled, SessionClosedError
from ..runners import Hub
from .ledger import Entry
from .operations import Operation
from .session import Call, Session, interrupt

_MANY = 16
_GIVE_WAY_S = 0.00005


class GroupedStep:
    """A step of a group. One that is cancelled before its turn is not run."""

    __slots__ = ("_group", "_is_cancelled", "action", "entry", "error", "place", "request_id", "result", "session")

    def __init__(self, group: StepGroup, session: Session, action: Any, place: int, request_id: int) -> None:
        self._group = group
        self._is_cancelled = False
        self.session = session
        self.action = action
        self.place = place
        self.request_id = request_id
        self.result: Any = None
        self.error: BaseException | None = None

    entry: Entry

    def cancel(self) -> None:
        """Keep it from being run, or interrupt it."""
        self._is_cancelled = True
        interrupt(self.session, self, self._group.operation, self._group.hub)

    def cancelled(self) -> BaseException | None:
        """Return why it must not be run."""
        if not self._is_cancelled:
            return None
        reason = self.session.close_reason
        return RequestCancelled() if reason is None else SessionClosedError(self.session.id, reason)


class StepGroup:
    """Runs its steps one after the other, then tells of all of them on the loop."""

    __slots__ = ("_told", "hub", "operation", "steps")

    kind = "step"

    def __init__(self, operation: Operation, hub: Hub, told: Callable[[StepGroup], None]) -> None:
        self.operation = operation
        self.hub = hub
        self._told = told
        self.steps: list[GroupedStep] = []

    @property
    def count(self) -> int:
        """How many calls this one stands for."""
        return len(self.steps)

    def run(self) -> None:
        """Do the steps, in the lane."""
        waiting: list[tuple[Session, Call]] = []
        in_lane = self.operation.in_lane
        for step in self.steps:
            session = step.session
            step.error = step.cancelled()
            if step.error is None:
                try:
                    step.result = in_lane(session.env, step.action)
                except BaseException as exc:
                    step.error = exc
            following = session.end_step(failed=step.error is not None)
            if following is not None:
                waiting.append((session, following))
        if self.hub.is_at_hand:
            self.deliver()
        else:
            self.hub.post(self)
            if len(self.steps) >= _MANY:
                # Or this thread would go on with the next group while the loop waits for the interpreter: all replies
                # would go out together at the end, and whoever waits for them would have nothing to do until then.
                time.sleep(_GIVE_WAY_S)
        for session, following in waiting:
            session.start(following)

    def deliver(self) -> None:
        """Hand the outcomes over."""
        self._told(self)
