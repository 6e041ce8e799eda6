"""Clients for environments whose actions are tools, and their blocking twins.

Tool requests are JSON-RPC in `mcp` frames on the client's own connection, or steps on servers without them; so tools,
resets and steps meet the same session. A call's progress comes in frames before its reply. Knows tool models and flows;
must not know how a server runs tools.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from math import isfinite
from typing import Any

from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from openenv.errors import (
    ExecutionError,
    OpenEnvError,
    ProtocolError,
    RequestValidationError,
    ServerError,
    SessionLost,
    ToolArgumentsError,
    ToolCallError,
    ToolNotFoundError,
    ToolTimeout,
    ToolTransportError,
    UnknownTypeError,
)
from openenv.protocol.client_sessions import Event, error_from_frame
from openenv.protocol.jsonrpc import JsonRpcErrorCode, McpMethod
from openenv.protocol.tool_messages import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from openenv.types import Observation, State, StepResult

from .env_client import EnvClient, SyncEnvClient
from .flows import ClientRequest, Flow, HangUp, next_reply, request

logger = logging.getLogger(__name__)

ProgressHandler = Callable[[float, float | None, str | None], object]
"""Called with progress, total and message."""

_GRACE_S = 1.0


# -- what servers answer, of this release and of older ones ---------------------------------------------------------

_CLASSES: Mapping[str, type[ToolCallError]] = {
    cls.error_type: cls
    for cls in (ToolCallError, ToolArgumentsError, ToolTransportError, ToolNotFoundError, ToolTimeout)
}
_RESULT_KEYS = frozenset({"content", "data", "is_error"})
_OBSERVATION_KEYS = frozenset({"tool_name", "result", "error", "done"})
# What older servers say; they name no type.
_UNKNOWN = re.compile(r"Unknown tool\b|Tool '[^']*' not found", re.IGNORECASE)
_MISFIT = re.compile(r"\d+ validation errors? for call\[")
_NO_TOOLS = "does not support MCP"


def read_tools(items: Any) -> list[Tool]:
    """Read a list of tools; a tool may be without a description.

    Raises:
        ProtocolError: It is not one.
    """
    if not isinstance(items, list):
        raise ProtocolError(f"The server's list of tools is not a list: {str(items)[:200]}")
    return [_tool(item) for item in items]


def _tool(item: Any) -> Tool:
    if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
        raise ProtocolError(f"The server lists a tool without a name: {str(item)[:200]}")
    schema = item.get("input_schema", item.get("inputSchema"))
    return Tool(
        name=item["name"],
        description=str(item.get("description") or ""),
        input_schema=dict(schema) if isinstance(schema, Mapping) else {},
    )


def read_result(name: str, result: Any) -> Any:
    """Return a tool's result: the data of a FastMCP result, or else its content; other results as they are.

    Raises:
        ToolCallError: The result says that the tool failed.
    """
    if not isinstance(result, Mapping):
        return result
    if result.keys() >= _OBSERVATION_KEYS:  # an environment that handles tools in its own step
        return read_observation(result, name)
    if not result.keys() >= _RESULT_KEYS:
        return result
    content = result["content"] if isinstance(result["content"], list) else []
    if result["is_error"]:
        raise tool_error(name, _text(content) or "the tool reports an error", None)
    if result["data"] is not None or result.get("structured_content") is not None:
        return result["data"]
    return _only_content(content)


def _only_content(content: list[Any]) -> Any:
    """Return the text of content blocks, or the blocks if one is not text. Tools without an output schema send them."""
    if all(isinstance(block, Mapping) and block.get("type") == "text" for block in content):
        return _text(content) if content else None
    return content


def _text(content: list[Any]) -> str:
    return "\n".join(str(block["text"]) for block in content if isinstance(block, Mapping) and block.get("text"))


def read_observation(observation: Mapping[str, Any], name: str) -> Any:
    """Return a tool's result from the observation of a step.

    Raises:
        ToolCallError: The observation says that it failed; the class follows its type.
    """
    error = observation.get("error")
    if isinstance(error, Mapping):
        raise tool_error(name, str(error.get("message", "")), error.get("error_type"))
    if error:
        raise tool_error(name, str(error), None)
    return read_result(name, observation.get("result"))


def tool_error(name: str, message: str, error_type: Any) -> ToolCallError:
    """Build the exception of a failed call; without a type, it follows from the text of older servers."""
    cls = _CLASSES.get(error_type) if isinstance(error_type, str) else None
    if cls is None:
        cls = ToolNotFoundError if _UNKNOWN.match(message) else ToolCallError
        cls = ToolArgumentsError if _MISFIT.match(message) else cls
    text = f"Tool '{name}' failed: {message}"
    if cls is ToolNotFoundError and "not found" not in message.lower():
        text = f"Tool '{name}' failed: not found ({message})"
    return cls(name, text)


def rpc_error(error: Any, tool_name: str | None) -> OpenEnvError:
    """Build the exception of a JSON-RPC error, for a call or else for a list."""
    content: Mapping[str, Any] = error if isinstance(error, Mapping) else {"message": str(error)}
    message, data = str(content.get("message", "unknown error")), content.get("data")
    details = data if isinstance(data, Mapping) else {}
    if isinstance(details.get("code"), str):  # what went wrong is not the tool
        return error_from_frame({**details, "message": message})
    if tool_name is None:
        return ServerError(f"list_tools failed: {message}", details=details)
    if _NO_TOOLS in message:
        return tool_error(tool_name, message, ToolTransportError.error_type)
    return tool_error(tool_name, message, details.get("error_type"))


def knows_no_tools(error: Any) -> bool:
    """Whether an error means that the server has no tool requests; the tools of older servers may be steps."""
    if not isinstance(error, Mapping) or error.get("data") is not None:
        return False
    return error.get("code") == JsonRpcErrorCode.METHOD_NOT_FOUND.value or _NO_TOOLS in str(error.get("message", ""))


def listed_observation(payload: Mapping[str, Any]) -> list[Tool]:
    """Read the observation of a step that lists tools.

    Raises:
        ServerError: The environment could not list them.
        ProtocolError: It is another observation.
    """
    observation = payload.get("observation")
    if not isinstance(observation, Mapping) or "tools" not in observation:
        raise ProtocolError(f"The environment answered a list of tools with {str(observation)[:200]}")
    metadata = observation.get("metadata") or payload.get("metadata")
    if not observation["tools"] and isinstance(metadata, Mapping) and metadata.get("error"):
        raise ServerError(f"list_tools failed: {metadata['error']}", details=metadata)
    return read_tools(observation["tools"])


def _tool_observation(fields: Mapping[str, Any], shared: Mapping[str, Any]) -> Observation | None:
    """Read an observation about tools, or None for another."""
    if "tools" in fields:
        try:
            return ListToolsObservation(tools=read_tools(fields["tools"]), **shared)
        except ProtocolError:  # an environment's own field of that name
            return None
    if isinstance(fields.get("tool_name"), str):
        return CallToolObservation(
            tool_name=fields["tool_name"], result=fields.get("result"), error=_tool_error(fields.get("error")), **shared
        )
    return None


def _tool_error(error: Any) -> ToolError | None:
    if not error:
        return None
    if not isinstance(error, Mapping):
        return ToolError(error_type=ToolErrorType.EXECUTION_ERROR, message=str(error))
    known = {kind.value for kind in ToolErrorType}
    kind = error.get("error_type") if error.get("error_type") in known else ToolErrorType.EXECUTION_ERROR
    return ToolError(error_type=ToolErrorType(kind), message=str(error.get("message", "")))


# -- clients -----------------------------------------------------------------------------------------------------------


class GenericMCPObservation(Observation):
    """An observation that is not about tools, with all fields of the environment's observation."""

    model_config = ConfigDict(extra="allow")


