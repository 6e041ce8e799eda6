"""Clients for environments whose actions are tools, and their blocking twins.

Tools, resets and steps go over one connection to one session. Knows tool models and flows; must not know how a server
runs tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Mapping
from functools import cached_property
from math import isfinite
from typing import Any

from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from ..errors import ProtocolError
from ..tool_types import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from ..types import Observation, State, StepResult
from .env_client import EnvClient, SyncEnvClient
from .flows import Flow
from .mcp_requests import ProgressHandler, ToolRequests, read_tools


class GenericMCPObservation(Observation):
    """An observation that is not about tools, with whatever fields the environment gave it."""

    model_config = ConfigDict(extra="allow")


class MCPClientBase(EnvClient[Any, Observation, State]):
    """A client that knows an environment's tools.

    `use_production_mode` says how tools are reached: True, by JSON-RPC beside the episode, where they cost no step and
    bring no reward; False, by steps. A server that knows no JSON-RPC on its socket is asked by steps in any case.

    Its arguments are those of `EnvClient`, but for `mode`: there is only `production`. `message_timeout_s` is how long
    a reply, or a sign of progress, may take where a call names no limit.
    """

    use_production_mode = True
    _tools_cache: list[Tool] | None = None

    @cached_property
    def _tool_requests(self) -> ToolRequests:
        return ToolRequests(self._driver, self._options.message_timeout_s)

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
            use_cache: Whether the list of an earlier call will do.

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

    def _list_tools_flow(self, use_cache: bool = True) -> Flow[list[Tool]]:
        if not use_cache or self._tools_cache is None:
            yield from self._start_provider()
            self._tools_cache = yield from self._tool_requests.list_tools(as_step=not self.use_production_mode)
        return list(self._tools_cache)

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


class MCPToolClient(MCPClientBase):
    """A client that calls an environment's tools, one at a time."""

    def call_tool(self, tool_name: str = "", /, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call a tool and return what it returned; every keyword is an argument of the tool.

        The tool's name may also be passed as `name=`, where no argument has that name.

        Raises:
            ToolNotFoundError: There is no such tool.
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
        """Call a tool under a limit of its own, or listen to its progress.

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
            raise ValueError(f"name must be that of a tool, not {name!r}")
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

    def _call_flow(
        self, name: str, arguments: dict[str, Any], timeout_s: float | None, on_progress: ProgressHandler | None
    ) -> Flow[Any]:
        yield from self._start_provider()
        by_step = not self.use_production_mode
        return (
            yield from self._tool_requests.call(
                name, arguments, timeout_s=timeout_s, on_progress=on_progress, as_step=by_step
            )
        )

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
        """Call a tool under a limit of its own, or listen to its progress. See `MCPToolClient.call_tool_with`."""
        call = self._client.call_tool_with
        return self._driver.run_helper(call, name, arguments, timeout_s=timeout_s, on_progress=on_progress)

    def get_tool(self, name: str) -> Tool | None:
        """Return the tool of that name, or None."""
        return self._driver.run_helper(self._client.get_tool, name)

    def has_tool(self, name: str) -> bool:
        """Return whether there is a tool of that name."""
        return self._driver.run_helper(self._client.has_tool, name)
