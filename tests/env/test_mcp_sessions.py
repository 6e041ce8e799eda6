"""Environments with tools in sessions: which step method runs, in which thread, and what a call that hangs leaves."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fastmcp import Context, FastMCP

from endless_tools import spin
from environments import Tools
from openenv import LocalEnv
from openenv.client.env_client import GenericEnvClient
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation, ListToolsAction
from openenv.server.app import create_app
from openenv.types import Action, Observation
from servers import Serve

LIMIT_S = 0.3


def endless() -> str:
    return spin()


class Toolbox(Tools):
    """Reports where its tools run."""

    def __init__(self) -> None:
        server = FastMCP("toolbox")
        self.by: list[str] = []
        self.resets = 0

        @server.tool
        def thread() -> int:
            """Return the thread."""
            return threading.get_ident()

        @server.tool
        def thread_with_context(ctx: Context) -> int:
            """Return the thread."""
            return threading.get_ident()

        @server.tool
        async def loop() -> int:
            """Return the loop."""
            return id(asyncio.get_running_loop())

        @server.tool
        def methods() -> list[str]:
            """Return which methods of the author's have run."""
            return self.by

        @server.tool
        async def count(ctx: Context) -> int:
            """Count the calls of a session."""
            counted = (await ctx.get_state("count") or 0) + 1
            await ctx.set_state("count", counted)
            return int(counted)

        @server.tool
        def fail() -> str:
            """Raise."""
            raise ValueError("argument not found")

        server.tool(endless, timeout=LIMIT_S)
        server.tool(endless, name="endless_unlimited")
        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.resets += 1
        return Observation(metadata={"thread": threading.get_ident()})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"thread": threading.get_ident(), "by": self.by})


class OverridesStep(Toolbox):
    """Has a step of its own."""

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self.by.append("step")
        observation = super().step(action, timeout_s=timeout_s, **kwargs)
        observation.reward = 1.0
        return observation


class OverridesStepAsync(Toolbox):
    """Has an asynchronous step of its own."""

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self.by.append("step_async")
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        observation.reward = 2.0
        return observation


class OverridesBoth(Toolbox):
    """Has both."""

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self.by.append("step")
        return super().step(action, timeout_s=timeout_s, **kwargs)

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self.by.append("step_async")
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        observation.reward = 2.0
        return observation


class BelowStep(OverridesStep):
    """Inherits the author's own step."""


class OverridesStepBelow(OverridesStepAsync):
    """Has a step of its own below an asynchronous one of another author's."""

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self.by.append("step")
        observation = super().step(action, timeout_s=timeout_s, **kwargs)
        observation.reward = 1.0
        return observation


CASES = [
    (Toolbox, [], None),
    (OverridesStep, ["step"], 1.0),
    (OverridesStepAsync, ["step_async"], 2.0),
    (OverridesBoth, ["step_async"], 2.0),
    (BelowStep, ["step"], 1.0),
]
CALL_METHODS = {"type": "call_tool", "tool_name": "methods", "arguments": {}}


def toolbox_app(env_cls: Callable[[], Any] = Toolbox, **options: Any) -> Any:
    return create_app(env_cls, CallToolAction, CallToolObservation, env_name="toolbox", **options)


def tool(env: Any, name: str, **arguments: Any) -> Any:
    """Call a tool over the wire; return its result."""
    observation = env.step({"type": "call_tool", "tool_name": name, "arguments": arguments}).observation
    assert observation["error"] is None, observation["error"]
    return observation["result"]["data"]


@pytest.mark.parametrize(("env_cls", "by", "reward"), CASES, ids=lambda case: getattr(case, "__name__", None))
def test_the_step_that_the_author_wrote_runs_in_this_process(env_cls: Any, by: list[str], reward: float | None) -> None:
    with LocalEnv(env_cls).sync() as env:
        env.reset()
        result = env.step(CallToolAction(tool_name="methods"))
        assert (result.observation.result.data, result.reward) == (by, reward)
        assert [listed.name for listed in env.step(ListToolsAction()).observation.tools][:1] == ["thread"]


@pytest.mark.parametrize(("env_cls", "by", "reward"), CASES, ids=lambda case: getattr(case, "__name__", None))
def test_the_step_that_the_author_wrote_runs_on_a_server(
    serve: Serve, env_cls: Any, by: list[str], reward: float | None
) -> None:
    with GenericEnvClient(base_url=serve(toolbox_app(env_cls)).url).sync() as env:
        env.reset()
        result = env.step(CALL_METHODS)
        assert (result.observation["result"]["data"], result.reward) == (by, reward)
        listed = env.step({"type": "list_tools"})
        assert listed.observation["tools"][0]["name"] == "thread"
        assert listed.reward == reward


def test_a_step_below_an_asynchronous_step_of_another_author_does_not_hide_it() -> None:
    with LocalEnv(OverridesStepBelow).sync() as env:
        env.reset()
        assert env.step(CallToolAction(tool_name="methods")).reward == 2.0


