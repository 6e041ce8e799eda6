"""Where a coroutine of an environment runs its blocking parts.

A session sets this to its own lane, so that blocking code stays on the session's one thread; without a session it is a
thread of asyncio's. Knows callables only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar, cast

T = TypeVar("T")
Offload = Callable[[Callable[[], Any]], Awaitable[Any]]

OFFLOAD: ContextVar[Offload] = ContextVar("openenv_offload", default=asyncio.to_thread)


async def run_blocking(function: Callable[[], T]) -> T:
    """Run blocking code away from the event loop and wait for it."""
    return cast(T, await OFFLOAD.get()(function))
