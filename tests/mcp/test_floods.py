"""What a client can pile up in the server: reports that it does not read, handshakes, streams, requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastmcp import Context
from websockets.sync.client import connect

from environments import Greeter, Tools
from openenv.env.tools.source import MOST_WAITING, ToolEvents
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from openenv.server.mcp import endpoint, mcp_sessions
from openenv.types import Observation
from servers import RunningServer, Serve
from waiting import wait_until_async

BOTH = {"accept": "application/json, text/event-stream"}
POLICY = AccessPolicy(orchestrator="trainer-token", agent="agent-token")
TRAINER = {"authorization": "Bearer trainer-token"}
AGENT = {"authorization": "Bearer agent-token"}
MB = 1024 * 1024


class Chatter(Tools):
    """Reports as often, and as much, as it is asked to."""

    TOOLS = ("chat", "wait")
    done = threading.Event()
    opened = threading.Event()

    async def chat(self, ctx: Context, times: int, size: int) -> str:
        """Report."""
        for number in range(times):
            await ctx.report_progress(number, times, "x" * size)
        self.done.set()
        return "said"

    async def wait(self) -> str:
        """Wait for ever."""
        await asyncio.Event().wait()
        return ""


def app_of(env_cls: type[Any], **options: Any) -> Any:
    return create_app(env_cls, CallToolAction, CallToolObservation, **{"max_concurrent_envs": 8, **options})


@pytest.fixture
def server(serve: Serve) -> RunningServer:
    Chatter.done.clear()
    return serve(app_of(Chatter))


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}


# -- reports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surface", ["standard MCP", "WS /mcp"])
def test_reports_that_a_client_does_not_read_do_not_pile_up(
    server: RunningServer, handshake: Any, surface: str
) -> None:
    """200 MB of them: the server keeps a few, answers others meanwhile, and the tool comes to its end."""
    call = rpc("tools/call", name="chat", arguments={"times": 50_000, "size": 4096}, _meta={"progressToken": 1})
    other = handshake(server.url)
    before = resident_mb()
    deaf = socket.create_connection(("127.0.0.1", server.port))
    with contextlib.closing(deaf), contextlib.ExitStack() as stack:
        if surface == "WS /mcp":
            address = f"ws://127.0.0.1:{server.port}/mcp"
            client = stack.enter_context(connect(address, sock=deaf, max_queue=1, proxy=None, close_timeout=0.1))
            client.send(json.dumps(call))
        else:
            body = json.dumps(call).encode()
            own = handshake(server.url)
            named = "".join(f"{name}: {value}\r\n" for name, value in own.headers.items())
            head = f"POST /mcp HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{named}"
            deaf.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        most = 0.0
        while not Chatter.done.is_set():
            assert other.request("ping").result == {}
            most = max(most, resident_mb() - before)
        assert most < 100, "megabytes"


def test_a_client_that_reads_gets_the_result_after_the_reports(server: RunningServer, handshake: Any) -> None:
    answer = handshake(server.url).call("chat", {"times": 300, "size": 10}, progressToken=1)
    assert answer.text == "said"
    numbers = [note["progress"] for note in answer.notes("notifications/progress")]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 299


@pytest.mark.anyio
async def test_reports_wait_in_a_bounded_queue_while_the_loop_is_busy() -> None:
    heard: list[float] = []
    events = ToolEvents(lambda progress, total, message: heard.append(progress))

    def report() -> None:
        for number in range(5000):
            events.progress(number)

    thread = threading.Thread(target=report)
    thread.start()
    thread.join()  # in the loop's own thread: nothing is heard meanwhile
    await wait_until_async(lambda: len(heard) >= MOST_WAITING)
    assert heard == list(range(5000 - MOST_WAITING, 5000)), "the latest ones, in order"
    events.progress(5000)
    await wait_until_async(lambda: heard[-1] == 5000)


# -- sessions -----------------------------------------------------------------------------------------------------


class Slow(Greeter):
    """Takes a while to begin."""

    entered = threading.Event()
    gate = threading.Event()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        self.entered.set()
        self.gate.wait(20)
        return Observation()


def test_a_handshake_whose_client_hangs_up_leaves_no_session(serve: Serve) -> None:
    server = serve(app_of(Slow))
    body = json.dumps(rpc("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={})).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        head = "POST /mcp HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\naccept: text/event-stream\r\n"
        peer.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert Slow.entered.wait(20)
    server.wait_for(lambda: all(session.is_ending for session in server.manager.sessions()))
    Slow.gate.set()
    server.wait_for(lambda: server.manager.active == 0)


def test_clients_with_open_streams_cannot_attach_without_end(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_sessions, "MAX_ATTACHED", 3)
    server = serve(app_of(Greeter, access=POLICY))
    with httpx2.Client(base_url=server.url, trust_env=False, headers=BOTH, timeout=30) as http:
        lent = http.post("/sessions", headers=TRAINER).json()["session_id"]
        hello = rpc(
            "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "x", "version": "1"}
        )
        streams = []
        for _ in range(3):
            begun = http.post("/mcp", json=hello, headers={**AGENT, "X-OpenEnv-Session": lent})
            named = {**AGENT, "mcp-session-id": begun.headers["mcp-session-id"]}
            stream = http.stream("GET", "/mcp", headers=named)
            stream.__enter__()
            streams.append(stream)
        refused = http.post("/mcp", json=hello, headers={**AGENT, "X-OpenEnv-Session": lent})
        assert "as many clients as it may" in refused.text
        streams.pop().__exit__(None, None, None)
        server.wait_for(
            lambda: "result" in http.post("/mcp", json=hello, headers={**AGENT, "X-OpenEnv-Session": lent}).json()
        )
        for stream in streams:
            stream.__exit__(None, None, None)


def test_a_client_has_a_limit_of_requests_under_way(
    server: RunningServer, handshake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_RUNNING", 3)
    client = handshake(server.url)

    def call(number: int) -> None:
        with httpx2.Client(base_url=server.url, trust_env=False, timeout=30) as http:
            http.post("/mcp", json={**rpc("tools/call", name="wait"), "id": number}, headers=client.headers)

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(100, 103)]
    for thread in threads:
        thread.start()
    session_id = client.session_id
    known = server.app.state.openenv_server._mcp.sessions.find(session_id)
    server.wait_for(lambda: len(known.running) == 3)
    assert client.request("ping").status == 429
    for number in range(100, 103):
        client.notify("notifications/cancelled", {"requestId": number})
    server.wait_for(lambda: not known.running)
    assert client.request("ping").result == {}
    for thread in threads:
        thread.join(10)
