"""The one place where environments, engines and calls of tests take their time on purpose."""

from __future__ import annotations

import asyncio
import time


def take(seconds: float) -> None:
    """Take so long, as a slow step does; 0 takes no time."""
    time.sleep(seconds)


async def take_async(seconds: float) -> None:
    """Take so long in a coroutine, which can be cancelled."""
    await asyncio.sleep(seconds)
