"""Transforms that every environment may need. Know observations only."""

from __future__ import annotations

from collections.abc import Iterable

from ..types import ObsT
from .environment import Transform


class CompositeTransform(Transform[ObsT]):
    """Applies several transforms, first to last."""

    def __init__(self, transforms: Iterable[Transform[ObsT]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, observation: ObsT) -> ObsT:
        """Return the observation after all transforms."""
        for transform in self.transforms:
            observation = transform(observation)
        return observation


class NullTransform(Transform[ObsT]):
    """Changes nothing."""

    def __call__(self, observation: ObsT) -> ObsT:
        """Return the observation itself."""
        return observation
