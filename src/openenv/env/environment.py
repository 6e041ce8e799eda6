"""`Environment`, the class that authors write, and the default state for classes that declare none.

Knows actions, observations, states and rubrics; must not know its callers or the wire.
"""

from __future__ import annotations

import copy
import functools
import inspect
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ValidationError
from typing_extensions import TypedDict

from openenv.protocol.generics import generic_arguments
from openenv.types import ActT, EnvironmentMetadata, ObsT, State, StateT

from .manifest import package_facts

if TYPE_CHECKING:
    from .rubrics.rubric import Rubric


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


# -- the state of an environment --------------------------------------------------------------------------------------
#
#   the class has                       env.state
#   a property, or a method             what it returns
#   `self.state = MyState()`            that object: it is in the instance, before the descriptor of the class
#   `state = MyState()` in the class    a copy of it for each instance (`CopiedState`)
#   nothing                             `CountedState`: a state with the episode's id that counts steps
#
# Only classes of the last kind, and those that set `self.state`, get wrapped `reset` and `step` methods.

_EPISODE: Final = "_openenv_episode"
RUBRIC_SCORES: Final = "rubric_scores"
"""The metadata key for the scores of a rubric's parts."""


@dataclass(slots=True)
class CountedEpisode:
    """The running episode of an environment that keeps no state."""

    id: str | None = None
    steps: int = 0
    state: Any = None  # once someone has asked for it
    is_inside: bool = False  # of a reset or a step, which may call another one: `super().step(...)`

    def count(self) -> None:
        """Count a step."""
        self.steps += 1
        fields = {} if self.state is None else vars(self.state)
        if "step_count" in fields:
            fields["step_count"] = self.steps  # without the validation of an assignment


class CountedState:
    """The default state of an environment: an object of its state model that counts steps."""

    def __get__(self, env: Any, owner: type[Any] | None = None) -> Any:
        if env is None:
            return self
        episode = _episode(env)
        if episode.state is None:
            episode.state = _new_state(type(env), episode)
        return episode.state


class CopiedState:
    """A state that is an attribute of a class: each instance gets a copy when it first uses it."""

    def __init__(self, template: Any) -> None:
        self.template = template

    def __get__(self, env: Any, owner: type[Any] | None = None) -> Any:
        if env is None:
            return self.template
        state = vars(env)["state"] = copy.deepcopy(self.template)
        return state


_STATE_CLASSES: WeakKeyDictionary[type[Any], type[BaseModel]] = WeakKeyDictionary()


def _episode(env: Any) -> CountedEpisode:
    fields = vars(env)
    if _EPISODE not in fields:
        fields[_EPISODE] = CountedEpisode()
    episode: CountedEpisode = fields[_EPISODE]
    return episode


def _new_state(env_cls: type[Any], episode: CountedEpisode) -> Any:
    if env_cls not in _STATE_CLASSES:
        declared = generic_arguments(env_cls, Environment)[2:3]
        is_model = bool(declared) and isinstance(declared[0], type) and issubclass(declared[0], BaseModel)
        _STATE_CLASSES[env_cls] = declared[0] if is_model else State
    model = _STATE_CLASSES[env_cls]
    values = {"episode_id": episode.id, "step_count": episode.steps}
    try:
        return model(**{name: value for name, value in values.items() if name in model.model_fields})
    except ValidationError as exc:
        raise TypeError(
            f"{env_cls.__name__} has no state, and {model.__name__} cannot be made without values: set "
            f"`self.state = {model.__name__}(...)` in reset, or write a property `state`"
        ) from exc


def _count_episodes(cls: type[Any]) -> None:
    """Wrap the `reset` and `step` functions of a class that sessions may call, so that its state counts."""
    for name, wrap in (("reset", _beginning), ("step", _counting)):
        own = [each for each in (name, f"{name}_async") if each in vars(cls)]
        for each in own or (name, f"{name}_async"):  # inherited from a class that does not count, such as a mixin
            function = inspect.getattr_static(cls, each, None)
            if inspect.isfunction(function) and not hasattr(function, "counts") and vars(Environment)[each] != function:
                wrapped = wrap(function)
                wrapped.counts = True
                setattr(cls, each, wrapped)


def _counting(function: Callable[..., Any]) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def step_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            episode = _episode(self)
            if episode.is_inside or "state" in self.__dict__:
                return await function(self, *args, **kwargs)
            episode.is_inside = True
            try:
                episode.count()
                return await function(self, *args, **kwargs)
            finally:
                episode.is_inside = False

        return step_async

    @functools.wraps(function)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        fields = self.__dict__
        if "state" in fields:
            return function(self, *args, **kwargs)
        episode = fields.get(_EPISODE) or _episode(self)
        if episode.is_inside:
            return function(self, *args, **kwargs)
        episode.is_inside = True
        try:
            episode.count()
            return function(self, *args, **kwargs)
        finally:
            episode.is_inside = False

    return step


