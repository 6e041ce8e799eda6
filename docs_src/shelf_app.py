from fastmcp import Context

from openenv import MCPEnvironment, Observation, tool


class Shelf(MCPEnvironment):
    """Put things on a shelf, and sort them."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None) -> Observation:
        self._items: list[str] = []
        return Observation()

    @tool
    def put(self, item: str) -> int:
        """Put an item on the shelf and return how many there are."""
        self._items.append(item)
        return len(self._items)

    @tool
    async def sort(self, ctx: Context) -> list[str]:
        """Sort the shelf."""
        for done, _ in enumerate(self._items, 1):
            await ctx.report_progress(done, len(self._items))
        self._items.sort()
        return self._items
