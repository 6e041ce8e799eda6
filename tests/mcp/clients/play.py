"""Plays a served desk with a client of another project and prints what it saw as JSON.

    python play.py mcp1|mcp2|fastmcp|openenv URL [MODE]

Run by interpreters that have one of the clients: it imports nothing of this repository's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from typing import Any

ENOUGH_S = 0.5
"""How long a call that never returns is waited for before it is cancelled."""


async def runs_on(call: asyncio.Future[Any]) -> None:
    """Give a call time to reach its tool, which must not return."""
    done, _ = await asyncio.wait({call}, timeout=ENOUGH_S)
    assert not done, "the tool has returned"


class Mcp1:
    """The official SDK, first major."""

    def __init__(self, session: Any) -> None:
        self.session = session

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, mode: str | None) -> Any:
        from mcp import ClientSession
        from mcp.client.streamable_http import streamablehttp_client

        async with streamablehttp_client(url + "/mcp") as (reader, writer, _):
            async with ClientSession(reader, writer) as session:
                await session.initialize()
                yield cls(session)

    async def names(self) -> list[str]:
        return [tool.name for tool in (await self.session.list_tools()).tools]

    async def call(self, tool: str, arguments: Any = None, on_progress: Any = None) -> Any:
        result = await self.session.call_tool(tool, arguments or {}, progress_callback=on_progress)
        if result.isError:
            raise RuntimeError(result.content[0].text)
        return result.structuredContent["result"]

    async def cancel(self, tool: str) -> None:
        from mcp import types

        request_id = self.session._request_id  # this client cancels nothing by itself: the application has to tell
        running = asyncio.ensure_future(self.session.call_tool(tool))
        await runs_on(running)
        params = types.CancelledNotificationParams(requestId=request_id, reason="enough")
        note = types.CancelledNotification(method="notifications/cancelled", params=params)
        await self.session.send_notification(types.ClientNotification(note))
        await running

    async def read(self) -> str:
        found: str = (await self.session.read_resource("note://today")).contents[0].text
        return found

    async def prompt(self) -> str:
        found: str = (await self.session.get_prompt("greet", {"name": "Ada"})).messages[0].content.text
        return found


class Mcp2(Mcp1):
    """The official SDK, second major."""

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, mode: str | None) -> Any:
        from mcp.client import Client

        async with Client(url + "/mcp", mode=mode) as client:
            yield cls(client)

    async def call(self, tool: str, arguments: Any = None, on_progress: Any = None) -> Any:
        result = await self.session.call_tool(tool, arguments or {}, progress_callback=on_progress)
        if result.is_error:
            raise RuntimeError(result.content[0].text)
        return result.structured_content["result"]

    async def cancel(self, tool: str) -> None:
        running = asyncio.ensure_future(self.session.call_tool(tool))
        await runs_on(running)
        running.cancel()
        await running


class FastMcp:
    """FastMCP's client."""

    def __init__(self, client: Any, major: int) -> None:
        self.client = client
        self.major = major

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, mode: str | None) -> Any:
        import fastmcp

        options = {} if mode is None else {"mode": mode}
        async with fastmcp.Client(url + "/mcp", **options) as client:
            yield cls(client, int(fastmcp.__version__.split(".")[0]))

    async def names(self) -> list[str]:
        return [tool.name for tool in await self.client.list_tools()]

    async def call(self, tool: str, arguments: Any = None, on_progress: Any = None) -> Any:
        return (await self.client.call_tool(tool, arguments or {}, progress_handler=on_progress)).data

    async def cancel(self, tool: str) -> None:
        request_id = self.client.session._request_id if self.major < 4 else None
        running = asyncio.ensure_future(self.client.call_tool(tool))
        await runs_on(running)
        if request_id is None:
            running.cancel()
        else:  # this client cancels nothing by itself either
            await self.client.cancel(request_id, "enough")
        await running

    async def read(self) -> str:
        found: str = (await self.client.read_resource("note://today"))[0].text
        return found

    async def prompt(self) -> str:
        found: str = (await self.client.get_prompt("greet", {"name": "Ada"})).messages[0].content.text
        return found


class Published:
    """The tool client of the published openenv package."""

    def __init__(self, client: Any) -> None:
        self.client = client

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, mode: str | None) -> Any:
        from openenv.core.mcp_client import MCPToolClient

        async with MCPToolClient(base_url=url) as client:
            client.use_production_mode = mode == "http"
            if mode != "http":
                await client.reset()
            yield cls(client)

    async def names(self) -> list[str]:
        return [tool.name for tool in await self.client.list_tools()]

    async def call(self, tool: str, arguments: Any = None, on_progress: Any = None) -> Any:
        result = await self.client.call_tool(tool, **(arguments or {}))
        return result["data"] if isinstance(result, dict) and "data" in result else result

    cancel = read = prompt = None


CLIENTS: dict[str, Any] = {"mcp1": Mcp1, "mcp2": Mcp2, "fastmcp": FastMcp, "openenv": Published}


async def failure(work: Any) -> Any:
    """How something failed."""
    try:
        await work
    except BaseException as exc:
        return [type(exc).__name__, str(exc)]
    return None


async def play(kind: Any, url: str, mode: str | None) -> dict[str, Any]:
    """Do everything that a client can."""
    seen: dict[str, Any] = {}
    progress: list[Any] = []

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        progress.append([done, total, message])

    async with kind.connect(url, mode) as client:
        seen["names"] = await client.names()
        seen["counts"] = [await client.call("count") for _ in range(3)]
        seen["worked"] = await client.call("work", {"steps": 3}, on_progress)
        seen["progress"] = progress
        seen["boom"] = await failure(client.call("boom"))
        seen["unknown"] = await failure(client.call("no_such_tool"))
        seen["arguments"] = await failure(client.call("echo", {"other": 1}))
        seen["big"] = len(await client.call("big", {"megabytes": 3}))
        if client.cancel is not None:
            seen["cancelled"] = await failure(client.cancel("wait"))
            seen["note"] = await client.read()
            seen["prompt"] = await client.prompt()
        async with kind.connect(url, mode) as other:
            seen["other"] = await other.call("count")
        seen["after"] = await client.call("count")
    return seen


if __name__ == "__main__":
    name, url, mode = (*sys.argv[1:], None)[:3]
    sys.stdout.write(json.dumps(asyncio.run(play(CLIENTS[name or ""], url or "", mode))) + "\n")
