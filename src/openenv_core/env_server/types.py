"""Legacy path of the shared models: `openenv.core.env_server.types` with base classes that accept `@dataclass`.

In `openenv-core` 0.1 `Action`, `Observation` and `State` were dataclasses, and environments decorate their subclasses
with `@dataclass`. The classes here are pydantic models like the current ones and allow decorated and plain subclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, Field

from openenv._lazy import lazy_exports
from openenv.core.env_server import types as _current
from openenv.types import Action as _Action
from openenv.types import Observation as _Observation
from openenv.types import State as _State

_OWN = ("Action", "Observation", "State")
_KEYWORD_ONLY = frozenset((*_Action.model_fields, *_Observation.model_fields))


class _Decorated(BaseModel):
    """Keeps the constructor of pydantic on subclasses decorated with `@dataclass`; accepts positional arguments."""

    def __init__(self, /, *args: Any, **values: Any) -> None:
        names = [name for name in type(self).model_fields if name not in _KEYWORD_ONLY]
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {len(names)} positional arguments but {len(args)} were given")
        super().__init__(**dict(zip(names, args, strict=False)), **values)
        finish = getattr(self, "__post_init__", None)
        if finish is not None:
            finish()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        type.__setattr__(cls, "__init__", cls.__init__)  # the decorator never replaces an `__init__` in the class body


@dataclass(repr=False, eq=False)
class Action(_Decorated, _Action):
    """Base class of actions; subclass it and add fields."""

    metadata: Annotated[dict[str, Any], Field(description="Free-form data that travels with the action")] = field(
        default_factory=dict
    )


@dataclass(repr=False, eq=False)
class Observation(_Decorated, _Observation):
    """Base class of observations; subclass it and add fields."""

    done: bool = Field(default=False, description="Whether the episode is over")
    reward: bool | int | float | None = Field(default=None, description="Reward of the last action")
    metadata: Annotated[dict[str, Any], Field(description="Free-form data beside the observation")] = field(
        default_factory=dict
    )


@dataclass(repr=False, eq=False)
class State(_Decorated, _State):
    """An environment's inner state, for debugging and orchestration; accepts extra fields."""

    episode_id: str | None = Field(default=None, description="Identifies the running episode")
    step_count: int = Field(default=0, ge=0, description="Steps taken in this episode")


__getattr__, __dir__, _names = lazy_exports(
    __name__, {name: _current.__name__ for name in vars(_current)["__all__"] if name not in _OWN}
)
__all__ = [*_OWN, *_names]