def _beginning(function: Callable[..., Any]) -> Any:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    names = [one.name for one in parameters]
    takes_id = "episode_id" in names or any(one.kind is one.VAR_KEYWORD for one in parameters)
    place = names.index("episode_id") - 1 if "episode_id" in names else len(names)

    def begin(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CountedEpisode | None:
        """Begin an episode, unless another reset has; the id is left to functions that take it."""
        episode = _episode(self)
        episode_id = args[place] if len(args) > place else kwargs.get("episode_id")
        if not takes_id:
            kwargs.pop("episode_id", None)
        if episode.is_inside:
            return None
        episode.id, episode.steps, episode.state = episode_id or str(uuid.uuid4()), 0, None
        episode.is_inside = True
        return episode

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def reset_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            episode = begin(self, args, kwargs)
            try:
                return await function(self, *args, **kwargs)
            finally:
                if episode is not None:
                    episode.is_inside = False

        wrapped: Any = reset_async
    else:

        @functools.wraps(function)
        def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
            episode = begin(self, args, kwargs)
            try:
                return function(self, *args, **kwargs)
            finally:
                if episode is not None:
                    episode.is_inside = False

        wrapped = reset
    if not takes_id:  # callers pass only the keywords in the signature
        keyword = inspect.Parameter("episode_id", inspect.Parameter.KEYWORD_ONLY, default=None)
        wrapped.__signature__ = signature.replace(parameters=[*parameters, keyword])
    return wrapped


class Environment(ABC, Generic[ActT, ObsT, StateT]):
    """Base class of environments: write `reset` and `step`, and `state` if it is more than steps and an episode's id.

    `async def step`, or an override of `reset_async` / `step_async`, is for work that waits. The docstring of a class
    is its description. `SUPPORTS_CONCURRENT_SESSIONS` says whether instances share nothing, and
    `REQUIRES_SINGLE_THREAD_EXECUTOR` that all instances need one and the same thread. Set `RUNS_INLINE` when every call
    answers within microseconds and waits for nothing: the runner `auto` then runs them on the event loop, without a
    hand-over to a thread. `PROMPT_TEMPLATE` is the first message for a language model that plays, with `{description}`,
    `{actions}` and `{observation}`. Set `HAS_EXTERNAL_STATE` when an episode changes anything outside of this object's
    memory: files, a database, another process. Such an environment is copied by `snapshot` and `restore` alone.
    """

    SUPPORTS_CONCURRENT_SESSIONS: ClassVar[bool] = False
    REQUIRES_SINGLE_THREAD_EXECUTOR: ClassVar[bool] = False
    RUNS_INLINE: ClassVar[bool] = False
    HAS_EXTERNAL_STATE: ClassVar[bool] = False
    PROMPT_TEMPLATE: ClassVar[str] = ""

    rubric: Rubric | None = None
    transform: Transform[ObsT] | None = None

    def __init_subclass__(cls, counts_episodes: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls).get("state")
        if isinstance(own, BaseModel):
            setattr(cls, "state", CopiedState(own))  # noqa: B010 - a type checker sees a property
        elif counts_episodes and isinstance(inspect.getattr_static(cls, "state"), CountedState):
            _count_episodes(cls)

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

    if TYPE_CHECKING:

        @property
        def state(self) -> StateT:
            """The state of the running episode."""
            raise NotImplementedError

    else:
        state = CountedState()

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment: by its class's docstring, and by the name and version in its package's files."""
        return class_metadata(type(self))

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

    def rubric_reward(self, action: ActT, observation: ObsT) -> float:
        """Score a step with the rubric, 0.0 without one; the scores of its parts go into the observation's metadata.

        Raises:
            TypeError: The rubric is asynchronous; `rubric_reward_async` is for those.
        """
        if self.rubric is None:
            return 0.0
        with self.rubric.part_scores() as scores:
            reward = self._apply_rubric(action, observation)
        _keep_scores(observation, scores)
        return reward

    async def rubric_reward_async(self, action: ActT, observation: ObsT) -> float:
        """Score a step as `rubric_reward` does, with a synchronous or asynchronous rubric."""
        if self.rubric is None:
            return 0.0
        with self.rubric.part_scores() as scores:
            reward = await self._apply_rubric_async(action, observation)
        _keep_scores(observation, scores)
        return reward

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


def _keep_scores(observation: Any, scores: dict[str, float]) -> None:
    metadata = getattr(observation, "metadata", None)
    if isinstance(metadata, dict):
        metadata[RUBRIC_SCORES] = scores


def class_metadata(env_cls: type[Any]) -> EnvironmentMetadata:
    """Describe a class by its docstring and its package's files, without an instance."""
    facts = package_facts(env_cls)
    return EnvironmentMetadata(
        name=facts.name or env_cls.__name__,
        description=_first_paragraph(env_cls) or f"{env_cls.__name__} environment",
        version=facts.version or "1.0.0",
        prompt_template=getattr(env_cls, "PROMPT_TEMPLATE", "") or None,
    )


def _first_paragraph(cls: type[Any]) -> str | None:
    """Return the first paragraph of the docstring that a class, or a base that its author wrote, has."""
    package = __name__.partition(".")[0]
    for base in cls.__mro__:
        text = vars(base).get("__doc__")
        if base in (object, ABC, Generic) or base.__module__.partition(".")[0] == package:
            continue
        if isinstance(text, str) and text.strip():
            return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
    return None
