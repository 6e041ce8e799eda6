"""Running an agent in a session: with our tool loop, with its own loop, or as a function that trainers call.

Knows sessions and models as interfaces; must not know environments.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import Any

from openenv.protocol.jsonrpc import JsonRpcErrorCode
from openenv.tool_types import RESERVED_TOOL_NAMES, Tool

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
    VerifyResult,
    plain,
)


class SessionMCPBridge:
    """Answers an agent's `tools/list` and `tools/call` requests from a session.

    Args:
        session: Where the tools are.
    """

    def __init__(self, session: ResourceSession) -> None:
        self._session = session

    def handle_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a JSON-RPC request; a failure is an error in the answer."""
        request_id = request.get("id")
        if request.get("jsonrpc") != "2.0" or not isinstance(request.get("method"), str):
            return _refusal(request_id, JsonRpcErrorCode.INVALID_REQUEST, "Invalid Request")
        params = request.get("params")
        if not isinstance(params, Mapping):
            params = {}
        if request["method"] == "tools/list":
            tools = [
                {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema}
                for tool in self._session.list_tools()
            ]
            return {"jsonrpc": "2.0", "id": request_id, "result": {"tools": tools}}
        if request["method"] == "tools/call":
            return self._call(request_id, params.get("name"), params.get("arguments"))
        return _refusal(request_id, JsonRpcErrorCode.METHOD_NOT_FOUND, f"Method not found: {request['method']}")

    def _call(self, request_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
        if not isinstance(name, str) or not name:
            return _refusal(request_id, JsonRpcErrorCode.INVALID_PARAMS, "Missing tool name")
        if name in RESERVED_TOOL_NAMES:
            return _refusal(request_id, JsonRpcErrorCode.INVALID_PARAMS, f"Tool name '{name}' is reserved")
        if arguments is not None and not isinstance(arguments, Mapping):
            return _refusal(request_id, JsonRpcErrorCode.INVALID_PARAMS, "Tool arguments must be an object")
        try:
            result = self._session.call_tool(name, dict(arguments or {}))
            shown = plain(result)
        except Exception as exc:  # the request boundary: an agent reads what went wrong
            text = str(exc.args[0]) if isinstance(exc, KeyError) and exc.args else str(exc)
            return _refusal(request_id, JsonRpcErrorCode.INTERNAL_ERROR, text or type(exc).__name__)
        return {"jsonrpc": "2.0", "id": request_id, "result": shown}


def _refusal(request_id: Any, code: JsonRpcErrorCode, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": int(code), "message": message, "data": None}}


class MCPHarnessAdapter(HarnessAdapter):
    """The plain tool loop: ask the model, call the tools it requests, send it the results, until it requests none."""

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
        outcome = _called(session, call.name, arguments, known)
        result.tool_trace.append(ToolTraceEntry(call.name, arguments, outcome))
        result.events.append(
            RolloutEvent("tool_call", {"tool_name": call.name, "arguments": arguments, "done": outcome.done})
        )
        result.messages.append(
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": _tool_text(outcome)}
        )
        result.metrics["tool_calls"] = len(result.tool_trace)
        if outcome.done:
            result.done = True
            return True
    return False


def _called(session: ResourceSession, name: str, arguments: dict[str, Any], known: set[str]) -> ToolResult:
    """Call a tool; the model reads the error of one that does not exist, and may correct itself."""
    try:
        return session.call_tool(name, arguments)
    except KeyError as exc:
        if name in known:
            raise
        return ToolResult(error=str(exc.args[0]) if exc.args else f"Unknown tool: {name}")


def _tool_text(result: ToolResult) -> str:
    data = {"error": result.error} if result.data is None and result.error is not None else result.data
    return data if isinstance(data, str) else json.dumps(plain(data), sort_keys=True)


_TOLERANCE = 1e-6


def build_harness_rollout_func(
    *,
    session_factory: Any,
    harness_adapter: HarnessAdapter,
    model_step_builder: Callable[[Any, ResourceSession], ModelStep],
    limits: HarnessRunLimits | None = None,
    reward_key: str = "env_reward",
) -> Callable[[list[Any], Any], dict[str, list[Any]]]:
    """Build a function that trainers call with prompts and themselves, and that returns tokens and rewards.

    The reward of a rollout is the environment's: a verdict that differs from what the last tool call brought is
    refused, so that no session can invent rewards.

    Args:
        session_factory: Makes a session for each prompt, which is its task.
        harness_adapter: Runs each session.
        model_step_builder: Gets the trainer and a session; returns how the model is asked.
        limits: Of each rollout.
        reward_key: What the rewards are called in the function's result.

    Returns:
        A function whose result has lists under `prompt_ids`, `completion_ids`, `logprobs`, `reward_key` and
        `verify_metrics`, an entry for each prompt. It raises ValueError for a verdict that is not the environment's
        reward, and for a rollout without any.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {
            key: [] for key in ("prompt_ids", "completion_ids", "logprobs", reward_key, "verify_metrics")
        }
        for prompt in prompts:
            session: ResourceSession = session_factory.create(prompt)
            try:
                result = harness_adapter.run_white_box(model_step_builder(trainer, session), session, limits)
                verdict = session.verify(transcript=result.messages, final_state=_final_state(result))
            finally:
                session.close()
            columns["prompt_ids"].append(result.prompt_ids)
            columns["completion_ids"].append(result.completion_ids)
            columns["logprobs"].append(result.logprobs)
            columns[reward_key].append(_agreed_reward(result, verdict))
            columns["verify_metrics"].append(verdict.metrics)
        return columns

    return rollout


def _final_state(result: HarnessRolloutResult) -> dict[str, Any]:
    return {
        "done": result.done,
        "metrics": result.metrics,
        "events": [dataclasses.asdict(event) for event in result.events],
        # Not `asdict` for the whole entry: it would copy the tools' data.
        "tool_trace": [{**vars(entry), "result": dict(vars(entry.result))} for entry in result.tool_trace],
    }


def _agreed_reward(result: HarnessRolloutResult, verdict: VerifyResult) -> float:
    rewards = [entry.result.metadata.get("reward") for entry in result.tool_trace]
    earned = next((float(reward) for reward in reversed(rewards) if reward is not None), None)
    if verdict.env_reward is None:
        if earned is None:
            raise ValueError("The rollout did not produce an environment reward")
        return earned
    reward = float(verdict.env_reward)
    if earned is not None and not isclose(reward, earned, rel_tol=0.0, abs_tol=_TOLERANCE):
        raise ValueError(
            f"verify.env_reward must forward the environment reward: the last tool call brought {earned}, not {reward}"
        )
    return reward
