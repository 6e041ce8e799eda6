"""The type of an error says what is wrong with a call of a tool, whatever the tool itself says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastmcp import Context, FastMCP
from fastmcp.server.middleware import Middleware
from pydantic import BaseModel

from openenv.protocol.tool_messages import ListToolsAction


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def add_async(a: int, b: int = 1) -> int:
    """Add two numbers, some time."""
    await asyncio.sleep(0)
    return a + b


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
def test_a_tool_that_raises_is_an_execution_error_for_any_message(make_env: Any, call: Any, tool: str) -> None:
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
