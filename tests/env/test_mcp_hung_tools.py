"""Tools that never return, on FastMCP servers that call them themselves: middleware, mounts, lifespans, `Depends`,
tools made of other tools. The call gets its error, the function ends, the environment closes at once."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastmcp import Context, FastMCP
from fastmcp.dependencies import Depends
from fastmcp.server.middleware import Middleware
from fastmcp.tools import Tool as FastMcpTool

import endless_tools
from openenv.env.tools.execution import TOOL_LOOP, TOOL_THREADS
from openenv.env.tools.source import ToolRequest

BRIEF = 0.3
SOON = 30.0
began, ended = threading.Event(), threading.Event()


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def spin() -> str:
    """Never return."""
    began.set()
    try:
        endless_tools.spin()
    finally:
        ended.set()


def spin_in_steps() -> Iterator[str]:
    """Never return, as a generator."""
    yield "one"
    yield spin()


def spin_with_context(ctx: Context) -> str:
    """Never return, with a context."""
    return spin()


def spin_with_dependency(helper: str = Depends(lambda: "given")) -> str:
    """Never return, with something injected."""
    return spin() + helper


def with_middleware(tool: Callable[..., Any]) -> Any:
    server = FastMCP("middle")
    server.add_middleware(Middleware())
    server.tool(tool, name="endless")
    return server


def mounted(tool: Callable[..., Any]) -> Any:
    server, middle, inner = FastMCP("outer"), FastMCP("middle"), FastMCP("inner")
    inner.tool(tool, name="endless")
    middle.mount(inner)
    server.mount(middle)
    return server


def with_lifespan(tool: Callable[..., Any]) -> Any:
    @asynccontextmanager
    async def lifespan(server: Any) -> AsyncIterator[dict[str, Any]]:
        yield {}

    server = FastMCP("living", lifespan=lifespan)
    server.tool(tool, name="endless")
    return server


def made_of_another(tool: Callable[..., Any]) -> Any:
    server = FastMCP("made")
    server.add_middleware(Middleware())
    server.add_tool(FastMcpTool.from_tool(FastMcpTool.from_function(tool), name="endless"))
    return server


def plain(tool: Callable[..., Any]) -> Any:
    server = FastMCP("plain")
    server.tool(tool, name="endless")
    return server


def ends_at_its_limit(call: Callable[[float], None]) -> bool:
    """Whether the function ends with its call. On a busy machine a brief limit may end the call before it begins."""
    limit = BRIEF
    while limit < SOON:
        began.clear()
        ended.clear()
        call(limit)
        if began.is_set():
            return ended.wait(SOON)
        limit *= 3
    return False


CASES = [
    *((build, spin) for build in (with_middleware, mounted, with_lifespan, made_of_another)),
    *((build, spin_in_steps) for build in (with_middleware, mounted)),
    *((build, spin_with_context) for build in (with_middleware, mounted)),
    *((build, spin_with_dependency) for build in (plain, with_middleware, mounted)),
]


@pytest.mark.slow_but_for(
    *(
        "step-with_middleware-spin",
        "step_async-mounted-spin",
        "step-with_lifespan-spin",
        "step_async-made_of_another-spin",
    ),
    *("step_async-with_middleware-spin_in_steps", "step-mounted-spin_in_steps"),
    *("step-mounted-spin_with_context", "step_async-plain-spin_with_dependency", "step-mounted-spin_with_dependency"),
)
@pytest.mark.parametrize(("build", "tool"), CASES, ids=lambda part: part.__name__)
def test_a_call_that_hangs_is_ended_and_leaves_nothing(
    make_env: Any, call: Any, build: Any, tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv.env.tools.fastmcp_client._CLOSE_S", 3 * SOON)
    env = make_env(add, server=build(tool))

    def hang(limit: float) -> None:
        assert call.failure(env, "endless", timeout_s=limit)[0] == "timeout"

    for _ in range(3):
        assert ends_at_its_limit(hang)
        assert call.data(env, "add", a=1) == 2
    begun = time.monotonic()
    env.close()
    assert time.monotonic() - begun < SOON  # it waits longer for a client that does not close


@pytest.mark.parametrize("build", [with_middleware, mounted], ids=lambda part: part.__name__)
def test_a_tools_own_limit_ends_it(make_env: Any, call: Any, build: Any) -> None:
    env: Any = None

    def hang(limit: float) -> None:
        nonlocal env
        server = build(add)
        server.tool(spin, name="limited", timeout=limit)
        env = make_env(server=server)
        assert call.failure(env, "limited")[0] == "timeout"

    assert ends_at_its_limit(hang)
    assert call.data(env, "endless", a=1) == 2


@pytest.mark.parametrize("build", [with_middleware, mounted], ids=lambda part: part.__name__)
def test_environments_that_share_a_server_hang_apart(make_env: Any, build: Any) -> None:
    """One module-level server behind all sessions is a habit; ending one's call leaves the other's alone."""
    release = threading.Event()

    def wait_for_release(patient: bool) -> str:
        if not patient:
            return spin()
        release.wait(SOON)
        return "released"

    server = build(wait_for_release)
    one, other = make_env(server=server), make_env(server=server)
    results: list[Any] = []
    request = ToolRequest("endless", {"patient": True}, timeout_s=SOON)
    patient = threading.Thread(target=lambda: results.append(one.tools.call_blocking(request).data))
    patient.start()
    TOOL_LOOP.run(other.tools.ask_server(lambda client: client.ping()))  # the limit is not spent on its connection

    def hang(limit: float) -> None:
        with pytest.raises(TimeoutError):
            other.tools.call_blocking(ToolRequest("endless", {"patient": False}, timeout_s=limit))

    assert ends_at_its_limit(hang)
    release.set()
    patient.join(SOON)
    assert results == ["released"]


def test_code_that_calls_the_function_gets_the_function(make_env: Any, call: Any) -> None:
    env = make_env(add, server=with_middleware(spin))
    call.data(env, "add", a=1)
    assert env.get_callables()["add"](a=2) == 3


def test_context_variables_reach_the_function(make_env: Any, call: Any) -> None:
    async def remember(ctx: Context, value: str) -> str:
        await ctx.set_state("value", value)
        return "kept"

    def session_of(ctx: Context) -> str:
        return ctx.session_id

    env = make_env(remember, session_of, server=with_middleware(spin))
    assert call.data(env, "remember", value="1") == "kept"
    assert call.data(env, "session_of") == call.data(env, "session_of") != ""


@pytest.mark.slow
def test_a_function_that_never_returns_from_c_keeps_neither_close_nor_exit() -> None:
    program = f"""
