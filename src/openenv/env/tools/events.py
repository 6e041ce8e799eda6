"""What a running tool tells before it is done: progress and log messages.

Knows who wants to hear them and on which loop; must not know how they travel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ToolEvents:
    """Listeners to one call; both are called on the loop where this was made, wherever the tool runs.

    Args:
        on_progress: Called with progress, total and message.
        on_log: Called with level, logger and data.
    """

    on_progress: Callable[[float, float | None, str | None], None]
    on_log: Callable[[str, str | None, Any], None] | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Tell progress, from any thread."""
        self.loop.call_soon_threadsafe(self.on_progress, progress, total, message)

    def log(self, level: str, logger: str | None, data: Any) -> None:
        """Tell a log message, from any thread."""
        if self.on_log is not None:
            self.loop.call_soon_threadsafe(self.on_log, level, logger, data)


EVENTS: ContextVar[ToolEvents | None] = ContextVar("openenv_tool_events", default=None)
"""The listeners of the call that is under way, where it goes through an environment's own `step`."""
