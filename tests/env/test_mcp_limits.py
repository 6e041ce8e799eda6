"""Tools that take too long: their calls end in time, and the next ones work."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from fastmcp import Context, FastMCP

from endless_tools import spin
from slow_steps import take, take_async
from waiting import wait_until_async

BRIEF = 0.3
"""A limit for tools that never end."""
SOON = 30.0
"""How long such a call may take at most, on a busy machine."""


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def hang() -> str:
    """Never return, politely."""
    await asyncio.Event().wait()
    return "never"


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


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("tool", ENDLESS, ids=lambda tool: tool.__name__)
def test_a_call_ends_when_its_time_is_up_and_the_next_one_works(make_env: Any, call: Any, tool: Any) -> None:
    env = make_env(tool, add)
    begun = time.monotonic()
    kind, message = call.failure(env, tool.__name__, timeout_s=BRIEF)
    assert (kind, tool.__name__ in message) == ("timeout", True)
    assert BRIEF * 0.9 <= time.monotonic() - begun < SOON
    assert call.data(env, "add", a=1) == 2


@pytest.mark.slow_but_for(
    "step_async-spin",
    "step_async-spin_stubbornly",
    "step-hang",
    "step_async-hang_with_context",
    "step-spin_with_context",
)
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
    released, ended = threading.Event(), threading.Event()

    async def stubborn() -> str:
        while not released.is_set():
            try:
                await take_async(0.01)
            except asyncio.CancelledError:
                continue
        ended.set()
        return "late"

    env = make_env(stubborn, add)
    try:
        assert call.failure(env, "stubborn", timeout_s=BRIEF)[0] == "timeout"
        assert call.data(env, "add", a=1) == 2
    finally:
        released.set()
        if call.method == "step_async":
            call.loop.run_until_complete(wait_until_async(ended.is_set))


def test_a_tool_within_its_limit_is_left_alone(make_env: Any, call: Any) -> None:
    def brief() -> str:
        take(0.1)
        return "done"

    env = make_env(brief)
    assert [call.data(env, "brief") for _ in range(3)] == ["done"] * 3


@pytest.mark.slow_but_for(
    "step-spin", "step-spin_stubbornly", "step_async-hang", "step-hang_with_context", "step_async-spin_with_context"
)
@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("tool", ENDLESS, ids=lambda tool: tool.__name__)
def test_the_limit_of_a_tool_of_one_mode_is_enforced(make_env: Any, call: Any, tool: Any) -> None:
    env = make_env(add)
    env._mode = "production"
    env.tool(mode="production")(tool)
    assert call.failure(env, tool.__name__, timeout_s=BRIEF)[0] == "timeout"
    assert call.data(env, "add", a=1) == 2
