"""Rubrics made of rubrics: Sequential, Gate and WeightedSum combine scores; RubricList and RubricDict only hold them.

Knows how to combine scores and which of them may be computed at the same time. Must not know the meaning of a score.
"""

from __future__ import annotations

import asyncio
import sys
from abc import abstractmethod
from collections.abc import Awaitable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .rubric import NUMBERED, Rubric, awaited, forget_trees, settled

Plan = Generator[list[Rubric], list[float], float]
"""Yields the rubrics to score next, is sent their scores, and returns the combined score."""

WEIGHT_TOLERANCE = 1e-6


class Composite(Rubric):
    """Combine children's scores by a plan that is written once and driven synchronously or asynchronously."""

    @abstractmethod
    def plan(self) -> Plan:
        """Yield the children to score, and return the combined score."""

    def forward(self, action: Any, observation: Any) -> float | Awaitable[float]:
        """Follow the plan; score the rubrics of one yield concurrently if the tree is async."""
        if self.is_async:
            return self._drive_async(action, observation)
        plan = self.plan()
        scores: list[float] | None = None
        while True:
            try:
                members = next(plan) if scores is None else plan.send(scores)
            except StopIteration as finished:
                score: float = finished.value
                return score
            # Outside the try, because a member's StopIteration would pass for the end of the plan.
            scores = []
            for member in members:
                outcome = member(action, observation)
                scores.append(outcome if type(outcome) is float else settled(outcome, "score", member))

    async def _drive_async(self, action: Any, observation: Any) -> float:
        plan = self.plan()
        scores: list[float] | None = None
        while True:
            try:
                members = next(plan) if scores is None else plan.send(scores)
            except StopIteration as finished:
                score: float = finished.value
                return score
            scores = await _gather_scores(members, action, observation)


class Numbered(Rubric):
    """Hold children in order; only the attribute `rubric_<i>` refers to the i-th one."""

    _names: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Count the members."""
        return len(self._names)

    def __getitem__(self, index: int) -> Rubric:
        """Return a member by position."""
        return self._members()[index]

    def __setitem__(self, index: int, rubric: Rubric) -> None:
        """Replace a member."""
        setattr(self, self._names[index], rubric)

    def __iter__(self) -> Iterator[Rubric]:
        """Iterate over the members in order."""
        return iter(self._members())

    def _members(self) -> list[Rubric]:
        return [getattr(self, name) for name in self._names]

    def _extend(self, rubrics: Iterable[Rubric]) -> None:
        for rubric in rubrics:
            # Interned, as the interpreter's cache of attribute lookups goes by identity.
            name = sys.intern(f"{NUMBERED}{len(self._names)}")
            setattr(self, name, rubric)
            self._names = (*self._names, name)


class Sequential(Composite, Numbered):
    """Score rubrics in order, stopping with 0.0 at the first that scores 0; otherwise give the last one's score.

    Without rubrics the score is 1.0.
    """

    def __init__(self, *rubrics: Rubric) -> None:
        super().__init__()
        self._extend(rubrics)

    def plan(self) -> Plan:
        """Ask for one member at a time, so that none runs after a zero."""
        score = 1.0
        for member in self._members():
            [score] = yield [member]
            if score == 0:
                return 0.0
        return score


class Gate(Composite):
    """Let a rubric's score through if it reaches the threshold, else give 0.0."""

    def __init__(self, rubric: Rubric, threshold: float = 1.0) -> None:
        super().__init__()
        self.rubric = rubric
        self.threshold = threshold

    def plan(self) -> Plan:
        """Compare the child's score with the threshold."""
        [score] = yield [self.rubric]
        return score if score >= self.threshold else 0.0


class WeightedSum(Composite, Numbered):
    """Add up the scores of rubrics, each multiplied by its weight; async ones are scored concurrently.

    Raises:
        ValueError: the counts differ, or the weights do not sum to 1.0.
    """

    def __init__(self, rubrics: Iterable[Rubric], weights: Iterable[float]) -> None:
        super().__init__()
        self._extend(rubrics)
        self._weights = list(weights)
        if len(self) != len(self._weights):
            raise ValueError(f"{len(self)} rubrics and {len(self._weights)} weights: their numbers must match")
        total = sum(self._weights)
        # Negated so that a NaN among the weights is refused too.
        if not abs(total - 1.0) <= WEIGHT_TOLERANCE:
            raise ValueError(f"the weights must sum to 1.0, but they sum to {total}")

    @property
    def weights(self) -> list[float]:
        """Return a copy of the weights, in the order of the rubrics."""
        return list(self._weights)

    def plan(self) -> Plan:
        """Ask for all members at once."""
        scores = yield self._members()
        return sum(weight * score for weight, score in zip(self._weights, scores, strict=True))


