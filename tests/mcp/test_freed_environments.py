"""A closed environment is freed, whichever way it was reached and however its tools hold it.

FastMCP keeps functions in caches of the process, and tools are functions of their environment.
"""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from held_environments import KINDS, Attribute, Guarded, Methods, Sharing, alive, census_first, still_alive
from openenv import GenericEnvClient, LocalEnv
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation, ListToolsAction
from openenv.server.app import create_app
from openenv.server.web.web_page import add_page
from servers import Serve
from waiting import wait_until

TOOLS = ("holds", "waits")
SOON_S = 20.0


@pytest.fixture(autouse=True)
def nothing_before() -> None:
    assert alive() == 0, "another test has left something"


def app_of(kind: type[Any], **options: Any) -> Any:
    return create_app(kind, CallToolAction, CallToolObservation, max_concurrent_envs=8, **options)


def action(tool: str) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": tool, "arguments": {}}


# -- ways in ------------------------------------------------------------------------------------------------------


def by_handshake(server: Any, clients: Any) -> None:
    client = clients["handshake"](server.url)
    client.request("tools/list")
    for tool in TOOLS:
        assert "bytes" in client.call(tool, progressToken=1).text
    for method in ("resources/list", "prompts/list", "resources/templates/list"):
        client.request(method)
    client.request("resources/read", {"uri": "note://today"})
    client.request("prompts/get", {"name": "greet"})
    assert still_alive() == 1
    assert client.http.delete("/mcp", headers=client.headers).status_code == 200


def by_modern(server: Any, clients: Any) -> None:
    client = clients["modern"](server.url)
    for tool in TOOLS:
        assert "bytes" in client.call(tool).text
    assert still_alive() == 1
    (session,) = server.manager.sessions()
    session.close()


def by_own_rpc(server: Any, clients: Any) -> None:
    wire = clients["wire"](server.url)
    named: dict[str, Any] = wire.own("openenv/session/create")["result"]
    nothing: dict[str, Any] = {}
    for params in (named, nothing):
        wire.own("tools/list", params)
        for tool in TOOLS:
            assert "bytes" in str(wire.own("tools/call", {"name": tool, **params}))
    wire.own("openenv/session/close", named)


def by_socket(server: Any, clients: Any) -> None:
    for path in ("/mcp", "/ws"):
        socket = clients["open_socket"](server.url, path)
        for tool in TOOLS:
            assert "bytes" in str(socket.own("tools/call", {"name": tool}))
        socket.socket.close()


def by_steps(server: Any, clients: Any) -> None:
    for protocol in ("v1", "v2"):
        with GenericEnvClient(server.url, protocol=protocol).sync() as client:
            client.reset()
            for tool in TOOLS:
                client.step(action(tool))
            client.step({"type": "list_tools"})


def by_http(server: Any, clients: Any) -> None:
    with httpx2.Client(base_url=server.url, trust_env=False, timeout=30) as http:
        named = {
            "X-OpenEnv-Session": http.post("/reset", json={}, headers={"X-OpenEnv-Session": "new"}).headers[
                "X-OpenEnv-Session"
            ]
        }
        for tool in TOOLS:
            http.post("/step", json={"action": action(tool)}, headers=named)
        http.delete(f"/sessions/{named['X-OpenEnv-Session']}")
        http.get("/metadata")
        http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"})


def by_page(server: Any, clients: Any) -> None:
    with httpx2.Client(base_url=server.url, trust_env=False, timeout=30) as http:
        http.get("/web/page")
        assert http.post("/web/reset", json={}).status_code == 200
        http.post("/web/step", json={"action": action("holds")})
        http.post("/web/call", json={"name": "waits", "arguments": {}})
        assert http.post("/web/close", json={}).status_code == 200


WAYS = (by_handshake, by_modern, by_own_rpc, by_socket, by_steps, by_http, by_page)


@pytest.fixture
def clients(handshake: Any, modern: Any, wire: Any, open_socket: Any) -> dict[str, Any]:
    return {"handshake": handshake, "modern": modern, "wire": wire, "open_socket": open_socket}


# Every way with the usual kind, and every kind with one way, are quick; the others are the rest of the table.
TABLE = [
    pytest.param(kind, way, marks=() if kind is Methods or way is by_handshake else pytest.mark.slow)
    for kind in KINDS
    for way in WAYS
]


