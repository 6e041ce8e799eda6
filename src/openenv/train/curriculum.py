"""The order in which tasks are trained on: shuffled epochs, or a `Curriculum` that follows the rewards."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


def shuffled(items: Sequence[ItemT], *, seed: int = 0, epochs: int | None = None) -> Iterator[ItemT]:
    """Yield items in a new random order in each epoch; without end where `epochs` is None."""
    draw = random.Random(seed)
    epoch = 0
    while items and (epochs is None or epoch < epochs):
        order = list(range(len(items)))
        draw.shuffle(order)
        yield from (items[index] for index in order)
        epoch += 1


class Curriculum(Generic[ItemT]):
    """Draws items without end, most often those of which the policy can learn: neither solved nor hopeless.

    An item whose rewards lie at the share p between the lowest and the highest that any item got is drawn with a weight
    of p(1 - p), and never with less than `floor`: what is solved is seen again, and what was hopeless is tried again.
    Give it to `rollouts` or `play`, which report the rewards of each group.

    Args:
        items: What to draw from, such as the tasks of a split.
        seed: Of the draws; they also depend on the order in which groups end.
        floor: The least weight, of 0.25 that is the greatest.
        memory: How much of an item's old rewards counts when new ones come, from 0 to 1.
    """

    def __init__(self, items: Sequence[ItemT], *, seed: int = 0, floor: float = 0.02, memory: float = 0.5) -> None:
        if not items:
            raise ValueError("a curriculum needs at least one item")
        if not 0 < floor <= 0.25 or not 0 <= memory < 1:
            raise ValueError("floor must be above 0 and at most 0.25, memory at least 0 and below 1")
        self._items = items
        self._draw = random.Random(seed)
        self._floor, self._memory = floor, memory
        self._means: dict[int, float] = {}
        self._range: tuple[float, float] | None = None
        self._drawn: list[int] = []
        self._lock = threading.Lock()  # a stream draws in another thread than it reports in

    def __iter__(self) -> Iterator[ItemT]:
        return self

    def __next__(self) -> ItemT:
        with self._lock:
            weights = [self._weight(index) for index in range(len(self._items))]
            (index,) = self._draw.choices(range(len(weights)), weights)
            self._drawn.append(index)
        return self._items[index]

    def update(self, number: int, rewards: Sequence[float | None]) -> None:
        """Take the rewards of the group that began with the item that was drawn as that number, counted from 0."""
        known = [reward for reward in rewards if reward is not None]
        if not known:
            return
        with self._lock:
            index = self._drawn[number]
            mean = sum(known) / len(known)
            before = self._means.get(index)
            self._means[index] = mean if before is None else self._memory * before + (1 - self._memory) * mean
            low, high = self._range or (known[0], known[0])
            self._range = min(low, *known), max(high, *known)

    def mean(self, index: int) -> float | None:
        """Return the mean reward of an item, newer ones counting more; None where there is none yet."""
        return self._means.get(index)

    def _weight(self, index: int) -> float:
        mean = self._means.get(index)
        if mean is None or self._range is None or self._range[0] == self._range[1]:
            return 0.25  # nothing is known: as good as the best
        low, high = self._range
        share = (mean - low) / (high - low)
        return max(self._floor, share * (1 - share))
