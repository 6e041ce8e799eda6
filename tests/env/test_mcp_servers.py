"""Servers with more than functions: middleware, mounts, lifespans, tools made of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastmcp import Context, FastMCP
from fastmcp.server.middleware import Middleware
from fastmcp.tools import Tool as FastMcpTool

from endless_tools import spin
from openenv.protocol.json_values import serialize_observation

BRIEF = 0.3
"""A limit for tools that never end."""
SOON = 30.0
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


async def hang() -> str:
    """Never return, politely."""
    await asyncio.Event().wait()
    return "never"


def misleading() -> str:
    """Raise with words that mean something else elsewhere."""
    raise ValueError("argument not found, invalid: unknown tool, timeout")


def unsendable() -> Any:
    return object()


async def hang_with_context(ctx: Context) -> str:
    """Never return, with a context."""
    return await hang()


async def remember(key: str, value: str, ctx: Context) -> str:
    """Keep a value."""
    await ctx.set_state(key, value)
    return ctx.session_id


async def recall(key: str, ctx: Context) -> str:
    """Give a value back."""
    return await ctx.get_state(key) or "nothing"


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
    env = make_env(add, add_async, misleading, hang, spin, remember, recall, unsendable, server=build())
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
    assert call.failure(env, "spin", timeout_s=BRIEF)[0] == "timeout"
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