class RubricList(Numbered):
    """Hold rubrics by position for a parent that decides how to combine them."""

    def __init__(self, rubrics: Iterable[Rubric] | None = None) -> None:
        super().__init__()
        self._extend(rubrics or ())

    def forward(self, action: Any, observation: Any) -> float:
        """Refuse to score: a list does not say how its scores combine."""
        raise NotImplementedError("RubricList cannot be scored; score its members in the parent's forward")

    def append(self, rubric: Rubric) -> None:
        """Add a rubric at the end."""
        self._extend([rubric])

    def extend(self, rubrics: Iterable[Rubric]) -> None:
        """Add rubrics at the end."""
        self._extend(rubrics)


class RubricDict(Rubric):
    """Hold rubrics by key for a parent that decides how to combine them.

    Any string is a key, also `"reset"` or `"keys"`: entries are not attributes, so no method is hidden. A key
    that is not an attribute of the class can be read and replaced as one.
    """

    def __init__(self, rubrics: Mapping[str, Rubric] | None = None) -> None:
        super().__init__()
        self._entries: dict[str, Rubric] = dict(rubrics or {})
        forget_trees()

    def forward(self, action: Any, observation: Any) -> float:
        """Refuse to score: a dict does not say how its scores combine."""
        raise NotImplementedError("RubricDict cannot be scored; score its entries in the parent's forward")

    def _collect_children(self) -> dict[str, Rubric]:
        """Collect the entries, then the rubrics that a subclass holds as attributes."""
        return {**self._entries, **super()._collect_children()}

    def __getitem__(self, key: str) -> Rubric:
        """Return the entry of a key."""
        return self._entries[key]

    def __setitem__(self, key: str, rubric: Rubric) -> None:
        """Add or replace an entry."""
        self.update({key: rubric})

    def __delitem__(self, key: str) -> None:
        """Remove an entry."""
        del self._entries[key]
        forget_trees()

    def __contains__(self, key: object) -> bool:
        """Say whether a key has an entry."""
        return key in self._entries

    def __len__(self) -> int:
        """Count the entries."""
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys."""
        return iter(self._entries)

    def keys(self) -> Iterator[str]:
        """Iterate over the keys."""
        return iter(self._entries.keys())

    def values(self) -> Iterator[Rubric]:
        """Iterate over the rubrics."""
        return iter(self._entries.values())

    def items(self) -> Iterator[tuple[str, Rubric]]:
        """Iterate over keys and rubrics."""
        return iter(self._entries.items())

    def update(self, rubrics: Mapping[str, Rubric]) -> None:
        """Add or replace several entries."""
        for key in rubrics:
            # The name of a rubric a subclass held as an attribute now means the entry, and nothing else.
            if isinstance(vars(self).get(key), Rubric):
                del vars(self)[key]
        self._entries.update(rubrics)
        forget_trees()

    def __getattr__(self, name: str) -> Rubric:
        # Reached only for missing attributes. Through vars(), as copying reads names before any entry exists.
        entries: dict[str, Rubric] = vars(self).get("_entries", {})
        if name in entries:
            return entries[name]
        raise AttributeError(f"{type(self).__name__} has no attribute and no entry {name!r}")

    if TYPE_CHECKING:  # A rubric can be assigned to any key as an attribute.

        def __setattr__(self, name: str, value: object) -> None: ...

    def _set_child(self, name: str, rubric: Rubric) -> None:
        # A rubric assigned to an entry's name replaces the entry, instead of hiding it or a method behind an attribute.
        if name in vars(self).get("_entries", {}):
            self._entries[name] = rubric
        else:
            super()._set_child(name, rubric)


async def _gather_scores(rubrics: list[Rubric], action: Any, observation: Any) -> list[float]:
    """Score rubrics concurrently; when one fails, the others are stopped before its error is raised."""
    tasks = [asyncio.ensure_future(_score(rubric, action, observation)) for rubric in rubrics]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _score(rubric: Rubric, action: Any, observation: Any) -> float:
    return await awaited(rubric(action, observation))
