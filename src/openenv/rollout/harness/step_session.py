"""`StepEnvSessionAdapter`: an environment that is stepped, as a session with tools.

Knows blocking clients; must not know how the session is run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from openenv.tool_types import RESERVED_TOOL_NAMES, Tool
from openenv.types import StepResult

from .interface import Message, ResourceSession, ToolResult, VerifyResult, plain

logger = logging.getLogger(__name__)


class StepEnvSessionAdapter(ResourceSession):
    """A session of an environment that is stepped: each tool call is a step.

    Args:
        client: A blocking client, or anything with `reset`, `step` and perhaps `state` and `close`.
        task: Passed to the builders.
        seed, episode_id: For the reset.
        tool_specs: The tools that the agent sees.
        action_builder: Makes an action of a tool's name and arguments.
        initial_messages_builder: Makes the first messages of the reset's result and the task.
        tool_result_builder: Makes what the agent sees of name, arguments, result and state.
        verify_builder: Makes the verdict of transcript, final state, last result and state.
        reset_kwargs: More for the reset.

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
        """Return what the builder makes of the reset."""
        return self._build_messages(self._first, self._task)

    def list_tools(self) -> list[Tool]:
        """Return the tools of the environment."""
        return list(self._tools.values())

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Take the step that the call stands for.

        Raises:
            KeyError: There is no such tool.
        """
        if name not in self._tools:
            raise KeyError(f"Unknown tool: {name}")
        self._last = _settled(self._client.step(self._build_action(name, arguments)))
        self._state = self._read_state()
        return self._build_tool_result(name, arguments, self._last, self._state)

    def verify(self, transcript: list[Message], final_state: Any | None = None) -> VerifyResult:
        """Return the verdict; by default the last step's reward."""
        return self._build_verdict(transcript, final_state, self._last, self._state)

    def close(self) -> None:
        """Close the client."""
        close = getattr(self._client, "close", None)
        if callable(close):
            _settled(close())

    def _abandon(self) -> None:
        """Close the client of a session that could not start; the first error is the one to raise."""
        try:
            self.close()
        except Exception:
            logger.exception("the client could not be closed")

    def _read_state(self) -> Any:
        state = getattr(self._client, "state", None)
        return _settled(state()) if callable(state) else state


def _settled(value: Any) -> Any:
    """Return a value; refuse an awaitable with a hint, since sessions block."""
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
    return ToolResult(data=data, done=done, metadata={"reward": result.reward, "state": plain(state)})


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
