"""Environments of the Open Reward Standard (ORS) as `Environment`s: an action calls a tool, which may pay and end.

Knows the class that `ors-sdk` and `openreward` share, by its methods; imports neither.

    ORS                                         here
    list_splits, list_tasks, get_task           the task API: list_splits, list_tasks, num_tasks, ...
    cls(task_spec, secrets), setup, get_prompt  reset: a new instance; its prompt is the first observation
    list_tools, list_task_tools                 a step with ListToolsAction
    a tool -> ToolOutput(blocks, reward, ...)   a step with CallToolAction
    teardown                                    the next reset, close
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Mapping, Sequence
from types import new_class
from typing import Any, ClassVar

from pydantic import Field

from openenv.env.environment import Environment
from openenv.errors import message_of
from openenv.protocol.tool_messages import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from openenv.types import EnvironmentMetadata, Observation, State

_METHODS = ("list_splits", "list_tasks", "list_tools", "get_prompt", "_call_tool")
_NO_ARGUMENTS = {"type": "object", "properties": {}}
_FIRST_SPLIT = "train"
# Reasons of the SDK, and our error types for them.
_REASONS = {"not_found": ToolErrorType.TOOL_NOT_FOUND, "input_validation": ToolErrorType.INVALID_ARGS}


class TaskPrompt(Observation):
    """The beginning of an episode: the prompt for the agent. A step with `ListToolsAction` lists its tools."""

    prompt: str = Field(default="", description="The text of the prompt")
    blocks: list[dict[str, Any]] = Field(default_factory=list, description="The prompt with its images")
    split: str | None = Field(default=None, description="The split that the task is of")
    index: int | None = Field(default=None, description="Its number there")


class ServedORS(Environment[CallToolAction, CallToolObservation, State]):
    """Base of the classes that `ors_environment` makes.

    `reset` takes `split` and `index`, the number of a task there, or a literal `task_spec`; by default the seed
    chooses a task of the split `train`, or of the first one.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    source: ClassVar[type[Any]]
    action_cls: ClassVar[type[CallToolAction]] = CallToolAction
    observation_cls: ClassVar[type[CallToolObservation]] = CallToolObservation
    reset_observation_cls: ClassVar[type[TaskPrompt]] = TaskPrompt

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        # One loop for all calls of a session: what setup opens on it, the tools use. A session has its own thread.
        self._loop = asyncio.new_event_loop()
        self._episode: Any = None
        self._is_over = False

    def reset(  # type: ignore[override]
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        task_spec: Mapping[str, Any] | None = None,
        split: str | None = None,
        index: int | None = None,
        secrets: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> TaskPrompt:
        """Begin an episode of a task, and return its prompt.

        Raises:
            ValueError: There is no such split or task, or both a task and the number of one were given.
        """
        # A specification is a task by itself. A number beside it would be ignored silently.
        if task_spec is not None and (split is not None or index is not None):
            raise ValueError("give a task_spec, or the split and index of a task, not both")
        # The previous instance is torn down before the new one sets up: they may use the same files or ports.
        self._end_episode()
        if task_spec is None:
            split, index = self._choose(split, index, seed)
            task_spec = self.get_task(split, index)
        self._state = State(episode_id=episode_id or str(uuid.uuid4()))
        # ORS creates one object per episode; secrets reach only that object.
        episode = self.source(task_spec=task_spec, secrets=dict(secrets or {}))
        self._episode, self._is_over = episode, False
        self._await(episode.setup())
        blocks = [_dump(block) for block in self._await(episode.get_prompt())]
        return TaskPrompt(prompt=_text(blocks), blocks=blocks, split=split, index=index)

    def step(  # type: ignore[override]
        self, action: CallToolAction | ListToolsAction, timeout_s: float | None = None, **kwargs: Any
    ) -> CallToolObservation | ListToolsObservation:
        """Call a tool, or list them.

        Raises:
            RuntimeError: No episode has begun, or it is over.
        """
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(tools=self._tools())
        if self._episode is None or self._is_over:
            raise RuntimeError("the episode is over: reset begins one" if self._is_over else "reset begins an episode")
        self._state.step_count += 1
        # Tools may depend on the task, so the list is read for each call.
        names = [tool.name for tool in self._tools()]
        if action.tool_name not in names:
            problem = f"tool not found: {action.tool_name!r}; there are {', '.join(names) or 'none'}"
            return _failed(action, ToolErrorType.TOOL_NOT_FOUND, problem)
        try:
            reply = self._await(self._episode._call_tool(action.tool_name, dict(action.arguments)))
        except Exception as error:  # the tool's own failure is the agent's to see, and the episode goes on
            return _failed(action, ToolErrorType.EXECUTION_ERROR, f"{type(error).__name__}: {message_of(error)}")
        # Newer SDKs wrap the result in a root model, older ones return it.
        outcome = getattr(reply, "root", reply)
        if not outcome.ok:
            # A tool that is there is refused for its arguments, unless the SDK names another reason.
            kind = _REASONS.get(getattr(outcome, "reason", None) or "input_validation", ToolErrorType.EXECUTION_ERROR)
            return _failed(action, kind, str(outcome.error))
        output = outcome.output
        # ORS has no truncation: a finished episode is terminated.
        self._is_over = bool(output.finished)
        blocks = [_dump(block) for block in output.blocks]
        # The form of MCP tool results, which clients of tools expect.
        result = {"content": blocks, "structured_content": None, "data": _text(blocks), "is_error": False}
        return CallToolObservation(
            tool_name=action.tool_name,
            result=result,
            reward=output.reward,
            done=self._is_over,
            terminated=self._is_over,
            metadata=dict(output.metadata or {}),
        )

    @property
    def state(self) -> State:
        """The episode's id and how many tools were called."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        text = inspect.getdoc(self.source) or f"{self.source.__name__}, an environment of the Open Reward Standard"
        return EnvironmentMetadata(name=self.source.__name__, description=text)

    def close(self) -> None:
        """End the episode and its event loop."""
        if self._loop.is_closed():
            return
        try:
            self._end_episode()
        finally:
            # Asynchronous generators of tools may hold connections; closing the loop alone would leak them.
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    # -- the catalogue of tasks ---------------------------------------------------------------------------------------

    def list_splits(self) -> list[dict[str, str]]:
        """Return the splits, each with its name and kind."""
        splits = self._await(self.source.list_splits())
        return [{"name": one, "type": _kind(one)} if isinstance(one, str) else _dump(one) for one in splits]

    def list_tasks(self, split: str) -> list[Any]:
        """Return the tasks of a split."""
        return [_dump(task) for task in self._await(self.source.list_tasks(split))]

    def num_tasks(self, split: str) -> int:
        """Count the tasks of a split."""
        # Counting is optional in ORS. Listing all tasks is the fallback.
        count = getattr(self.source, "num_tasks", None)
        return len(self.list_tasks(split)) if count is None else int(self._await(count(split)))

    def get_task(self, split: str, index: int) -> Any:
        """Return one task.

        Raises:
            IndexError: The split has no such task.
        """
        count = self.num_tasks(split)
        # Negative indexes count from the end, as in Python and in ORS.
        if not -count <= index < count:
            raise IndexError(f"the split {split!r} has {count} tasks, so there is no {index}")
        get = getattr(self.source, "get_task", None)
        return self.list_tasks(split)[index] if get is None else _dump(self._await(get(split, index % count)))

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        """Return some tasks of a split, as a slice does."""
        return [self.get_task(split, index) for index in range(*slice(start, stop).indices(self.num_tasks(split)))]

    # -----------------------------------------------------------------------------------------------------------------

    def _choose(self, split: str | None, index: int | None, seed: int | None) -> tuple[str, int]:
        names = [one["name"] for one in self.list_splits()]
        if not names:
            raise ValueError(f"{self.source.__name__} has no splits, so reset needs a task_spec")
        if split is not None and split not in names:
            raise ValueError(f"unknown split {split!r}; choose from {', '.join(names)}")
        chosen = split or (_FIRST_SPLIT if _FIRST_SPLIT in names else names[0])
        if index is not None:
            return chosen, index
        count = self.num_tasks(chosen)
        if not count:
            raise ValueError(f"the split {chosen!r} has no tasks")
        # The remainder makes every seed valid, and equal seeds choose equal tasks.
        return chosen, (seed or 0) % count

    def _tools(self) -> list[Tool]:
        """Return the tools of the class; during an episode, add the tools of its task."""
        specs = [*self.source.list_tools().tools]
        # Some environments add tools per task, such as a submission form.
        if self._episode is not None and hasattr(self._episode, "list_task_tools"):
            specs += self._await(self._episode.list_task_tools()).tools
        return [
            Tool(name=one.name, description=one.description or "", input_schema=dict(one.input_schema or _NO_ARGUMENTS))
            for one in specs
        ]

    def _end_episode(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            self._await(episode.teardown())

    def _await(self, value: Any) -> Any:
        """Return a value, or the result of an awaitable: methods of ORS may return either."""

        async def wait() -> Any:
            return await value

        # A session has its thread, so blocking it on the session's loop blocks nobody else.
        return self._loop.run_until_complete(wait()) if inspect.isawaitable(value) else value


def ors_environment(source: type[Any]) -> type[ServedORS]:
    """Make an `Environment` class of an environment class of ORS.

    Raises:
        TypeError: The object is not such a class; the text lists the missing methods.
    """
    missing = [name for name in _METHODS if not hasattr(source, name)]
    if not inspect.isclass(source) or missing:
        raise TypeError(f"{source!r} is not an environment class of ORS: it lacks {', '.join(missing) or 'a class'}")
    members = {"__module__": __name__, "__doc__": source.__doc__, "source": source}
    return new_class(f"{source.__name__}Environment", (ServedORS,), exec_body=lambda space: space.update(members))


def _failed(action: CallToolAction, kind: ToolErrorType, message: str) -> CallToolObservation:
    return CallToolObservation(tool_name=action.tool_name, error=ToolError(error_type=kind, message=message))


def _dump(value: Any) -> Any:
    """Return a model as plain data without empty fields; other values as they are."""
    dump = getattr(value, "model_dump", None)
    return value if dump is None else dump(mode="json", exclude_none=True)


def _text(blocks: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(str(block["text"]) for block in blocks if block.get("type") == "text")


def _kind(split: str) -> str:
    """Return the purpose of a split with this name; ORS treats unknown names as validation."""
    return split if split in ("train", "validation", "test") else "validation"
