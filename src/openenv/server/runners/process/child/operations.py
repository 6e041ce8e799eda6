"""The operations that a server can request on an environment in a worker.

Each is an `Operation` on the worker's session, so it runs here as it would in a server: blocking code in the session's
thread, coroutines on the loop. Knows environments and tools; must not know messages.

    reset, step, step_with, state     the Gym operations, encoded here by the server's encoder
    method, mode, restore             plain calls
    tool, client                      tools, and FastMCP's client of the server behind them
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from openenv.env.binding import Encoder
from openenv.env.copies import restore_into
from openenv.env.tools.source import EVENTS, ToolEvents, ToolRequest, ToolSource, find_tools

from ....sessions.operations import Operation, StepInput, build_operations, interrupt_tools
from ..messages import unpack


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """The argument of an operation.

    Args:
        argument: The argument from the server.
        events: Receives the events of a running tool.
    """

    argument: Any
    events: ToolEvents | None = None


def operation_of(name: str, encode: Encoder) -> Operation:
    """Return the operation with a name."""
    return _gym(name, encode) if name in ("reset", "step", "step_with", "state") else _OTHERS[name]


def unencoded(value: Any) -> Any:
    """Return a value as it is: the encoder of requests without one."""
    return value


@functools.lru_cache(maxsize=64)
def _gym(name: str, encode: Encoder) -> Operation:
    plain: Operation = getattr(build_operations(encode, encode), name)
    in_loop, prefers_lane = plain.in_loop, plain.prefers_lane

    def argument(request: WorkerRequest) -> Any:
        return StepInput(*request.argument) if name == "step_with" else request.argument

    def run(env: Any, request: WorkerRequest) -> Any:
        with_events = EVENTS.set(request.events)
        try:
            return plain.in_lane(env, argument(request))
        finally:
            EVENTS.reset(with_events)

    async def run_async(env: Any, request: WorkerRequest) -> Any:
        assert in_loop is not None
        EVENTS.set(request.events)  # each coroutine runs in a new task, so other calls do not see it
        return await in_loop(env, argument(request))

    def prefers(env: Any, request: WorkerRequest) -> bool:
        return prefers_lane is not None and prefers_lane(env, argument(request))

    return Operation(plain.kind, run, None if in_loop is None else run_async, prefers, plain.interrupt)


def _method(env: Any, request: WorkerRequest) -> Any:
    """Call a method; collect the items of an iterator, which cannot be sent."""
    name, arguments, keywords = request.argument
    result = getattr(env, name)(*arguments, **keywords)
    return list(result) if isinstance(result, Iterator) else result


def _set_mode(env: Any, request: WorkerRequest) -> None:
    env._mode = request.argument


def tools_of(env: Any) -> ToolSource:
    """Return the tools of an environment."""
    tools = find_tools(env)
    if tools is None:
        raise RuntimeError("the environment no longer has tools; it had some when it was opened")
    return tools


def _tool_request(request: WorkerRequest) -> ToolRequest:
    name, arguments, timeout_s = request.argument
    return ToolRequest(name, arguments, timeout_s, request.events)


def _call_tool(env: Any, request: WorkerRequest) -> Any:
    return tools_of(env).call_blocking(_tool_request(request))


async def _call_tool_async(env: Any, request: WorkerRequest) -> Any:
    return await tools_of(env).call(_tool_request(request))


def _call_only_blocks(env: Any, request: WorkerRequest) -> bool:
    return tools_of(env).is_blocking(request.argument[0])


async def _ask_client(env: Any, request: WorkerRequest) -> Any:
    """Call a method of the FastMCP client for the environment's server."""
    name, arguments, keywords = request.argument

    def ask(client: Any) -> Awaitable[Any]:
        method: Callable[..., Awaitable[Any]] = getattr(client, name)
        return method(*arguments, **keywords)

    return await tools_of(env).ask_server(ask)


def _never(env: Any, request: WorkerRequest) -> Any:
    raise AssertionError("this runs on the event loop")


def _restore(env: Any, request: WorkerRequest) -> None:
    restore_into(env, unpack(request.argument))


_OTHERS: Final = {
    "restore": Operation("call", _restore),
    "method": Operation("call", _method),
    "mode": Operation("call", _set_mode),
    "tool": Operation("tool", _call_tool, _call_tool_async, _call_only_blocks, interrupt_tools),
    "client": Operation("tool", _never, _ask_client),
}


async def completed(begun: Any) -> Any:
    """Await the coroutine returned by a method, or all items of an asynchronous generator."""
    if inspect.isasyncgen(begun):
        return [item async for item in begun]
    return await begun
