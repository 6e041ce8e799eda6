"""`MCPEnvironment`: tools listed and called by `step` and `step_async`, typed errors, limits, modes, code mode."""

from __future__ import annotations

import asyncio
import base64
import functools
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastmcp import Context, FastMCP
from fastmcp.dependencies import Depends
from fastmcp.server.dependencies import get_context
from fastmcp.server.middleware import Middleware
from fastmcp.tools import Tool as FastMcpTool
from fastmcp.utilities.types import Image
from pydantic import BaseModel

from openenv.env.environment import Transform
from openenv.env.mcp import MCP_TOOL_CALL_TIMEOUT, MCPEnvironment, get_server_tools
from openenv.protocol.codec import serialize_observation
from openenv.tool_types import CallToolAction, CallToolObservation, ListToolsAction, ListToolsObservation
from openenv.types import Action, Observation

RESERVED = ["reset", "step", "state", "close"]
BRIEF = 0.3
"""A limit for tools that never end."""
SOON = 10.0
"""How long such a call may take at most, on a busy machine."""


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def add_async(a: int, b: int = 1) -> int:
    """Add two numbers, some time."""
    await asyncio.sleep(0)
    return a + b


def undocumented(text: str) -> str:
    return text


def spin() -> str:
    """Never return."""
    while True:
        time.sleep(0.005)


async def hang() -> str:
    """Never return, politely."""
    await asyncio.Event().wait()
    return "never"


# -- names ----------------------------------------------------------------------------------------------------------


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


# -- listing and calling --------------------------------------------------------------------------------------------


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


# -- errors ---------------------------------------------------------------------------------------------------------


def misleading() -> str:
    """Raise with words that mean something else elsewhere."""
    raise ValueError("argument not found, invalid: unknown tool, timeout")


async def misleading_async() -> str:
    """Do the same asynchronously."""
    raise TimeoutError("unknown tool: invalid argument")


async def misleading_with_context(ctx: Context) -> str:
    """Do the same with a context."""
    raise KeyError("not found")


def recursive_model() -> str:
    """Raise pydantic's own error from inside the tool."""

    class Strict(BaseModel):
        x: int

    return str(Strict.model_validate({"x": "no"}))


@pytest.mark.parametrize("tool", ["misleading", "misleading_async", "misleading_with_context", "recursive_model"])
def test_a_tool_that_raises_is_an_execution_error_whatever_it_says(make_env: Any, call: Any, tool: str) -> None:
    env = make_env(misleading, misleading_async, misleading_with_context, recursive_model, add)
    kind, message = call.failure(env, tool)
    assert kind == "execution_error"
    assert message
    assert call.data(env, "add", a=1) == 2


@pytest.mark.parametrize(
    ("tool", "arguments", "named"),
    [
        ("add", {}, "a"),
        ("add", {"a": "one"}, "a"),
        ("add", {"a": 1, "c": 2}, "c"),
        ("add_async", {"a": None}, "a"),
        ("with_context", {"text": 3}, "text"),
        ("with_context", {"text": "x", "ctx": 1}, "ctx"),
    ],
)
def test_arguments_that_do_not_fit_are_named_and_the_tool_is_not_called(
    make_env: Any, call: Any, tool: str, arguments: dict[str, Any], named: str
) -> None:
    called: list[str] = []

    async def with_context(text: str, ctx: Context) -> str:
        called.append(text)
        return text

    env = make_env(add, add_async, with_context)
    kind, message = call.failure(env, tool, **arguments)
    assert kind == "invalid_args"
    assert named in message
    assert called == []


def test_a_tool_that_does_not_exist_is_not_found(make_env: Any, call: Any) -> None:
    kind, message = call.failure(make_env(add), "subtract", a=1)
    assert kind == "tool_not_found"
    assert "not found" in message.lower()
    assert "subtract" in message


def unsendable() -> Any:
    return object()


async def unsendable_async() -> Any:
    return {"key": object()}


async def unsendable_with_context(ctx: Context) -> Any:
    return [object()]


def unsendable_as_declared() -> dict[str, Any]:
    return {"key": object()}


