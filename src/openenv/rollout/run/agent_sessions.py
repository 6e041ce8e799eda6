"""Agent sessions, the published harness interface for trainers: an agent works in a session with tools.

A `HarnessAdapter` runs an agent in a `ResourceSession`, and `build_harness_rollout_func` makes a function for trainers
from both. If the agent has its own loop, its session is a `TrainableSession`. Must not know servers, sandboxes or the
agents of rollouts.
"""

from __future__ import annotations

import inspect
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from math import isclose
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from pydantic_core import to_jsonable_python

from openenv.client.rewards import RewardHistory
from openenv.protocol.json_values import finite_reward, reply_reward
from openenv.protocol.jsonrpc import JsonRpcErrorCode
from openenv.protocol.tool_messages import RESERVED_TOOL_NAMES as RESERVED_TOOL_NAMES
from openenv.protocol.tool_messages import Tool
from openenv.types import StepResult

from ..capture.training_trace import TraceEntry, TrainingTrace

logger = logging.getLogger(__name__)

# ---- the interface ----

Message = dict[str, Any]
"""A message in the format of OpenAI chat completions."""


class ToolCallLike(Protocol):
    """A tool call that a model requests."""

    id: str
    name: str
    args: dict[str, Any]


class ModelResponse(Protocol):
    """A model's response, as `openenv.core.llm_client` returns it."""

    content: str
    tool_calls: list[Any]


@dataclass
class ToolResult:
    """The result of a tool call; `done` ends the rollout, `error` is for the agent to read."""

    data: Any = None
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class VerifyResult:
    """A session's verdict on a rollout; a reward of None means no reward."""

    env_reward: float | None = None
    done: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutEvent:
    """An event of a rollout."""

    type: str
    payload: dict[str, Any] = field(default_factory=dict)


@dataclass
class ToolTraceEntry:
    """A tool call with its result."""

    tool_name: str
    arguments: dict[str, Any]
    result: ToolResult


@dataclass
class ModelStepResult:
    """A model's response with its tokens."""

    response: ModelResponse
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class HarnessRolloutResult:
    """A rollout: its messages, its tool calls, and the tokens of its turns as one row (`merge_turns`)."""

    messages: list[Message] = field(default_factory=list)
    tool_trace: list[ToolTraceEntry] = field(default_factory=list)
    events: list[RolloutEvent] = field(default_factory=list)
    done: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list, kw_only=True)
    """For each completion ID: 1 if the model sampled it, 0 if the environment inserted it."""


@dataclass
class HarnessRunLimits:
    """The limits of a rollout, and the sampling parameters of its model."""

    max_turns: int = 10
    max_tool_calls_per_turn: int | None = None
    max_total_tool_calls: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


class ModelStep(Protocol):
    """Requests a model's next message."""

    def __call__(self, messages: list[Message], tools: list[Tool], sampling: dict[str, Any]) -> ModelStepResult:
        """Return the model's response."""
        ...


class ResourceSession(ABC):
    """An agent's tools and messages during one rollout."""

    @abstractmethod
    def initial_messages(self) -> list[Message]:
        """Return the first messages of the rollout."""

    @abstractmethod
    def list_tools(self) -> list[Tool]:
        """Return the tools that the agent may call."""

    @abstractmethod
    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool."""

    @abstractmethod
    def verify(self, transcript: list[Message], final_state: Any | None = None) -> VerifyResult:
        """Judge the rollout."""

    @abstractmethod
    def close(self) -> None:
        """Free the resources of the session."""


@runtime_checkable
class LoopOwningSession(Protocol):
    """Additional methods of a session whose agent runs its own loop: wait for its end, read its model calls."""

    def wait_for_completion(self, timeout_s: float | None = ...) -> int:
        """Wait for the agent; return its exit code."""
        ...

    def fetch_proxy_trace(self) -> list[TraceEntry]:
        """Return a record of each model call."""
        ...


@runtime_checkable
class TrainableSession(Protocol):
    """A session with an agent that runs its own loop, and with model calls that a trainer can use."""

    def wait_for_completion(self, timeout_s: float | None = ...) -> int:
        """Wait for the agent; return its exit code."""
        ...

    def fetch_training_trace(self) -> TrainingTrace:
        """Return the agent's calls after checking them; raises ValueError if a trainer cannot use them."""
        ...


SessionT = TypeVar("SessionT", bound=ResourceSession)


class ResourceSessionFactory(ABC, Generic[SessionT]):
    """Creates one session per rollout."""

    @abstractmethod
    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> SessionT:
        """Create a session for a task."""


