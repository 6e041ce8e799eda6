"""Synchronous tools that FastMCP itself calls, made such that a cancelled call ends them.

FastMCP waits for the thread of a synchronous function whatever happens to the call. A coroutine in its place, of the
same signature, lets go at once and interrupts the function. Knows FastMCP's tools; must not know environments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from fastmcp import FastMCP
from fastmcp.tools.function_tool import FunctionTool

from .interrupt import Interrupted, Interruptible
from .threads import TOOL_THREADS

_MARK = "__openenv_blocking__"


def make_cancellable(server: Any) -> None:
    """Replace the synchronous functions behind a server's tools, those of servers mounted in it included."""
    for tool in _function_tools(server, set()):
        if getattr(tool, "run_in_thread", True):  # else it asks for the loop's own thread
            tool.fn = cancellable(tool.fn)


def cancellable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a coroutine function that does the same in a thread; asynchronous functions stay as they are."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return function

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        running = Interruptible()
        try:
            value = await TOOL_THREADS.run(lambda: running.run(lambda: _completed(function(*args, **kwargs))))
        except Interrupted:
            raise RuntimeError("the tool was interrupted") from None
        except BaseException:
            running.stop()
            raise
        return await value if inspect.isawaitable(value) else value

    setattr(call, _MARK, function)
    return call


def blocking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that `cancellable` was given; any other is returned as it is."""
    original: Callable[..., Any] = getattr(function, _MARK, function)
    return original


def _completed(value: Any) -> Any:
    """A generator's body is part of the call."""
    return list(value) if inspect.isgenerator(value) else value


def _function_tools(server: Any, seen: set[int]) -> Iterator[FunctionTool]:
    if id(server) in seen:
        return
    seen.add(id(server))
    for provider in server.providers:
        while (inner := getattr(provider, "_inner", None)) is not None:  # a mount under a prefix
            provider = inner
        mounted = getattr(provider, "server", None)
        if isinstance(mounted, FastMCP):
            yield from _function_tools(mounted, seen)
        for component in list(getattr(provider, "_components", {}).values()):
            yield from _of(component)


def _of(component: Any) -> Iterator[FunctionTool]:
    """The function behind a tool, also behind those that were made from another tool."""
    while component is not None:
        if isinstance(component, FunctionTool):
            yield component
        component = getattr(component, "parent_tool", None)
