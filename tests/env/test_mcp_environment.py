"""`MCPEnvironment`: names of tools, listing and calling them by `step` and `step_async`, and its end."""

from __future__ import annotations

import asyncio
import base64
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fastmcp import Context, FastMCP
from fastmcp.utilities.types import Image
from pydantic import BaseModel

from openenv.env.environment import Transform
from openenv.env.mcp_environment import MCP_TOOL_CALL_TIMEOUT, MCPEnvironment, get_server_tools
from openenv.protocol.json_values import serialize_observation
from openenv.protocol.tool_messages import CallToolObservation, ListToolsAction, ListToolsObservation
from openenv.types import Action, Observation

RESERVED = ["reset", "step", "state", "close"]


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def add_async(a: int, b: int = 1) -> int:
    """Add two numbers, some time."""
    await asyncio.sleep(0)
    return a + b


def undocumented(text: str) -> str:
    return text


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESERVED)
def test_a_server_with_a_reserved_tool_name_is_refused(make_env: Any, name: str) -> None:
    server = FastMCP("tools")
    server.tool(add, name=name)
    with pytest.raises(ValueError, match=f"(?i){name}.*reserved|reserved.*{name}"):
        make_env(server=server)


@pytest.mark.parametrize("name", RESERVED)
@pytest.mark.parametrize("mode", [None, "production", "simulation"])
def test_the_decorator_refuses_reserved_names(make_env: Any, name: str, mode: Any) -> None:
    def function() -> str:
        """Do something."""
        return ""

    function.__name__ = name
    env = make_env()
    with pytest.raises(ValueError, match=f"(?i){name}.*reserved|reserved.*{name}"):
        env.tool(mode)(function)


def test_the_tools_of_a_server_are_found_by_name() -> None:
    server = FastMCP("tools")
    server.tool(add)
    assert set(get_server_tools(server)) == {"add"}
    assert get_server_tools(server)["add"].fn is add
    assert MCP_TOOL_CALL_TIMEOUT == 30.0


# -- listing and calling ----------------------------------------------------------------------------------------------


def test_tools_are_listed_with_purpose_and_schema(make_env: Any, call: Any) -> None:
    listed = call.step(make_env(add, add_async), ListToolsAction())
    assert isinstance(listed, ListToolsObservation)
    first, second = listed.tools
    assert (first.name, first.description) == ("add", "Add two numbers.")
    assert first.input_schema["required"] == ["a"]
    assert first.input_schema["properties"]["a"] == {"type": "integer"}
    assert second.input_schema == first.input_schema
    assert not listed.done
    assert listed.reward is None


def test_a_tool_without_a_docstring_is_listed_like_any_other(make_env: Any, call: Any) -> None:
    listed = call.step(make_env(undocumented, add), ListToolsAction())
    assert [(tool.name, tool.description) for tool in listed.tools] == [
        ("undocumented", ""),
        ("add", "Add two numbers."),
    ]


@pytest.mark.parametrize("tool", ["add", "add_async"])
def test_a_call_returns_the_tools_result(make_env: Any, call: Any, tool: str) -> None:
    observation = call(make_env(add, add_async), tool, a=1, b=2)
    assert isinstance(observation, CallToolObservation)
    assert (observation.tool_name, observation.error) == (tool, None)
    assert observation.result.data == 3
    assert observation.result.structured_content == {"result": 3}
    assert observation.result.content[0].text == "3"
    assert observation.result.is_error is False


@pytest.mark.parametrize("tool", ["add", "add_async"])
def test_arguments_are_converted_and_defaults_are_filled_in(make_env: Any, call: Any, tool: str) -> None:
    assert call.data(make_env(add, add_async), tool, a="41") == 42


def test_models_dictionaries_and_lists_come_back_as_json(make_env: Any, call: Any) -> None:
    class Point(BaseModel):
        x: int = 1

    def model() -> Point:
        return Point()

    def table() -> dict[str, Any]:
        return {"a": [1, None]}

    def several() -> list[int]:
        return [1, 2]

    def nothing() -> None:
        return None

    model.__annotations__["return"] = Point
    env = make_env(model, table, several, nothing)
    assert call.data(env, "model") == {"x": 1}
    assert call.data(env, "table") == {"a": [1, None]}
    assert call.data(env, "several") == [1, 2]
    assert call.data(env, "nothing") is None


def test_a_model_among_the_arguments_is_built(make_env: Any, call: Any) -> None:
    class Point(BaseModel):
        x: int

    def double(point: Any) -> int:
        return point.x * 2

    double.__annotations__["point"] = Point
    env = make_env(double)
    assert call.data(env, "double", point={"x": 4}) == 8
    kind, message = call.failure(env, "double", point={"x": "four"})
    assert kind == "invalid_args"
    assert "point.x" in message


def test_methods_partial_functions_and_generators_are_tools_too(make_env: Any, call: Any) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def up(self, by: int = 1) -> int:
            self.count += by
            return self.count

    def numbers(to: int) -> Iterator[int]:
        yield from range(to)

    counter = Counter()
    env = make_env(counter.up, numbers)
    assert call.data(env, "up") == 1
    assert call.data(env, "up", by=3) == counter.count == 4
    assert call(env, "numbers", to=3).result.content[0].text == "[0,1,2]"


