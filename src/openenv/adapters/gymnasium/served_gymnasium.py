"""Any Gymnasium environment as an `Environment`: spaces as models, info as metadata, pictures on request.

Knows Gymnasium and the base class; must not know servers.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import new_class
from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar

import gymnasium
from gymnasium.error import Error as GymnasiumError
from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, create_model

from openenv.env.columnar import ColumnarEnvironment, StepValues
from openenv.env.environment import Environment
from openenv.protocol.columns import ColumnLayout
from openenv.types import Action, ActT, EnvironmentMetadata, Observation, ObsT, State

from .spaces import (
    SPACE_KEY,
    SomeSpace,
    SpaceColumns,
    UnsupportedSpace,
    checker,
    describe,
    schema_of,
    wire_writer,
)

__all__ = [
    "RENDER_KEY",
    "GymnasiumError",
    "ServedGymnasium",
    "UnsupportedSpace",
    "gymnasium_environment",
    "gymnasium_target",
    "picture_of",
]

RENDER_KEY: Final = "render"
# Classic control and toy text compute a step in microseconds. A thread per session would cost more than the step.
_AT_ONCE: Final = ("gymnasium.envs.classic_control.", "gymnasium.envs.toy_text.")
"""The runner for environments with steps of a few microseconds that wait for nothing."""

ModelT = TypeVar("ModelT", Action, Observation)
MakeEnv = Callable[..., "gymnasium.Env[Any, Any]"]


class ServedGymnasium(Environment[ActT, ObsT, State], ColumnarEnvironment, Generic[ActT, ObsT]):
    """Base of the classes that `gymnasium_environment` makes.

    `reset` takes Gymnasium's `options`; with `render=True` each observation's metadata holds a picture.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    name: ClassVar[str]
    make: ClassVar[MakeEnv]
    action_cls: ClassVar[type[Action]]
    observation_cls: ClassVar[type[Observation]]
    action_space: ClassVar[SomeSpace]
    observation_space: ClassVar[SomeSpace]
    write_observation: ClassVar[Callable[[Any], Any]]
    action_columns: ClassVar[SpaceColumns]
    observation_columns: ClassVar[SpaceColumns]

    def __init__(self) -> None:
        super().__init__()
        self._env = type(self).make()
        self._is_rendered = self._env.render_mode == "rgb_array"
        self._episode_id: str | None = None
        self._steps = 0

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        options: dict[str, Any] | None = None,
        render: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Begin an episode."""
        return self._observed(*self._begin(seed, episode_id, options, render))

    def _begin(
        self, seed: int | None, episode_id: str | None, options: dict[str, Any] | None, render: bool | None
    ) -> tuple[Any, dict[str, Any]]:
        # Gymnasium fixes the render mode at construction, so a change of mode needs a new environment.
        if render is not None and render != self._is_rendered:
            self._env.close()
            self._env = type(self).make(render_mode="rgb_array") if render else type(self).make()
            self._is_rendered = self._env.render_mode == "rgb_array"
        observation, info = self._env.reset(seed=seed, options=options)
        self._episode_id, self._steps = episode_id or str(uuid.uuid4()), 0
        return observation, info

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Take an action."""
        observation, reward, terminated, truncated, info = self._env.step(action.action)
        self._steps += 1
        # NumPy's bool_ is not JSON. Gymnasium environments return either type.
        terminated, truncated = bool(terminated), bool(truncated)
        return self._observed(
            observation,
            info,
            reward=float(reward),
            done=terminated or truncated,
            terminated=terminated,
            truncated=truncated,
        )

    @classmethod
    def valid_actions(cls, actions: Sequence[Any]) -> Any:
        """Return for each row of the action arrays whether the action space contains it."""
        return cls.action_columns.contains(actions)

    def reset_values(self, kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Begin an episode in columns."""
        known = (kwargs.get(name) for name in ("seed", "episode_id", "options", "render"))
        observation, info = self._begin(*known)
        return self.observation_columns.split(observation), self._metadata(info)

    def step_values(self, action: Sequence[Any]) -> StepValues:
        """Take an action in columns."""
        single = self.observation_columns
        value = action[0] if self.action_columns.is_single else self.action_columns.join(action)
        observation, reward, terminated, truncated, info = self._env.step(value)
        self._steps += 1
        parts = (observation,) if single.is_single else single.split(observation)
        metadata = self._metadata(info) if info or self._is_rendered else info
        return parts, float(reward), bool(terminated), bool(truncated), metadata

    def _metadata(self, info: dict[str, Any]) -> dict[str, Any]:
        # Info keys may be numbers in Gymnasium, but are texts in JSON.
        metadata = {str(key): value for key, value in info.items()} if info else {}
        if self._is_rendered:
            metadata[RENDER_KEY] = picture_of(self._env.render())
        return metadata

    def _observed(self, observation: Any, info: dict[str, Any], **fields: Any) -> Any:
        wire = type(self).write_observation(observation)
        return self.observation_cls(observation=wire, metadata=self._metadata(info), **fields)  # type: ignore[call-arg]

    @property
    def state(self) -> State:
        """The episode's id and step count."""
        return State(episode_id=self._episode_id, step_count=self._steps)

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name=self.name, description=f"Gymnasium's {self.name}", version=gymnasium.__version__
        )

    def close(self) -> None:
        """Close the Gymnasium environment."""
        self._env.close()


