"""The operations on an environment: construct, reset, step, state, close, and free calls.

An operation is built once per surface, with the surface's encoder, which runs in the same thread as the environment's
code. Knows how to call environments; must not know threads, sessions or frames.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from openenv.env.binding import Encoder, RemoteEnvironment, bind_instance, run_blocking
from openenv.env.environment import Environment
from openenv.env.tools.source import ToolSource, tools_to_close

OperationKind = Literal["construct", "reset", "step", "state", "tool", "call", "fork", "restore", "close"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. A session runs `in_loop` if the environment overrides the async method, else `in_lane`.

    Args:
        kind: The name of the operation.
        in_lane: Runs in the session's lane, for blocking code.
        in_loop: Runs on the event loop.
        prefers_lane: Whether `in_loop` would only block, for an environment and an argument; then `in_lane` runs.
        interrupt: Interrupts a running call in the lane, if possible.
    """

    kind: OperationKind
    in_lane: Callable[[Any, Any], Any]
    in_loop: Callable[[Any, Any], Awaitable[Any]] | None = None
    prefers_lane: Callable[[Any, Any], bool] | None = None
    interrupt: Callable[[Any], None] | None = None


@dataclass(frozen=True, slots=True)
class StepInput:
    """An action and the keywords of its request."""

    action: Any
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of one surface. `step` takes an action, `step_with` a `StepInput`, `reset` keywords."""

    reset: Operation
    step: Operation
    step_with: Operation
    state: Operation


def build_operations(encode_observation: Encoder, encode_state: Encoder) -> Operations:
    """Build operations that encode their results."""

    def reset(env: Any, kwargs: Mapping[str, Any]) -> Any:
        return encode_observation(env.reset(**bind_instance(env).reset.accept(kwargs)))

    async def reset_async(env: Any, kwargs: Mapping[str, Any]) -> Any:
        if isinstance(env, RemoteEnvironment):
            return await env.ask("reset", dict(kwargs), encode_observation)
        method = bind_instance(env).reset
        return encode_observation(await getattr(env, method.name)(**method.accept(kwargs)))

    def step(env: Any, action: Any) -> Any:
        return encode_observation(env.step(action))

    async def step_async(env: Any, action: Any) -> Any:
        if isinstance(env, RemoteEnvironment):
            return await env.ask("step", action, encode_observation)
        return encode_observation(await getattr(env, bind_instance(env).step.name)(action))

    def step_with(env: Any, step: StepInput) -> Any:
        return encode_observation(env.step(step.action, **bind_instance(env).step.accept(step.kwargs)))

    async def step_with_async(env: Any, step: StepInput) -> Any:
        if isinstance(env, RemoteEnvironment):
            return await env.ask("step_with", (step.action, dict(step.kwargs)), encode_observation)
        method = bind_instance(env).step
        observation = await getattr(env, method.name)(step.action, **method.accept(step.kwargs))
        return encode_observation(observation)

    def state(env: Any, _: Any) -> Any:
        return encode_state(read_state(env))

    async def state_async(env: RemoteEnvironment, _: Any) -> Any:
        return await env.ask("state", None, encode_state)

    return Operations(
        reset=Operation("reset", reset, reset_async),
        step=Operation("step", step, step_async, step_only_blocks, interrupt_tools),
        step_with=Operation(
            "step",
            step_with,
            step_with_async,
            lambda env, step: step_only_blocks(env, step.action),
            interrupt_tools,
        ),
        state=Operation("state", state, state_async),
    )


def step_only_blocks(env: Any, action: Any) -> bool:
    """Whether a step that could run on the event loop would have to leave it again for all its work."""
    if not bind_instance(env).step_is_twofold:
        return False
    try:
        return bool(env.only_blocks(action))
    except Exception:  # the step itself raises what is wrong
        return True


def interrupt_tools(env: Any) -> None:
    """End the tool that an environment is running, if any."""
    tools = getattr(env, "tools", None)
    if isinstance(tools, ToolSource):
        tools.interrupt()


def read_state(env: Any) -> Any:
    """Read an environment's state, a property in ours and a method in some older ones."""
    state = env.state
    return state() if inspect.ismethod(state) else state


def _construct(_: Any, factory: Callable[[], Any]) -> Any:
    env = factory()
    if env is None:
        raise TypeError("the environment factory returned None")
    return env


def _close(env: Any, _: Any) -> None:
    tools = tools_to_close(env)
    try:
        close = getattr(env, "close", None)
        if callable(close):
            close()
    finally:
        if tools is not None:  # an environment that is no `MCPEnvironment` does not know of them
            tools.close()


async def _close_async(env: Any, _: Any) -> None:
    tools = None if isinstance(env, RemoteEnvironment) else tools_to_close(env)
    try:
        await env.close()
    finally:
        if tools is not None:
            await run_blocking(tools.close)


def _call(env: Any, function: Callable[[Any], Any]) -> Any:
    return function(env)


def closes_at_once(env: Any) -> bool:
    """Whether `close` cannot hang: the environment has nothing to close, or only tools that no client is open for."""
    close = getattr(type(env), "close", Environment.close)
    attributes = getattr(env, "__dict__", {})
    if getattr(close, "closes_tools", False):
        tools = attributes.get("tools")
        return isinstance(tools, ToolSource) and tools.closes_at_once
    return close is Environment.close and "mcp_server" not in attributes


def _never(env: Any, _: Any) -> Any:
    raise AssertionError("this runs on the event loop")


async def _work(_: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


CONSTRUCT = Operation("construct", _construct)
CLOSE = Operation("close", _close, _close_async)
CALL = Operation("call", _call)
# Their argument does the work, with the environment at rest meanwhile: no other call of the session runs.
FORK = Operation("fork", _never, _work)
RESTORE = Operation("restore", _never, _work)
