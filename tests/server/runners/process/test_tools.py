"""Tools of environments in worker processes: listed, called, watched, interrupted, and lost with their process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastmcp import Client
from fastmcp.exceptions import ToolError

from openenv import MCPToolClient
from openenv.errors import SessionLost
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.app import create_app
from openenv.types import Action, Observation

Serve = Callable[..., Any]
SOON_S = 60


@pytest.fixture(scope="module")
def tools() -> Any:
    """The environments with tools."""
    import importlib.util
    import sys

    name = "process_runner_tool_environments"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("tool_environments.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def toolbox(tools: Any, **options: Any) -> Any:
    options = {"runner": "process", "env_processes": 2, "max_concurrent_envs": 8, **options}
    return create_app(tools.Toolbox, CallToolAction, CallToolObservation, **options)


@pytest.mark.parametrize("runner", ["process", "thread"])
@pytest.mark.slow
def test_an_mcp_client_finds_the_same_tools_results_and_failures_with_either_runner(
    serve: Serve, tools: Any, runner: str
) -> None:
    server = serve(toolbox(tools, runner=runner))

    async def use() -> None:
        async with Client(server.url + "/mcp") as client:
            names = {tool.name for tool in await client.list_tools()}
            assert names == {"add", "where", "die", "spin", "fail", "count"}
            assert (await client.call_tool("add", {"a": 2, "b": 3})).data == 5
            pid = (await client.call_tool("where", {})).data
            assert (pid == os.getpid()) == (runner == "thread")
            for name, arguments, words in (
                ("fail", {}, "out of paint"),
                ("add", {"a": "x", "b": 1}, "a"),
                ("nothing", {}, "nothing"),
            ):
                with pytest.raises(Exception, match=words):
                    await client.call_tool(name, arguments)
            events: list[tuple[float, float | None, str | None]] = []

            async def progress(done: float, total: float | None, text: str | None) -> None:
                events.append((done, total, text))

            assert (await client.call_tool("count", {"to": 3}, progress_handler=progress)).data == 3
            assert events == [(1, 3, "at 1"), (2, 3, "at 2"), (3, 3, "at 3")]
            assert (await client.read_resource("perils://list"))[0].text == "cliff, river"
            prompt = await client.get_prompt("advise", {"place": "the river"})
            assert prompt.messages[0].content.text == "How to cross the river?"
            with pytest.raises(Exception, match=r"perils://nothing|not found"):
                await client.read_resource("perils://nothing")

    asyncio.run(asyncio.wait_for(use(), SOON_S))
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    headers = {"Accept": "application/json, text/event-stream"}
    answer = httpx2.post(server.url + "/mcp", json=body, headers=headers, timeout=60)
    assert answer.json()["result"]["instructions"] == "Mind the gap."


@pytest.mark.slow
def test_tools_that_only_one_mode_has_are_those_of_the_servers_mode(serve: Serve, tools: Any) -> None:
    server = serve(toolbox(tools, mode="production"))

    async def names() -> set[str]:
        async with Client(server.url + "/mcp") as client:
            return {tool.name for tool in await client.list_tools()}

    assert "_only_in_production" in asyncio.run(asyncio.wait_for(names(), SOON_S))


def test_tool_actions_are_steps(serve: Serve, tools: Any) -> None:
    server = serve(toolbox(tools))
    with MCPToolClient(base_url=server.url).sync() as env:
        env.reset()
        assert env.call_tool("add", a=1, b=1) == 2
        assert env.call_tool("where") != os.getpid()
        assert "add" in {tool.name for tool in env.list_tools()}


@pytest.mark.slow
def test_a_tool_that_takes_too_long_is_interrupted_in_its_process(serve: Serve, tools: Any) -> None:
    server = serve(toolbox(tools))

    async def use() -> None:
        async with Client(server.url + "/mcp") as client:
            with pytest.raises(Exception, match=r"(?i)time|cancel"):
                await client.call_tool("spin", {"seconds": 3600}, timeout=0.5)
            assert (await client.call_tool("add", {"a": 1, "b": 1})).data == 2  # the session is free again

    asyncio.run(asyncio.wait_for(use(), SOON_S))


@pytest.mark.slow
@pytest.mark.parametrize("env", ["Toolbox", "BringsServer"])
def test_a_tool_that_kills_its_process_is_a_typed_error_and_other_sessions_go_on(
    serve: Serve, tools: Any, env: str
) -> None:
    if env == "Toolbox":
        server = serve(toolbox(tools))
    else:
        options = {"max_concurrent_envs": 8, "runner": "process", "env_processes": 2}
        server = serve(create_app(tools.BringsServer, Action, Observation, **options))
    with httpx2.Client(base_url=server.url, timeout=60) as http:

        def ask(session: str, tool: str) -> Any:
            params = {"name": tool, "arguments": {}, "session_id": session}
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            return http.post("/mcp", json=body).json()

        sessions = []
        for number in range(2):
            body = {"jsonrpc": "2.0", "id": number, "method": "openenv/session/create", "params": {}}
            sessions.append(http.post("/mcp", json=body).json()["result"]["session_id"])
        pids = [ask(session, "where")["result"]["data"] for session in sessions]
        assert pids[0] != pids[1]
        error = ask(sessions[0], "die")["error"]
        assert error["data"]["code"] == SessionLost.code
        assert error["data"]["reason"] == "worker crashed"
        assert ask(sessions[1], "where")["result"]["data"] == pids[1]
        assert "worker crashed" in ask(sessions[0], "where")["error"]["message"]


def test_an_mcp_client_learns_that_its_session_is_lost(serve: Serve, tools: Any) -> None:
    server = serve(toolbox(tools))

    async def use() -> None:
        async with Client(server.url + "/mcp") as client:
            await client.call_tool("where", {})
            with pytest.raises(Exception, match="worker crashed") as caught:
                await client.call_tool("die", {})
            assert not isinstance(caught.value, ToolError)

    asyncio.run(asyncio.wait_for(use(), SOON_S))