def gymnasium_target(env_id: str) -> type[ServedGymnasium[Any, Any]]:
    """Make the class that `openenv serve gymnasium:ID` serves; `module:ID` imports a module first.

    Raises:
        ValueError: Gymnasium has no such environment, or its spaces cannot be described.
    """
    try:
        return gymnasium_environment(env_id)
    except (GymnasiumError, UnsupportedSpace) as exc:
        raise ValueError(str(exc)) from exc


def gymnasium_environment(env: str | MakeEnv, **kwargs: Any) -> type[ServedGymnasium[Any, Any]]:
    """Make an `Environment` class of a Gymnasium environment; its models are `action_cls` and `observation_cls`.

    Args:
        env: Its id, as for `gymnasium.make`, or a function that makes one and takes `render_mode`.
        kwargs: For `gymnasium.make`, or for the function.

    Raises:
        UnsupportedSpace: Its spaces cannot be described.
        gymnasium.error.Error: There is no such environment.
    """

    # `gymnasium.make` takes an ID; a function builds environments that are not registered.
    def make(**more: Any) -> gymnasium.Env[Any, Any]:
        return gymnasium.make(env, **kwargs, **more) if isinstance(env, str) else env(**kwargs, **more)

    # Spaces belong to instances, so one instance is made, read and closed.
    sample = make()
    try:
        action_space, observation_space = sample.action_space, sample.observation_space
        name = env if isinstance(env, str) else type(sample.unwrapped).__name__
    finally:
        sample.close()
    # "ALE/Pong-v5" -> "PongV5": class names must be identifiers, and users read them in error messages.
    title = "".join(part for part in name.rpartition("/")[2].title() if part.isalnum())
    valid_action = Annotated[Any, BeforeValidator(checker(action_space))]
    action_cls = _model(Action, title, action_space, valid_action)
    observation_cls = _model(Observation, title, observation_space, Any)
    members = {
        # Members of a class body, built here because names and models depend on the environment.
        "__doc__": f"Gymnasium's {name}.",
        "__module__": __name__,
        "name": name,
        "make": staticmethod(make),
        "action_cls": action_cls,
        "observation_cls": observation_cls,
        "action_space": action_space,
        "observation_space": observation_space,
        "write_observation": staticmethod(wire_writer(observation_space)),
        **_column_members(action_space, observation_space),
        "RUNS_INLINE": type(sample.unwrapped).__module__.startswith(_AT_ONCE),
    }
    base: Any = ServedGymnasium
    made: type[ServedGymnasium[Any, Any]] = new_class(
        f"{title}Environment", (base[action_cls, observation_cls],), exec_body=lambda space: space.update(members)
    )
    make_picklable(made, gymnasium_environment, (env, kwargs))
    return made


def _column_members(action_space: SomeSpace, observation_space: SomeSpace) -> dict[str, Any]:
    try:
        actions, observations = SpaceColumns(action_space, "action"), SpaceColumns(observation_space, "observation")
    except UnsupportedSpace:  # text, for example: its steps carry models
        return {}
    layout = ColumnLayout(actions.columns, observations.columns)
    return {"action_columns": actions, "observation_columns": observations, "column_layout": layout}


def make_picklable(made: Any, maker: Callable[..., Any], arguments: tuple[Any, dict[str, Any]]) -> None:
    """Let a class and its models be pickled by how they are made: another process cannot import them by name.

    Args:
        made: The class, with `action_cls` and `observation_cls`.
        maker: The function that has made it.
        arguments: Its first argument, and its keywords.
    """
    # Process runners and gateways send the class to another process. It has no module path to import there, so
    try:
        # it is sent as the arguments that made it.
        recipe = pickle.dumps((maker, *arguments))
    except Exception:  # a local function, for example
        return
    for cls, name in ((made, ""), (made.action_cls, "action_cls"), (made.observation_cls, "observation_cls")):
        type.__setattr__(cls, "__made_by__", (_made_again, (recipe, name)))


# The cache keeps one class per recipe: two unpicklings of one class must be identical for `isinstance`.
@lru_cache(maxsize=64)
def _served(recipe: bytes) -> type[Any]:
    maker, argument, kwargs = pickle.loads(recipe)
    made: type[Any] = maker(argument, **kwargs)
    return made


def _made_again(recipe: bytes, name: str) -> type[Any]:
    """Return a class that another process made; the same one each time."""
    served = _served(recipe)
    cls: type[Any] = getattr(served, name) if name else served
    return cls


def _model(base: type[ModelT], title: str, space: SomeSpace, value: Any) -> type[ModelT]:
    """Make an action or observation model with one field, a value of the space, and the space in its schema."""
    kind: Any = Annotated[value, WithJsonSchema(schema_of(space))]
    field: Any = (kind, Field(description=f"A value of {str(space)[:200]}"))
    config = ConfigDict(**{**base.model_config, "json_schema_extra": {SPACE_KEY: describe(space)}})
    name = f"{title}{base.__name__}"
    parent = type(f"{name}Base", (base,), {"model_config": config, "__module__": __name__})
    return create_model(name, __base__=parent, __module__=__name__, **{base.__name__.lower(): field})


def picture_of(frame: Any) -> Any:
    """Return a frame as an image, which JSON carries as a PNG, or as an array without Pillow."""
    try:
        from PIL import Image  # an optional dependency
    except ImportError:
        return frame
    return frame if frame is None else Image.fromarray(frame)
