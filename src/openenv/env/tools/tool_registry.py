"""`ToolRegistry`: every tool of one environment, for `step` and for MCP alike.

Holds FastMCP's tools and those that exist in one mode only; finds, describes and calls them. The active mode is the
environment's. Errors are told apart by exception class, never by their words. Knows tools; must not know who calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext
from typing import Any

from fastmcp.exceptions import ToolError
from fastmcp.tools.function_tool import FunctionTool

from ...errors import ToolCallError, ToolNotFoundError, ToolTimeout, ToolTransportError, message_of
from ...tool_types import RESERVED_TOOL_NAMES, Tool
from ..binding import run_blocking
from .execution import TOOL_LOOP, WATCHDOG, Interrupted, Interruptible, blocking
from .fastmcp_client import ServerConnection
from .function_tools import Arguments, EnvContext, PreparedTool, ServerTools, is_unguarded, wraps_result
from .source import EVENTS, ToolEvents, ToolOutcome, ToolSource

logger = logging.getLogger(__name__)


class ToolRegistry(ToolSource):
    """The tools of one environment.

    Args:
        server: The FastMCP server that holds the tools of both modes.
        mode: Tells the active mode, or None where it is unknown.
    """

    def __init__(self, server: Any, *, mode: Callable[[], str | None] = lambda: None) -> None:
        self.server = server
        self._mode = mode
        self._of_server = ServerTools(server)
        self._of_mode: dict[str, dict[str, PreparedTool]] = {}
        self._connection = ServerConnection(server)
        self._session_id = uuid.uuid4().hex
        self._is_closed = False
        self._stop: Callable[[], Any] | None = None
        self._blocking: dict[str, bool] = {}

    # -- what there is --------------------------------------------------------------------------------------------

    def check_names(self) -> None:
        """Refuse tools that take the name of something an environment has.

        Raises:
            ValueError: A name is reserved.
        """
        check_names(tool.name for tool in self._of_server.local_tools())

    def add(self, function: Callable[..., Any], mode: str) -> None:
        """Add a tool that exists in one mode only.

        Raises:
            ValueError: The name is reserved.
        """
        tool = PreparedTool(FunctionTool.from_function(function))
        check_names([tool.name])
        self._of_mode.setdefault(tool.name, {})[mode] = tool

    async def describe(self) -> list[dict[str, Any]]:
        """List the tools as MCP's `tools/list` does, nulls included."""
        tools = {tool.name: tool for tool in await self._of_server.all_tools()}
        for name, of_mode in self._of_mode.items():
            if (prepared := of_mode.get(self._mode() or "")) is not None:
                tools[name] = prepared.tool
            else:
                tools.pop(name, None)
        return [tool.to_mcp_tool().model_dump(mode="json", by_alias=True) for tool in tools.values()]

    async def list_tools(self) -> list[Tool]:
        """List the tools as observations carry them."""
        return [_tool(described) for described in await self.describe()]

    def list_tools_blocking(self) -> list[Tool]:
        """The same for synchronous code."""
        return TOOL_LOOP.run(self.list_tools())

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the tools' functions by name, for code that calls them; coroutines are made callable as they are."""
        local = self._of_server.local_tools()
        found = {tool.name: blocking(tool.fn) for tool in local if isinstance(tool, FunctionTool)}
        for name, of_mode in self._of_mode.items():
            found.pop(name, None)
            if (prepared := of_mode.get(self._mode() or "")) is not None:
                found[name] = prepared.tool.fn
        return {name: _callable(function) for name, function in found.items()}

    # -- calling --------------------------------------------------------------------------------------------------

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        events: ToolEvents | None = None,
    ) -> ToolOutcome:
        """Call a tool; asynchronous ones run on this loop, others where blocking code runs.

        Raises:
            ToolNotFoundError: No such tool, or not in this mode.
            ToolArgumentsError: The arguments do not fit.
            ToolTimeout: It did not return in time.
            ToolCallError: It raised.
        """
        events = events or EVENTS.get()
        tool = self._find(name)
        limit = _shorter(timeout_s, tool.timeout_s if tool is not None else None)
        if tool is None or not self._is_own(tool):
            return await _within(limit, name, self._call_through_server(name, arguments, tool, events))
        checked = tool.check(arguments)
        if not tool.is_plain:
            return await _within(limit, name, _guarded(name, self._run_injected(tool, arguments, events)))
        context = EnvContext(self.server, self._session_id, events)
        if tool.is_async:
            return await _within(limit, name, _run_async(tool, checked, context))
        running = Interruptible()
        try:
            # The watchdog stops it where it keeps this very loop from seeing that its time is up.
            return await _within(limit, name, run_blocking(lambda: _run(tool, checked, context, running, limit)))
        except BaseException:
            running.stop()
            raise

    def is_blocking(self, name: str) -> bool:
        """Whether a call would do nothing but block: a plain function of the environment's own.

        Found once per name: a tool that changes its nature runs as it should all the same, if not where it is best.
        """
        known = self._blocking.get(name)
        if known is None:
            try:
                tool = self._find(name)
            except ToolCallError:
                return True  # says so at once, wherever it is asked
            known = tool is not None and tool.is_plain and not tool.is_async and self._is_own(tool)
            self._blocking[name] = known
        return known

    def interrupt(self) -> None:
        """End the blocking call that is under way, as far as that is possible."""
        stop = self._stop
        if stop is not None:
            stop()

    def call_blocking(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        events: ToolEvents | None = None,
    ) -> ToolOutcome:
        """Call a tool from synchronous code; raises as `call` does."""
        events = events or EVENTS.get()
        tool = self._find(name)
        limit = _shorter(timeout_s, tool.timeout_s if tool is not None else None)
        if tool is None or not self._is_own(tool):
            return self._wait(limit, name, self._call_through_server(name, arguments, tool, events))
        checked = tool.check(arguments)
        if not tool.is_plain:
            return self._wait(limit, name, _guarded(name, self._run_injected(tool, arguments, events)))
        context = EnvContext(self.server, self._session_id, events)
        if tool.is_async:
            return self._wait(limit, name, _run_async(tool, checked, context))
        running = Interruptible()
        self._stop = running.stop
        try:
            return _run(tool, checked, context, running, limit)
        finally:
            self._stop = None

    async def ask_server(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Do something with FastMCP's client of the server: resources, prompts, completions."""
        return await self._connection.use(work)

    def close(self) -> None:
        """Close the way to the server; no tool can be called any more."""
        self._is_closed = True
        self._connection.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> PreparedTool | None:
        """Return a function tool; None stands for one that only the server itself can find."""
        if self._is_closed:
            raise ToolTransportError(name, "the environment is closed")
        of_mode = self._of_mode.get(name)
        if of_mode is not None:
            prepared = of_mode.get(self._mode() or "")
            if prepared is None:
                raise ToolNotFoundError(name)
            return prepared
        prepared = self._of_server.find(name)
        if prepared is None and self._of_server.is_plain and not self._of_server.has(name):
            raise ToolNotFoundError(name)
        return prepared

    def _is_own(self, tool: PreparedTool) -> bool:
        """Whether the tool may be run here, with nothing of the server's in between."""
        return tool.name in self._of_mode or (self._of_server.is_plain and is_unguarded(tool))

    def _wait(self, limit: float | None, name: str, work: Coroutine[Any, Any, ToolOutcome]) -> ToolOutcome:
        """Wait in this thread for a call on the tool loop; an interruption cancels it."""
        if TOOL_LOOP.is_current:
            return TOOL_LOOP.run(work)  # which refuses: it would wait for itself
        waiting = TOOL_LOOP.submit(_within(limit, name, work))
        self._stop = waiting.cancel
        try:
            return waiting.result()
        except concurrent.futures.CancelledError:
            raise _stopped(name, None) from None
        finally:
            self._stop = None

    async def _run_injected(
        self, tool: PreparedTool, arguments: Mapping[str, Any], events: ToolEvents | None
    ) -> ToolOutcome:
        async with EnvContext(self.server, self._session_id, events):
            return await tool.run_injected(arguments)

    async def _call_through_server(
        self, name: str, arguments: Mapping[str, Any], tool: PreparedTool | None, events: ToolEvents | None
    ) -> ToolOutcome:
        own_limit = None
        if tool is not None:
            tool.check(arguments)
            wraps, own_limit = tool.wraps_result, tool.timeout_s
        else:
            schema = next((found for found in await self.describe() if found["name"] == name), None)
            if schema is None:
                raise ToolNotFoundError(name)
            wraps = wraps_result(schema.get("outputSchema"))
        return await self._connection.call(name, arguments, events=events, wraps_result=wraps, limit_s=own_limit)


def check_names(names: Any) -> None:
    """Refuse reserved names.

    Raises:
        ValueError: A name is reserved.
    """
    taken = sorted(RESERVED_TOOL_NAMES.intersection(names))
    if taken:
        raise ValueError(f"Tool names {taken} are reserved: an environment has methods of that name")


def _tool(described: Mapping[str, Any]) -> Tool:
    return Tool(
        name=described["name"],
        description=described.get("description") or "",
        input_schema=described.get("inputSchema") or {},
    )


def _shorter(one: float | None, other: float | None) -> float | None:
    limits = [limit for limit in (one, other) if limit is not None]
    return min(limits, default=None)


def _callable(function: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.iscoroutinefunction(function):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return TOOL_LOOP.run(function(*args, **kwargs))

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call


def _run(
    tool: PreparedTool, checked: Arguments, context: EnvContext, running: Interruptible, limit: float | None
) -> ToolOutcome:
    """Run a synchronous tool in this thread, and interrupt it when its time is up; what it raises is its failure."""
    watched = nullcontext() if limit is None else WATCHDOG.limit(limit, running.stop)
    try:
        with watched, context:
            return running.run(lambda: tool.run(checked, context))
    except Interrupted:
        raise _stopped(tool.name, limit) from None
    except Exception as exc:
        if running.is_stopped:
            raise _stopped(tool.name, limit) from exc
        raise _failed(tool.name, exc) from exc


def _stopped(name: str, limit: float | None) -> ToolTimeout:
    return ToolTimeout(name, f"Tool '{name}' was interrupted" if limit is None else None, timeout_s=limit)


async def _run_async(tool: PreparedTool, checked: Arguments, context: EnvContext) -> ToolOutcome:
    """Run an asynchronous tool on this loop; whatever it raises is its failure."""
    with context:
        return await _guarded(tool.name, tool.run_async(checked, context))


async def _guarded(name: str, work: Awaitable[ToolOutcome]) -> ToolOutcome:
    """Whatever an asynchronous tool raises is the tool's failure."""
    try:
        return await work
    except Exception as exc:
        raise _failed(name, exc) from exc


def _failed(name: str, exc: Exception) -> ToolCallError:
    """Make what callers are told of a tool that raised; its traceback is for whoever reads the log."""
    if not isinstance(exc, ToolError):  # FastMCP's way of telling the agent something on purpose
        logger.info("the tool %s failed", name, exc_info=exc)
    return ToolCallError(name, message_of(exc))


async def _within(limit: float | None, name: str, work: Coroutine[Any, Any, ToolOutcome]) -> ToolOutcome:
    """Wait for a call as long as it may take. One that does not let itself be cancelled is not waited for."""
    if limit is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=limit)
    except BaseException:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        raise ToolTimeout(name, timeout_s=limit)
    return task.result()
