"""OpenEnv's JSON-RPC: `tools/list`, `tools/call`, `openenv/session/create`, `openenv/session/close`.

Served on `POST /mcp`, `WS /mcp` and in the `mcp` frames of `/ws`, byte for byte as existing clients expect. A tool's
failure is a JSON-RPC error. An agent's call is a step of the episode, as over standard MCP, and shows it as little; an
orchestrator's calls the tool itself. Knows the session manager; must not know transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import ValidationError

from openenv.env.tools.source import ToolEvents, ToolRequest
from openenv.errors import (
    EnvironmentFactoryError,
    OpenEnvError,
    SessionCapacityError,
    SessionElsewhere,
    SessionLost,
    SessionNotFoundError,
    ToolCallError,
    ToolNotFoundError,
)
from openenv.protocol.jsonrpc import (
    JsonRpcErrorCode,
    JsonRpcRequest,
    JsonRpcResponse,
    McpError,
    McpMethod,
    code_name,
    internal_error,
    invalid_params,
    invalid_request,
    method_not_found,
    notification,
)
from openenv.protocol.schema import problems_of

from ..access import Role
from ..service import EnvService
from ..sessions.events import RequestOrigin
from ..sessions.lifetime import CLOSED_BY_CLIENT
from ..sessions.session import Session, SessionKind, SessionState
from .tool_calls import NoTools, ToolOperations, origin_of_rpc, tool_request

Notify = Callable[[dict[str, Any]], None]
InSession = Callable[[Session, RequestOrigin | None], Awaitable[Any]]
_SHOWN_PROBLEMS = 1000  # characters; unknown keys of a request are repeated in them
_ALL_FIELDS = ("title", "description", "inputSchema", "outputSchema", "icons", "annotations", "meta", "execution")


class OpenEnvRpc:
    """Answers OpenEnv's JSON-RPC for one served environment."""

    def __init__(self, service: EnvService) -> None:
        self._service = service
        self._manager = service.manager
        self._errors = service.errors
        self._operations = ToolOperations(service.action_cls)

    async def answer(
        self,
        data: Any,
        *,
        own: Session | None = None,
        notify: Notify | None = None,
        role: Role = Role.ORCHESTRATOR,
    ) -> dict[str, Any]:
        """Answer one request.

        Args:
            data: The decoded request.
            own: The session of the request's connection; without one, `session_id` names the session.
            notify: Sends progress before the response, where the transport can.
            role: The caller's role.
        """
        if not isinstance(data, dict):
            self._manager.report_error(JsonRpcErrorCode.PARSE_ERROR.name)
            return JsonRpcResponse.error_response(JsonRpcErrorCode.PARSE_ERROR).model_dump()
        try:
            request = JsonRpcRequest.model_validate(data)
        except ValidationError as exc:
            self._manager.report_error(JsonRpcErrorCode.INVALID_REQUEST.name)
            text = f"Invalid Request: {problems_of(exc)[:_SHOWN_PROBLEMS]}"
            return JsonRpcResponse.error_response(JsonRpcErrorCode.INVALID_REQUEST, text).model_dump()
        try:
            result = await self._dispatch(request, own, notify, role)
        except McpError as exc:
            if exc.__cause__ is None:  # an error with a cause was reported already
                self._manager.report_error(code_name(exc.code))
            code = JsonRpcErrorCode(exc.code)
            return JsonRpcResponse.error_response(code, str(exc), exc.data, request.id).model_dump()
        return {"jsonrpc": "2.0", "id": request.id, "result": result}

    async def _dispatch(self, request: JsonRpcRequest, own: Session | None, notify: Notify | None, role: Role) -> Any:
        params = request.params
        match request.method:
            case McpMethod.TOOLS_LIST.value:
                tools = await self._run(request, own, role, self._list)
                return {"tools": [_described(tool) for tool in tools]}
            case McpMethod.TOOLS_CALL.value:
                call = _tool_call(params, notify)
                return await self._run(request, own, role, self._call_of(role, call))
            case "openenv/session/create":
                return await self._create(own, role)
            case "openenv/session/close":
                return self._close(params, own, role)
        raise method_not_found(request.method)

    async def _list(self, session: Session, origin: RequestOrigin | None) -> Any:
        return await session.run(self._operations.list, cancellable=True, origin=origin)

    def _call_of(self, role: Role, call: ToolRequest) -> InSession:
        operations, mode = self._operations, self._service.mode
        if role is Role.ORCHESTRATOR:
            return lambda session, origin: session.run(
                operations.call, call, cancellable=True, is_last=session.kind is SessionKind.ONCE, origin=origin
            )
        return lambda session, origin: operations.run_for_agent(session, call, mode=mode, origin=origin)

    async def _run(self, request: JsonRpcRequest, own: Session | None, role: Role, work: InSession) -> Any:
        """Run on the connection's session, the named session, or a new environment for this request."""
        params = request.params
        origin = origin_of_rpc(self._manager, request.id, params)
        try:
            session = own if own is not None else self._named(params)
            if session is not None:
                return await work(session, origin)
            # Whether an agent's call is a step depends on the environment.
            async with self._manager.borrow(is_built=role is Role.AGENT) as borrowed:
                return await work(borrowed, origin)
        except NoTools as exc:
            raise internal_error(str(exc)) from exc
        except ToolCallError as exc:
            text = f"Unknown tool: {exc.tool_name!r}" if isinstance(exc, ToolNotFoundError) else str(exc)
            raise internal_error(text, {"error_type": exc.error_type}) from exc
        except OpenEnvError as exc:
            raise _refusal(self._errors.shown(exc)) from exc
        except McpError:
            raise
        except Exception as exc:
            raise internal_error(self._errors.text(exc)) from exc

    def _named(self, params: Mapping[str, Any]) -> Session | None:
        name = params.get("session_id")
        if name is None:
            return None
        try:
            session = self._manager.find(str(name))
        except SessionElsewhere as exc:
            raise invalid_params(str(exc), {"code": exc.code}) from exc
        except (SessionNotFoundError, SessionLost) as exc:
            reason = "" if isinstance(exc, SessionNotFoundError) else f" ({exc.reason})"
            raise invalid_params(f"Unknown session_id: {name}{reason}") from exc
        if session.state is SessionState.CREATING:
            raise invalid_request(f"Session {name} is still initializing")
        return session

    async def _create(self, own: Session | None, role: Role) -> dict[str, Any]:
        if own is not None:
            return {"session_id": own.id}
        try:
            session = await self._manager.open(SessionKind.HTTP, by_agent=role is Role.AGENT)
        except OpenEnvError as exc:
            raise _refusal(exc) from exc
        return {"session_id": session.id}

    def _close(self, params: Mapping[str, Any], own: Session | None, role: Role) -> dict[str, Any]:
        if params.get("session_id") is None:
            raise invalid_params("Missing 'session_id' in params")
        if own is not None and params["session_id"] == own.id:
            raise invalid_request("A connection's own session ends with the connection")
        session = self._named(params)
        assert session is not None
        if role is Role.AGENT and not session.by_agent:
            raise invalid_request("An agent can only close sessions that agents have opened")
        if session.close_when_detached(CLOSED_BY_CLIENT):
            return {"session_id": session.id, "closed": True}
        return {"session_id": session.id, "closed": False, "closing": True}


