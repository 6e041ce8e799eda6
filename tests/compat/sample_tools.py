"""An environment of tools that both packages can serve: what the tests of tool clients talk to."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastmcp import Context, FastMCP

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

try:
    from openenv.env.mcp_environment import MCPEnvironment
except ImportError:  # the published package
    from openenv.core.env_server.mcp_environment import MCPEnvironment


class Shelf(MCPEnvironment):
    """Keeps a list of items; its tools return every kind of thing."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("shelf")
        self.items: list[str] = []
        self.steps = 0
        for tool in (self.put, self.bare, self.table, self.nothing, self.fail, self.slow, self.count_to, self.greet):
            server.tool(tool)
        super().__init__(server)

    def put(self, item: str) -> int:
        """Put an item on the shelf and say how many there are."""
        self.items.append(item)
        return len(self.items)

    def bare(self):  # type: ignore[no-untyped-def]
        return "only text"

    def table(self) -> dict[str, Any]:
        """Return an object that has a field called data."""
        return {"data": [1, 2], "items": list(self.items)}

    def nothing(self) -> None:
        """Return nothing."""

    def fail(self, words: str) -> str:
        """Raise."""
        raise ValueError(words)

    def slow(self, seconds: float) -> str:
        """Take a while."""
        time.sleep(seconds)
        return "done"

    async def count_to(self, number: int, ctx: Context) -> int:
        """Report progress on the way."""
        for step in range(1, number + 1):
            await ctx.report_progress(step, number, f"step {step}")
            await asyncio.sleep(0)
        return number

    def greet(self, name: str) -> str:
        """Have an argument that is called name."""
        return f"Hello, {name}!"

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        """Empty the shelf."""
        self.items.clear()
        self.steps = 0
        return Observation(metadata={"status": "ready"})

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Count steps."""
        self.steps += 1
        return super().step(action, timeout_s=timeout_s, **kwargs)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError(f"not about tools: {action!r}")

    @property
    def state(self) -> State:
        """How many steps there were, and what is on the shelf."""
        return State(episode_id="shelf", step_count=self.steps)


app = create_app(Shelf, CallToolAction, CallToolObservation, max_concurrent_envs=8)
