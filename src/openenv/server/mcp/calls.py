"""Operations on a session that concern tools: list, call, call as a step of the episode, ask the FastMCP server.

Each runs as one call of the session, in its turn. Knows tools and operations; must not know JSON-RPC.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...env.binding import bind
from ...env.tools.source import EVENTS, ToolEvents, ToolSource
from ...sessions.operations import Operation, interrupt_tools
from ...tool_types import CallToolAction
from .tools import NoTools, tools_of


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a client asks for."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    events: ToolEvents | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a tool call led to as a step of an episode: the agent's part and the orchestrator's."""

    observation: Any
    reward: float | None
    done: bool


class ToolOperations:
    """The operations for one action class."""

    def __init__(self, action_cls: type[Any] | None) -> None:
        self._action_cls = action_cls
        self.list = Operation("tool", _never, self._list)
        self.call = Operation("tool", self._call_blocking, self._call, self._only_blocks, interrupt_tools)
        self.ask = Operation("tool", _never, self._ask)
        self.step = Operation("step", self._step, self._step_async, _step_only_blocks, interrupt_tools)

    async def _list(self, env: Any, _: Any) -> list[dict[str, Any]]:
        return await tools_of(env, self._action_cls).describe()

    async def _call(self, env: Any, call: ToolCall) -> Any:
        tools = tools_of(env, self._action_cls)
        return await tools.call(call.name, call.arguments, timeout_s=call.timeout_s, events=call.events)

    def _call_blocking(self, env: Any, call: ToolCall) -> Any:
        tools = tools_of(env, self._action_cls)
        return tools.call_blocking(call.name, call.arguments, timeout_s=call.timeout_s, events=call.events)

    def _only_blocks(self, env: Any, call: ToolCall) -> bool:
        try:
            return tools_of(env, self._action_cls).is_blocking(call.name)
        except NoTools:
            return False

    async def _ask(self, env: Any, work: Callable[[Any], Awaitable[Any]]) -> Any:
        return await tools_of(env, self._action_cls).ask_server(work)

    def _step(self, env: Any, call: ToolCall) -> StepOutcome:
        token = EVENTS.set(call.events)
        try:
            return _stepped(env.step(_action(call), **_limit(env, call)))
        finally:
            EVENTS.reset(token)

    async def _step_async(self, env: Any, call: ToolCall) -> StepOutcome:
        EVENTS.set(call.events)  # a task of its own: nobody else sees it
        step = getattr(env, bind(type(env)).step.name)
        return _stepped(await step(_action(call), **_limit(env, call)))


def _step_only_blocks(env: Any, call: ToolCall) -> bool:
    tools = getattr(env, "tools", None)
    return bind(type(env)).step_is_twofold and isinstance(tools, ToolSource) and tools.is_blocking(call.name)


def _never(env: Any, argument: Any) -> Any:
    raise AssertionError("tool operations run on the event loop")


def _action(call: ToolCall) -> CallToolAction:
    return CallToolAction(tool_name=call.name, arguments=dict(call.arguments))


def _limit(env: Any, call: ToolCall) -> dict[str, Any]:
    return {} if call.timeout_s is None else bind(type(env)).step.accept({"timeout_s": call.timeout_s})


def _stepped(observation: Any) -> StepOutcome:
    reward = getattr(observation, "reward", None)
    done = bool(getattr(observation, "done", False))
    return StepOutcome(observation, None if reward is None else float(reward), done)
