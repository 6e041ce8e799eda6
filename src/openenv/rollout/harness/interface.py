"""The interface of harnesses and sessions: results, limits, and three abstract classes.

Must not know any loop, server or agent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from pydantic_core import to_jsonable_python

from openenv.tool_types import Tool

Message = dict[str, Any]
"""A message in the shape of OpenAI's chat completions."""


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
    """A session's verdict on a rollout; a reward of None means that there is none."""

    env_reward: float | None = None
    done: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutEvent:
    """Something that happened in a rollout."""

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
    """A rollout: its messages, its tool calls, and the tokens of all turns in a row."""

    messages: list[Message] = field(default_factory=list)
    tool_trace: list[ToolTraceEntry] = field(default_factory=list)
    events: list[RolloutEvent] = field(default_factory=list)
    done: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class HarnessRunLimits:
    """How long a rollout may go on, and the sampling parameters of its model."""

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
    """What an agent works in during one rollout."""

    @abstractmethod
    def initial_messages(self) -> list[Message]:
        """Return the messages that the rollout begins with."""

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
        """Free what the session holds."""


SessionT = TypeVar("SessionT", bound=ResourceSession)


class ResourceSessionFactory(ABC, Generic[SessionT]):
    """Makes sessions, one for each rollout."""

    @abstractmethod
    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> SessionT:
        """Make a session for a task."""


class HarnessAdapter(ABC):
    """Runs an agent in a session."""

    @abstractmethod
    def run_white_box(
        self, model_step: ModelStep, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """Run the agent's loop here, with one model request per turn."""

    @abstractmethod
    def run_black_box(self, session: ResourceSession, limits: HarnessRunLimits | None = None) -> HarnessRolloutResult:
        """Let an agent run that has its own loop and its own model."""


def plain(value: Any) -> Any:
    """Return a value as JSON values; anything else becomes its text."""
    return to_jsonable_python(value, fallback=str, inf_nan_mode="constants")
