"""What tools are given besides their arguments: a context, state, what FastMCP injects."""

from __future__ import annotations

import asyncio
from typing import Any

from fastmcp import Context, FastMCP
from fastmcp.dependencies import Depends
from fastmcp.server.dependencies import get_context

from openenv.protocol.tool_messages import CallToolAction


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


def test_progress_and_messages_without_a_listener_are_no_error(make_env: Any, call: Any) -> None:
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
