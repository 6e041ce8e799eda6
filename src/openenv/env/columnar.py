"""`ColumnarEnvironment`: an environment whose actions and observations are arrays, for steps without models.

A batch of such environments reads its actions from arrays and writes its results to arrays (`protocol.columns`). Knows
arrays and values; must not know who steps it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from openenv.errors import NonFiniteReward
from openenv.protocol.columns import ColumnLayout

from .environment import Environment

StepValues = tuple[Sequence[Any], float, bool, bool, Mapping[str, Any]]


class ColumnarEnvironment(ABC):
    """The methods that an `Environment` adds for steps in columns. They do the same as `reset` and `step`."""

    column_layout: ClassVar[ColumnLayout | None] = None
    """The arrays, or None for an environment with other values."""

    @classmethod
    @abstractmethod
    def valid_actions(cls, actions: Sequence[Any]) -> Any:
        """Return for each row of the action arrays whether `step` would accept it."""

    @abstractmethod
    def reset_values(self, kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Begin an episode; return a value for each observation column, and the metadata."""

    @abstractmethod
    def step_values(self, action: Sequence[Any]) -> StepValues:
        """Take an action, given as a value for each action column.

        Return a value for each observation column, the reward, terminated, truncated, and the metadata.
        """


def step_action(env: ColumnarEnvironment, action: Sequence[Any]) -> StepValues:
    """Take an action, given as a value for each action column.

    Raises:
        NonFiniteReward: The reward is not a finite number.
    """
    values = env.step_values(action)
    if not math.isfinite(values[1]):
        raise NonFiniteReward.of(values[1])
    return values


def layout_of(env_cls: Any) -> ColumnLayout | None:
    """Return the layout of a class whose steps may run in columns; None for any other.

    A subclass that overrides `step`, `reset` or a hook around them must have its own methods called.
    """
    if not isinstance(env_cls, type) or not issubclass(env_cls, ColumnarEnvironment):
        return None
    owner = next((cls for cls in env_cls.__mro__ if "step_values" in vars(cls)), None)
    for name in ("step", "reset", "reset_values", "valid_actions"):
        if next((cls for cls in env_cls.__mro__ if name in vars(cls)), None) is not owner:
            return None
    base: Any = Environment
    for name in ("step_async", "reset_async"):
        if getattr(env_cls, name, None) is not getattr(base, name, None):
            return None
    return env_cls.column_layout
