"""Tool clients with real servers, ours and the published one: by JSON-RPC and by steps, awaited and blocking."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from sample_tools import Shelf
from sample_tools import app as shelf_app

from openenv.client.env_client import GenericEnvClient, SyncEnvClient
from openenv.client.mcp_client import GenericMCPObservation, MCPClientBase, MCPToolClient
from openenv.errors import (
    ClientModeError,
    RequestTimeout,
    SessionLost,
    ToolArgumentsError,
    ToolCallError,
    ToolNotFoundError,
    ToolTimeout,
)
from openenv.protocol.tool_messages import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
)
from openenv.server.app import HTTPEnvServer, create_app
from openenv.server.sessions.lifetime import SessionLimits
from program_interpreters import Interpreter
from servers import Serve
from waiting import wait_until_healthy

SAMPLES = Path(__file__).parents[1] / "compat"
NAMES = ["put", "bare", "table", "nothing", "fail", "slow", "count_to", "greet"]
Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def published_shelf(
    published: Interpreter, tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[str]:
    """The environment in a process of the published package."""
    port = free_port()
    command = [published.python, "-m", "uvicorn", "sample_tools:app", "--host", "127.0.0.1", "--port", str(port)]
    log = tmp_path_factory.mktemp("shelf") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=published.environment(SAMPLES), stdout=output, stderr=output)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(15)


@pytest.fixture(params=["ours", pytest.param("published", marks=pytest.mark.published)])
def shelf_url(request: pytest.FixtureRequest) -> str:
    """Each of the two servers."""
    if request.param == "published":
        url: str = request.getfixturevalue("published_shelf")
        return url
    return str(request.getfixturevalue("serve")(shelf_app).url)


@pytest.fixture
def our_url(serve: Serve) -> str:
    """Our server alone."""
    return str(serve(shelf_app).url)


@pytest.fixture(params=["frames", "steps"])
def shelf(request: pytest.FixtureRequest, shelf_url: str) -> Iterator[Any]:
    """A blocking client of each server, by each way to its tools."""
    client = MCPToolClient(base_url=shelf_url)
    client.use_production_mode = request.param == "frames"
    with client.sync() as shelf:
        shelf.reset()
        yield shelf


@pytest.fixture(params=["awaited", "blocking", "sync", "sync in a running loop"])
def ask(request: pytest.FixtureRequest, our_url: str) -> Iterator[Ask]:
    """Call a client's methods by name, in each way that it can be used."""
    client: Any = MCPToolClient(base_url=our_url)
    if request.param.startswith("sync"):
        client = client.sync()
    loop = asyncio.new_event_loop()

    async def on_loop(method: str, *args: Any, **kwargs: Any) -> Any:
        outcome = getattr(client, method)(*args, **kwargs)
        return await outcome if request.param == "awaited" else outcome

    def call(method: str, *args: Any, **kwargs: Any) -> Any:
        if request.param in ("blocking", "sync"):
            return getattr(client, method)(*args, **kwargs)
        return loop.run_until_complete(on_loop(method, *args, **kwargs))

    yield call
    call("close")
    loop.close()


def test_every_use_has_the_same_methods_and_results(ask: Ask) -> None:
    assert [tool.name for tool in ask("list_tools")] == NAMES
    assert ask("has_tool", "put") is True
    assert ask("has_tool", "take") is False
    assert ask("get_tool", "put").description == "Put an item on the shelf and say how many there are."
    assert ask("get_tool", "take") is None
    ask("reset")
    assert ask("call_tool", "put", item="a") == 1
    assert ask("call_tool_with", "put", {"item": "b"}, timeout_s=5) == 2
    with pytest.raises(ToolNotFoundError, match=r"Tool 'take' failed: .*not found"):
        ask("call_tool", "take")
    assert ask("step", CallToolAction(tool_name="put", arguments={"item": "c"})).observation.result["data"] == 3


def test_blocking_use_starts_no_thread_and_no_event_loop(our_url: str) -> None:
    before = {thread for thread in threading.enumerate() if thread.name != "openenv-keepalive"}
    with MCPToolClient(base_url=our_url).sync() as shelf:
        assert shelf.call_tool("put", item="a") == 1
        new = {thread.name for thread in threading.enumerate() if thread not in before}
        assert not any("loop" in name for name in new), new
        assert shelf.async_client._driver._private_loop is None


