"""The tools of any environment, the session operations that list and call them, and the agent's view of a call.

An environment has tools as an `MCPEnvironment`, by an attribute `mcp_server`, or by taking tool actions in `step`.
Knows environments and operations; must not know requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from openenv.env.binding import bind_instance, run_blocking
from openenv.env.tools.source import EVENTS, ToolEvents, ToolOutcome, ToolRequest, ToolSource, find_tools
from openenv.errors import (
    NonFiniteReward,
    ToolArgumentsError,
    ToolCallError,
    ToolNotFoundError,
    ToolTimeout,
    ToolTransportError,
)
from openenv.protocol.json_values import decode, finite_reward, split_observation
from openenv.protocol.jsonrpc import invalid_params
from openenv.protocol.schema import takes_tool_actions
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation, ListToolsAction, ToolErrorType
from openenv.types import Observation, ServerMode

from ..sessions.events import RequestOrigin
from ..sessions.manager import SessionManager
from ..sessions.operations import Operation, build_operations, interrupt_tools
from ..sessions.session import Session, SessionKind

_ERRORS: Mapping[ToolErrorType, type[ToolCallError]] = {
    ToolErrorType.EXECUTION_ERROR: ToolCallError,
    ToolErrorType.INVALID_ARGS: ToolArgumentsError,
    ToolErrorType.TRANSPORT_ERROR: ToolTransportError,
    ToolErrorType.TOOL_NOT_FOUND: ToolNotFoundError,
    ToolErrorType.TIMEOUT: ToolTimeout,
}


def _unencoded(observation: Any) -> Any:
    """Return an observation; refuse a reward that is not a finite number."""
    finite_reward(getattr(observation, "reward", None))
    return observation


RESET: Final = build_operations(_unencoded, lambda state: state).reset
"""Begins an episode; returns the first observation unencoded."""

# Fields of an observation for the orchestrator only. `metadata` may contain anything, such as the solution.
_HIDDEN: Final = frozenset({"reward", "done", "terminated", "truncated", "metadata"})


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

    async def call(self, request: ToolRequest) -> Any:
        """Take the action that calls the tool."""
        observation = await self._step(_action(request))
        raise_error(observation)
        return observation

    async def ask_server(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Refuse: the environment has no FastMCP server."""
        raise NoTools

    async def _step(self, action: Any) -> Any:
        method = bind_instance(self._env).step
        function = getattr(self._env, method.name)
        if method.is_async:
            return await function(action)
        return await run_blocking(lambda: function(action))


def tools_of(env: Any, action_cls: type[Any] | None) -> ToolSource:
    """Find an environment's tools.

    Raises:
        NoTools: It has none.
    """
    tools = find_tools(env)
    if tools is not None:
        return tools
    if inspect.isclass(action_cls) and issubclass(action_cls, (CallToolAction, ListToolsAction)):
        return StepTools(env)
    raise NoTools


def raise_error(observation: Any) -> None:
    """Raise the failure in a tool call's observation, if it has one."""
    if isinstance(observation, CallToolObservation) and observation.error is not None:
        error = observation.error
        raise _ERRORS[ToolErrorType(error.error_type)](observation.tool_name, error.message)


def agent_view(observation: Any) -> ToolOutcome | dict[str, Any]:
    """Return the agent's view of a tool call: the tool's result, never reward, end or metadata of a step.

    Every reply to an agent passes here, on all surfaces.

    Raises:
        ToolCallError: The call failed.
    """
    if isinstance(observation, ToolOutcome):
        return observation
    raise_error(observation)
    result = getattr(observation, "result", None)
    if isinstance(result, ToolOutcome):
        return result
    fields = decode(split_observation(observation, null_reward=True).fields)
    shown = {name: value for name, value in fields.items() if name not in _HIDDEN}
    if isinstance(result, Observation) and "result" in shown:
        shown["result"] = agent_view(result)
    return shown