class MCPClientBase(EnvClient[Any, Observation, State]):
    """A client that knows an environment's tools.

    `use_production_mode` selects how to call tools. True: by JSON-RPC beside the episode, which costs no step and
    brings no reward. False: by steps. If the server supports no JSON-RPC on its socket, steps are used in any case.

    The arguments are those of `EnvClient`, except `mode`, which must be `production`. `message_timeout_s` limits the
    wait for a reply or a sign of progress if a call sets no limit.
    """

    use_production_mode = True
    _tools_cache: list[Tool] | None = None
    _last_rpc_id = 0
    _only_steps = False  # an older server, once it has shown to be one

    @classmethod
    def _checked_mode(cls, mode: str | None) -> str:
        if mode is not None and mode.lower() != "production":
            raise ValueError(
                f"invalid mode {mode!r}: MCPToolClient and the other MCP clients only have 'production'; "
                "use GenericEnvClient for 'simulation'"
            )
        return "production"

    def list_tools(self, use_cache: bool = True) -> Coroutine[Any, Any, list[Tool]]:
        """Return the environment's tools.

        Args:
            use_cache: Whether to return the list of an earlier call.

        Raises:
            ServerError: The server has no tools, or could not list them.
            SessionLost: The episode is gone; `reset` begins a new one.
        """
        return self._driver.run(self._list_tools_flow(use_cache), "MCPClientBase.list_tools")

    def sync(self) -> SyncMCPClient:
        """Return the blocking twin of this client."""
        return SyncMCPClient(self)

    def _clone(self) -> Self:
        clone = super()._clone()
        clone.use_production_mode = self.use_production_mode
        return clone

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _step_payload(self, action: Any) -> dict[str, Any]:
        if isinstance(action, ListToolsAction):
            return {"type": action.type}
        if isinstance(action, CallToolAction):
            return {"type": action.type, "tool_name": action.tool_name, "arguments": action.arguments}
        if isinstance(action, BaseModel):
            return action.model_dump()
        return dict(action) if isinstance(action, Mapping) else {"action": str(action)}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Observation]:
        fields = payload.get("observation") or {}
        reward, done = payload.get("reward"), bool(payload.get("done", False))
        shared = {name: fields[name] for name in ("terminated", "truncated") if name in fields}
        shared |= {
            "done": done,
            "reward": reward,
            "metadata": payload.get("metadata") or fields.get("metadata") or {},
        }
        observation = _tool_observation(fields, shared) or GenericMCPObservation(**{**fields, **shared})
        return StepResult(observation, reward, done, payload.get("metadata"))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(episode_id=payload.get("episode_id"), step_count=payload.get("step_count") or 0)

    # -- tool requests as flows -----------------------------------------------------------------------------------

    def _list_tools_flow(self, use_cache: bool = True) -> Flow[list[Tool]]:
        if not use_cache or self._tools_cache is None:
            yield from self._start_provider()
            self._tools_cache = yield from self._list_flow()
        return list(self._tools_cache)

    def _list_flow(self) -> Flow[list[Tool]]:
        if self._only_steps or not self.use_production_mode:
            return (yield from self._list_by_step())
        tools: list[Tool] = []
        cursor: str | None = None
        while True:
            reply = yield from self._rpc(McpMethod.TOOLS_LIST, {} if cursor is None else {"cursor": cursor})
            if cursor is None and knows_no_tools(reply.get("error")):
                listed: list[Tool] = yield from self._instead(reply["error"], None, self._list_by_step())
                return listed
            if "error" in reply:
                yield from self._raise(reply["error"], None)
            page = reply.get("result")
            if not isinstance(page, dict):
                raise ProtocolError(f"The server's list of tools is not one: {str(page)[:200]}")
            tools += read_tools(page.get("tools"))
            following = page.get("nextCursor")
            if not isinstance(following, str) or following == cursor:
                return tools
            cursor = following

    def _call_flow(
        self, name: str, arguments: dict[str, Any], timeout_s: float | None, on_progress: ProgressHandler | None
    ) -> Flow[Any]:
        """Call a tool and return its result.

        Args:
            name: The tool.
            arguments: Its arguments.
            timeout_s: The limit of the call, which the server keeps; we wait a little longer for it to say so.
            on_progress: Called with the call's progress; a step has none.
        """
        yield from self._start_provider()
        if self._only_steps or not self.use_production_mode:
            return (yield from self._call_by_step(name, arguments, timeout_s))
        params: dict[str, Any] = {"name": name, "arguments": arguments}
        if timeout_s is not None:
            params["timeout_s"] = timeout_s
        try:
            reply = yield from self._rpc(McpMethod.TOOLS_CALL, params, timeout_s=timeout_s, on_progress=on_progress)
        except ExecutionError as exc:  # an older server whose environment returned a value that cannot be sent
            raise ToolCallError(name, f"Tool '{name}' failed: {exc}") from exc
        if knows_no_tools(reply.get("error")):
            steps = self._call_by_step(name, arguments, timeout_s)
            return (yield from self._instead(reply["error"], name, steps))
        if "error" in reply:
            yield from self._raise(reply["error"], name)
        return read_result(name, reply.get("result"))

    def _rpc(
        self,
        method: McpMethod,
        params: dict[str, Any],
        *,
        timeout_s: float | None = None,
        on_progress: ProgressHandler | None = None,
    ) -> Flow[dict[str, Any]]:
        """Send a request and return the reply, a result or an error.

        If the server has no `mcp` frames, its refusal is converted to "method not found".
        """
        self._last_rpc_id += 1
        request_id = self._last_rpc_id
        if on_progress is not None:
            params = {**params, "_meta": {"progressToken": request_id}}
        message = {"jsonrpc": "2.0", "id": request_id, "method": method.value, "params": params}
        # A little longer than the server may take, so that it can say that the time is over and the session survives.
        grace_s = 0.0 if timeout_s is None else _GRACE_S + min(4.0, timeout_s / 10)
        deadline = None if timeout_s is None else self._driver.backoff.clock() + timeout_s + grace_s
        call = ClientRequest(
            "mcp",
            message,
            self._left(deadline),
            on_event=None if on_progress is None else partial(_report_event, on_progress),
            events_extend=deadline is None,
        )
        try:
            reply = yield from request(self._driver, call)
        except UnknownTypeError as exc:
            return {"error": {"code": JsonRpcErrorCode.METHOD_NOT_FOUND.value, "message": str(exc)}}
        while "method" in reply:  # v1 has no events: progress comes as a separate frame
            try:
                _report_notification(on_progress, request_id, reply)
            except BaseException:  # after an interrupt, this reply would be taken for that of the next request
                self._driver.session.lose("a request was interrupted")
                yield HangUp()
                raise
            reply = yield from next_reply(self._driver, "mcp", self._left(deadline))
        if reply.get("id") != request_id and not (reply.get("id") is None and "error" in reply):
            self._driver.session.lose("the server answered another request")
            yield HangUp()
            raise ProtocolError(f"The server answered request {reply.get('id')!r} instead of {request_id}")
        return reply

    def _left(self, deadline: float | None) -> float | None:
        """Return how long to wait for the next message. If a call sets no limit, each sign of progress extends it."""
        if deadline is None:
            return self._options.message_timeout_s
        return max(0.001, deadline - self._driver.backoff.clock())

    def _raise(self, error: Any, tool_name: str | None) -> Flow[None]:
        exc = rpc_error(error, tool_name)
        if isinstance(exc, SessionLost):
            self._driver.session.lose(exc.reason)
            yield HangUp()
        raise exc

    def _list_by_step(self) -> Flow[list[Tool]]:
        return listed_observation((yield from self._request("step", {"type": ListToolsAction().type})))

    def _call_by_step(self, name: str, arguments: Mapping[str, Any], timeout_s: float | None) -> Flow[Any]:
        action = CallToolAction(tool_name=name, arguments=dict(arguments))
        fields = {"type": action.type, "tool_name": name, "arguments": action.arguments}
        limit = self._options.message_timeout_s if timeout_s is None else timeout_s
        try:
            payload = yield from request(self._driver, ClientRequest("step", fields, limit))
        except ExecutionError as exc:
            raise ToolCallError(name, f"Tool '{name}' failed: {exc}") from exc
        observation = payload.get("observation")
        if isinstance(observation, Mapping) and "tool_name" in observation:
            return read_observation(observation, name)
        return observation  # the environment's own way to answer a tool call

    def _instead(self, refusal: Any, tool_name: str | None, steps: Flow[Any]) -> Flow[Any]:
        """Try steps. If they are refused as well, the server has no tools: raise the first refusal."""
        try:
            result = yield from steps
        except ToolCallError:
            self._only_steps = True
            raise
        except (RequestValidationError, UnknownTypeError, ExecutionError, ProtocolError) as exc:
            raise rpc_error(refusal, tool_name) from exc
        self._only_steps = True
        return result


