"""`Environment`: the class that authors write.

Knows actions, observations, states and rubrics; must not know its callers or the wire.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, runtime_checkable

from typing_extensions import TypedDict

from ..types import ActT, EnvironmentMetadata, ObsT, StateT

if TYPE_CHECKING:
    from ..rubrics.rubric import Rubric


class Message(TypedDict):
    """One message of a chat."""

    role: str
    content: str


class ModelTokenizer(Protocol):
    """A tokenizer with a chat template."""

    def apply_chat_template(
        self, conversation: list[Message], tokenize: bool = True, return_tensors: str | None = None, **kwargs: Any
    ) -> Any:
        """Render a conversation, as tokens or as text."""
        ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        """Turn tokens into text."""
        ...


class Transform(ABC, Generic[ObsT]):
    """Changes an observation on its way out, for example to add a reward."""

    @abstractmethod
    def __call__(self, observation: ObsT) -> ObsT:
        """Return the observation, changed or not."""


class CompositeTransform(Transform[ObsT]):
    """Applies several transforms, first to last."""

    def __init__(self, transforms: Iterable[Transform[ObsT]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, observation: ObsT) -> ObsT:
        """Apply the transforms in order."""
        for transform in self.transforms:
            observation = transform(observation)
        return observation


class NullTransform(Transform[ObsT]):
    """Changes nothing."""

    def __call__(self, observation: ObsT) -> ObsT:
        """Return the observation itself."""
        return observation


@runtime_checkable
class TaskProvider(Protocol):
    """The methods of an environment that has a catalogue of tasks."""

    def list_splits(self) -> list[Any]:
        """Name the splits."""
        ...

    def list_tasks(self, split: str) -> list[Any]:
        """List the tasks of a split."""
        ...

    def num_tasks(self, split: str) -> int:
        """Count the tasks of a split."""
        ...

    def get_task(self, split: str, index: int) -> Any:
        """Return one task."""
        ...

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        """Return some tasks of a split."""
        ...


class Environment(ABC, Generic[ActT, ObsT, StateT]):
    """Base class of environments: write `reset`, `step` and `state`.

    Override `reset_async` / `step_async` instead when the work is asynchronous. Set `SUPPORTS_CONCURRENT_SESSIONS`
    when instances share nothing, and `REQUIRES_SINGLE_THREAD_EXECUTOR` when all instances need one and the same thread.
    Set `RUNS_INLINE` when every call answers within microseconds and waits for nothing: the runner `auto` then runs
    them on the event loop, without a hand-over to a thread.
    Set `HAS_EXTERNAL_STATE` when an episode changes what is not in the memory of this object: files, a database,
    another process. Such an environment is copied by `snapshot` and `restore` alone.
    """

    SUPPORTS_CONCURRENT_SESSIONS: ClassVar[bool] = False
    REQUIRES_SINGLE_THREAD_EXECUTOR: ClassVar[bool] = False
    RUNS_INLINE: ClassVar[bool] = False
    HAS_EXTERNAL_STATE: ClassVar[bool] = False

    rubric: Rubric | None = None
    transform: Transform[ObsT] | None = None

    def __init__(self, transform: Transform[ObsT] | None = None, rubric: Rubric | None = None) -> None:
        self.transform = transform
        self.rubric = rubric

    @abstractmethod
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> ObsT:
        """Begin an episode and return its first observation."""

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> ObsT:
        """Begin an episode; override this one when it waits for something."""
        return self.reset(seed=seed, episode_id=episode_id, **kwargs)

    @abstractmethod
    def step(self, action: ActT, timeout_s: float | None = None, **kwargs: Any) -> ObsT:
        """Take an action and return the observation after it."""

    async def step_async(self, action: ActT, timeout_s: float | None = None, **kwargs: Any) -> ObsT:
        """Take an action; override this one when it waits for something."""
        return self.step(action, timeout_s=timeout_s, **kwargs)

    @property
    @abstractmethod
    def state(self) -> StateT:
        """The state of the running episode."""

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        name = type(self).__name__
        return EnvironmentMetadata(name=name, description=f"{name} environment", version="1.0.0")

    def render_web(self, observation: dict[str, Any]) -> str | None:
        """Draw an observation for the web page, or return None for the default view.

        An override may take a second parameter `theme`: it gets `"light"` or `"dark"`, as the visitor's page is.
        """
        return None

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Offer buttons on the web page: label and action fields each."""
        return []

    def snapshot(self) -> Any:
        """Return everything that the running episode depends on, random generators too; `restore` takes it.

        Override both where copies cannot be made without your help. The value must be picklable for the process runner.
        """
        raise NotImplementedError(f"{type(self).__name__} does not write snapshot()")

    def restore(self, snapshot: Any) -> None:
        """Continue the episode of a snapshot, which another instance may have made; no `reset` comes before."""
        raise NotImplementedError(f"{type(self).__name__} does not write restore()")

    def close(self) -> None:
        """Release the environment's resources."""

    def _apply_transform(self, observation: ObsT) -> ObsT:
        """Run the transform, if there is one."""
        return observation if self.transform is None else self.transform(observation)

    def _apply_rubric(self, action: ActT, observation: ObsT) -> float:
        """Score a step; 0.0 without a rubric.

        Raises:
            TypeError: The rubric is asynchronous; `_apply_rubric_async` is for those.
        """
        if self.rubric is None:
            return 0.0
        score = self.rubric(action, observation)
        if inspect.isawaitable(score):
            if inspect.iscoroutine(score):
                score.close()
            raise TypeError(f"{type(self.rubric).__name__} is asynchronous: use `await self._apply_rubric_async(...)`")
        return score

    async def _apply_rubric_async(self, action: ActT, observation: ObsT) -> float:
        """Score a step with a synchronous or asynchronous rubric; 0.0 without one."""
        return 0.0 if self.rubric is None else await self.rubric.acall(action, observation)

    def _reset_rubric(self) -> None:
        """Make the rubric forget the last episode."""
        if self.rubric is not None:
            self.rubric.reset()

    async def _reset_rubric_async(self) -> None:
        """Make the rubric forget the last episode, from asynchronous code."""
        if self.rubric is not None:
            reset = getattr(self.rubric, "reset_async", self.rubric.reset)
            done: Any = reset()
            if inspect.isawaitable(done):
                await done
