import asyncio

import httpx2
from fastmcp import Client

SERVER = "http://localhost:8000"


async def play(address: str) -> None:
    """The agent: sees tools and their results, no reward."""
    async with Client(address) as client:
        for item in ("pear", "apple", "plum"):
            await client.call_tool("put", {"item": item})
        print((await client.call_tool("sort")).data)


opened = httpx2.post(f"{SERVER}/reset", json={"seed": 7}, headers={"X-OpenEnv-Session": "new"})
session = opened.headers["X-OpenEnv-Session"]
asyncio.run(play(f"{SERVER}/mcp?session_id={session}"))
print(httpx2.get(f"{SERVER}/sessions/{session}").json()["episode"])
httpx2.delete(f"{SERVER}/sessions/{session}")
