"""The same with tools: each step is a call in an `mcp` frame, beside resets and states on the same connection."""

from __future__ import annotations

from typing import Any

from fastmcp import FastMCP

from openenv import MCPToolClient
from openenv.core.client_types import StepResult
from openenv.env.mcp_environment import MCPEnvironment

from .environment import Book, Counting, Move, Seen, counting
from .episode import PING_S


class ToolCounting(MCPEnvironment):
    """Counts calls of its one tool as `Counting` counts steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    inner_cls: type[Counting]

    def __init__(self) -> None:
        tools = FastMCP("counting")
        tools.tool(self._take, name="move")
        super().__init__(tools)
        self._inner = self.inner_cls()

    def _take(self, owner: int, number: int, word: str, pause_s: float) -> dict[str, Any]:
        seen = self._inner.step(Move(owner=owner, number=number, word=word, pause_s=pause_s))
        return {**seen.model_dump(exclude={"metadata"}), "reward": seen.reward}

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        return self._inner.reset(seed, episode_id, **kwargs)

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        raise ValueError("there are only tools")

    @property
    def state(self) -> Any:
        return self._inner.state

    def close(self) -> None:
        super().close()
        self._inner.close()


def tool_counting(book: Book, *, coroutine: bool) -> type[ToolCounting]:
    """Return an environment class that writes into a book."""
    return type("ToolCounting", (ToolCounting,), {"inner_cls": counting(book, coroutine=coroutine)})


class WholeStates(MCPToolClient):
    """A client that keeps all fields of a state."""

    def _parse_state(self, payload: dict[str, Any]) -> Any:
        return payload


class ToolPlayer:
    """Plays with tools what others play with steps."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def reset(self, **kwargs: Any) -> Any:
        """Begin an episode."""
        result = await self._client.reset(**kwargs)
        seen = result.observation
        return StepResult(observation=seen if isinstance(seen, dict) else seen.model_dump(), done=False)

    async def step(self, action: Move) -> Any:
        """Call the tool."""
        arguments = action.model_dump(exclude={"metadata"})
        return StepResult(observation=await self._client.call_tool("move", **arguments), done=False)

    async def state(self) -> Any:
        """Ask for the state."""
        return await self._client.state()

    async def close(self) -> None:
        """Hang up."""
        await self._client.close()


def tool_client(url: str) -> ToolPlayer:
    """Return a client that finds out quickly when no server is there."""
    return ToolPlayer(
        WholeStates(
            url,
            connect_timeout_s=2.0,
            message_timeout_s=10.0,
            websocket_ping_interval_s=PING_S,
            websocket_ping_timeout_s=PING_S,
        )
    )