@pytest.mark.parametrize("env_cls", [Toolbox, OverridesStep, OverridesStepAsync], ids=lambda cls: cls.__name__)
def test_all_blocking_code_of_a_session_runs_in_one_thread(serve: Serve, env_cls: Any) -> None:
    server = serve(toolbox_app(env_cls, max_concurrent_envs=4))
    with GenericEnvClient(base_url=server.url).sync() as env, GenericEnvClient(base_url=server.url).sync() as other:
        threads = {env.reset().metadata["thread"]}
        other.reset()
        for _ in range(10):
            threads |= {tool(env, "thread"), tool(env, "thread_with_context")}
            tool(other, "thread")
        assert len(threads) == 1
        assert threading.get_ident() not in threads


def test_two_hundred_calls_of_a_session_make_no_thread_and_no_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["thread", "thread_with_context", "loop", "count"]
    with GenericEnvClient(base_url=serve(toolbox_app()).url).sync() as env:
        env.reset()
        for name in names:
            tool(env, name)
        env.step({"type": "list_tools"})
        made: list[str] = []
        start, new_event_loop = threading.Thread.start, asyncio.new_event_loop

        def counted_start(thread: threading.Thread) -> None:
            made.append(thread.name)
            start(thread)

        def counted_loop() -> Any:
            made.append("loop")
            return new_event_loop()

        monkeypatch.setattr(threading.Thread, "start", counted_start)
        monkeypatch.setattr(asyncio, "new_event_loop", counted_loop)
        loops = {tool(env, "loop") for _ in range(50)}
        for _ in range(50):
            for name in ("thread", "thread_with_context", "count"):
                tool(env, name)
            env.step({"type": "list_tools"})
        assert len(loops) == 1
        assert made == []


def test_state_of_the_context_is_the_sessions(serve: Serve) -> None:
    server = serve(toolbox_app(max_concurrent_envs=4))
    with GenericEnvClient(base_url=server.url).sync() as env, GenericEnvClient(base_url=server.url).sync() as other:
        assert [tool(env, "count") for _ in range(3)] == [1, 2, 3]
        assert tool(other, "count") == 1


@pytest.mark.parametrize("env_cls", [Toolbox, OverridesStep, OverridesStepAsync], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("runner", ["thread", "inline"])
def test_a_tool_that_never_ends_costs_its_call_and_nothing_else(serve: Serve, env_cls: Any, runner: str) -> None:
    server = serve(toolbox_app(env_cls, runner=runner))
    with GenericEnvClient(base_url=server.url).sync() as env:
        env.reset()
        thread = tool(env, "thread")
        failed = env.step({"type": "call_tool", "tool_name": "endless", "arguments": {}}).observation
        assert failed["error"]["error_type"] == "timeout"
        assert tool(env, "thread") == thread
        assert tool(env, "count") == 1
    server.wait_for(lambda: not _is_endless())


@pytest.mark.parametrize("env_cls", [Toolbox, OverridesStep, OverridesStepAsync], ids=lambda cls: cls.__name__)
def test_a_tool_that_never_ends_is_stopped_in_this_process_too(env_cls: Any) -> None:
    with LocalEnv(env_cls).sync() as env:
        env.reset()
        assert env.step(CallToolAction(tool_name="endless")).observation.error.error_type == "timeout"
        assert env.step(CallToolAction(tool_name="count")).observation.result.data == 1
    assert not _is_endless()


def test_a_client_that_leaves_during_a_call_ends_the_call(serve: Serve, in_a_hurry: Any) -> None:
    server = serve(toolbox_app())
    with GenericEnvClient(base_url=server.url).sync() as env:
        env.reset()
        with pytest.raises(TimeoutError), in_a_hurry(env, 0.5):
            env.step({"type": "call_tool", "tool_name": "endless_unlimited", "arguments": {}})
    server.wait_for(lambda: not _is_endless())
    server.wait_for(lambda: server.manager.active == 0)


def _is_endless() -> bool:
    return any(frame.f_code is endless.__code__ for frame in sys._current_frames().values())


def test_a_failed_call_is_a_step_like_any_other(serve: Serve) -> None:
    with GenericEnvClient(base_url=serve(toolbox_app()).url).sync() as env:
        env.reset()
        for name, kind in [("fail", "execution_error"), ("nothing", "tool_not_found")]:
            result = env.step({"type": "call_tool", "tool_name": name, "arguments": {}})
            assert result.observation["error"]["error_type"] == kind
            assert result.observation["result"] is None
            assert not result.done
        failed = env.step({"type": "call_tool", "tool_name": "thread", "arguments": {"x": 1}})
        assert failed.observation["error"]["error_type"] == "invalid_args"
        assert tool(env, "count") == 1


def test_the_environment_is_closed_with_its_session(serve: Serve) -> None:
    made: list[Toolbox] = []

    def make() -> Toolbox:
        made.append(Toolbox())
        return made[-1]

    server = serve(toolbox_app(make))
    with GenericEnvClient(base_url=server.url).sync() as env:
        env.reset()
        tool(env, "count")
    server.wait_for(lambda: made[-1].mcp_server is None)
    assert made[-1].mcp_client is None
