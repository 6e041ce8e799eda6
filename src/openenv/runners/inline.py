"""The inline runner: calls run at once, in the caller's thread. For environments that answer in microseconds.

Knows nothing but how to call; blocking code here blocks its caller.
"""

from __future__ import annotations

from .base import Lane, LaneCall


class InlineLane:
    """Runs each call as it is submitted."""

    __slots__ = ()

    def submit(self, call: LaneCall) -> None:
        """Run the call now."""
        call.run()

    def release(self) -> None:
        """Nothing is held."""


class InlineRunner:
    """Hands out the one inline lane."""

    name = "inline"

    def __init__(self) -> None:
        self._lane = InlineLane()

    def lane(self) -> Lane:
        """Return the lane."""
        return self._lane

    def pin(self, lane: Lane) -> None:
        """All calls share the caller's thread already."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Nothing to stop."""