@pytest.mark.slow_but_for("Methods-by_steps", "Guarded-by_handshake")
@pytest.mark.parametrize(("kind", "way"), TABLE)
def test_a_closed_environment_is_freed(serve: Serve, clients: Any, kind: type[Any], way: Callable[..., None]) -> None:
    app = app_of(kind)
    add_page(app)
    server = serve(app)
    way(server, clients)
    server.wait_for(lambda: server.manager.active == 0 and not server.manager.slots.all(), SOON_S)
    server.wait_for(lambda: alive() == 0, SOON_S)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Methods, Guarded])
@pytest.mark.parametrize("way", [by_handshake, by_steps])
def test_it_is_freed_with_the_inline_runner_too(serve: Serve, clients: Any, kind: type[Any], way: Any) -> None:
    server = serve(app_of(kind, runner="inline"))
    way(server, clients)
    server.wait_for(lambda: not server.manager.slots.all(), SOON_S)
    server.wait_for(lambda: alive() == 0, SOON_S)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_freed_in_one_process_without_a_server(kind: type[Any]) -> None:
    with LocalEnv[Any, Any, Any](kind, CallToolAction).sync() as local:
        local.reset()
        if kind is not Attribute:
            for tool in TOOLS:
                local.step(CallToolAction(tool_name=tool))
            local.step(ListToolsAction())
    del local
    wait_until(lambda: alive() == 0, SOON_S)


def test_an_environment_that_is_closed_by_hand_is_freed() -> None:
    env = Methods()
    assert env.step(CallToolAction(tool_name="holds")).result is not None
    assert "bytes" in str(env.execute_code("result = holds()").metadata)
    asyncio.run(env.step_async(CallToolAction(tool_name="waits")))
    env.close()
    del env
    wait_until(lambda: alive() == 0, SOON_S)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Methods, Guarded, Attribute])
def test_it_is_freed_in_a_worker_process(serve: Serve, handshake: Any, kind: type[Any]) -> None:
    factory = functools.partial(census_first, kind)
    models = (CallToolAction, CallToolObservation)
    server = serve(create_app(factory, *models, max_concurrent_envs=8, runner="process", env_processes=1))
    census = handshake(server.url)
    assert census.call("others").text == "0"
    for _ in range(3):
        client = handshake(server.url)
        for tool in TOOLS:
            client.call(tool)
        client.http.delete("/mcp", headers=client.headers)
    server.wait_for(lambda: server.manager.active == 1)
    server.wait_for(lambda: census.call("others").text == "0", SOON_S)


def test_environments_that_share_a_server_do_not_disturb_each_other() -> None:
    """A server of the module's own: closing one environment takes nothing from the others."""
    one, other = Sharing(), Sharing()
    assert one.tools is not other.tools
    one.close()
    called = other.step(CallToolAction(tool_name="adds", arguments={"a": 1, "b": 2}))
    assert called.result.data == 3
    other.close()


def test_an_environment_keeps_its_tools_while_others_are_closed(serve: Serve, handshake: Any) -> None:
    server = serve(app_of(Guarded))
    kept = handshake(server.url)
    for _ in range(3):
        client = handshake(server.url)
        assert "bytes" in client.call("holds").text
        client.http.delete("/mcp", headers=client.headers)
        assert "bytes" in kept.call("holds").text
        assert "bytes" in kept.call("waits").text
    assert {tool["name"] for tool in kept.request("tools/list").result["tools"]} >= {*TOOLS}


@pytest.mark.slow
def test_garbage_of_closed_environments_does_not_pile_up(serve: Serve, handshake: Any) -> None:
    """Nothing but a circle holds them; the collector would not look for long, since they are few objects."""
    server = serve(app_of(Methods))
    gc.disable()
    try:
        most = 0
        for _ in range(40):
            client = handshake(server.url)
            client.call("holds")
            client.http.delete("/mcp", headers=client.headers)
            server.wait_for(lambda: server.manager.active == 0)
            most = max(most, still_alive())
    finally:
        gc.enable()
    assert most <= 20, "two dozen at the most, however many sessions there were"