def _refusal(exc: OpenEnvError) -> McpError:
    """Turn a session's error into a refusal."""
    code = {} if isinstance(exc, (SessionCapacityError, EnvironmentFactoryError)) else {"code": exc.code}
    return McpError(JsonRpcErrorCode.SERVER_ERROR.value, str(exc), {**code, **exc.details})


def _tool_call(params: Mapping[str, Any], notify: Notify | None) -> ToolRequest:
    timeout_s = params.get("timeout_s")
    request = tool_request(params, _events(params, notify), timeout_s)
    if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and timeout_s > 0):
        raise invalid_params("'timeout_s' must be a positive number")
    return request


def _events(params: Mapping[str, Any], notify: Notify | None) -> ToolEvents | None:
    meta = params.get("_meta")
    token = meta.get("progressToken") if isinstance(meta, dict) else None
    if token is None or notify is None:
        return None

    def on_progress(progress: float, total: float | None, message: str | None) -> None:
        notify(progress_notification(token, progress, total, message))

    return ToolEvents(on_progress, loop=asyncio.get_running_loop())


def progress_notification(token: Any, progress: float, total: float | None, message: str | None) -> dict[str, Any]:
    """Build a progress notification; absent values are left out."""
    params: dict[str, Any] = {"progressToken": token, "progress": progress}
    if total is not None:
        params["total"] = total
    if message is not None:
        params["message"] = message
    return notification("notifications/progress", params)


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with all fields, as the FastMCP client does; tools of a `step` have another shape."""
    if "input_schema" in tool:
        return dict(tool)
    fields = {"meta": tool.get("_meta"), **tool}
    return {"name": tool["name"], **{name: fields.get(name) for name in _ALL_FIELDS}}
