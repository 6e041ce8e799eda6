"""What every surface asks of an environment's tools. Light to import: FastMCP is loaded by environments, not here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .events import ToolEvents


class ToolSource(ABC):
    """Some tools."""

    @abstractmethod
    async def describe(self) -> list[dict[str, Any]]:
        """List the tools as MCP's `tools/list` does."""

    @abstractmethod
    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        events: ToolEvents | None = None,
    ) -> Any:
        """Call a tool; raises `ToolCallError` and its kind."""

    def is_blocking(self, name: str) -> bool:
        """Whether a call would do nothing but block, so that `call_blocking` suits it."""
        return False

    def call_blocking(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        events: ToolEvents | None = None,
    ) -> Any:
        """Call a tool from synchronous code; raises as `call` does."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """End the blocking call that is under way, as far as that is possible."""
        return

    @abstractmethod
    async def ask_server(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Do something with FastMCP's client of the server behind the tools."""