@pytest.mark.parametrize(
    "tool", [unsendable, unsendable_async, unsendable_with_context, unsendable_as_declared], ids=lambda t: t.__name__
)
def test_a_result_that_cannot_be_sent_is_an_execution_error(make_env: Any, call: Any, tool: Any) -> None:
    env = make_env(tool, add)
    kind, message = call.failure(env, tool.__name__)
    assert kind == "execution_error"
    assert "object" in message
    assert call.data(env, "add", a=1) == 2


def test_a_list_that_fails_is_an_empty_list_that_says_why(make_env: Any, call: Any) -> None:
    class Broken(Middleware):
        async def on_list_tools(self, context: Any, call_next: Any) -> Any:
            raise RuntimeError("the shop is closed")

    server = FastMCP("tools")
    server.add_middleware(Broken())
    listed = call.step(make_env(add, server=server), ListToolsAction())
    assert listed.tools == []
    assert listed.metadata["error_type"] == "list_tools_failed"
    assert "the shop is closed" in listed.metadata["error"]


# -- limits ---------------------------------------------------------------------------------------------------------


def spin_stubbornly() -> str:
    """Turn what stops it into another error."""
    try:
        return spin()
    except BaseException as exc:
        raise RuntimeError("cleaning up failed") from exc


async def hang_with_context(ctx: Context) -> str:
    """Never return, with a context."""
    return await hang()


def spin_with_context(ctx: Context) -> str:
    """Never return, synchronously, with a context."""
    return spin()


