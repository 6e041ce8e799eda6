"""Tools of one mode only, and code that calls tools."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastmcp import Context

from openenv.env.mcp_environment import get_server_tools
from openenv.protocol.tool_messages import ListToolsAction


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def add_async(a: int, b: int = 1) -> int:
    """Add two numbers, some time."""
    await asyncio.sleep(0)
    return a + b


def undocumented(text: str) -> str:
    return text


async def remember(key: str, value: str, ctx: Context) -> str:
    """Keep a value."""
    await ctx.set_state(key, value)
    return ctx.session_id


async def recall(key: str, ctx: Context) -> str:
    """Give a value back."""
    return await ctx.get_state(key) or "nothing"


# -- modes ------------------------------------------------------------------------------------------------------------


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


def test_a_tool_of_one_mode_has_context_and_state(make_env: Any, call: Any) -> None:
    env = make_env(recall)
    env._mode = "production"
    env.tool(mode="production")(remember)
    call.data(env, "remember", key="a", value="1")
    assert call.data(env, "recall", key="a") == "1"


# -- code mode --------------------------------------------------------------------------------------------------------


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