class MCPToolClient(MCPClientBase):
    """A client that calls an environment's tools, one at a time."""

    def call_tool(self, tool_name: str = "", /, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call a tool and return its result; every keyword is an argument of the tool.

        The tool's name may also be passed as `name=` if the tool has no argument `name`.

        Raises:
            ToolNotFoundError: No tool has that name.
            ToolArgumentsError: The arguments do not fit.
            ToolTimeout: The tool took longer than the server lets it.
            ToolCallError: The tool failed.
            SessionLost: The episode is gone; `reset` begins a new one.
        """
        name = tool_name or kwargs.pop("name", "")
        return self.call_tool_with(name, kwargs)

    def call_tool_with(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        on_progress: ProgressHandler | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Call a tool with a time limit, or listen to its progress.

        Args:
            name: The tool.
            arguments: Its arguments.
            timeout_s: How long the call may take, longer or shorter than `message_timeout_s`. A server that keeps the
                limit answers with `ToolTimeout`, and the episode goes on; one that does not answer at all is given up
                shortly after, as `RequestTimeout`, and the episode with it.
            on_progress: Called with progress, total and message (each of the latter may be None) while the tool
                runs; a plain function, which must not use this client.

        Raises:
            ToolCallError: As for `call_tool`.
            RequestTimeout: No reply came in time; the episode is lost.
            ValueError: The name is empty, or the limit is not a positive number.
            TypeError: `on_progress` is a coroutine function.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be the name of a tool, not {name!r}")
        if timeout_s is not None and not (timeout_s > 0 and isfinite(timeout_s)):
            raise ValueError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
        if inspect.iscoroutinefunction(on_progress):
            raise TypeError("on_progress must be a plain function; it may create a task")
        return self._driver.run(
            self._call_flow(name, dict(arguments or {}), timeout_s, on_progress), "MCPToolClient.call_tool_with"
        )

    def get_tool(self, name: str) -> Coroutine[Any, Any, Tool | None]:
        """Return the tool of that name, or None."""
        return self._driver.run(self._get_tool_flow(name), "MCPToolClient.get_tool")

    def has_tool(self, name: str) -> Coroutine[Any, Any, bool]:
        """Return whether there is a tool of that name."""
        return self._driver.run(self._has_tool_flow(name), "MCPToolClient.has_tool")

    def sync(self) -> SyncMCPToolClient:
        """Return the blocking twin of this client."""
        return SyncMCPToolClient(self)

    def _get_tool_flow(self, name: str) -> Flow[Tool | None]:
        was_cached = self._tools_cache is not None
        tool = _named(name, (yield from self._list_tools_flow()))
        if tool is None and was_cached:  # it may have come since
            tool = _named(name, (yield from self._list_tools_flow(use_cache=False)))
        return tool

    def _has_tool_flow(self, name: str) -> Flow[bool]:
        return (yield from self._get_tool_flow(name)) is not None


def _named(name: str, tools: list[Tool]) -> Tool | None:
    return next((tool for tool in tools if tool.name == name), None)


def _report_notification(on_progress: ProgressHandler | None, request_id: int, notice: Mapping[str, Any]) -> None:
    """Pass on a notification about this call; an exception in the handler does not end the call."""
    params = notice.get("params")
    if on_progress is None or notice["method"] != "notifications/progress" or not isinstance(params, Mapping):
        return
    if params.get("progressToken") == request_id:
        _report(on_progress, params)


def _report_event(on_progress: ProgressHandler, event: Event) -> None:
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


# The blocking twins call the method of their client, so that a subclass that overrides it is called.


class SyncMCPClient(SyncEnvClient[Any, Observation, State]):
    """Blocks where its `MCPClientBase` would be awaited."""

    _client: MCPClientBase

    def list_tools(self, use_cache: bool = True) -> list[Tool]:
        """Return the environment's tools; see `MCPClientBase.list_tools`."""
        return self._driver.run_helper(self._client.list_tools, use_cache=use_cache)


class SyncMCPToolClient(SyncMCPClient):
    """Blocks where its `MCPToolClient` would be awaited."""

    _client: MCPToolClient

    def call_tool(self, tool_name: str = "", /, **kwargs: Any) -> Any:
        """Call a tool; every keyword is an argument of the tool. See `MCPToolClient.call_tool`."""
        return self._driver.run_helper(self._client.call_tool, *([tool_name] if tool_name else []), **kwargs)

    def call_tool_with(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        on_progress: ProgressHandler | None = None,
    ) -> Any:
        """Call a tool with a time limit, or listen to its progress. See `MCPToolClient.call_tool_with`."""
        call = self._client.call_tool_with
        return self._driver.run_helper(call, name, arguments, timeout_s=timeout_s, on_progress=on_progress)

    def get_tool(self, name: str) -> Tool | None:
        """Return the tool of that name, or None."""
        return self._driver.run_helper(self._client.get_tool, name)

    def has_tool(self, name: str) -> bool:
        """Return whether there is a tool of that name."""
        return self._driver.run_helper(self._client.has_tool, name)
