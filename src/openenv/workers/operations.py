"""What a server can ask of an environment in a worker.

Each is an `Operation` on the worker's own session, so it runs there as it would in a server: blocking code in the
session's thread, coroutines on the loop. Knows environments and tools; must not know sockets.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ..env.tools.source import EVENTS, ToolEvents, ToolSource
from ..sessions.operations import Encoder, Operation, StepInput, build_operations, interrupt_tools


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for.

    Args:
        argument: The operation's own.
        encode: Applied to the result, where the environment's code runs.
        events: Where a running tool tells its progress.
    """

    argument: Any
    encode: Encoder
    events: ToolEvents | None = None


def same(value: Any) -> Any:
    """Leave a result as it is."""
    return value


def operation(name: str, encode: Encoder | None) -> Operation:
    """Return an operation by its name."""
    return _gym(name, encode or same) if name in ("reset", "step", "step_with", "state") else _OTHERS[name]


@functools.lru_cache(maxsize=64)
def _gym(name: str, encode: Encoder) -> Operation:
    plain: Operation = getattr(build_operations(encode, encode), name)
    in_loop, prefers_lane = plain.in_loop, plain.prefers_lane

    def run(env: Any, asked: Asked) -> Any:
        with_events = EVENTS.set(asked.events)
        try:
            return plain.in_lane(env, _argument(name, asked))
        finally:
            EVENTS.reset(with_events)

    async def run_async(env: Any, asked: Asked) -> Any:
        assert in_loop is not None
        EVENTS.set(asked.events)  # a task of its own: nobody else sees it
        return await in_loop(env, _argument(name, asked))

    def prefers(env: Any, asked: Asked) -> bool:
        return prefers_lane is not None and prefers_lane(env, _argument(name, asked))

    return Operation(plain.kind, run, None if in_loop is None else run_async, prefers, plain.interrupt)


def _argument(name: str, asked: Asked) -> Any:
    return StepInput(*asked.argument) if name == "step_with" else asked.argument


# -- anything else that an environment has ------------------------------------------------------------------------


def _method(env: Any, asked: Asked) -> Any:
    """Call a method; what is made while it is read is read here."""
    name, arguments, keywords = asked.argument
    found = getattr(env, name)(*arguments, **keywords)
    return list(found) if isinstance(found, Iterator) else found


def _set_mode(env: Any, asked: Asked) -> None:
    env._mode = asked.argument


# -- tools --------------------------------------------------------------------------------------------------------

_OF_SERVERS: WeakKeyDictionary[Any, ToolSource] = WeakKeyDictionary()


def tools_of(env: Any) -> ToolSource | None:
    """Return the tools of an environment, its own or those of the FastMCP server that it brings."""
    own = getattr(env, "tools", None)
    if isinstance(own, ToolSource):
        return own
    server = getattr(env, "mcp_server", None)
    if server is None or not hasattr(server, "local_provider"):
        return None
    registry = _OF_SERVERS.get(server)
    if registry is None:
        from ..env.tools.tool_registry import ToolRegistry  # loads FastMCP, which this environment has loaded already

        registry = _OF_SERVERS[server] = ToolRegistry(server)
    return registry


def _tools(env: Any) -> ToolSource:
    tools = tools_of(env)
    if tools is None:
        raise RuntimeError("the environment has no tools any more")
    return tools


def _call_tool(env: Any, asked: Asked) -> Any:
    name, arguments, timeout_s = asked.argument
    return _tools(env).call_blocking(name, arguments, timeout_s=timeout_s, events=asked.events)


async def _call_tool_async(env: Any, asked: Asked) -> Any:
    name, arguments, timeout_s = asked.argument
    return await _tools(env).call(name, arguments, timeout_s=timeout_s, events=asked.events)


def _call_only_blocks(env: Any, asked: Asked) -> bool:
    return _tools(env).is_blocking(asked.argument[0])


async def describe_tools(env: Any) -> Any:
    """List the tools; needs no turn: a long call must not keep a client from looking."""
    return await _tools(env).describe()


async def _ask_client(env: Any, asked: Asked) -> Any:
    """Call a method of FastMCP's client of the server behind the tools."""
    name, arguments, keywords = asked.argument

    def ask(client: Any) -> Awaitable[Any]:
        method: Callable[..., Awaitable[Any]] = getattr(client, name)
        return method(*arguments, **keywords)

    return await _tools(env).ask_server(ask)


def _never(env: Any, asked: Asked) -> Any:
    raise AssertionError("this runs on the event loop")


_OTHERS = {
    "method": Operation("call", _method),
    "mode": Operation("call", _set_mode),
    "tool": Operation("tool", _call_tool, _call_tool_async, _call_only_blocks, interrupt_tools),
    "client": Operation("tool", _never, _ask_client),
}


async def completed(found: Any) -> Any:
    """Wait for what a method has begun: a coroutine, or all that an asynchronous generator has to give."""
    if inspect.isasyncgen(found):
        return [item async for item in found]
    return await found if inspect.isawaitable(found) else found
