"""Waiting for a change that may come from any thread: a line of futures, first come, first served.

Knows asyncio futures; must not know what is waited for.
"""

from __future__ import annotations

import asyncio
import threading


class Line:
    """Those who wait, in the order they came."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._lock = threading.Lock()

    def notify_one(self) -> None:
        """Wake whoever has waited longest; may be called from any thread."""
        while True:
            with self._lock:
                if not self._waiters:
                    return
                future = next(iter(self._waiters))
                loop = self._waiters.pop(future)
            if _wake_soon(loop, future):
                return

    def notify_all(self) -> None:
        """Wake everybody; may be called from any thread."""
        with self._lock:
            waiters, self._waiters = self._waiters, {}
        for future, loop in waiters.items():
            _wake_soon(loop, future)

    def subscribe(self) -> asyncio.Future[None]:
        """Take a place in line *before* looking at the state, so that no change is missed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiters[future] = loop
        return future

    def unsubscribe(self, future: asyncio.Future[None]) -> bool:
        """Leave the line; say whether one was still in it, and not already called."""
        with self._lock:
            return self._waiters.pop(future, None) is not None


def _wake_soon(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> bool:
    try:
        loop.call_soon_threadsafe(_wake, future)
    except RuntimeError:  # a closed loop has nobody left to wake
        return False
    return True


async def wait_until(future: asyncio.Future[None], deadline: float | None) -> bool:
    """Wait for a subscription until a time of the loop's clock; say whether the change came."""
    if deadline is None:
        await future
        return True
    remaining = deadline - asyncio.get_running_loop().time()
    if remaining <= 0:
        return False
    done, _ = await asyncio.wait([future], timeout=remaining)
    return bool(done)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
