"""Legacy path of the shared models: as `openenv.core.env_server.types`, but what is subclassed may be a dataclass.

In the first release `Action`, `Observation` and `State` were dataclasses, and environments decorate their own with
`@dataclass`. These take that as well as plain subclasses, and are what the current ones are: pydantic models.
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
    """Keeps its constructor when `@dataclass` is put on a subclass, and does what the decorator's would do."""

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
        type.__setattr__(cls, "__init__", cls.__init__)  # the decorator leaves what a class itself has


@dataclass(repr=False, eq=False)
class Action(_Decorated, _Action):
    """What an agent asks of an environment; subclass it and add fields."""

    metadata: Annotated[dict[str, Any], Field(description="Free-form data that travels with the action")] = field(
        default_factory=dict
    )


@dataclass(repr=False, eq=False)
class Observation(_Decorated, _Observation):
    """What an environment answers; subclass it and add fields."""

    done: bool = Field(default=False, description="Whether the episode is over")
    reward: bool | int | float | None = Field(default=None, description="Reward of the last action")
    metadata: Annotated[dict[str, Any], Field(description="Free-form data beside the observation")] = field(
        default_factory=dict
    )


@dataclass(repr=False, eq=False)
class State(_Decorated, _State):
    """An environment's inner state, for debugging and orchestration; extra fields are welcome."""

    episode_id: str | None = Field(default=None, description="Identifies the running episode")
    step_count: int = Field(default=0, ge=0, description="Steps taken in this episode")


__getattr__, __dir__, _names = lazy_exports(
    __name__, {name: _current.__name__ for name in vars(_current)["__all__"] if name not in _OWN}
)
__all__ = [*_OWN, *_names]