def tool_request(params: Mapping[str, Any], events: ToolEvents | None, timeout_s: Any = None) -> ToolRequest:
    """Read the parameters of `tools/call`.

    Raises:
        McpError: They do not fit.
    """
    name, arguments = params.get("name"), params.get("arguments")
    if not isinstance(name, str) or not name:
        raise invalid_params("Missing 'name' in params")
    if arguments is not None and not isinstance(arguments, dict):
        raise invalid_params("'arguments' must be an object")
    return ToolRequest(name, arguments or {}, timeout_s, events)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A tool call that was a step of an episode: the observation is for the agent, the rest for the orchestrator."""

    observation: Any
    reward: float | None
    done: bool


class ToolOperations:
    """Session operations for one action class: list and call tools, call one as a step, use the FastMCP server."""

    def __init__(self, action_cls: type[Any] | None) -> None:
        self._action_cls = action_cls
        self.list = Operation("tool", _never, self._list)
        self.call = Operation("tool", self._call_blocking, self._call, self._only_blocks, interrupt_tools)
        self.ask = Operation("tool", _never, self._ask)
        self.step = Operation("step", self._step, self._step_async, _step_only_blocks, interrupt_tools)

    async def run_for_agent(
        self, session: Session, call: ToolRequest, *, mode: ServerMode, origin: RequestOrigin | None
    ) -> ToolOutcome | dict[str, Any]:
        """Call a tool for an agent, and return the agent's view.

        In a simulation, if the environment takes tool actions, the call is a step of the episode; its reward and end
        are recorded for the orchestrator. An agent cannot reset, so the first step of its session resets the episode.

        Raises:
            ToolCallError: The tool failed.
            NonFiniteReward: The step's reward is not a finite number; the episode's statistics say so too.
            NoTools: The environment has no tools.
        """
        if mode is ServerMode.SIMULATION and self._is_step(session.env):
            try:
                if not session.was_reset and (session.by_agent or session.kind is SessionKind.ONCE):
                    await session.run(RESET, {})
                taken: StepOutcome = await session.run(self.step, call, cancellable=True, origin=origin)
            except NonFiniteReward as exc:
                session.episode.fail(exc.code)
                raise
            session.episode.record(taken.reward, done=taken.done)
            return agent_view(taken.observation)
        return agent_view(await session.run(self.call, call, cancellable=True, origin=origin))

    def _is_step(self, env: Any) -> bool:
        if isinstance(getattr(env, "tools", None), ToolSource):
            return takes_tool_actions(self._action_cls)
        return isinstance(tools_of(env, self._action_cls), StepTools)

    async def _list(self, env: Any, _: Any) -> list[dict[str, Any]]:
        return await tools_of(env, self._action_cls).describe()

    async def _call(self, env: Any, call: ToolRequest) -> Any:
        return await tools_of(env, self._action_cls).call(call)

    def _call_blocking(self, env: Any, call: ToolRequest) -> Any:
        return tools_of(env, self._action_cls).call_blocking(call)

    def _only_blocks(self, env: Any, call: ToolRequest) -> bool:
        try:
            return tools_of(env, self._action_cls).is_blocking(call.name)
        except NoTools:
            return False

    async def _ask(self, env: Any, work: Callable[[Any], Awaitable[Any]]) -> Any:
        return await tools_of(env, self._action_cls).ask_server(work)

    def _step(self, env: Any, call: ToolRequest) -> StepOutcome:
        token = EVENTS.set(call.events)
        try:
            return _stepped(env.step(_action(call), **_limit(env, call)))
        finally:
            EVENTS.reset(token)

    async def _step_async(self, env: Any, call: ToolRequest) -> StepOutcome:
        EVENTS.set(call.events)  # needs no reset: the call runs in a separate task and context
        step = getattr(env, bind_instance(env).step.name)
        return _stepped(await step(_action(call), **_limit(env, call)))


def _step_only_blocks(env: Any, call: ToolRequest) -> bool:
    tools = getattr(env, "tools", None)
    return bind_instance(env).step_is_twofold and isinstance(tools, ToolSource) and tools.is_blocking(call.name)


def _never(env: Any, argument: Any) -> Any:
    raise AssertionError("this operation runs on the event loop")


def _action(call: ToolRequest) -> CallToolAction:
    return CallToolAction(tool_name=call.name, arguments=dict(call.arguments))


def _limit(env: Any, call: ToolRequest) -> dict[str, Any]:
    return {} if call.timeout_s is None else bind_instance(env).step.accept({"timeout_s": call.timeout_s})


def _stepped(observation: Any) -> StepOutcome:
    reward = finite_reward(getattr(observation, "reward", None))
    done = bool(getattr(observation, "done", False))
    return StepOutcome(observation, None if reward is None else float(reward), done)


def origin_of_rpc(manager: SessionManager, request_id: Any, params: Mapping[str, Any]) -> RequestOrigin | None:
    """Return a JSON-RPC request's id and trace (`traceparent` in `_meta`, as MCP reserves it), if they are recorded."""
    if not manager.wants_origins:
        return None
    meta = params.get("_meta")
    parent = meta.get("traceparent") if isinstance(meta, Mapping) else None
    return RequestOrigin(
        request_id if isinstance(request_id, (str, int)) else None, parent if isinstance(parent, str) else None
    )
