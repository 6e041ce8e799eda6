"""A FastMCP server's own in-memory client, kept open for one environment on the shared tool loop.

For everything that a direct call cannot do: middleware, mounted servers and proxies, lifespans, resources and prompts.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastmcp import Client
from fastmcp.exceptions import ToolError as FastMcpToolError

from openenv.errors import ToolCallError, ToolTimeout, ToolTransportError, message_of

from .execution import TOOL_LOOP, make_cancellable
from .source import ToolEvents, ToolOutcome, ToolRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")
_CLOSE_S = 5.0
_MARGIN_S = 0.5


def new_client(server: Any, **handlers: Any) -> Any:
    """Make FastMCP's client of a server in this process, of the MCP era that has sessions, so that state lasts."""
    if "mode" in inspect.signature(Client.__init__).parameters:
        handlers["mode"] = "legacy"
    return Client(server, **handlers)


class ServerConnection:
    """One client, opened by its first use. Its work runs on the tool loop; any thread and any loop may use it."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._client: Any = None
        self._opening: asyncio.Lock | None = None
        self._events: ToolEvents | None = None
        self._is_closed = False

    async def call(self, request: ToolRequest, *, wraps_result: bool, limit_s: float | None = None) -> ToolOutcome:
        """Call a tool. Cancelling the wait cancels the call.

        Args:
            request: The call.
            wraps_result: Whether the tool's schema wraps plain values as `{"result": value}`.
            limit_s: The tool's own limit, at which the server ends the call.

        Raises:
            ToolTimeout: The server ended the call.
            ToolCallError: The tool raised.
            ToolTransportError: FastMCP's client failed.
        """
        begun = time.monotonic()
        work = self._with_client(lambda client: self._call(client, request, wraps_result))
        future = TOOL_LOOP.submit(_settled(work))
        try:
            settled = await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            # Not near the moment when the server itself ends the call: both at once can end MCP 1's connection.
            if limit_s is None or time.monotonic() - begun < limit_s - _MARGIN_S:
                future.cancel()
            raise
        if isinstance(settled, ToolOutcome):
            return settled
        # The server gives its reason in words only; the clock is reliable.
        if limit_s is not None and time.monotonic() - begun >= limit_s:
            raise ToolTimeout(request.name, timeout_s=limit_s) from settled
        raise settled

    async def use(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run a coroutine with the open client, on the tool loop, and wait for it on this one."""
        future = TOOL_LOOP.submit(self._with_client(work))
        try:
            return await asyncio.wrap_future(future)
        finally:
            future.cancel()

    @property
    def is_in_use(self) -> bool:
        """Whether a client was opened, or is being opened."""
        return self._opening is not None

    def close(self) -> None:
        """Close the client for good, from any thread."""
        self._is_closed = True
        if not self.is_in_use:
            return
        closing = TOOL_LOOP.submit(self._close())
        if TOOL_LOOP.is_current:
            return
        try:
            closing.result(_CLOSE_S)
        except Exception:
            logger.exception("the MCP session of an environment did not close")

    # -- on the tool loop -----------------------------------------------------------------------------------------

    async def _with_client(self, work: Callable[[Any], Awaitable[T]]) -> T:
        return await work(await self._open())

    async def _open(self) -> Any:
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._is_closed:
                raise ToolTransportError("", "the environment is closed")
            if self._client is not None and not self._client.is_connected():  # the server's side has died
                await self._leave()
            if self._client is None:
                client = new_client(self._server, log_handler=self._on_log)
                try:
                    await client.__aenter__()
                except Exception as exc:
                    raise ToolTransportError("", f"the MCP server could not be started: {message_of(exc)}") from exc
                self._client = client
        return self._client

    async def _close(self) -> None:
        assert self._opening is not None
        async with self._opening:  # waits for an opening in progress
            await self._leave()

    async def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(None, None, None)

    async def _call(self, client: Any, request: ToolRequest, wraps_result: bool) -> ToolOutcome:
        make_cancellable(self._server)
        name, self._events = request.name, request.events
        handlers = {} if request.events is None else {"progress_handler": _on_progress(request.events)}
        request_id = getattr(client.session, "_request_id", None)  # of the call, in MCP 1
        try:
            result = await client.call_tool(name, dict(request.arguments), **handlers)
        except asyncio.CancelledError:
            if request_id is not None:  # MCP 2 sends the cancellation itself
                await client.cancel(request_id, "cancelled")
            raise
        except FastMcpToolError as exc:
            raise ToolCallError(name, message_of(exc)) from exc
        except Exception as exc:
            raise ToolTransportError(name, message_of(exc)) from exc
        finally:
            self._events = None
        return ToolOutcome.from_result(result, wraps_result=wraps_result)

    async def _on_log(self, message: Any) -> None:
        if self._events is not None:
            self._events.log(str(message.level), message.logger, message.data)


async def _settled(work: Awaitable[ToolOutcome]) -> ToolOutcome | Exception:
    """Return the exception instead of raising it: the waiting coroutine may be gone."""
    try:
        return await work
    except Exception as exc:
        return exc


def _on_progress(events: ToolEvents) -> Callable[[float, float | None, str | None], Awaitable[None]]:
    async def report(progress: float, total: float | None, message: str | None) -> None:
        events.progress(progress, total, message)

    return report
