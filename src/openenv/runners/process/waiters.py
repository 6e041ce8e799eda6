"""Whoever waits for a worker's answer: a coroutine, or a thread. Knows hubs and futures; must not know workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from ...env.tools.source import ToolEvents
from ...errors import RequestCancelled
from ..dispatch import Dispatcher


class Waiter:
    """Waits for one answer. `resolve` is called once, from any thread."""

    __slots__ = ("error", "events", "result")

    def __init__(self, events: ToolEvents | None = None) -> None:
        self.events = events
        self.result: Any = None
        self.error: BaseException | None = None

    def resolve(self, result: Any, error: BaseException | None) -> None:
        """Take the answer."""
        self.result = result
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Tell whoever waits."""
        raise NotImplementedError

    def take(self) -> Any:
        """Return the result, or raise what came instead."""
        if self.error is not None:
            raise self.error
        return self.result


class ThreadWaiter(Waiter):
    """Waits in a thread."""

    __slots__ = ("_done",)

    def __init__(self) -> None:
        super().__init__()
        self._done = threading.Event()

    def wake(self) -> None:
        self._done.set()

    def wait(self) -> Any:
        """Block until the answer is there."""
        self._done.wait()
        return self.take()


class LoopWaiter(Waiter):
    """Waits on an event loop."""

    __slots__ = ("_future", "_hub", "_is_resolved")

    def __init__(self, hub: Dispatcher, events: ToolEvents | None = None) -> None:
        super().__init__(events)
        self._hub = hub
        self._is_resolved = False
        self._future: asyncio.Future[None] = hub.loop.create_future()

    def wake(self) -> None:
        self._hub.post(self)

    def deliver(self) -> None:
        """Go on, on the loop."""
        self._is_resolved = True
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, cancel: Callable[[], None]) -> Any:
        """Wait for the answer.

        The other side is told when the wait is cancelled, and waited for all the same: a session has one call at a
        time, so its next one must not begin before this one has ended.
        """
        is_cancelled = False
        while not self._is_resolved:
            try:
                await self._future
            except asyncio.CancelledError:
                if not is_cancelled:
                    is_cancelled = True
                    cancel()
                self._future = self._hub.loop.create_future()
        if is_cancelled and isinstance(self.error, RequestCancelled):
            raise asyncio.CancelledError
        return self.take()
