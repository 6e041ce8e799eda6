"""The two ways to run an agent in a session: its loop is ours, or its own.

Knows sessions and models as shapes; must not know environments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from openenv.tool_types import Tool

from .bridge import SessionMCPBridge
from .interface import (
    HarnessAdapter,
    HarnessRolloutResult,
    HarnessRunLimits,
    Message,
    ModelStep,
    ModelStepResult,
    ResourceSession,
    RolloutEvent,
    ToolCallLike,
    ToolResult,
    ToolTraceEntry,
    plain,
)


class MCPHarnessAdapter(HarnessAdapter):
    """The plain tool loop: ask the model, call what it asks for, tell it the results, until it asks for nothing."""

    def run_white_box(
        self, model_step: ModelStep, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """Run the loop until the model calls no tool, a tool ends the rollout, or a limit does."""
        limits = limits or HarnessRunLimits()
        tools = session.list_tools()
        result = HarnessRolloutResult(messages=list(session.initial_messages()))
        for turn in range(limits.max_turns):
            answer = model_step(result.messages, tools, limits.sampling)
            calls = list(answer.response.tool_calls or ())
            _note_answer(result, turn, answer, calls)
            if not calls:
                result.done = True
                break
            if _call_all(result, session, tools, calls, limits):
                break
        return result

    def run_black_box(self, session: ResourceSession, limits: HarnessRunLimits | None = None) -> HarnessRolloutResult:
        """Refuse: this adapter has no agent of its own.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("MCPHarnessAdapter only runs white boxes; CLIHarnessAdapter runs agents of their own")


class CLIHarnessAdapter(HarnessAdapter):
    """Runs an agent that has its own loop.

    Args:
        runner: Runs it: gets a bridge to the session's tools, the session and the limits.
    """

    def __init__(
        self, runner: Callable[[SessionMCPBridge, ResourceSession, HarnessRunLimits], HarnessRolloutResult]
    ) -> None:
        self._runner = runner

    def run_white_box(
        self, model_step: ModelStep, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """Refuse: the agent asks its model itself.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("CLIHarnessAdapter only runs black boxes; MCPHarnessAdapter runs white ones")

    def run_black_box(self, session: ResourceSession, limits: HarnessRunLimits | None = None) -> HarnessRolloutResult:
        """Let the runner run."""
        return self._runner(SessionMCPBridge(session), session, limits or HarnessRunLimits())


def _note_answer(
    result: HarnessRolloutResult, turn: int, answer: ModelStepResult, calls: Sequence[ToolCallLike]
) -> None:
    content = answer.response.content
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(plain(call.args))},
            }
            for call in calls
        ]
    shown = [{"id": call.id, "name": call.name, "arguments": dict(call.args)} for call in calls]
    result.messages.append(message)
    result.events.append(RolloutEvent("model_response", {"turn": turn, "content": content, "tool_calls": shown}))
    result.prompt_ids.extend(answer.prompt_ids)
    result.completion_ids.extend(answer.completion_ids)
    result.logprobs.extend(answer.logprobs)
    result.metrics["turns"] = turn + 1
    result.metrics.setdefault("tool_calls", 0)


def _call_all(
    result: HarnessRolloutResult,
    session: ResourceSession,
    tools: Sequence[Tool],
    calls: Sequence[ToolCallLike],
    limits: HarnessRunLimits,
) -> bool:
    """Call the tools of one turn; return whether the rollout ends with it."""
    known = {tool.name for tool in tools}
    for call in calls[: limits.max_tool_calls_per_turn]:
        if limits.max_total_tool_calls is not None and len(result.tool_trace) >= limits.max_total_tool_calls:
            result.metrics["truncated"] = True
            return True
        arguments = dict(call.args)
        found = _called(session, call.name, arguments, known)
        result.tool_trace.append(ToolTraceEntry(call.name, arguments, found))
        result.events.append(
            RolloutEvent("tool_call", {"tool_name": call.name, "arguments": arguments, "done": found.done})
        )
        result.messages.append(
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": _tool_text(found)}
        )
        result.metrics["tool_calls"] = len(result.tool_trace)
        if found.done:
            result.done = True
            return True
    return False


def _called(session: ResourceSession, name: str, arguments: dict[str, Any], known: set[str]) -> ToolResult:
    """Call a tool; one that the model made up is its own mistake, which it reads and may correct."""
    try:
        return session.call_tool(name, arguments)
    except KeyError as exc:
        if name in known:
            raise
        return ToolResult(error=str(exc.args[0]) if exc.args else f"Unknown tool: {name}")


def _tool_text(result: ToolResult) -> str:
    data = {"error": result.error} if result.data is None and result.error is not None else result.data
    return data if isinstance(data, str) else json.dumps(plain(data), sort_keys=True)
