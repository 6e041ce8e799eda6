"""Standard MCP: the methods, the same for every era and transport.

The environment's FastMCP server answers for resources, prompts and completions. A tool call is a step of the episode
where the environment takes tool actions; the orchestrator learns its reward and end, the agent never does. Knows
sessions and shapes; must not know HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from openenv._lazy import load_package_version
from openenv.env.tools.source import ToolEvents, ToolOutcome
from openenv.errors import OpenEnvError, SessionCapacityError, ToolCallError, ToolNotFoundError, message_of
from openenv.protocol.json_values import encode
from openenv.protocol.jsonrpc import (
    LOG_LEVELS,
    META_LOG_LEVEL,
    SUPPORTED_VERSIONS,
    Era,
    JsonRpcErrorCode,
    McpError,
    McpMessage,
    internal_error,
    invalid_params,
    method_not_found,
    modern_result,
    notification,
    page,
)

from ..service import EnvService, Redaction
from ..sessions.session import Session
from .mcp_sessions import McpSession
from .openenv_rpc import progress_notification
from .tool_calls import NoTools, StepTools, ToolOperations, origin_of_rpc, tool_request, tools_of

PAGE_SIZE = 100
# The key of each list in a result, and the FastMCP client method that returns the list.
_LISTS = {
    "resources/list": ("resources", "list_resources"),
    "resources/templates/list": ("resourceTemplates", "list_resource_templates"),
    "prompts/list": ("prompts", "list_prompts"),
}
_HANDSHAKE_ONLY = frozenset({"ping", "logging/setLevel"})


@dataclass(slots=True)
class McpExchange:
    """One request: its era, its session, and the receiver of its notifications."""

    era: Era
    session: Session | None
    notify: Callable[[dict[str, Any]], None]
    client: McpSession | None = None


class McpMethods:
    """Answers MCP requests for one served environment."""

    def __init__(self, service: EnvService) -> None:
        self._service = service
        self._operations = ToolOperations(service.action_cls)
        self._described: list[dict[str, Any]] | None = None
        self._server_info: dict[str, Any] | None = None
        self._table: Mapping[str, Callable[[McpMessage, McpExchange], Awaitable[dict[str, Any]]]] = {
            "ping": self._ping,
            "logging/setLevel": self._set_level,
            "server/discover": self._discover,
            "tools/list": self._list_tools,
            "tools/call": self._call_tool,
            "resources/list": self._list_of_server,
            "resources/templates/list": self._list_of_server,
            "resources/read": self._read_resource,
            "prompts/list": self._list_of_server,
            "prompts/get": self._get_prompt,
            "completion/complete": self._complete,
        }

    @property
    def server_info(self) -> dict[str, Any]:
        """Name and version of the environment."""
        if self._server_info is None:
            self._server_info = {"name": self._service.env_name, "version": load_package_version()}
        return self._server_info

    def needs_session(self, method: str | None) -> bool:
        """Return whether a method works on an episode."""
        return method in ("tools/call", "resources/read", "prompts/get", "completion/complete")

    def knows(self, method: str | None, era: Era) -> bool:
        """Return whether an era has a method."""
        if method == "server/discover":
            return True
        return method in self._table and (era == "handshake" or method not in _HANDSHAKE_ONLY)

    def initialized(self, client: McpSession) -> dict[str, Any]:
        """Answer `initialize`."""
        result: dict[str, Any] = {
            "protocolVersion": client.version,
            "capabilities": {**_capabilities(), "logging": {}},
            "serverInfo": self.server_info,
        }
        instructions = getattr(getattr(client.session.env, "mcp_server", None), "instructions", None)
        return {**result, "instructions": instructions} if instructions else result

    async def answer(self, message: McpMessage, exchange: McpExchange) -> dict[str, Any]:
        """Return the result of one request.

        Raises:
            McpError: It failed.
        """
        method = message.method or ""
        if not self.knows(method, exchange.era):
            raise method_not_found(method)
        try:
            result = await self._table[method](message, exchange)
        except (NoTools, OpenEnvError) as exc:
            raise mcp_error(exc, self._service.errors) from exc
        return modern_result(method, result, self.server_info) if exchange.era == "modern" else result

    # -- about the server -----------------------------------------------------------------------------------------

    async def _ping(self, message: McpMessage, exchange: McpExchange) -> dict[str, Any]:
        return {}

    async def _set_level(self, message: McpMessage, exchange: McpExchange) -> dict[str, Any]:
        level = message.params.get("level")
        if level not in LOG_LEVELS:
            raise invalid_params(f"Invalid level: choose one of {', '.join(LOG_LEVELS)}")
        if exchange.client is not None:
            exchange.client.log_level = level
        return {}

    async def _discover(self, message: McpMessage, exchange: McpExchange) -> dict[str, Any]:
        return {"supportedVersions": list(SUPPORTED_VERSIONS), "capabilities": _capabilities()}

    # -- tools ----------------------------------------------------------------------------------------------------

    async def _list_tools(self, message: McpMessage, exchange: McpExchange) -> dict[str, Any]:
        tools = [_without_nulls(tool) for tool in await self._tools(exchange.session)]
        return _listed("tools", tools, message)

    async def _tools(self, session: Session | None) -> list[dict[str, Any]]:
        if session is not None:
            tools = tools_of(session.env, self._service.action_cls)
            if not isinstance(tools, StepTools):
                return await tools.describe()  # outside the session's queue: a running call must not delay a listing
            described: list[dict[str, Any]] = await session.run(self._operations.list)
            return described
        if self._described is None:
            async with self._service.manager.borrow() as borrowed:
                self._described = await borrowed.run(self._operations.list)
        return self._described

    async def _call_tool(self, message: McpMessage, exchange: McpExchange) -> dict[str, Any]:
        session = exchange.session
        assert session is not None
        call = tool_request(message.params, _events(message, exchange))
        origin = origin_of_rpc(self._service.manager, message.id, message.params)
        try:
            # The same for all roles: results of standard MCP are for agents.
            mode = self._service.mode
            return _tool_result(await self._operations.run_for_agent(session, call, mode=mode, origin=origin))
        except ToolNotFoundError as exc:
            raise invalid_params(f"Unknown tool: {exc.tool_name}") from exc
        except ToolCallError as exc:
            return failure(str(exc))
        except (OpenEnvError, NoTools, asyncio.CancelledError):
            raise
        except Exception as exc:  # an environment's own `step` may raise anything
            return failure(self._service.errors.text(exc))

    # -- resources, prompts, completions: the FastMCP server's ----------------------------------------------------

    async def _list_of_server(self, message: McpMessage, exchange: McpExchange) -> dict[str, Any]:
        key, method = _LISTS[message.method or ""]
        return _listed(key, await self._ask(exchange, lambda client: getattr(client, method)()), message)

    async def _read_resource(self, message: McpMessage, exchange: McpExchange) -> dict[str, Any]:
        uri = message.params.get("uri")
        if not isinstance(uri, str):
            raise invalid_params("Missing 'uri' in params")
        try:
            contents: dict[str, Any] = await self._ask(exchange, lambda client: client.read_resource_mcp(uri))
        except McpError as exc:
            if exc.code in (-32002, JsonRpcErrorCode.INVALID_PARAMS.value):
                code = -32002 if exchange.era == "handshake" else JsonRpcErrorCode.INVALID_PARAMS.value
                raise McpError(code, f"Resource not found: {uri}", {"uri": uri}) from exc
            raise
        return contents

    async def _get_prompt(self, message: McpMessage, exchange: McpExchange) -> dict[str, Any]:
        name, arguments = message.params.get("name"), message.params.get("arguments") or {}
        if not isinstance(name, str):
            raise invalid_params("Missing 'name' in params")
        prompt: dict[str, Any] = await self._ask(exchange, lambda client: client.get_prompt_mcp(name, arguments))
        return prompt

    async def _complete(self, message: McpMessage, exchange: McpExchange) -> dict[str, Any]:
        ref, argument = message.params.get("ref"), message.params.get("argument")
        if not isinstance(ref, dict) or not isinstance(argument, dict):
            raise invalid_params("'ref' and 'argument' must be objects")
        try:
            completion: dict[str, Any] = await self._ask(exchange, lambda client: _completion(client, ref, argument))
        except McpError as exc:
            if exc.code == JsonRpcErrorCode.METHOD_NOT_FOUND.value:  # a server without completions
                return {"completion": {"values": [], "hasMore": False}}
            raise
        return completion

    async def _ask(self, exchange: McpExchange, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run a coroutine with the FastMCP server's client, in the request's session or a borrowed environment."""

        async def guarded(client: Any) -> Any:
            try:
                return await work(client)
            except Exception as exc:
                raise _server_error(exc) from exc

        if exchange.session is not None:
            result = await exchange.session.run(self._operations.ask, guarded, cancellable=True)
        else:
            async with self._service.manager.borrow() as borrowed:
                result = await borrowed.run(self._operations.ask, guarded, cancellable=True)
        return [_dumped(item) for item in result] if isinstance(result, list) else _dumped(result)


