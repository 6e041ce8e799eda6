"""The bridge: a real MCP server on a real socket, used by FastMCP's own client."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from fastmcp import Client, Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.utilities.types import Image

from openenv.adapters.turns import HarnessMCPBridge, build_bridge_server
from openenv.errors import HarnessError

pytestmark = pytest.mark.anyio


@pytest.fixture
def shop() -> FastMCP[Any]:
    server: FastMCP[Any] = FastMCP("shop")

    @server.tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool
    async def remember(text: str, ctx: Context) -> dict[str, str]:
        """Remember something."""
        await ctx.info(f"heard {text}")
        return {"heard": text}

    @server.tool
    def picture() -> Image:
        """Draw."""
        return Image(data=b"\x89PNG", format="png")

    @server.tool
    def fail() -> str:
        """Fail."""
        raise ValueError("out of stock")

    return server


def is_open(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname, parts.port)) == 0


async def test_an_mcp_client_uses_the_tools_under_their_new_names(shop: FastMCP[Any]) -> None:
    bridge = HarnessMCPBridge(await build_bridge_server(shop, {"env_add": "add"}))
    assert bridge.url is None
    url = bridge.start()
    assert bridge.start() == url == bridge.url
    try:
        async with Client(url) as client:
            tools = {tool.name: tool for tool in await client.list_tools()}
            assert set(tools) == {"env_add", "remember", "picture", "fail"}
            assert tools["env_add"].description == "Add two numbers."
            assert (await client.call_tool("env_add", {"a": 1, "b": 2})).data == 3
            assert (await client.call_tool("remember", {"text": "x"})).structured_content == {"heard": "x"}
            assert (await client.call_tool("picture", {})).content[0].type == "image"
            with pytest.raises(ToolError, match="out of stock"):
                await client.call_tool("fail", {})
            with pytest.raises(ToolError, match=r"argument|valid|required"):
                await client.call_tool("env_add", {"a": "many"})
    finally:
        bridge.stop()
    assert bridge.url is None
    assert not is_open(url)
    bridge.stop()


async def test_without_new_names_the_server_itself_is_served(shop: FastMCP[Any]) -> None:
    assert await build_bridge_server(shop, {}) is shop
    bridge = HarnessMCPBridge(shop)
    first = bridge.start()
    bridge.stop()
    second = bridge.start()
    try:
        assert first != second
        async with Client(second) as client:
            assert (await client.call_tool("add", {"a": 2, "b": 2})).data == 4
    finally:
        bridge.stop()


@pytest.mark.parametrize(
    ("renames", "text"), [({"x": "nothing"}, "does not expose: nothing"), ({"add": "fail"}, "add")]
)
async def test_names_that_do_not_fit_are_refused(shop: FastMCP[Any], renames: dict[str, str], text: str) -> None:
    with pytest.raises(HarnessError, match=text):
        await build_bridge_server(shop, renames)


async def test_a_process_that_does_not_know_the_path_finds_nothing(shop: FastMCP[Any]) -> None:
    bridge = HarnessMCPBridge(shop)
    parts = urlsplit(bridge.start())
    try:
        assert parts.hostname == "127.0.0.1"
        for path in ("/mcp", "/", "/x/mcp"):
            reply = httpx2.post(
                f"http://127.0.0.1:{parts.port}{path}", json={"jsonrpc": "2.0", "method": "ping", "id": 1}
            )
            assert reply.status_code == 404
    finally:
        bridge.stop()


def test_an_address_that_cannot_be_bound_is_an_error(shop: FastMCP[Any]) -> None:
    with pytest.raises(OSError):
        HarnessMCPBridge(shop, host="203.0.113.7").start(2)