ENDLESS = [spin, spin_stubbornly, hang, hang_with_context, spin_with_context]


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Check that no thread still spins in a tool when a test is over."""
    yield
    deadline = time.monotonic() + SOON
    while _spinning() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _spinning()


def _spinning() -> bool:
    for frame in sys._current_frames().values():
        at: Any = frame
        while at is not None:
            if at.f_code is spin.__code__:
                return True
            at = at.f_back
    return False


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("tool", ENDLESS, ids=lambda tool: tool.__name__)
def test_a_call_ends_when_its_time_is_up_and_the_next_one_works(make_env: Any, call: Any, tool: Any) -> None:
    env = make_env(tool, add)
    begun = time.monotonic()
    kind, message = call.failure(env, tool.__name__, timeout_s=BRIEF)
    assert (kind, tool.__name__ in message) == ("timeout", True)
    assert BRIEF * 0.9 <= time.monotonic() - begun < SOON
    assert call.data(env, "add", a=1) == 2


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("tool", ENDLESS, ids=lambda tool: tool.__name__)
def test_a_tools_own_limit_is_kept(make_env: Any, call: Any, tool: Any) -> None:
    server = FastMCP("tools")
    server.tool(tool, timeout=BRIEF)
    env = make_env(add, server=server)
    begun = time.monotonic()
    kind, _ = call.failure(env, tool.__name__)
    assert kind == "timeout"
    assert time.monotonic() - begun < SOON
    assert call.data(env, "add", a=1) == 2


def test_the_shorter_of_two_limits_counts(make_env: Any, call: Any) -> None:
    server = FastMCP("tools")
    server.tool(hang, timeout=60.0)
    begun = time.monotonic()
    assert call.failure(make_env(server=server), "hang", timeout_s=BRIEF)[0] == "timeout"
    assert time.monotonic() - begun < SOON


def test_an_asynchronous_tool_that_will_not_be_cancelled_is_not_waited_for(make_env: Any, call: Any) -> None:
    released = threading.Event()

    async def stubborn() -> str:
        while not released.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return "late"

    env = make_env(stubborn, add)
    try:
        assert call.failure(env, "stubborn", timeout_s=BRIEF)[0] == "timeout"
        assert call.data(env, "add", a=1) == 2
    finally:
        released.set()
        if call.method == "step_async":
            call.loop.run_until_complete(asyncio.sleep(0.05))


def test_a_tool_within_its_limit_is_left_alone(make_env: Any, call: Any) -> None:
    def brief() -> str:
        time.sleep(0.1)
        return "done"

    env = make_env(brief)
    assert [call.data(env, "brief") for _ in range(3)] == ["done"] * 3


# -- context --------------------------------------------------------------------------------------------------------


async def remember(key: str, value: str, ctx: Context) -> str:
    """Keep a value."""
    await ctx.set_state(key, value)
    return ctx.session_id


async def recall(key: str, ctx: Context) -> str:
    """Give a value back."""
    return await ctx.get_state(key) or "nothing"


def test_state_lasts_from_call_to_call_and_is_not_shared_by_environments(make_env: Any, call: Any) -> None:
    one, other = make_env(remember, recall), make_env(remember, recall)
    first = call.data(one, "remember", key="a", value="1")
    assert call.data(one, "recall", key="a") == "1"
    assert call.data(other, "recall", key="a") == "nothing"
    assert call.data(one, "remember", key="b", value="2") == first
    assert call.data(other, "remember", key="b", value="2") != first


def test_environments_that_share_a_server_still_do_not_share_state(make_env: Any, call: Any) -> None:
    server = FastMCP("tools")
    one, other = make_env(remember, recall, server=server), make_env(server=server)
    call.data(one, "remember", key="a", value="1")
    assert (call.data(one, "recall", key="a"), call.data(other, "recall", key="a")) == ("1", "nothing")


def test_state_is_the_same_for_both_step_methods(make_env: Any, call: Any) -> None:
    env = make_env(remember, recall)
    env.step(CallToolAction(tool_name="remember", arguments={"key": "a", "value": "1"}))
    assert call.data(env, "recall", key="a") == "1"


def test_progress_and_messages_that_nobody_listens_to_are_no_error(make_env: Any, call: Any) -> None:
    async def chatty(ctx: Context) -> str:
        await ctx.report_progress(1, 2, "half")
        await ctx.info("hello")
        await ctx.warning("careful")
        return "done"

    assert call.data(make_env(chatty), "chatty") == "done"


def test_a_synchronous_tool_may_have_a_context(make_env: Any, call: Any) -> None:
    def who(greeting: str, ctx: Context) -> str:
        return f"{greeting} {ctx.fastmcp.name}"

    assert call.data(make_env(who), "who", greeting="hello") == "hello tools"


def test_the_context_is_at_hand_without_a_parameter_too(make_env: Any, call: Any) -> None:
    def here() -> str:
        return get_context().session_id

    async def there() -> str:
        await asyncio.sleep(0)
        return get_context().session_id

    env = make_env(here, there, remember)
    session = call.data(env, "remember", key="a", value="1")
    assert call.data(env, "here") == call.data(env, "there") == session


def test_every_call_has_a_request_id_of_its_own(make_env: Any, call: Any) -> None:
    async def identify(ctx: Context) -> list[str]:
        return [ctx.request_id, ctx.request_id]

    env = make_env(identify)
    first, second = call.data(env, "identify"), call.data(env, "identify")
    assert first[0] == first[1]
    assert first[0] != second[0]


def test_what_fastmcp_injects_is_injected(make_env: Any, call: Any) -> None:
    def price() -> int:
        return 3

    async def cost(count: int, each: int = Depends(price)) -> int:
        return count * each

    def cost_in_thread(count: int, each: int = Depends(price)) -> int:
        return count * each

    env = make_env(cost, cost_in_thread)
    assert call.data(env, "cost", count=2) == call.data(env, "cost_in_thread", count=2) == 6
    assert call.failure(env, "cost", count=2, each=1)[0] == "invalid_args"


# -- modes ----------------------------------------------------------------------------------------------------------


def test_a_tool_of_one_mode_exists_in_that_mode_only(make_env: Any, call: Any) -> None:
    env = make_env(add)

    @env.tool(mode="simulation")
    def cheat(level: int, why: str = "because") -> str:
        """Skip a level."""
        return f"{why} {level}"

    for mode in (None, "production"):
        env._mode = mode
        assert call.names(env) == ["add"]
        kind, message = call.failure(env, "cheat", level=1)
        assert kind == "tool_not_found"
        assert "not found" in message.lower()
    env._mode = "simulation"
    assert call.names(env) == ["add", "cheat"]
    assert call.data(env, "cheat", level=2) == "because 2"
    assert call.failure(env, "cheat", level="two")[0] == "invalid_args"


def test_a_tool_may_have_an_implementation_for_each_mode(make_env: Any, call: Any) -> None:
    env = make_env()

    def real() -> str:
        """Buy for money."""
        return "bought"

    def pretended(count: int = 1) -> str:
        """Pretend to buy."""
        return f"pretended {count}"

    real.__name__ = pretended.__name__ = "buy"
    env.tool(mode="production")(real)
    env.tool(mode="simulation")(pretended)
    env._mode = "production"
    assert call.data(env, "buy") == "bought"
    assert [t.description for t in call.step(env, ListToolsAction()).tools] == ["Buy for money."]
    env._mode = "simulation"
    assert call.data(env, "buy", count=2) == "pretended 2"
    assert [t.description for t in call.step(env, ListToolsAction()).tools] == ["Pretend to buy."]


def test_a_tool_without_a_mode_is_the_servers(make_env: Any, call: Any) -> None:
    env = make_env()
    assert env.tool()(add) is add
    assert set(get_server_tools(env.mcp_server)) == {"add"}
    for mode in (None, "production", "simulation"):
        env._mode = mode
        assert call.data(env, "add", a=1) == 2


@pytest.mark.parametrize("mode", ["training", "", "Production", 3])
def test_other_modes_do_not_exist(make_env: Any, mode: Any) -> None:
    with pytest.raises(ValueError, match=r"(?i)mode.*production.*simulation"):
        make_env().tool(mode=mode)


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("tool", ENDLESS, ids=lambda tool: tool.__name__)
def test_the_limit_of_a_tool_of_one_mode_is_enforced(make_env: Any, call: Any, tool: Any) -> None:
    env = make_env(add)
    env._mode = "production"
    env.tool(mode="production")(tool)
    assert call.failure(env, tool.__name__, timeout_s=BRIEF)[0] == "timeout"
    assert call.data(env, "add", a=1) == 2


def test_a_tool_of_one_mode_has_context_and_state(make_env: Any, call: Any) -> None:
    env = make_env(recall)
    env._mode = "production"
    env.tool(mode="production")(remember)
    call.data(env, "remember", key="a", value="1")
    assert call.data(env, "recall", key="a") == "1"


# -- code mode ------------------------------------------------------------------------------------------------------


def test_the_tools_of_the_active_mode_are_callables(make_env: Any) -> None:
    env = make_env(add, add_async)
    env.tool(mode="simulation")(undocumented)
    assert env.supports_code_mode
    assert set(env.get_callables()) == {"add", "add_async"}
    env._mode = "simulation"
    functions = env.get_callables()
    assert (functions["add"](1, b=4), functions["add_async"](2), functions["undocumented"]("x")) == (5, 3, "x")


def test_code_calls_tools_and_gives_its_result(make_env: Any) -> None:
    env = make_env(add, add_async)
    code = "def twice(x):\n    return add(x, x)\nresult = [twice(n) + add_async(n) for n in range(3)]"
    assert env.execute_code(code).metadata == {"result": [1, 4, 7]}
    assert env.execute_code("x = 1").metadata == {"result": None}


def test_code_that_is_none_is_a_syntax_error(make_env: Any) -> None:
    error = make_env(add).execute_code("add(1,").metadata["error"]
    assert error.startswith("Syntax error:")


def test_code_that_raises_says_what(make_env: Any) -> None:
    env = make_env(add)
    assert "division by zero" in env.execute_code("1 / 0").metadata["error"]
    assert "nonsense" in env.execute_code("nonsense()").metadata["error"]
    assert "result" not in env.execute_code("result = 1\n1 / 0").metadata


def test_programs_do_not_see_each_others_variables(make_env: Any) -> None:
    env = make_env(add)
    env.execute_code("left = 1\nadd = None")
    assert "left" in env.execute_code("result = left").metadata["error"]
    assert env.execute_code("result = add(1)").metadata == {"result": 2}


# -- transforms, sessions, the end ----------------------------------------------------------------------------------


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


# -- servers with more than functions -------------------------------------------------------------------------------


class Counting(Middleware):
    """Counts calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def on_call_tool(self, context: Any, call_next: Any) -> Any:
        self.calls.append(context.message.name)
        return await call_next(context)


