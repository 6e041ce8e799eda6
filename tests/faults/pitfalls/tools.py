"""Scenarios of tool clients: what is left of one that dies, and what it lists."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

from fastapi import FastAPI, Request, WebSocket

from openenv.core.mcp_client import MCPToolClient

from .stage import PATIENCE_S, Stage, result, until

DYING_CLIENT = """
import asyncio, os, sys
from openenv.core.mcp_client import MCPToolClient

async def main():
    await MCPToolClient(base_url=sys.argv[1]).connect()
    os._exit(0)

asyncio.run(main())
"""


def tool_client_that_dies(stage: Stage) -> str:
    """W6: the process of a connected tool client is killed; is its slot free for the next client?"""
    server = stage.serve(stage.app(max_concurrent_envs=1))
    subprocess.run([sys.executable, "-c", DYING_CLIENT, server.url], timeout=110, check=True)
    assert stage.watch.count("built") <= 1  # a session is opened when something is asked of it
    until(lambda: stage.watch.alive == 0, PATIENCE_S)
    return f"the next client gets {result(stage.socket(server).ask({'type': 'reset'}))}"


def tool_without_a_description(stage: Stage) -> str:
    """W28: one of two tools has no description; how many does the client list?"""
    described: dict[str, str | None] = {"a": "First", "b": None}
    tools: list[Any] = [{"name": name, "description": text, "inputSchema": {}} for name, text in described.items()]
    return _listed(stage, {"result": {"tools": tools}})


def tools_that_cannot_be_listed(stage: Stage) -> str:
    """W28: the server answers with an error; does the client get it?"""
    return _listed(stage, {"error": {"code": -32603, "message": "the tools are broken"}})


def _listed(stage: Stage, answer: dict[str, Any]) -> str:
    """List the tools of a server that gives this answer, over HTTP and over its socket alike."""
    app = FastAPI()

    def reply(asked: dict[str, Any]) -> dict[str, Any]:
        listing = asked["method"] == "tools/list"
        return {"jsonrpc": "2.0", "id": asked["id"], **(answer if listing else {"result": {"session_id": "s"}})}

    @app.post("/mcp")
    async def mcp(request: Request) -> dict[str, Any]:
        return reply(await request.json())

    @app.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        await socket.accept()
        async for frame in socket.iter_json():
            if frame["type"] == "mcp":
                await socket.send_json({"type": "mcp", "data": reply(frame["data"])})

    async def play() -> int:
        client = MCPToolClient(base_url=stage.serve(app).url)
        try:
            return len(await client.list_tools())
        finally:
            await client.close()

    try:
        return f"{asyncio.run(play())} tools"
    except RuntimeError as exc:
        return "an error" if "the tools are broken" in str(exc) else str(exc)