class HarnessAdapter(ABC):
    """Runs an agent in a session."""

    @abstractmethod
    def run_white_box(
        self, model_step: ModelStep, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """Run the agent's loop here, with one model request per turn."""

    @abstractmethod
    def run_black_box(self, session: ResourceSession, limits: HarnessRunLimits | None = None) -> HarnessRolloutResult:
        """Run an agent that has its own loop and its own model."""


def plain(value: Any) -> Any:
    """Return a value as JSON values; other objects become their text."""
    return to_jsonable_python(value, fallback=str, inf_nan_mode="constants")


# ---- running an agent ----


class SessionMCPBridge:
    """Answers an agent's `tools/list` and `tools/call` requests from a session.

    Args:
        session: Provides the tools.
    """

    def __init__(self, session: ResourceSession) -> None:
        self.session = session

    def handle_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a JSON-RPC request; a failure becomes a JSON-RPC error."""
        request_id = request.get("id")
        if request.get("jsonrpc") != "2.0" or not isinstance(request.get("method"), str):
            return _refusal(request_id, JsonRpcErrorCode.INVALID_REQUEST, "Invalid Request")
        params = request.get("params")
        if not isinstance(params, Mapping):
            params = {}
        if request["method"] == "tools/list":
            tools = [
                {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema}
                for tool in self.session.list_tools()
            ]
            return {"jsonrpc": "2.0", "id": request_id, "result": {"tools": tools}}
        if request["method"] == "tools/call":
            return self._call(request_id, params.get("name"), params.get("arguments"))
        return _refusal(request_id, JsonRpcErrorCode.METHOD_NOT_FOUND, "Method not found")

    def _call(self, request_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
        if not isinstance(name, str) or not name:
            return _refusal(request_id, JsonRpcErrorCode.INVALID_PARAMS, "Missing tool name")
        if name in RESERVED_TOOL_NAMES:
            return _refusal(request_id, JsonRpcErrorCode.INVALID_PARAMS, f"Reserved orchestration tool: {name}")
        if arguments is not None and not isinstance(arguments, Mapping):
            return _refusal(request_id, JsonRpcErrorCode.INVALID_PARAMS, "Tool arguments must be an object")
        try:
            result = self.session.call_tool(name, dict(arguments or {}))
            shown = plain(result)
        except Exception as exc:  # the request boundary: the agent reads the error
            text = str(exc.args[0]) if isinstance(exc, KeyError) and exc.args else str(exc)
            return _refusal(request_id, _code_of(exc), text or type(exc).__name__)
        return {"jsonrpc": "2.0", "id": request_id, "result": shown}


def _code_of(error: Exception) -> JsonRpcErrorCode:
    """Return the code of a failed call: a session raises KeyError for an unknown tool, ValueError for its arguments."""
    if isinstance(error, KeyError):
        return JsonRpcErrorCode.METHOD_NOT_FOUND
    return JsonRpcErrorCode.INVALID_PARAMS if isinstance(error, ValueError) else JsonRpcErrorCode.INTERNAL_ERROR


def _refusal(request_id: Any, code: JsonRpcErrorCode, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": int(code), "message": message, "data": None}}


class MCPHarnessAdapter(HarnessAdapter):
    """The plain tool loop: ask the model, call the requested tools, send the results, until it requests no tool."""

    def run_white_box(
        self, model_step: ModelStep, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """Run the loop until the model calls no tool, a tool ends the rollout, or a limit is reached."""
        limits = limits or HarnessRunLimits()
        tools = session.list_tools()
        result = HarnessRolloutResult(messages=list(session.initial_messages()))
        answers: list[ModelStepResult] = []
        for turn in range(limits.max_turns):
            answer = model_step(result.messages, tools, limits.sampling)
            answers.append(answer)
            calls = list(answer.response.tool_calls or ())
            _note_answer(result, turn, answer, calls)
            if not calls:
                result.done = True
                break
            if _call_all(result, session, tools, calls, limits):
                break
        _set_tokens(result, answers)
        return result

    def run_black_box(self, session: ResourceSession, limits: HarnessRunLimits | None = None) -> HarnessRolloutResult:
        """Refuse: this adapter contains no agent.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "MCPHarnessAdapter only runs white boxes; use CLIHarnessAdapter for agents with their own loop"
        )


