from fastmcp import Context
from shelf_app import Shelf

from openenv import tool


class TidyShelf(Shelf):
    """The episode ends with `sort`; sorting three items or more is worth 1."""

    @tool
    async def sort(self, ctx: Context) -> list[str]:
        """Sort the shelf, which ends the episode."""
        items = await super().sort(ctx)
        self.earn(1.0 if len(items) >= 3 else 0.0, done=True)
        return items