@pytest.mark.slow_but_for("frames-ours", "steps-ours", "steps-published")
def test_tools_are_listed_with_their_schemas_also_one_without_a_description(shelf: Any) -> None:
    tools = {tool.name: tool for tool in shelf.list_tools()}
    assert list(tools) == NAMES
    assert all(isinstance(tool, Tool) for tool in tools.values())
    assert tools["put"].input_schema["properties"] == {"item": {"type": "string"}}
    assert tools["bare"].description == ""


def test_results_come_unwrapped(shelf: Any) -> None:
    assert shelf.call_tool("put", item="a") == 1
    assert shelf.call_tool("table") == {"data": [1, 2], "items": ["a"]}
    assert shelf.call_tool("nothing") is None
    assert shelf.call_tool("bare") == "only text"


def test_a_tool_argument_may_be_called_name(shelf: Any) -> None:
    assert shelf.call_tool("greet", name="Ada") == "Hello, Ada!"
    assert shelf.call_tool(name="put", item="a") == 1


def test_the_state_of_tools_persists_between_calls_steps_and_resets(shelf: Any) -> None:
    shelf.call_tool("put", item="a")
    shelf.step(CallToolAction(tool_name="put", arguments={"item": "b"}))
    assert shelf.call_tool("put", item="c") == 3
    assert shelf.state().episode_id == "shelf"
    shelf.reset()
    assert shelf.call_tool("put", item="d") == 1


def test_two_clients_share_nothing(shelf: Any) -> None:
    shelf.call_tool("put", item="a")
    with shelf.new_session() as other:
        assert type(other) is type(shelf)
        assert other.async_client.use_production_mode is shelf.async_client.use_production_mode
        assert other.call_tool("put", item="b") == 1
    assert shelf.call_tool("put", item="c") == 2


def test_failures_are_typed_and_the_session_lives_on(shelf: Any) -> None:
    shelf.call_tool("put", item="a")
    with pytest.raises(ToolCallError, match=r"^Tool 'fail' failed: .*out of order") as caught:
        shelf.call_tool("fail", words="out of order")
    assert type(caught.value) is ToolCallError
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.tool_name == "fail"
    with pytest.raises(ToolArgumentsError, match=r"(?s)Tool 'put' failed: .*item"):
        shelf.call_tool("put")
    with pytest.raises(ToolNotFoundError, match=r"(?i)^Tool 'take' failed: .*not found"):
        shelf.call_tool("take", item="a")
    assert shelf.call_tool("put", item="b") == 2


def test_steps_about_tools_give_their_observations(shelf: Any) -> None:
    listed = shelf.step(ListToolsAction())
    assert isinstance(listed.observation, ListToolsObservation)
    assert [tool.name for tool in listed.observation.tools] == NAMES
    called = shelf.step(CallToolAction(tool_name="fail", arguments={"words": "no"}))
    assert isinstance(called.observation, CallToolObservation)
    assert called.observation.error.error_type.value == "execution_error"
    assert called.observation.tool_name == "fail"
    ready = shelf.reset()
    assert type(ready.observation) is GenericMCPObservation
    assert ready.observation.metadata == {"status": "ready"}


def test_a_call_may_take_longer_than_other_replies(shelf_url: str, in_a_hurry: Callable[..., Any]) -> None:
    with MCPToolClient(base_url=shelf_url).sync() as shelf:
        shelf.call_tool("put", item="a")
        with in_a_hurry(shelf, 0.3):
            assert shelf.call_tool_with("slow", {"seconds": 0.7}, timeout_s=20) == "done"


def test_a_reply_that_does_not_come_loses_the_session_until_reset(
    shelf_url: str, in_a_hurry: Callable[..., Any]
) -> None:
    with MCPToolClient(base_url=shelf_url).sync() as shelf:
        shelf.call_tool("put", item="a")
        with pytest.raises(RequestTimeout), in_a_hurry(shelf, 0.3):
            shelf.call_tool("slow", seconds=1.5)
        with pytest.raises(SessionLost):
            shelf.call_tool("put", item="b")
        with pytest.raises(SessionLost):
            shelf.list_tools(use_cache=False)
        shelf.reset()
        assert shelf.call_tool("put", item="c") == 1