def _capabilities() -> dict[str, Any]:
    return {
        "tools": {"listChanged": False},
        "resources": {"subscribe": False, "listChanged": False},
        "prompts": {"listChanged": False},
        "completions": {},
    }


def _listed(key: str, items: list[dict[str, Any]], message: McpMessage) -> dict[str, Any]:
    cut, cursor = page(items, message.params.get("cursor"), PAGE_SIZE)
    return {key: cut} if cursor is None else {key: cut, "nextCursor": cursor}


def _without_nulls(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "input_schema" in tool:
        return {"name": tool["name"], "description": tool["description"], "inputSchema": tool["input_schema"]}
    return {key: value for key, value in tool.items() if value is not None}


def failure(text: str) -> dict[str, Any]:
    """Return the result of a failed tool call."""
    return {"content": [{"type": "text", "text": text}], "isError": True}


def mcp_error(exc: Exception, errors: Redaction, *, prefix: str = "") -> McpError:
    """Turn a failure into a JSON-RPC error; redact its text if clients may not see it.

    Args:
        exc: The failure.
        errors: Decides what clients may see.
        prefix: Precedes the text of an unexpected exception.
    """
    if isinstance(exc, McpError):
        return exc
    if isinstance(exc, NoTools):
        return internal_error(str(exc))
    if not isinstance(exc, OpenEnvError):
        return internal_error(f"{prefix}{errors.text(exc)}")
    shown = errors.shown(exc)
    code = JsonRpcErrorCode.SERVER_ERROR if isinstance(shown, SessionCapacityError) else JsonRpcErrorCode.INTERNAL_ERROR
    return McpError(code.value, str(shown), {"code": shown.code, **shown.details})


def _tool_result(shown: ToolOutcome | dict[str, Any]) -> dict[str, Any]:
    """Return the result of `tools/call` from the agent's view; an observation becomes text."""
    if isinstance(shown, ToolOutcome):
        return shown.as_mcp()
    fields = {name: value for name, value in shown.items() if name != "tool_name"}
    value = fields.get("result") if fields.keys() <= {"result", "error"} else fields
    text = value if isinstance(value, str) else encode(value).decode()
    return {"content": [{"type": "text", "text": text}], "isError": False}


def _events(message: McpMessage, exchange: McpExchange) -> ToolEvents:
    """Send a running tool's progress and log messages as notifications, if the client wants them."""
    token = message.progress_token
    level = message.meta.get(META_LOG_LEVEL) if exchange.era == "modern" else None
    if exchange.client is not None:
        level = exchange.client.log_level or "info"

    def on_progress(progress: float, total: float | None, text: str | None) -> None:
        if token is not None:
            exchange.notify(progress_notification(token, progress, total, text))

    def on_log(severity: str, logger: str | None, data: Any) -> None:
        if level in LOG_LEVELS and severity in LOG_LEVELS and LOG_LEVELS.index(severity) >= LOG_LEVELS.index(level):
            params = {"level": severity, "data": data, **({"logger": logger} if logger else {})}
            exchange.notify(notification("notifications/message", params))

    return ToolEvents(on_progress, on_log)


def _dumped(value: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = value.model_dump(mode="json", by_alias=True, exclude_none=True)
    for name in ("resultType", "ttlMs", "cacheScope"):  # fields of the inner server's era, which may differ from ours
        dumped.pop(name, None)
    return dumped


async def _completion(client: Any, ref: dict[str, Any], argument: dict[str, Any]) -> Any:
    try:
        from mcp.types import PromptReference, ResourceTemplateReference
    except ImportError:  # newer releases have a package for the types
        from mcp_types import PromptReference, ResourceTemplateReference
    kinds: dict[str, Any] = {"ref/prompt": PromptReference, "ref/resource": ResourceTemplateReference}
    kind = kinds.get(ref.get("type", ""))
    if kind is None:
        raise invalid_params("Invalid 'ref'")
    return await client.complete_mcp(kind.model_validate(ref), argument)


def _server_error(exc: Exception) -> McpError:
    """Pass on the FastMCP server's error; an error without a code means that the request was invalid."""
    if isinstance(exc, McpError):
        return exc
    code = getattr(getattr(exc, "error", None), "code", None)
    if not isinstance(code, int) or code == 0:
        code = JsonRpcErrorCode.INVALID_PARAMS.value
    return McpError(code, message_of(exc))