def test_a_synchronous_wrapper_of_an_asynchronous_tool_is_awaited(make_env: Any, call: Any) -> None:
    @functools.wraps(add_async)
    def logged(*args: Any, **kwargs: Any) -> Any:
        return add_async(*args, **kwargs)

    assert call.data(make_env(logged), "add_async", a=2) == 3


def test_tools_added_or_removed_later_are_seen(make_env: Any, call: Any) -> None:
    env = make_env(add)
    env.mcp_server.tool(undocumented)
    assert call.names(env) == ["add", "undocumented"]
    assert call.data(env, "undocumented", text="x") == "x"
    env.mcp_server.local_provider.remove_tool("add")
    assert call.names(env) == ["undocumented"]
    assert call.failure(env, "add", a=1)[0] == "tool_not_found"


def test_every_other_action_reaches_the_environments_own_step(make_env: Any, call: Any) -> None:
    observation = call.step(make_env(add), Action(metadata={"move": "left"}))
    assert observation.metadata == {"taken": {"move": "left"}}


def test_a_result_of_ten_megabytes_arrives_whole(make_env: Any, call: Any) -> None:
    def large(size: int) -> str:
        return "x" * size

    observation = call(make_env(large), "large", size=10_000_000)
    assert len(observation.result.data) == 10_000_000
    assert len(serialize_observation(observation)["observation"]["result"]["data"]) == 10_000_000


def test_an_image_arrives_as_an_image_block(make_env: Any, call: Any) -> None:
    def picture() -> Image:
        return Image(data=b"\x89PNG", format="png")

    picture.__annotations__["return"] = Image
    observation = call(make_env(picture), "picture")
    sent = serialize_observation(observation)["observation"]["result"]
    data = base64.b64encode(b"\x89PNG").decode()
    image = {"type": "image", "data": data, "mimeType": "image/png", "annotations": None, "meta": None}
    assert sent == {"content": [image], "structured_content": None, "meta": None, "data": None, "is_error": False}
    assert observation.result.content[0].data == data


def misleading() -> str:
    """Raise with words that mean something else elsewhere."""
    raise ValueError("argument not found, invalid: unknown tool, timeout")


async def remember(key: str, value: str, ctx: Context) -> str:
    """Keep a value."""
    await ctx.set_state(key, value)
    return ctx.session_id


# -- transforms, sessions, the end ------------------------------------------------------------------------------------


class Paid(Transform[Observation]):
    """Pays for every observation."""

    def __call__(self, observation: Observation) -> Observation:
        observation.reward = 2.5
        return observation


def test_a_transform_sees_every_observation_of_the_tools(make_env: Any, call: Any) -> None:
    env = make_env(add, misleading, transform=Paid())
    assert call.step(env, ListToolsAction()).reward == 2.5
    assert call(env, "add", a=1).reward == 2.5
    assert call(env, "misleading").reward == 2.5
    assert call(env, "nonsense").reward == 2.5


@pytest.mark.anyio
async def test_the_client_of_the_server_can_be_opened_in_nested_blocks(make_env: Any) -> None:
    env = make_env(add)
    async with env.mcp_session() as outer:
        async with env.mcp_session() as inner:
            assert inner is outer is env.mcp_client
            assert (await inner.call_tool("add", {"a": 1})).data == 2
        assert outer.is_connected()
        assert [tool.name for tool in await outer.list_tools()] == ["add"]
    assert not env.mcp_client.is_connected()
    async with env.mcp_session() as again:
        assert (await again.call_tool("add", {"a": 2})).data == 3


def test_a_closed_environment_has_neither_server_nor_client_nor_tools(make_env: Any, call: Any) -> None:
    env = make_env(add, remember)
    call.data(env, "remember", key="a", value="1")
    env.close()
    assert (env.mcp_server, env.mcp_client) == (None, None)
    kind, message = call.failure(env, "add", a=1)
    assert kind in ("execution_error", "transport_error")
    assert "closed" in message
    env.close()


@pytest.mark.anyio
async def test_a_closed_environment_opens_no_client(make_env: Any) -> None:
    env = make_env(add)
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        async with env.mcp_session():
            pass


# -- threads and loops ------------------------------------------------------------------------------------------------


def test_two_hundred_calls_make_no_thread_and_no_event_loop(
    make_env: Any, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make_env(add, add_async, remember)

    def round_of_calls() -> None:
        call.names(env)
        call.data(env, "add", a=1)
        call.data(env, "add_async", a=1)
        call.data(env, "remember", key="a", value="1")

    for _ in range(3):
        round_of_calls()
    made: list[str] = []
    new_event_loop, start = asyncio.new_event_loop, threading.Thread.start

    def counted_loop() -> asyncio.AbstractEventLoop:
        made.append("loop")
        return new_event_loop()

    def counted_start(thread: threading.Thread) -> None:
        made.append(thread.name)
        start(thread)

    monkeypatch.setattr(asyncio, "new_event_loop", counted_loop)
    monkeypatch.setattr(threading.Thread, "start", counted_start)
    for _ in range(50):
        round_of_calls()
    # Without a session, asyncio's pool is where blocking tools run: it grows to its size once and stays.
    assert [name for name in made if not name.startswith("asyncio_")] == []
    assert len(made) <= 8


def test_environments_are_made_without_a_thread_or_a_loop(monkeypatch: pytest.MonkeyPatch, make_env: Any) -> None:
    made: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: made.append(thread.name))
    envs: list[MCPEnvironment] = [make_env(add, add_async) for _ in range(5)]
    assert made == []
    assert len({id(env.mcp_server) for env in envs}) == 5