import time
from fastmcp import FastMCP
from fastmcp.server.middleware import Middleware
from openenv.env.mcp_environment import MCPEnvironment
from openenv.protocol.tool_messages import CallToolAction
from openenv.types import Observation, State

class Sleepy(MCPEnvironment):
    def __init__(self):
        server = FastMCP("sleepy")
        server.add_middleware(Middleware())
        server.tool(lambda: time.sleep({SOON * 4}), name="endless")
        super().__init__(server)
    def reset(self, **kwargs): return Observation()
    state = property(lambda self: State())
    def _step_impl(self, action, timeout_s=None, **kwargs): return Observation()

env = Sleepy()
print(env.step(CallToolAction(tool_name="endless"), timeout_s={BRIEF}).error.error_type.value)
env.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SOON * 3)
    assert (done.returncode, done.stdout.strip()) == (0, "timeout"), done.stderr


def test_threads_are_used_again(make_env: Any, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env(add, server=with_middleware(spin))
    call.data(env, "add", a=1)
    made: list[str] = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        made.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    for number in range(20):
        call.data(env, "add", a=number)
    assert len(made) <= 1


@pytest.mark.anyio
async def test_what_a_function_raises_reaches_the_one_who_waits() -> None:
    with pytest.raises(ZeroDivisionError):
        await TOOL_THREADS.run(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await TOOL_THREADS.run(functools.partial(next, iter(())))
    names = await asyncio.gather(*(TOOL_THREADS.run(lambda: threading.current_thread().name) for _ in range(20)))
    assert set(names) == {"openenv-tool"}
