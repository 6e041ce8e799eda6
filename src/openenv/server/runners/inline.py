"""The inline runner: calls run at once, in the caller's thread. For environments that answer in microseconds.

Blocking code blocks its caller. Only a server closes environments in separate threads: `close` waits for other things
more often than a step, and a hanging one must not stop the server.
"""

from __future__ import annotations

import threading
from collections import deque

from .base import Lane, LaneCall
from .dispatcher import Dispatcher


class InlineLane(Lane):
    """Runs each call when it is submitted. A call submitted during another one runs after it, not inside it."""

    __slots__ = ("_closes_apart", "_following", "_running", "host")

    def __init__(self, host: InlineLane | None = None, *, closes_apart: bool = False) -> None:
        self.host: InlineLane = host or self
        self._closes_apart = closes_apart
        self._running = False
        self._following: deque[LaneCall] = deque()

    def submit(self, call: LaneCall, dispatcher: Dispatcher | None = None) -> None:
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
        """Run the call in a separate thread if the runner says so, else like any other call."""
        if self._closes_apart:
            threading.Thread(target=call.run, name="openenv-close", daemon=True).start()
        else:
            self.submit(call)


class InlineRunner:
    """Hands out inline lanes.

    Args:
        closes_apart: Whether environments are closed in separate threads.
    """

    name = "inline"
    placement = "loop"

    def __init__(self, *, closes_apart: bool = False) -> None:
        self._host = InlineLane()
        self._closes_apart = closes_apart

    def lane(self) -> Lane:
        """Return a lane."""
        return InlineLane(self._host, closes_apart=self._closes_apart)

    def pin(self, lane: Lane) -> None:
        """From now on, close environments in the caller's thread: they need the same thread for all calls."""
        self._closes_apart = False

    def close(self, timeout_s: float = 5.0) -> None:
        """Do nothing: this runner has no threads."""
