"""`ToolRegistry`: one description and one way to call for every surface, cancellation, events, the server behind it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastmcp import Context, FastMCP
from fastmcp.dependencies import Depends
from fastmcp.server.middleware import Middleware

from endless_tools import spin
from openenv.env.tools.source import ToolEvents, ToolRequest
from openenv.env.tools.tool_registry import ToolRegistry
from openenv.errors import (
    ToolArgumentsError,
    ToolCallError,
    ToolNotFoundError,
    ToolTimeout,
    ToolTransportError,
)
from slow_steps import take_async
from waiting import wait_until_async

SOON = 30.0


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def steps(ctx: Context) -> str:
    """Report progress and two messages."""
    await ctx.report_progress(1, 2, "half")
    await ctx.info("hello")
    await ctx.report_progress(2, 2)
    return "done"


class Nothing(Middleware):
    """Passes everything on."""


def plain() -> Any:
    return FastMCP("tools")


def not_plain() -> Any:
    server = FastMCP("tools")
    server.add_middleware(Nothing())
    return server


@pytest.fixture(params=[plain, not_plain], ids=lambda build: build.__name__)
def server(request: pytest.FixtureRequest) -> Any:
    """A server whose tools are called directly, and one whose tools are called through FastMCP's client."""
    return request.param()


@pytest.fixture
def registry(server: Any) -> Iterator[ToolRegistry]:
    """The tools of the server."""
    made = ToolRegistry(server)
    yield made
    made.close()


@pytest.mark.anyio
async def test_tools_are_described_as_mcp_does(server: Any, registry: ToolRegistry) -> None:
    server.tool(add)
    server.tool(spin)
    described = {tool["name"]: tool for tool in await registry.describe()}
    assert described["add"]["description"] == "Add two numbers."
    assert described["add"]["inputSchema"]["required"] == ["a"]
    assert described["add"]["outputSchema"]["properties"]["result"]["type"] == "integer"
    assert described["spin"]["description"] is None
    assert {"title", "icons", "annotations"} <= described["add"].keys()


@pytest.mark.anyio
async def test_errors_are_exceptions_of_their_kind(server: Any, registry: ToolRegistry) -> None:
    def fail() -> str:
        raise ValueError("invalid argument: not found")

    async def hang() -> str:
        await asyncio.Event().wait()
        return ""

    for function in (add, fail, hang):
        server.tool(function)
    with pytest.raises(ToolNotFoundError, match="not found") as missing:
        await registry.call(ToolRequest("nothing"))
    with pytest.raises(ToolArgumentsError, match="a"):
        await registry.call(ToolRequest("add", {"a": "x"}))
    with pytest.raises(ToolCallError, match="invalid argument") as failed:
        await registry.call(ToolRequest("fail"))
    with pytest.raises(TimeoutError) as late:
        await registry.call(ToolRequest("hang", {}, timeout_s=0.2))
    assert type(failed.value) is ToolCallError
    assert isinstance(late.value, ToolTimeout)
    assert missing.value.tool_name == "nothing"
    assert missing.value.details == {"tool_name": "nothing", "error_type": "tool_not_found"}


@pytest.mark.anyio
async def test_progress_and_messages_reach_the_listeners_of_the_call(server: Any, registry: ToolRegistry) -> None:
    server.tool(steps)
    reports: list[Any] = []
    messages: list[Any] = []
    home = threading.get_ident()

    def on_progress(progress: float, total: float | None, message: str | None) -> None:
        assert threading.get_ident() == home
        reports.append((progress, total, message))

    events = ToolEvents(on_progress, lambda level, logger, data: messages.append((level, data)))
    outcome = await registry.call(ToolRequest("steps", {}, events=events))
    assert outcome.data == "done"
    await wait_until_async(lambda: len(reports) == 2 and len(messages) == 1)
    assert reports == [(1, 2, "half"), (2, 2, None)]
    assert (messages[0][0], messages[0][1]["msg"]) == ("info", "hello")


