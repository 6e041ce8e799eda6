"""The inline runner: calls run at once, in the caller's thread. For environments that answer in microseconds.

Blocking code here blocks its caller. Only a server's environments are closed in a thread apart: `close` waits for
other things more often than a step, and one that hangs must not stop the server.
"""

from __future__ import annotations

import threading
from collections import deque

from .base import Lane, LaneCall


class InlineLane(Lane):
    """Runs each call as it is submitted; a call submitted by another one runs after it, not inside it."""

    __slots__ = ("_closes_apart", "_following", "_running", "host")

    def __init__(self, host: InlineLane | None = None, *, closes_apart: bool = False) -> None:
        self.host: InlineLane = host or self
        self._closes_apart = closes_apart
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

    def submit_close(self, call: LaneCall) -> None:
        """Run the call in a thread of its own where the runner closes apart, else as any other."""
        if self._closes_apart:
            threading.Thread(target=call.run, name="openenv-close", daemon=True).start()
        else:
            self.submit(call)


class InlineRunner:
    """Hands out inline lanes.

    Args:
        closes_apart: Whether environments are closed in threads of their own.
    """

    name = "inline"

    def __init__(self, *, closes_apart: bool = False) -> None:
        self._host = InlineLane()
        self._closes_apart = closes_apart

    def lane(self) -> Lane:
        """Return a lane."""
        return InlineLane(self._host, closes_apart=self._closes_apart)

    def pin(self, lane: Lane) -> None:
        """Close environments in the caller's thread too, from now on: they need one and the same."""
        self._closes_apart = False

    def close(self, timeout_s: float = 5.0) -> None:
        """Do nothing: there is nothing to stop."""