def test_a_limit_that_our_server_keeps_leaves_the_session_as_it_is(
    our_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv.client.mcp_client._GRACE_S", 20.0)  # for a busy machine
    with MCPToolClient(base_url=our_url).sync() as shelf:
        shelf.call_tool("put", item="a")
        with pytest.raises(ToolTimeout, match="Tool 'slow' failed"):
            shelf.call_tool_with("slow", {"seconds": 1.0}, timeout_s=0.2)
        assert shelf.call_tool("put", item="b") == 2


def test_progress_reaches_the_caller_in_order(our_url: str) -> None:
    reports: list[Any] = []
    with MCPToolClient(base_url=our_url).sync() as shelf:
        result = shelf.call_tool_with("count_to", {"number": 3}, on_progress=lambda *report: reports.append(report))
        assert result == 3
    assert reports == [(1, 3, "step 1"), (2, 3, "step 2"), (3, 3, "step 3")]


def test_progress_reaches_awaiting_code_too(our_url: str) -> None:
    async def main() -> list[Any]:
        reports: list[Any] = []
        async with MCPToolClient(base_url=our_url) as shelf:
            await shelf.call_tool_with("count_to", {"number": 2}, on_progress=lambda *report: reports.append(report))
        return reports

    assert [news[0] for news in asyncio.run(main())] == [1, 2]


def test_who_wants_no_progress_gets_the_result_alone(shelf: Any) -> None:
    assert shelf.call_tool("count_to", number=3) == 3
    assert shelf.call_tool("put", item="a") == 1


def test_calls_of_several_tasks_take_turns_and_get_their_own_replies(our_url: str) -> None:
    async def main() -> list[Any]:
        async with MCPToolClient(base_url=our_url) as shelf:
            return list(await asyncio.gather(*(shelf.call_tool("greet", name=str(n)) for n in range(20))))

    assert asyncio.run(main()) == [f"Hello, {n}!" for n in range(20)]


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_a_client_that_dies_leaves_no_session_behind(serve: Serve, protocol: str) -> None:
    """With v2 the session waits for its client to come back, for a while."""
    app = FastAPI()
    limits = SessionLimits(sessions=1, grace_s=0.3)
    app.state.openenv_server = HTTPEnvServer(Shelf, CallToolAction, CallToolObservation, limits=limits)
    app.state.openenv_server.register_routes(app)
    server = serve(app)
    script = (
        "import os, sys\n"
        "from openenv.client.mcp_client import MCPToolClient\n"
        "client = MCPToolClient(base_url=sys.argv[1], protocol=sys.argv[2])\n"
        "assert client.call_tool('put', item='a') == 1\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, server.url, protocol], check=True)
    server.wait_for(lambda: not server.manager.sessions())


def test_a_production_server_offers_tools_and_episodes_over_websocket(serve: Serve) -> None:
    server = serve(create_app(Shelf, CallToolAction, CallToolObservation, mode="production"))
    with MCPToolClient(base_url=server.url).sync() as shelf:
        assert shelf.has_tool("put")
        assert shelf.call_tool("put", item="a") == 1
        assert shelf.call_tool("put", item="b") == 2
        shelf.reset()
        assert shelf.call_tool("put", item="c") == 1
        assert [tool.name for tool in shelf.step(ListToolsAction()).observation.tools][:1] == ["put"]


def test_an_environment_without_tools_says_so(parrot: Any) -> None:
    with MCPToolClient(base_url=parrot.url).sync() as client:
        with pytest.raises(RuntimeError, match="does not support MCP"):
            client.list_tools()
        with pytest.raises(ToolCallError, match=r"Tool 'put' failed: .*does not support MCP"):
            client.call_tool("put", item="a")
        assert client.state().step_count == 0, "no step was taken in search of tools"


def test_the_list_is_kept_until_it_is_requested_again(our_url: str) -> None:
    with MCPToolClient(base_url=our_url).sync() as shelf:
        first = shelf.list_tools()
        shelf.async_client._tools_cache = first[:1]
        assert shelf.list_tools() == first[:1]
        assert shelf.has_tool("greet"), "a tool that is not in the list is looked for once more"
        assert shelf.list_tools(use_cache=False) == first


def test_helpers_of_subclasses_work_awaited_and_blocking(our_url: str) -> None:
    class Shelf(MCPToolClient):
        async def put_twice(self, item: str) -> int:
            await self.call_tool("put", item=item)
            count: int = await self.call_tool("put", item=item)
            return count

        def put_plain(self, item: str) -> Any:
            return self.call_tool("put", item=item)

        async def call_tool(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return await super().call_tool(*args, **kwargs)

    async def awaited() -> tuple[int, int]:
        async with Shelf(base_url=our_url) as shelf:
            return await shelf.put_twice("a"), await shelf.put_plain("a")

    async def in_a_notebook() -> tuple[int, int]:
        with Shelf(base_url=our_url).sync() as shelf:
            return shelf.put_twice("a"), shelf.call_tool("put", item="a")

    assert asyncio.run(awaited()) == (2, 3)
    assert asyncio.run(in_a_notebook()) == (2, 3)
    with Shelf(base_url=our_url).sync() as shelf:
        assert shelf.put_twice("a") == 2
        assert shelf.put_plain("a") == 3


def test_the_plain_blocking_twin_works_as_well(our_url: str) -> None:
    async def in_a_notebook() -> Any:
        with SyncEnvClient(MCPToolClient(base_url=our_url)) as shelf:
            return shelf.call_tool("put", item="a"), shelf.has_tool("put")

    with SyncEnvClient(MCPToolClient(base_url=our_url)) as shelf:
        assert shelf.call_tool("put", item="a") == 1
    assert asyncio.run(in_a_notebook()) == (1, True)


def test_the_base_class_lists_tools(our_url: str) -> None:
    with MCPClientBase(base_url=our_url).sync() as client:
        assert [tool.name for tool in client.list_tools()] == NAMES
        assert not hasattr(MCPClientBase, "call_tool")


def test_mixing_both_uses_is_refused(our_url: str) -> None:
    client = MCPToolClient(base_url=our_url)
    assert client.call_tool("put", item="a") == 1

    async def await_it() -> None:
        await client.call_tool("put", item="b")

    with pytest.raises(ClientModeError):
        asyncio.run(await_it())
    client.close()


def test_only_production_is_a_mode_of_tool_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"MCPToolClient.*production.*simulation"):
        MCPToolClient(base_url="http://localhost:8000", mode="simulation")
    monkeypatch.setenv("OPENENV_CLIENT_MODE", "simulation")
    client = MCPToolClient(base_url="http://localhost:8000")
    assert client._mode == "production"
    assert client.use_production_mode is True
    assert MCPToolClient(base_url="http://localhost:8000", mode="Production")._mode == "production"


@pytest.mark.parametrize("limit", [0, -1, float("inf"), float("nan")])
def test_a_limit_must_be_a_positive_number(limit: float) -> None:
    client = MCPToolClient(base_url="http://localhost:8000")
    with pytest.raises(ValueError, match="timeout_s"):
        client.call_tool_with("put", timeout_s=limit)


def test_what_cannot_be_called_is_refused_before_anything_is_sent() -> None:
    client = MCPToolClient(base_url="http://localhost:1")

    async def listen(*_: Any) -> None: ...

    with pytest.raises(ValueError, match="name"):
        client.call_tool()
    with pytest.raises(TypeError, match="on_progress"):
        client.call_tool_with("put", on_progress=listen)


def test_actions_of_any_kind_can_be_stepped() -> None:
    client = MCPToolClient(base_url="http://localhost:8000")
    assert client._step_payload({"a": 1}) == {"a": 1}
    assert client._step_payload("look") == {"action": "look"}
    assert client._step_payload(ListToolsAction()) == {"type": "list_tools"}


def test_observations_keep_the_fields_of_the_environment() -> None:
    client = MCPToolClient(base_url="http://localhost:8000")
    payload = {"observation": {"tools": ["hammer"], "board": [1], "metadata": {"a": 1}}, "reward": 0.5, "done": True}
    result = client._parse_result(payload)
    assert isinstance(result.observation, GenericMCPObservation)
    assert result.observation.model_dump() == {
        "tools": ["hammer"], "board": [1], "metadata": {"a": 1}, "reward": 0.5, "done": True,
    }  # fmt: skip
    state = client._parse_state({"episode_id": "e", "step_count": 3, "secret": "x"})
    assert state.model_dump() == {"episode_id": "e", "step_count": 3}


def test_importing_the_clients_loads_no_server_and_no_fastmcp() -> None:
    script = (
        "import sys\n"
        "from openenv.core import MCPToolClient\n"
        "assert not {'fastapi', 'starlette', 'uvicorn', 'fastmcp', 'mcp', 'httpx2'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_dict_clients_and_tool_clients_meet_the_same_kind_of_session(our_url: str) -> None:
    with GenericEnvClient(base_url=our_url).sync() as client:
        client.reset()
        called = client.step({"type": "call_tool", "tool_name": "put", "arguments": {"item": "a"}})
        assert called.observation["result"]["data"] == 1
