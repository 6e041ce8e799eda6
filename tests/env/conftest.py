"""Fixtures for environments with tools: made from a few functions, called by both methods, closed when a test ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from fastmcp import FastMCP

from environments import Tools
from openenv.env.mcp_environment import MCPEnvironment
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation, ListToolsAction, ListToolsObservation
from openenv.types import Action, Observation
from waiting import wait_until

MakeEnv = Callable[..., MCPEnvironment]


class ToolEnv(Tools):
    """An environment that has tools and nothing else."""

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"taken": action.metadata})


class Caller:
    """Lists and calls tools through one of the two step methods."""

    def __init__(self, method: str, loop: asyncio.AbstractEventLoop) -> None:
        self.method = method
        self.loop = loop

    def step(self, env: MCPEnvironment, action: Action, timeout_s: float | None = None) -> Any:
        """Take any action."""
        if self.method == "step":
            return env.step(action, timeout_s=timeout_s)
        return self.loop.run_until_complete(env.step_async(action, timeout_s=timeout_s))

    def __call__(
        self, env: MCPEnvironment, tool: str, timeout_s: float | None = None, **arguments: Any
    ) -> CallToolObservation:
        """Call a tool."""
        action = CallToolAction(tool_name=tool, arguments=arguments)
        return cast(CallToolObservation, self.step(env, action, timeout_s))

    def data(self, env: MCPEnvironment, tool: str, **arguments: Any) -> Any:
        """Call a tool that must succeed, and return what it returned."""
        observation = self(env, tool, **arguments)
        assert observation.error is None, observation.error
        return observation.result.data

    def failure(
        self, env: MCPEnvironment, tool: str, timeout_s: float | None = None, **arguments: Any
    ) -> tuple[str, str]:
        """Call a tool that must fail; return the class of the error and its text."""
        observation = self(env, tool, timeout_s, **arguments)
        assert observation.error is not None, observation.result
        assert observation.result is None
        return observation.error.error_type.value, observation.error.message

    def names(self, env: MCPEnvironment) -> list[str]:
        """List the tools' names."""
        return [tool.name for tool in cast(ListToolsObservation, self.step(env, ListToolsAction())).tools]


@pytest.fixture
def event_loop_of_test() -> Iterator[asyncio.AbstractEventLoop]:
    """One loop for all asynchronous calls of a test."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture(params=["step", "step_async"])
def call(request: pytest.FixtureRequest, event_loop_of_test: asyncio.AbstractEventLoop) -> Caller:
    """Call tools, once by `step` and once by `step_async`."""
    return Caller(request.param, event_loop_of_test)


@pytest.fixture
def make_env() -> Iterator[MakeEnv]:
    """Make an environment: from functions, or from a FastMCP server."""
    made: list[MCPEnvironment] = []

    def make(*functions: Callable[..., Any], server: Any = None, transform: Any = None) -> MCPEnvironment:
        server = FastMCP("tools") if server is None else server
        for function in functions:
            server.tool(function)
        made.append(ToolEnv(server, transform))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Check that no thread is still in a tool called `spin` when a test is over."""
    yield
    wait_until(lambda: not _spinning())
    assert not _spinning()


def _spinning() -> bool:
    for frame in sys._current_frames().values():
        at: Any = frame
        while at is not None:
            if at.f_code.co_name == "spin":
                return True
            at = at.f_back
    return False
