from collections.abc import AsyncIterator

from fastmcp import Client, FastMCP

from openenv import Observation, create_app
from openenv.core.harness import (
    AgenticHarnessAdapter,
    HarnessAction,
    HarnessConfig,
    HarnessEnvironment,
    HarnessEvent,
    HarnessEventType,
)
from openenv.core.harness.adapter import HarnessStartupError
from openenv.protocol.tool_messages import Tool


class Clerk(AgenticHarnessAdapter):
    """A small agent that puts every word of a message on a shelf."""

    url: str | None = None
    tools: Client | None = None

    async def inject_tools(self, tools: list[Tool], bridge_url: str | None = None) -> None:
        self.url = bridge_url

    async def start(self, working_directory: str) -> None:
        if self.url is None:
            raise HarnessStartupError("the clerk needs a shelf")
        self.tools = await Client(self.url).__aenter__()

    async def stop(self) -> None:
        if self.tools is not None:
            await self.tools.__aexit__(None, None, None)
        self.tools = None

    async def is_alive(self) -> bool:
        return self.tools is not None

    async def send_message_streaming(self, message: str) -> AsyncIterator[HarnessEvent]:
        assert self.tools is not None
        count = 0
        for word in message.split():
            yield HarnessEvent(type=HarnessEventType.TOOL_CALL, data={"name": "put", "item": word})
            count = (await self.tools.call_tool("put", {"item": word})).data
        yield HarnessEvent(type=HarnessEventType.TURN_COMPLETE, data={"response": f"{count} on the shelf"})


def make_shop() -> HarnessEnvironment:
    shelf: list[str] = []
    tools: FastMCP = FastMCP("shop")

    @tools.tool
    def put(item: str) -> int:
        """Put an item on the shelf."""
        shelf.append(item)
        return len(shelf)

    return HarnessEnvironment(Clerk(HarnessConfig(name="clerk", command=["none"])), mcp=tools)


app = create_app(make_shop, HarnessAction, Observation, mode="production")
