"""The inline runner: calls run at once, in the caller's thread. For environments that answer in microseconds.

Blocking code here blocks its caller.
"""

from __future__ import annotations

from collections import deque

from .base import Lane, LaneCall


class InlineLane(Lane):
    """Runs each call as it is submitted; a call submitted by another one runs after it, not inside it."""

    __slots__ = ("_following", "_running", "host")

    def __init__(self, host: InlineLane | None = None) -> None:
        self.host: InlineLane = host or self
        self._running = False
        self._following: deque[LaneCall] = deque()

    def submit(self, call: LaneCall) -> None:
        """Run the call now, or as soon as the running one is done."""
        if self._running:
            self._following.append(call)
            return
        self._running = True
        try:
            call.run()
            while self._following:
                self._following.popleft().run()
        finally:
            self._running = False


class InlineRunner:
    """Hands out inline lanes."""

    name = "inline"

    def __init__(self) -> None:
        self._host = InlineLane()

    def lane(self) -> Lane:
        """Return a lane."""
        return InlineLane(self._host)

    def pin(self, lane: Lane) -> None:
        """Do nothing: all calls share the caller's thread already."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Do nothing: there is nothing to stop."""
