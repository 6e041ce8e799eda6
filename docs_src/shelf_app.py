from typing import Any

from fastmcp import Context, FastMCP

from openenv import Action, MCPEnvironment, Observation, State, create_app
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation


class Shelf(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("shelf")
        server.tool(self.put)
        server.tool(self.sort)
        super().__init__(server)
        self._items: list[str] = []

    def put(self, item: str) -> int:
        """Put an item on the shelf and return how many there are."""
        self._items.append(item)
        return len(self._items)

    async def sort(self, ctx: Context) -> list[str]:
        """Sort the shelf."""
        for done, _ in enumerate(self._items, 1):
            await ctx.report_progress(done, len(self._items))
        self._items.sort()
        return self._items

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._items.clear()
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("this environment has only tools")

    @property
    def state(self) -> State:
        return State()


app = create_app(Shelf, CallToolAction, CallToolObservation, max_concurrent_envs=16)
