"""`ToolRegistry`: every tool of one environment, for `step` and for MCP alike.

Holds FastMCP's tools and the tools of a single mode; finds, describes and calls them. Errors differ by exception
class, never by their text. Knows tools; must not know its callers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastmcp.exceptions import ToolError
from fastmcp.tools.function_tool import FunctionTool

from openenv.errors import ToolCallError, ToolNotFoundError, ToolTimeout, ToolTransportError, message_of
from openenv.protocol.tool_messages import RESERVED_TOOL_NAMES, Tool

from ..binding import run_blocking
from .execution import TOOL_LOOP, WATCHDOG, Interrupted, Interruptible, blocking, functions_of
from .fastmcp_caches import forget_functions, share_descriptions
from .fastmcp_client import ServerConnection
from .function_tools import Arguments, EnvContext, PreparedTool, ServerTools, is_unguarded, wraps_result
from .source import ToolOutcome, ToolRequest, ToolSource

logger = logging.getLogger(__name__)

_USERS = "_openenv_users"  # the attribute of a server that says which registries use it


class ToolRegistry(ToolSource):
    """The tools of one environment.

    Args:
        server: The FastMCP server that holds the tools of both modes.
        mode: Returns the active mode, or None if it is unknown.
    """

    def __init__(self, server: Any, *, mode: Callable[[], str | None] = lambda: None) -> None:
        share_descriptions()
        self.server = server
        self._mode = mode
        self._of_server = ServerTools(server)
        self._of_mode: dict[str, dict[str, PreparedTool]] = {}
        self._connection = ServerConnection(server)
        self._session_id = uuid.uuid4().hex
        self._is_closed = False
        self._was_called_by_server = False
        self._stop: Callable[[], Any] | None = None
        self._blocking: dict[str, bool] = {}
        self._users: set[int] = vars(server).setdefault(_USERS, set()) if hasattr(server, "__dict__") else set()
        self._users.add(id(self))

    # -- listing --------------------------------------------------------------------------------------------------

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
        """List the tools, from synchronous code."""
        return TOOL_LOOP.run(self.list_tools())

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the tools' functions by name, for code that calls them; asynchronous ones as blocking functions."""
        local = self._of_server.local_tools()
        functions = {tool.name: blocking(tool.fn) for tool in local if isinstance(tool, FunctionTool)}
        for name, of_mode in self._of_mode.items():
            functions.pop(name, None)
            if (prepared := of_mode.get(self._mode() or "")) is not None:
                functions[name] = prepared.tool.fn
        return {name: _callable(function) for name, function in functions.items()}

    # -- calling --------------------------------------------------------------------------------------------------

    async def call(self, request: ToolRequest) -> ToolOutcome:
        """Call a tool; asynchronous tools run on this loop, others where blocking code runs.

        Raises:
            ToolNotFoundError: No such tool, or not in this mode.
            ToolArgumentsError: The arguments do not fit.
            ToolTimeout: It did not return in time.
            ToolCallError: It raised.
        """
        call = self._prepare(request)
        if call.work is not None:
            return await _within(call.limit, call.name, call.work)
        running = Interruptible()
        try:
            # `run` sets a watchdog too: a tool that holds the GIL keeps this loop from seeing that the time is up.
            return await _within(call.limit, call.name, run_blocking(lambda: call.run(running)))
        except BaseException:
            running.stop()
            raise

    def call_blocking(self, request: ToolRequest) -> ToolOutcome:
        """Call a tool from synchronous code; raises as `call` does."""
        call = self._prepare(request)
        if call.work is not None:
            return self._wait(call.limit, call.name, call.work)
        running = Interruptible()
        self._stop = running.stop
        try:
            return call.run(running)
        finally:
            self._stop = None

    def is_blocking(self, name: str) -> bool:
        """Return whether a call awaits nothing: the tool is a plain function of the environment.

        Looked up once per name. A tool that is replaced by one of another kind still runs, but not in the best place.
        """
        known = self._blocking.get(name)
        if known is None:
            try:
                tool = self._find(name)
            except ToolCallError:
                return True  # the call fails at once, so it may run anywhere
            known = tool is not None and tool.is_plain and not tool.is_async and self._is_own(tool)
            self._blocking[name] = known
        return known

    def interrupt(self) -> None:
        """Stop the running blocking call, as far as that is possible."""
        stop = self._stop
        if stop is not None:
            stop()

    async def ask_server(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run a coroutine with FastMCP's client of the server: resources, prompts, completions."""
        return await self._connection.use(work)

    def close(self) -> None:
        """Close the connection to the server, and leave no trace of the tools in FastMCP; calls fail from now on."""
        if self._is_closed:
            return
        self._is_closed = True
        self._connection.close()
        self._users.discard(id(self))
        tools = [tool for of_mode in self._of_mode.values() for tool in of_mode.values()]
        functions = []
        if not self._users:  # otherwise other environments still use the server's tools
            tools += self._of_server.prepared()
            functions = functions_of(self.server)
        functions += [function for tool in tools for function in tool.functions()]
        forget_functions(functions, with_wrappers=self._was_called_by_server)

    @property
    def closes_at_once(self) -> bool:
        """Whether no call has opened the connection to the server."""
        return not self._connection.is_in_use

    # -- inside ---------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> PreparedTool | None:
        """Return a function tool, or None for a tool that only the server itself can find."""
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
        """Return whether the tool can be called directly, without the server."""
        return tool.name in self._of_mode or (self._of_server.is_plain and is_unguarded(tool))

    def _prepare(self, request: ToolRequest) -> _ToolCall:
        """Check a call and choose how it runs.

        From slow to fast: through FastMCP's client (middleware, mounted servers, guarded tools), by FastMCP's own
        injection of dependencies, as a coroutine, as a plain function.
        """
        name = request.name
        tool = self._find(name)
        limits = (request.timeout_s, None if tool is None else tool.timeout_s)
        limit = min((limit for limit in limits if limit is not None), default=None)
        if tool is None or not self._is_own(tool):
            self._was_called_by_server = True
            return _ToolCall(name, limit, work=self._call_through_server(request, tool))
        checked = tool.check(request.arguments)
        context = EnvContext(self.server, self._session_id, request.events)
        if not tool.is_plain:
            self._was_called_by_server = True
            return _ToolCall(name, limit, work=_guarded(name, tool.run_injected(request.arguments, context)))
        if tool.is_async:
            return _ToolCall(name, limit, work=_run_async(tool, checked, context))
        return _ToolCall(name, limit, function=partial(tool.run, checked, context), context=context)

    def _wait(self, limit: float | None, name: str, work: Coroutine[Any, Any, ToolOutcome]) -> ToolOutcome:
        """Wait in this thread for a call on the tool loop; an interruption cancels it."""
        if TOOL_LOOP.is_current:
            return TOOL_LOOP.run(work)  # raises: the loop would wait for itself
        waiting = TOOL_LOOP.submit(_within(limit, name, work))
        self._stop = waiting.cancel
        try:
            return waiting.result()
        except concurrent.futures.CancelledError:
            raise _interrupted(name, None) from None
        finally:
            self._stop = None

    async def _call_through_server(self, request: ToolRequest, tool: PreparedTool | None) -> ToolOutcome:
        own_limit = None
        if tool is not None:
            tool.check(request.arguments)
            wraps, own_limit = tool.wraps_result, tool.timeout_s
        else:
            schema = next((schema for schema in await self.describe() if schema["name"] == request.name), None)
            if schema is None:
                raise ToolNotFoundError(request.name)
            wraps = wraps_result(schema.get("outputSchema"))
        return await self._connection.call(request, wraps_result=wraps, limit_s=own_limit)


@dataclass(slots=True)
class _ToolCall:
    """One call, checked and ready: a coroutine for a loop (`work`), or else a plain function for a thread."""

    name: str
    limit: float | None
    work: Coroutine[Any, Any, ToolOutcome] | None = None
    function: Callable[[], ToolOutcome] | None = None
    context: EnvContext | None = None

    def run(self, running: Interruptible) -> ToolOutcome:
        """Run the function in this thread, and interrupt it at its limit; an exception is the tool's failure."""
        assert self.function is not None
        assert self.context is not None
        watched = nullcontext() if self.limit is None else WATCHDOG.limit(self.limit, running.stop)
        try:
            with watched, self.context:
                return running.run(self.function)
        except Interrupted:
            raise _interrupted(self.name, self.limit) from None
        except Exception as exc:
            if running.is_stopped:
                raise _interrupted(self.name, self.limit) from exc
            raise _tool_failure(self.name, exc) from exc


def check_names(names: Any) -> None:
    """Refuse tools named like a method of an environment.

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


def _callable(function: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.iscoroutinefunction(function):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return TOOL_LOOP.run(function(*args, **kwargs))

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call


def _interrupted(name: str, limit: float | None) -> ToolTimeout:
    return ToolTimeout(name, f"Tool '{name}' was interrupted" if limit is None else None, timeout_s=limit)


async def _run_async(tool: PreparedTool, checked: Arguments, context: EnvContext) -> ToolOutcome:
    with context:
        return await _guarded(tool.name, tool.run_async(checked, context))


async def _guarded(name: str, work: Awaitable[ToolOutcome]) -> ToolOutcome:
    """Turn any exception of an asynchronous tool into the tool's failure."""
    try:
        return await work
    except Exception as exc:
        raise _tool_failure(name, exc) from exc


def _tool_failure(name: str, exc: Exception) -> ToolCallError:
    """Build the error that callers get for a tool that raised; the traceback goes to the log only."""
    if not isinstance(exc, ToolError):  # FastMCP's class for messages that are meant for the agent
        logger.info("the tool %s failed", name, exc_info=exc)
    return ToolCallError(name, message_of(exc))


async def _within(limit: float | None, name: str, work: Coroutine[Any, Any, ToolOutcome]) -> ToolOutcome:
    """Wait for a call up to its limit.

    Not `asyncio.wait_for`: it waits for the cancelled task, and a tool may refuse to be cancelled.
    """
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
