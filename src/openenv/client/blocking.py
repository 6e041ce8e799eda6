"""Running a coroutine from code that is not one.

Knows event loops and threads; must not know clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_async_safely(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result, also when a loop already runs in this thread."""
    if asyncio._get_running_loop() is None:
        return asyncio.run(coro)
    with ThreadPoolExecutor(1, thread_name_prefix="openenv-run-async") as pool:
        return pool.submit(asyncio.run, coro).result()
