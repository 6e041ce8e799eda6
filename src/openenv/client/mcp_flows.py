"""Tool requests as flows: JSON-RPC in `mcp` frames on the client's own socket, or steps on servers without them.

One socket carries tools, resets and steps, so that all of them meet the same session, which ends with the socket. A
call's progress comes in frames before its reply. Knows frames; must not know clients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import (
    ExecutionError,
    ProtocolError,
    RequestValidationError,
    SessionLost,
    ToolCallError,
    UnknownTypeError,
)
from ..protocol.client_sessions import Event
from ..protocol.jsonrpc import McpMethod
from ..tool_types import CallToolAction, ListToolsAction, Tool
from .flows import Flow, HangUp, Link, next_reply, request
from .mcp_replies import knows_no_tools, listed_observation, read_observation, read_result, read_tools, rpc_error

logger = logging.getLogger(__name__)

ProgressHandler = Callable[[float, float | None, str | None], object]
"""Called with progress, total and message."""

_GRACE_S = 1.0


class ToolRequests:
    """The tool requests of one client.

    Args:
        link: Its connection.
        reply_timeout_s: How long a reply, or a sign of progress, may take when a call names no limit.
        clock: Tells the time in seconds.
    """

    def __init__(self, link: Link, reply_timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._reply_timeout_s = reply_timeout_s
        self._clock = clock
        self._last_id = 0
        self._only_steps = False  # an older server, once it has shown to be one

    def list_tools(self, *, as_step: bool) -> Flow[list[Tool]]:
        """Ask for the tools.

        Args:
            as_step: Whether to ask by a step of the episode.
        """
        if as_step or self._only_steps:
            return (yield from self._list_by_step())
        reply = yield from self._rpc_or_refusal(McpMethod.TOOLS_LIST, {})
        if knows_no_tools(reply.get("error")):
            listed: list[Tool] = yield from self._instead(reply["error"], None, self._list_by_step())
            return listed
        tools = read_tools((yield from self._result(reply, None)).get("tools"))
        cursor = reply["result"].get("nextCursor")
        while isinstance(cursor, str):
            reply = yield from self._rpc(McpMethod.TOOLS_LIST, {"cursor": cursor})
            page = yield from self._result(reply, None)
            tools += read_tools(page.get("tools"))
            cursor = page.get("nextCursor") if page.get("nextCursor") != cursor else None
        return tools

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float | None,
        on_progress: ProgressHandler | None,
        as_step: bool,
    ) -> Flow[Any]:
        """Call a tool and return what it returned.

        Args:
            timeout_s: The limit of the call, which the server keeps; we wait a little longer for it to say so.
            on_progress: Told of the call's progress.
            as_step: Whether to call by a step of the episode; then there is no progress.
        """
        if as_step or self._only_steps:
            return (yield from self._call_by_step(name, arguments, timeout_s))
        params: dict[str, Any] = {"name": name, "arguments": arguments}
        if timeout_s is not None:
            params["timeout_s"] = timeout_s
        try:
            reply = yield from self._rpc_or_refusal(
                McpMethod.TOOLS_CALL, params, timeout_s=_patience(timeout_s), on_progress=on_progress
            )
        except ExecutionError as exc:  # an older server whose environment returned what cannot be sent
            raise ToolCallError(name, f"Tool '{name}' failed: {exc}") from exc
        if knows_no_tools(reply.get("error")):
            steps = self._call_by_step(name, arguments, timeout_s)
            return (yield from self._instead(reply["error"], name, steps))
        if "error" in reply:
            yield from self._raise(reply["error"], name)
        return read_result(name, reply.get("result"))

    # -- JSON-RPC -------------------------------------------------------------------------------------------------

    def _rpc_or_refusal(
        self,
        method: McpMethod,
        params: dict[str, Any],
        *,
        timeout_s: float | None = None,
        on_progress: ProgressHandler | None = None,
    ) -> Flow[dict[str, Any]]:
        """Ask; a server that has never heard of `mcp` frames refuses in the words of one that has."""
        try:
            return (yield from self._rpc(method, params, timeout_s=timeout_s, on_progress=on_progress))
        except UnknownTypeError as exc:
            return {"error": {"code": -32601, "message": str(exc)}}

    def _rpc(
        self,
        method: McpMethod,
        params: dict[str, Any],
        *,
        timeout_s: float | None = None,
        on_progress: ProgressHandler | None = None,
    ) -> Flow[dict[str, Any]]:
        """Ask, and return the reply, be it a result or an error."""
        self._last_id += 1
        request_id = self._last_id
        if on_progress is not None:
            params = {**params, "_meta": {"progressToken": request_id}}
        message = {"jsonrpc": "2.0", "id": request_id, "method": method.value, "params": params}
        deadline = None if timeout_s is None else self._clock() + timeout_s
        listen = None if on_progress is None else partial(_hear, on_progress)
        left_s = self._left(deadline)
        reply = yield from request(self._link, "mcp", message, left_s, listen=listen, events_count=deadline is None)
        while "method" in reply:  # v1 has no events
            try:
                _tell(on_progress, request_id, reply)
            except BaseException:  # an interrupt: the reply would be taken for that of the next request
                self._link.session.lose("a request was interrupted")
                yield HangUp()
                raise
            reply = yield from next_reply(self._link, "mcp", self._left(deadline))
        if reply.get("id") != request_id and not (reply.get("id") is None and "error" in reply):
            self._link.session.lose("the server answered another request")
            yield HangUp()
            raise ProtocolError(f"The server answered request {reply.get('id')!r} instead of {request_id}")
        return reply

    def _left(self, deadline: float | None) -> float | None:
        """How long to wait for the next message. Without a limit of its own, progress keeps a call going."""
        return self._reply_timeout_s if deadline is None else max(0.001, deadline - self._clock())

    def _result(self, reply: dict[str, Any], tool_name: str | None) -> Flow[dict[str, Any]]:
        if "error" in reply:
            yield from self._raise(reply["error"], tool_name)
        result = reply.get("result")
        if not isinstance(result, dict):
            raise ProtocolError(f"The server's list of tools is not one: {str(result)[:200]}")
        return result

    def _raise(self, error: Any, tool_name: str | None) -> Flow[None]:
        found = rpc_error(error, tool_name)
        if isinstance(found, SessionLost):
            self._link.session.lose(found.reason)
            yield HangUp()
        raise found

    # -- steps ----------------------------------------------------------------------------------------------------

    def _list_by_step(self) -> Flow[list[Tool]]:
        payload = yield from request(self._link, "step", {"type": ListToolsAction().type}, self._reply_timeout_s)
        return listed_observation(payload)

    def _call_by_step(self, name: str, arguments: Mapping[str, Any], timeout_s: float | None) -> Flow[Any]:
        action = CallToolAction(tool_name=name, arguments=dict(arguments))
        fields = {"type": action.type, "tool_name": name, "arguments": action.arguments}
        limit = self._reply_timeout_s if timeout_s is None else timeout_s
        try:
            payload = yield from request(self._link, "step", fields, limit)
        except ExecutionError as exc:
            raise ToolCallError(name, f"Tool '{name}' failed: {exc}") from exc
        observation = payload.get("observation")
        if isinstance(observation, Mapping) and "tool_name" in observation:
            return read_observation(observation, name)
        return observation  # the environment's own way to answer a tool call

    def _instead(self, refusal: Any, tool_name: str | None, steps: Flow[Any]) -> Flow[Any]:
        """Try steps. Where they are refused as well, there are no tools, and the first refusal says it best."""
        try:
            found = yield from steps
        except ToolCallError:
            self._only_steps = True
            raise
        except (RequestValidationError, UnknownTypeError, ExecutionError, ProtocolError) as exc:
            raise rpc_error(refusal, tool_name) from exc
        self._only_steps = True
        return found


def _patience(timeout_s: float | None) -> float | None:
    """How long to wait for a server that is to keep a limit: a little longer, so that the session survives it."""
    return None if timeout_s is None else timeout_s + _GRACE_S + min(4.0, timeout_s / 10)


def _tell(on_progress: ProgressHandler | None, request_id: int, notice: Mapping[str, Any]) -> None:
    """Pass on what is news of this call; a handler that raises does not end it."""
    params = notice.get("params")
    if on_progress is None or notice["method"] != "notifications/progress" or not isinstance(params, Mapping):
        return
    if params.get("progressToken") == request_id:
        _report(on_progress, params)


def _hear(on_progress: ProgressHandler, event: Event) -> None:
    """Pass on an event of v2."""
    if event.name == "progress":
        _report(on_progress, event.content)


def _report(on_progress: ProgressHandler, news: Mapping[str, Any]) -> None:
    if not isinstance(news.get("progress"), (int, float)):
        return
    try:
        on_progress(news["progress"], news.get("total"), news.get("message"))
    except Exception:
        logger.exception("on_progress raised")