@pytest.mark.anyio
async def test_cancelling_the_wait_cancels_an_asynchronous_tool(server: Any, registry: ToolRegistry) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def wait() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    server.tool(wait)
    server.tool(add)
    task = asyncio.ensure_future(registry.call(ToolRequest("wait")))
    await wait_until_async(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until_async(ended.is_set)
    assert (await registry.call(ToolRequest("add", {"a": 1}))).data == 2


@pytest.mark.anyio
async def test_cancelling_the_wait_stops_a_synchronous_tool() -> None:
    server = plain()
    server.tool(spin)
    registry = ToolRegistry(server)
    task = asyncio.ensure_future(registry.call(ToolRequest("spin")))
    await wait_until_async(_is_spinning)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until_async(lambda: not _is_spinning())


@pytest.mark.anyio
async def test_a_blocking_call_is_interrupted_from_another_thread() -> None:
    server = plain()
    server.tool(spin)
    server.tool(add)
    registry = ToolRegistry(server)
    call = asyncio.create_task(asyncio.to_thread(registry.call_blocking, ToolRequest("spin")))
    await wait_until_async(_is_spinning)
    registry.interrupt()
    with pytest.raises(ToolTimeout, match="spin"):
        await call
    registry.interrupt()  # nothing runs any more
    assert registry.call_blocking(ToolRequest("add", {"a": 1})).data == 2


def test_a_plain_function_only_blocks_and_nothing_else_does() -> None:
    async def wait() -> str:
        return ""

    def with_context(ctx: Context) -> str:
        return ""

    def with_dependency(more: int = Depends(lambda: 1)) -> str:
        return ""

    simple, guarded = plain(), not_plain()
    for function in (add, wait, with_context, with_dependency):
        simple.tool(function)
        guarded.tool(function)
    names = ["add", "wait", "with_context", "with_dependency", "nothing"]
    registry = ToolRegistry(simple)
    assert [registry.is_blocking(name) for name in names] == [True, False, True, False, True]
    assert not any(ToolRegistry(guarded).is_blocking(name) for name in names)


@pytest.mark.anyio
async def test_calls_at_the_same_time_do_not_mix(server: Any, registry: ToolRegistry) -> None:
    async def twice(text: str) -> str:
        await take_async(0.001)
        return text * 2

    server.tool(twice)
    server.tool(add)
    calls = [registry.call(ToolRequest("twice", {"text": str(n)})) for n in range(20)]
    calls += [registry.call(ToolRequest("add", {"a": n})) for n in range(20)]
    outcomes = await asyncio.gather(*calls)
    assert [outcome.data for outcome in outcomes] == [str(n) * 2 for n in range(20)] + [n + 1 for n in range(20)]


@pytest.mark.anyio
async def test_resources_and_prompts_are_asked_of_the_server(server: Any, registry: ToolRegistry) -> None:
    @server.resource("notes://one")
    def note() -> str:
        return "buy milk"

    @server.prompt
    def greet(name: str) -> str:
        return f"Hello {name}"

    async def ask(client: Any) -> Any:
        return (await client.read_resource("notes://one"))[0].text, await client.get_prompt("greet", {"name": "you"})

    text, prompt = await registry.ask_server(ask)
    assert text == "buy milk"
    assert prompt.messages[0].content.text == "Hello you"


@pytest.mark.anyio
async def test_the_client_of_the_server_is_opened_once(server: Any, registry: ToolRegistry) -> None:
    async def same(client: Any) -> int:
        return id(client)

    clients = await asyncio.gather(*(registry.ask_server(same) for _ in range(5)))
    assert len({*clients, await registry.ask_server(same)}) == 1


@pytest.mark.anyio
async def test_a_server_that_cannot_start_is_a_transport_error() -> None:
    @asynccontextmanager
    async def broken(server: Any) -> Any:
        raise RuntimeError("no database")
        yield

    server = FastMCP("broken", lifespan=broken)
    server.tool(add)
    registry = ToolRegistry(server)
    with pytest.raises(ToolTransportError):
        await registry.call(ToolRequest("add", {"a": 1}, timeout_s=SOON))
    registry.close()


@pytest.mark.anyio
async def test_nothing_can_be_called_once_it_is_closed(server: Any, registry: ToolRegistry) -> None:
    server.tool(add)
    assert (await registry.call(ToolRequest("add", {"a": 1}))).data == 2
    registry.close()
    registry.close()
    with pytest.raises(ToolTransportError, match="closed"):
        await registry.call(ToolRequest("add", {"a": 1}))
    with pytest.raises(ToolTransportError, match="closed"):
        registry.call_blocking(ToolRequest("add", {"a": 1}))


@pytest.mark.anyio
async def test_a_client_is_not_opened_again_after_the_end(server: Any, registry: ToolRegistry) -> None:
    async def anything(client: Any) -> bool:
        return True

    assert await registry.ask_server(anything)
    registry.close()
    with pytest.raises(ToolTransportError, match="closed"):
        await registry.ask_server(anything)


def _is_spinning() -> bool:
    return any(frame.f_code is spin.__code__ for frame in sys._current_frames().values())
