"""One event loop in a thread of its own, for coroutines that synchronous code has to wait for.

Shared by every environment of the process, so that no call pays for a thread or a loop. Knows asyncio only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """An event loop that starts when it is first needed. A forked child starts its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this loop's thread, where waiting for it would never end."""
        return self._thread is threading.current_thread()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._running())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it.

        Raises:
            RuntimeError: Called on the loop itself.
        """
        if self.is_current:
            work.close()
            raise RuntimeError("synchronous code on the tool loop cannot wait for it; use the async method")
        return self.submit(work).result()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call a function on the loop."""
        self._running().call_soon_threadsafe(function)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Call a function on the loop after a while; only for code that runs there."""
        self._running().call_later(delay_s, function)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return self._loop


TOOL_LOOP = BackgroundLoop("openenv-tools")
