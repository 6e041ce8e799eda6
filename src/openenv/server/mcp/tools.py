"""The tools of any environment: of an `MCPEnvironment`, of one that only brings a FastMCP server, of one that takes
tool actions. Knows environments; must not know requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from ...env.binding import bind, run_blocking
from ...env.tools.source import ToolEvents, ToolOutcome, ToolSource
from ...errors import ToolArgumentsError, ToolCallError, ToolNotFoundError, ToolTimeout, ToolTransportError
from ...tool_types import CallToolAction, CallToolObservation, ListToolsAction, ToolErrorType

_ERRORS: Mapping[ToolErrorType, type[ToolCallError]] = {
    ToolErrorType.EXECUTION_ERROR: ToolCallError,
    ToolErrorType.INVALID_ARGS: ToolArgumentsError,
    ToolErrorType.TRANSPORT_ERROR: ToolTransportError,
    ToolErrorType.TOOL_NOT_FOUND: ToolNotFoundError,
    ToolErrorType.TIMEOUT: ToolTimeout,
}


class NoTools(Exception):
    """The environment has no tools."""

    def __init__(self) -> None:
        super().__init__("Environment does not support MCP")


class StepTools(ToolSource):
    """Tools that an environment offers only as actions of `step`."""

    def __init__(self, env: Any) -> None:
        self._env = env

    async def describe(self) -> list[dict[str, Any]]:
        """Ask the environment for its tools."""
        observation = await self._step(ListToolsAction())
        return [
            {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
            for tool in observation.tools
        ]

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        events: ToolEvents | None = None,
    ) -> Any:
        """Take the action that calls the tool."""
        observation = await self._step(CallToolAction(tool_name=name, arguments=dict(arguments)))
        raise_error(observation)
        return observation

    async def ask_server(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """There is no server."""
        raise NoTools

    async def _step(self, action: Any) -> Any:
        method = bind(type(self._env)).step
        function = getattr(self._env, method.name)
        if method.is_async:
            return await function(action)
        return await run_blocking(lambda: function(action))


_OF_SERVERS: WeakKeyDictionary[Any, ToolSource] = WeakKeyDictionary()


def tools_of(env: Any, action_cls: type[Any] | None) -> ToolSource:
    """Find an environment's tools.

    Raises:
        NoTools: It has none.
    """
    own = getattr(env, "tools", None)
    if isinstance(own, ToolSource):
        return own
    server = getattr(env, "mcp_server", None)
    if isinstance(server, ToolSource):  # it stands for one in another process
        return server
    if server is not None and hasattr(server, "local_provider"):
        return _of_server(server)
    if inspect.isclass(action_cls) and issubclass(action_cls, (CallToolAction, ListToolsAction)):
        return StepTools(env)
    raise NoTools


def _of_server(server: Any) -> ToolSource:
    from ...env.tools.tool_registry import ToolRegistry  # loads FastMCP, which this environment has loaded already

    registry = _OF_SERVERS.get(server)
    if registry is None:
        registry = _OF_SERVERS[server] = ToolRegistry(server)
    return registry


def raise_error(observation: Any) -> None:
    """Raise the failure that an observation of a tool call carries."""
    if isinstance(observation, CallToolObservation) and observation.error is not None:
        error = observation.error
        raise _ERRORS[ToolErrorType(error.error_type)](observation.tool_name, error.message)


def outcome_of(observation: Any) -> ToolOutcome | None:
    """Return a tool's result from an observation, if it is one of ours."""
    result = getattr(observation, "result", None)
    return result if isinstance(result, ToolOutcome) else None
