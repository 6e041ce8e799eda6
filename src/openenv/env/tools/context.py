"""FastMCP's `Context` for tools that are called without FastMCP's transports.

What a tool asks of it goes to the environment's own session: its id, its state, listeners to the running call. Knows
FastMCP's context; must not know how events travel.
"""

from __future__ import annotations

import uuid
from contextvars import Token
from typing import Any

from fastmcp import Context
from fastmcp.server.context import _current_context
from typing_extensions import Self

from .source import ToolEvents


class EnvContext(Context):
    """The context of one call."""

    def __init__(self, server: Any, session_id: str, events: ToolEvents | None) -> None:
        super().__init__(server)
        self._env_session_id = session_id
        self._env_events = events
        self._env_token: Token[Any] | None = None
        self._env_request_id: str | None = None

    def __enter__(self) -> Self:
        """Be the current context. `async with` does more, and costs more: it is for what FastMCP injects."""
        self._env_token = _current_context.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._env_token is not None:
            _current_context.reset(self._env_token)
            self._env_token = None

    @property
    def session_id(self) -> str:
        """The same for every call of one environment."""
        return self._env_session_id

    @property
    def request_id(self) -> str:
        """One for each call."""
        if self._env_request_id is None:
            self._env_request_id = uuid.uuid4().hex
        return self._env_request_id

    async def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Tell whoever waits for the call."""
        if self._env_events is not None:
            self._env_events.progress(progress, total, message)

    async def log(
        self, message: str, level: Any = None, logger_name: str | None = None, extra: Any = None, **_: Any
    ) -> None:
        """Send a log message to whoever waits for the call."""
        if self._env_events is not None:
            self._env_events.log(level or "info", logger_name, {"msg": message, "extra": extra})
