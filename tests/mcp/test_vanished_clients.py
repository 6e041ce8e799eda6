"""A thousand clients that open a session and go without a word: every slot comes back with its lease."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastmcp import FastMCP

from environments import Tools
from openenv.core.env_server.http_server import create_app
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.types import ConcurrencyConfig
from servers import Serve

CLIENTS = 1000
LEASE_S = 5.0  # longer than a busy machine takes for an answer
BOUND_S = 60.0

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "brief", "version": "1"}},
}
CREATE = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}


class Brief(Tools):
    """An environment with one tool, which costs little to build."""

    built = 0
    alive = 0
    lock = threading.Lock()

    def __init__(self) -> None:
        server: FastMCP = FastMCP("brief")
        server.tool(ping)
        super().__init__(server)
        with self.lock:
            Brief.built += 1
            Brief.alive += 1

    def close(self) -> None:
        super().close()
        with self.lock:
            Brief.alive -= 1


def ping() -> str:
    """Answer."""
    return "pong"


async def vanish(address: tuple[str, int], body: dict[str, Any], gate: asyncio.Semaphore) -> bool:
    """Open a session and drop the connection; whether there was a session."""
    content = json.dumps(body).encode()
    head = (
        "POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"accept: application/json, text/event-stream\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    async with gate:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head.encode() + content)
        status = await reader.readuntil(b"\r\n\r\n")
        length = int(status.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        writer.transport.abort()
    return "result" in answer


@pytest.mark.parametrize(
    "body",
    [CREATE, INITIALIZE],
    ids=["openenv/session/create", "initialize"],
)
@pytest.mark.slow
def test_all_slots_come_back_after_a_thousand_clients_vanished(serve: Serve, wire: Any, body: dict[str, Any]) -> None:
    Brief.alive = Brief.built = 0
    config = ConcurrencyConfig(max_concurrent_envs=CLIENTS, session_timeout=LEASE_S)
    server = serve(create_app(Brief, CallToolAction, CallToolObservation, concurrency_config=config))
    parts = urlsplit(server.url)
    address = (parts.hostname or "", parts.port or 0)

    async def storm() -> int:
        gate = asyncio.Semaphore(64)
        return sum(await asyncio.gather(*(vanish(address, body, gate) for _ in range(CLIENTS))))

    assert asyncio.run(storm()) == CLIENTS
    assert Brief.built == CLIENTS
    server.wait_for(lambda: server.manager.active == 0, BOUND_S)
    server.wait_for(lambda: Brief.alive == 0, BOUND_S)
    assert "result" in wire(server.url).own("openenv/session/create")


def test_a_client_that_vanishes_during_a_call_frees_its_slot(desk: Any, handshake: Any) -> None:
    server = desk(sessions=1, lease_s=1.5)
    client = handshake(server.url)
    body = {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": {"name": "wait"}}
    with pytest.raises(Exception, match="timed out"):
        client.http.post("/mcp", json=body, headers=client.headers, timeout=0.5)
    server.wait_for(lambda: server.manager.active == 0, 60)
    assert server.watch.alive == 0