def with_middleware() -> Any:
    server = FastMCP("middle")
    server.add_middleware(Counting())
    return server


def mounted() -> Any:
    server, inner = FastMCP("outer"), FastMCP("inner")
    inner.tool(undocumented, name="hidden")
    server.mount(inner)
    return server


def with_lifespan() -> Any:
    @asynccontextmanager
    async def lifespan(server: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"shared": "database"}

    return FastMCP("living", lifespan=lifespan)


NOT_PLAIN = [with_middleware, mounted, with_lifespan]


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("build", NOT_PLAIN, ids=lambda build: build.__name__)
def test_servers_that_are_not_plain_behave_alike(make_env: Any, call: Any, build: Callable[[], Any]) -> None:
    env = make_env(add, add_async, misleading, hang, remember, recall, unsendable, server=build())
    assert set(call.names(env)) >= {"add", "add_async"}
    observation = call(env, "add", a=1)
    assert (observation.result.data, observation.result.structured_content) == (2, {"result": 2})
    assert serialize_observation(observation)["observation"]["result"].keys() == {
        "content",
        "structured_content",
        "meta",
        "data",
        "is_error",
    }
    assert call.data(env, "add_async", a=2) == 3
    assert call.failure(env, "misleading")[0] == "execution_error"
    assert call.failure(env, "add", a="x")[0] == "invalid_args"
    kind, message = call.failure(env, "nonsense")
    assert (kind, "not found" in message) == ("tool_not_found", True)
    assert call.failure(env, "hang", timeout_s=BRIEF)[0] == "timeout"
    call.data(env, "remember", key="a", value="1")
    assert call.data(env, "recall", key="a") == "1"


