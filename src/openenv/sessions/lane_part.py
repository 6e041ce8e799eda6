"""A piece of a coroutine's work that runs in its session's lane. Knows hubs and futures; must not know sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..runners import Hub


class LanePart:
    """A piece of a coroutine's work that runs in the lane. If nobody waits any more, it is not begun."""

    __slots__ = ("_error", "_function", "_future", "_hub", "_result", "kind")

    count = 1

    def __init__(self, function: Callable[[], Any], future: asyncio.Future[Any], hub: Hub) -> None:
        self.kind = "step"
        self._function = function
        self._future = future
        self._hub = hub
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, in the lane."""
        if self._future.cancelled():
            return
        try:
            self._result = self._function()
        except BaseException as exc:
            self._error = exc
        if self._hub.is_at_hand:
            self.deliver()
        else:
            self._hub.post(self)

    def deliver(self) -> None:
        """Hand the outcome over."""
        if self._future.done():
            return
        if self._error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(raisable(self._error))


def raisable(error: BaseException) -> BaseException:
    """A coroutine may not raise StopIteration, and an exit asked for by an environment is not ours to carry out.

    Nor is a cancellation that it raises one of whoever waits, who would leave without a word to those who ask again.
    """
    if isinstance(error, StopIteration) or not isinstance(error, Exception):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