class CLIHarnessAdapter(HarnessAdapter):
    """Runs an agent that has its own loop.

    Args:
        runner: Runs the agent; it receives a bridge to the session's tools, the session and the limits.
    """

    def __init__(
        self, runner: Callable[[SessionMCPBridge, ResourceSession, HarnessRunLimits], HarnessRolloutResult]
    ) -> None:
        self._runner = runner

    def run_white_box(
        self, model_step: ModelStep, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """Refuse: the agent calls its model itself.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("CLIHarnessAdapter only runs black boxes; use MCPHarnessAdapter for white boxes")

    def run_black_box(self, session: ResourceSession, limits: HarnessRunLimits | None = None) -> HarnessRolloutResult:
        """Call the runner."""
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
    result.metrics["turns"] = turn + 1
    result.metrics.setdefault("tool_calls", 0)


@dataclass(slots=True)
class MergedTurns:
    """Turns merged into one training row: a prompt, and all tokens after it."""

    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    turns: int = 0
    """The number of turns in the row."""

    def takes(self, turn: ModelStepResult) -> bool:
        """Return whether the prompt of a turn starts with all tokens of the row."""
        prompt, split = list(turn.prompt_ids), len(self.prompt_ids)
        seen = split + len(self.completion_ids)
        return prompt[:split] == self.prompt_ids and prompt[split:seen] == self.completion_ids

    def add(self, turn: ModelStepResult) -> None:
        """Append a turn for which `takes` is true."""
        added = turn.prompt_ids[len(self.prompt_ids) + len(self.completion_ids) :]
        self.completion_ids += [*added, *turn.completion_ids]
        self.logprobs += [*(0.0 for _ in added), *turn.logprobs]
        self.env_mask += [*(0 for _ in added), *(1 for _ in turn.completion_ids)]
        self.turns += 1


def merge_turns(turns: Iterable[ModelStepResult]) -> MergedTurns:
    """Merge the turns of a conversation into one training row.

    Each prompt must start with all earlier tokens. The tokens that it adds, such as tool results, are masked:

        turn 1   prompt 1 2      sampled 3 4
        turn 2   prompt 1 2 3 4 5 6          sampled 7
        row      prompt 1 2      completion  3 4 5 6 7      env_mask 1 1 0 0 1

    Any other prompt starts a new row, because the model never saw both parts together. That happens if a template
    removes thoughts, or an agent shortens its conversation. Returns the row with the most sampled tokens, the last one
    if several have as many.

    Raises:
        ValueError: some turns have log-probabilities, but a turn does not have one for each sampled token.
    """
    turns = list(turns)
    has_logprobs = any(turn.logprobs for turn in turns)
    rows: list[MergedTurns] = []
    for turn in turns:
        if has_logprobs and len(turn.logprobs) != len(turn.completion_ids):
            counts = f"{len(turn.completion_ids)} sampled tokens and {len(turn.logprobs)} log-probabilities"
            raise ValueError(f"A model step has {counts}: training needs one for each")
        if not rows or not rows[-1].takes(turn):
            rows.append(MergedTurns(prompt_ids=list(turn.prompt_ids)))
        rows[-1].add(turn)
    row = max(reversed(rows), key=lambda row: sum(row.env_mask), default=MergedTurns())
    row.logprobs = row.logprobs if has_logprobs else []
    return row


def _set_tokens(result: HarnessRolloutResult, answers: Sequence[ModelStepResult]) -> None:
    """Set the tokens of a result to the merged row; its metrics count the turns outside the row."""
    named = [answer for answer in answers if answer.prompt_ids or answer.completion_ids]
    row = merge_turns(named)
    result.prompt_ids, result.completion_ids = row.prompt_ids, row.completion_ids
    result.logprobs, result.env_mask = row.logprobs, row.env_mask
    if row.turns < len(named):
        result.metrics["turns_left_out"] = len(named) - row.turns


def _call_all(
    result: HarnessRolloutResult,
    session: ResourceSession,
    tools: Sequence[Tool],
    calls: Sequence[ToolCallLike],
    limits: HarnessRunLimits,
) -> bool:
    """Call the tools of one turn; return whether this ends the rollout."""
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
    """Call a tool. If it does not exist, return the error, so that the model can correct itself."""
    try:
        return session.call_tool(name, arguments)
    except KeyError as exc:
        if name in known:
            raise
        return ToolResult(error=str(exc.args[0]) if exc.args else f"Unknown tool: {name}")


def _tool_text(result: ToolResult) -> str:
    data = {"error": result.error} if result.data is None and result.error is not None else result.data
    return data if isinstance(data, str) else json.dumps(plain(data), sort_keys=True)


# ---- an environment that is stepped, as a session ----


class StepEnvSessionAdapter(ResourceSession):
    """A session of an environment with `step`: each tool call is a step.

    Args:
        client: A blocking client, or any object with `reset`, `step` and perhaps `state` and `close`.
        task: Passed to the builders.
        seed, episode_id: Arguments of `reset`.
        tool_specs: The tools that the agent sees.
        action_builder: Makes an action from a tool's name and arguments.
        initial_messages_builder: Makes the first messages from the result of `reset` and the task.
        tool_result_builder: Makes the agent's view of a step from name, arguments, result and state.
        verify_builder: Makes the verdict from transcript, final state, last result and state.
        reset_kwargs: More arguments of `reset`.

    Raises:
        ValueError: A tool has a reserved name.
        TypeError: The client does not block.
    """

    def __init__(
        self,
        client: Any,
        *,
        task: Any = None,
        seed: int | None = None,
        episode_id: str | None = None,
        tool_specs: list[Tool],
        action_builder: Callable[[str, dict[str, Any]], Any],
        initial_messages_builder: Callable[[StepResult[Any], Any], list[Message]],
        tool_result_builder: Callable[[str, dict[str, Any], StepResult[Any], Any], ToolResult] | None = None,
        verify_builder: Callable[[list[Message], Any | None, StepResult[Any] | None, Any], VerifyResult] | None = None,
        reset_kwargs: dict[str, Any] | None = None,
    ) -> None:
        taken = sorted(RESERVED_TOOL_NAMES.intersection(tool.name for tool in tool_specs))
        if taken:
            raise ValueError(f"Tool names {taken} are reserved for the code that runs the rollout")
        self._client = client
        self._task = task
        self._tools = {tool.name: tool for tool in tool_specs}
        self._build_action = action_builder
        self._build_messages = initial_messages_builder
        self._build_tool_result = tool_result_builder or _shown_step
        self._build_verdict = verify_builder or _last_reward
        arguments = dict(reset_kwargs or {})
        arguments |= {key: value for key, value in (("seed", seed), ("episode_id", episode_id)) if value is not None}
        self._last: StepResult[Any] | None = None
        try:
            self._first: StepResult[Any] = _settled(client.reset(**arguments))
            self._state = self._read_state()
        except BaseException:
            self._abandon()
            raise

    def initial_messages(self) -> list[Message]:
        """Return the first messages, made by the builder."""
        return self._build_messages(self._first, self._task)

    def list_tools(self) -> list[Tool]:
        """Return the tools of the environment."""
        return list(self._tools.values())

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Take the step for this call.

        Raises:
            KeyError: The tool does not exist.
        """
        if name not in self._tools:
            raise KeyError(f"Unknown tool: {name}")
        self._last = _settled(self._client.step(self._build_action(name, arguments)))
        self._state = self._read_state()
        return self._build_tool_result(name, arguments, self._last, self._state)

    def verify(self, transcript: list[Message], final_state: Any | None = None) -> VerifyResult:
        """Return the verdict; by default with the reward of the last step."""
        return self._build_verdict(transcript, final_state, self._last, self._state)

    def close(self) -> None:
        """Close the client."""
        close = getattr(self._client, "close", None)
        if callable(close):
            _settled(close())

    def _abandon(self) -> None:
        """Close the client after a failed start; log a second error, so that the first one is raised."""
        try:
            self.close()
        except Exception:
            logger.exception("the client could not be closed")

    def _read_state(self) -> Any:
        state = getattr(self._client, "state", None)
        return _settled(state()) if callable(state) else state


def _settled(value: Any) -> Any:
    """Return a value; refuse an awaitable with a hint, because sessions block."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError("the client must block: give the session `client.sync()`")
    return value


def _shown_step(name: str, arguments: dict[str, Any], result: StepResult[Any], state: Any) -> ToolResult:
    done = bool(result.done)
    data = {
        "tool_name": name,
        "arguments": arguments,
        "observation": result.observation,
        "reward": result.reward,
        "done": done,
    }
    return ToolResult(
        data=data, done=done, metadata={"reward": reply_reward(result.reward, result.metadata), "state": plain(state)}
    )


def _last_reward(
    transcript: list[Message], final_state: Any | None, last: StepResult[Any] | None, state: Any
) -> VerifyResult:
    reward = None if last is None or last.reward is None else float(last.reward)
    steps = getattr(state, "step_count", None)
    return VerifyResult(
        env_reward=reward,
        done=bool(last is not None and last.done),
        metrics={} if steps is None else {"step_count": steps},
        artifacts={
            "final_state": plain(state) if final_state is None else final_state,
            "transcript_length": len(transcript),
        },
    )


# ---- what trainers call ----

_TOLERANCE = 1e-6


def build_harness_rollout_func(
    *,
    session_factory: Any,
    harness_adapter: HarnessAdapter,
    model_step_builder: Callable[[Any, ResourceSession], ModelStep],
    limits: HarnessRunLimits | None = None,
    reward_key: str = "env_reward",
    concurrency: int = 1,
    requires_reward: bool = True,
) -> Callable[[list[Any], Any], dict[str, list[Any]]]:
    """Build a function that a trainer calls with prompts and itself; it returns tokens and rewards.

    The environment decides the reward: a verdict with another reward than the last tool call is refused, so that no
    session can invent rewards.

    Args:
        session_factory: Creates a session for each prompt; the prompt is the task.
        harness_adapter: Runs each session.
        model_step_builder: Receives the trainer and a session; returns the function that calls the model.
        limits: The limits of each rollout.
        reward_key: The key of the rewards in the result.
        concurrency: The number of rollouts at once, each in a thread.
        requires_reward: Count a missing reward as 0, and raise an error if no rollout has had a reward. If False, a
            missing reward is None, which trainers such as TRL leave out of the group.

    Returns:
        A function that returns a dictionary of lists with one entry per prompt: `prompt_ids`, `completion_ids`,
        `logprobs`, `env_mask` (1 for sampled tokens, 0 for tool results), `reward_key` and `verify_metrics`. It raises
        ValueError if a verdict differs from the environment's reward, or if the environment has never given a reward,
        and NonFiniteReward for NaN and infinity.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")

    history = RewardHistory()

    def one(prompt: Any, trainer: Any) -> dict[str, Any]:
        session: ResourceSession = session_factory.create(prompt)
        try:
            result = harness_adapter.run_white_box(model_step_builder(trainer, session), session, limits)
            verdict = session.verify(transcript=result.messages, final_state=rollout_final_state(result))
        finally:
            session.close()
        return {
            "prompt_ids": result.prompt_ids,
            "completion_ids": result.completion_ids,
            "logprobs": result.logprobs,
            "env_mask": result.env_mask or [1] * len(result.completion_ids),
            reward_key: agreed_reward(result, verdict, is_required=False),
            "verify_metrics": verdict.metrics,
        }

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        if concurrency == 1:
            rows = [one(prompt, trainer) for prompt in prompts]
        else:
            with ThreadPoolExecutor(concurrency, thread_name_prefix="openenv-rollout") as pool:
                futures = [pool.submit(one, prompt, trainer) for prompt in prompts]
                try:
                    rows = [future.result() for future in futures]
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        if requires_reward:
            _fill_missing(rows, reward_key, history)
        keys = ("prompt_ids", "completion_ids", "logprobs", "env_mask", reward_key, "verify_metrics")
        return {key: [row[key] for row in rows] for key in keys}

    return rollout


def rollout_final_state(result: HarnessRolloutResult) -> dict[str, Any]:
    """Return the final state that `ResourceSession.verify` receives."""
    return {
        "done": result.done,
        "metrics": result.metrics,
        "events": [asdict(event) for event in result.events],
        # `asdict` for the whole entry would copy the data of the tools.
        "tool_trace": [{**vars(entry), "result": dict(vars(entry.result))} for entry in result.tool_trace],
    }


def _fill_missing(rows: list[dict[str, Any]], key: str, history: RewardHistory) -> None:
    """Count missing rewards as 0 if the environment gave a reward in any rollout of this function.

    Raises:
        ValueError: It never gave one.
    """
    history.gives_rewards |= any(row[key] is not None for row in rows)
    if rows and not history.gives_rewards:
        raise ValueError("The rollout did not produce an environment reward")
    for row in rows:
        row[key] = history.value(row[key])


def agreed_reward(result: HarnessRolloutResult, verdict: VerifyResult, *, is_required: bool) -> float | None:
    """Return the environment's reward, which the verdict must forward; None if neither has one.

    Raises:
        ValueError: They differ, or a required reward is missing.
        NonFiniteReward: One of them is not a finite number.
    """
    rewards = [entry.result.metadata.get("reward") for entry in result.tool_trace]
    earned = next((float(finite_reward(reward)) for reward in reversed(rewards) if reward is not None), None)
    if verdict.env_reward is None:
        if earned is None and is_required:
            raise ValueError("The rollout did not produce an environment reward")
        return earned
    reward = float(finite_reward(verdict.env_reward))
    if earned is not None and not isclose(reward, earned, rel_tol=0.0, abs_tol=_TOLERANCE):
        raise ValueError(
            f"verify.env_reward must forward the environment reward: the last tool call brought {earned}, not {reward}"
        )
    return reward if earned is None else earned  # they differ by rounding at most: take the tool's number