@pytest.mark.parametrize("build", NOT_PLAIN, ids=lambda build: build.__name__)
def test_environments_on_servers_that_are_not_plain_do_not_share_state(
    make_env: Any, call: Any, build: Callable[[], Any]
) -> None:
    server = build()
    one, other = make_env(remember, recall, server=server), make_env(server=server)
    call.data(one, "remember", key="a", value="1")
    assert (call.data(one, "recall", key="a"), call.data(other, "recall", key="a")) == ("1", "nothing")


@pytest.mark.parametrize("build", NOT_PLAIN, ids=lambda build: build.__name__)
@pytest.mark.parametrize("tool", [hang, hang_with_context], ids=lambda tool: tool.__name__)
def test_a_tools_own_limit_is_a_timeout_on_every_server(
    make_env: Any, call: Any, build: Callable[[], Any], tool: Any
) -> None:
    server = build()
    server.tool(tool, timeout=BRIEF)
    env = make_env(add, server=server)
    assert call.failure(env, tool.__name__)[0] == "timeout"
    assert call.data(env, "add", a=1) == 2


def test_middleware_sees_every_call(make_env: Any, call: Any) -> None:
    counting = Counting()
    server = FastMCP("middle")
    server.add_middleware(counting)
    env = make_env(add, server=server)
    call.data(env, "add", a=1)
    call.data(env, "add", a=2)
    assert counting.calls == ["add", "add"]


def test_a_mounted_servers_tools_can_be_called(make_env: Any, call: Any) -> None:
    env = make_env(add, server=mounted())
    assert call.names(env) == ["add", "hidden"]
    assert call.data(env, "hidden", text="found") == "found"


def test_a_lifespan_is_entered_once_and_left_when_the_environment_is_closed(make_env: Any, call: Any) -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def lifespan(server: Any) -> AsyncIterator[dict[str, Any]]:
        seen.append("entered")
        yield {"shared": "database"}
        seen.append("left")

    env = make_env(add, server=FastMCP("living", lifespan=lifespan))
    for a in range(3):
        call.data(env, "add", a=a)
    assert seen == ["entered"]
    env.close()
    assert seen == ["entered", "left"]


def test_a_tool_made_of_another_tool_can_be_called(make_env: Any, call: Any) -> None:
    server = FastMCP("tools")
    original = FastMcpTool.from_function(add)
    server.add_tool(FastMcpTool.from_tool(original, name="plus", description="Add."))
    env = make_env(undocumented, server=server)
    assert set(call.names(env)) == {"plus", "undocumented"}
    assert call.data(env, "plus", a=1) == 2


# -- threads and loops ----------------------------------------------------------------------------------------------


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
