"""The reaper: looks at unused sessions now and then, as long as there are any.

It starts with the first session it has to watch, on whatever loop that session was opened, and needs no start-up hook.
Knows when to look; what counts as unused is in `leases`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Reaper:
    """Calls `look` periodically until it returns False."""

    def __init__(self, look: Callable[[], bool], *, period_s: float) -> None:
        self._look = look
        self._period_s = period_s
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def ensure_running(self) -> None:
        """Arm the timer on the running loop, unless it is armed on a loop that is still open."""
        if self._timer is not None and self._loop is not None and not self._loop.is_closed():
            return
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._period_s, self._tick)

    def stop(self) -> None:
        """Look no more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _tick(self) -> None:
        self._timer = None
        if self._look():
            self.ensure_running()
