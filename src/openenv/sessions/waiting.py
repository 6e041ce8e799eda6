"""Waiting for a change that may come from any thread: a line of futures, first come, first served.

Knows asyncio futures; must not know what is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque


class ChangeSignal:
    """Wakes all that wait for the next change."""

    def __init__(self) -> None:
        self._waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._lock = threading.Lock()

    def notify(self) -> None:
        """Wake everybody; may be called from any thread."""
        with self._lock:
            waiters, self._waiters = self._waiters, deque()
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # a closed loop has nobody left to wake
                loop.call_soon_threadsafe(_wake, future)

    def subscribe(self) -> asyncio.Future[None]:
        """Take a place in line *before* looking at the state, so that no change is missed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiters.append((loop, future))
        return future

    def unsubscribe(self, future: asyncio.Future[None]) -> None:
        """Leave the line."""
        if not future.done():
            with self._lock:
                self._waiters = deque(entry for entry in self._waiters if entry[1] is not future)


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
