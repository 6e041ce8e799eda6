"""The items of a stream: their order, their numbers, and how both continue after a restart.

    shuffled, Curriculum, any iterable ──> ItemSource ──> number and item ──> groups (`stream`)

An order continues by repetition: a new process reads the same items again and skips those whose groups were delivered.
A curriculum depends on rewards, so its draws are written to a file before their groups start. Knows no groups.
"""

# A stream with a store writes `streams/ID.jsonl` there. The file is locked while its process lives.
#
#     {"format": 1, "stream": "9f3c2a", "started_at": 1794802380.1}
#     {"number": 0, "index": 17}          draws of a curriculum only; a torn last line is ignored
#     {"number": 1, "index": 3}

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from openenv.errors import RolloutError
from openenv.sandboxes.host import is_locked, open_locked

ItemT = TypeVar("ItemT")

FORMAT = 1
"""The format of stream files and of `state_dict`."""
_END = object()


def shuffled(items: Sequence[ItemT], *, seed: int = 0, epochs: int | None = None) -> Iterator[ItemT]:
    """Yield items in a new random order in each epoch; endless if `epochs` is None."""
    draw = random.Random(seed)
    epoch = 0
    while items and (epochs is None or epoch < epochs):
        order = list(range(len(items)))
        draw.shuffle(order)
        yield from (items[index] for index in order)
        epoch += 1


class Curriculum(Generic[ItemT]):
    """Draws items endlessly, and prefers items from which the policy can learn: neither solved nor hopeless.

    Let p be the mean reward of an item, scaled so that the lowest reward of all items is 0 and the highest is 1. Then
    its weight is p(1 - p), but at least `floor`, so that solved and hopeless items are tried again. Pass the curriculum
    to `rollouts` or `play`, which report the rewards of each group. Several streams can share one.

    Args:
        items: The items, such as the tasks of a split.
        seed: The seed of the draws, which also depend on the order of finished groups.
        floor: The smallest weight; the largest possible weight is 0.25.
        memory: The weight of an item's old mean when new rewards arrive, from 0 to 1.
    """

    def __init__(self, items: Sequence[ItemT], *, seed: int = 0, floor: float = 0.02, memory: float = 0.5) -> None:
        if not items:
            raise ValueError("a curriculum needs at least one item")
        if not 0 < floor <= 0.25 or not 0 <= memory < 1:
            raise ValueError("floor must be above 0 and at most 0.25, memory at least 0 and below 1")
        self.items = items
        self._random = random.Random(seed)
        self._floor, self._memory = floor, memory
        self._means: dict[int, float] = {}
        self._range: tuple[float, float] | None = None
        self._lock = threading.Lock()  # a stream draws and reports in different threads

    def __iter__(self) -> Iterator[ItemT]:
        return self

    def __next__(self) -> ItemT:
        return self.items[self.draw()]

    def draw(self) -> int:
        """Return the index of the next item."""
        with self._lock:
            weights = [self._weight(index) for index in range(len(self.items))]
            return self._random.choices(range(len(weights)), weights)[0]

    def update(self, index: int, rewards: Sequence[float | None]) -> None:
        """Report the rewards of a group; `index` is the position of its item in `items`."""
        scored = [reward for reward in rewards if reward is not None]
        if not scored:
            return
        with self._lock:
            mean = sum(scored) / len(scored)
            before = self._means.get(index)
            self._means[index] = mean if before is None else self._memory * before + (1 - self._memory) * mean
            low, high = self._range or (scored[0], scored[0])
            self._range = min(low, *scored), max(high, *scored)

    def mean(self, index: int) -> float | None:
        """Return the mean reward of an item, in which newer rewards count more; None before the first reward."""
        return self._means.get(index)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the draws and the means, as JSON values."""
        with self._lock:
            return {
                "means": {str(index): mean for index, mean in self._means.items()},
                "range": self._range,
                "random": self._random.getstate(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        version, numbers, gauss = state["random"]
        with self._lock:
            self._means = {int(index): mean for index, mean in state["means"].items()}
            self._range = None if state["range"] is None else (state["range"][0], state["range"][1])
            self._random.setstate((version, tuple(numbers), gauss))

    def _weight(self, index: int) -> float:
        mean = self._means.get(index)
        if mean is None or self._range is None or self._range[0] == self._range[1]:
            return 0.25  # nothing is known about the item: use the largest weight
        low, high = self._range
        share = (mean - low) / (high - low)
        return max(self._floor, share * (1 - share))


@dataclass(slots=True)
class NumberSet:
    """Numbers that are added roughly in order: all below `below`, and a few more."""

    below: int = 0
    more: set[int] = field(default_factory=set)

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.more

    def __len__(self) -> int:
        return self.below + len(self.more)

    def add(self, number: int) -> None:
        """Add a number."""
        self.more.add(number)
        while self.below in self.more:
            self.more.remove(self.below)
            self.below += 1


class ItemSource(Generic[ItemT]):
    """Numbers the items of a stream. `next` is called by one thread at a time.

    Args:
        items: The items; a new process passes the same ones again.
        folder: The folder of stream files, or None to write none.
    """

    def __init__(self, items: Iterable[ItemT], folder: Path | None) -> None:
        self.stream_id = secrets.token_hex(3)
        self.is_resumed = False
        self._curriculum = items if isinstance(items, Curriculum) else None
        self._iterator: Iterator[ItemT] = iter(items)
        self._folder = folder
        self._number = 0
        self._drawn: list[int] = []  # the index of each number, for a curriculum
        self._reported = NumberSet()  # numbers whose rewards the curriculum has
        self._file: int | None = None

    def next(self) -> tuple[int, ItemT] | None:
        """Return the next number and its item; None at the end."""
        number = self._number
        if self._curriculum is None:
            item: Any = next(self._iterator, _END)
            if item is _END:
                return None
        else:
            if number == len(self._drawn):
                self._drawn.append(self._curriculum.draw())
                self._write({"number": number, "index": self._drawn[number]})
            item = self._curriculum.items[self._drawn[number]]
        self._number += 1
        return number, cast("ItemT", item)

    def report(self, number: int, rewards: Sequence[float | None]) -> None:
        """Report the rewards of a group to the curriculum, once also if a resumed stream yields the group again."""
        if self._curriculum is not None and number not in self._reported:
            self._reported.add(number)
            self._curriculum.update(self._drawn[number], rewards)

    def open(self) -> None:
        """Create or open the stream file, and lock it.

        Raises:
            RolloutError: another process runs this stream.
        """
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self.stream_id}.jsonl"
        is_new = not path.exists()
        if not is_new and is_locked(path):
            raise RolloutError(f"Another process runs the stream {self.stream_id} of this store; wait for its end")
        self._file = open_locked(path)
        os.lseek(self._file, 0, os.SEEK_END)
        if is_new:
            self._write({"format": FORMAT, "stream": self.stream_id, "started_at": time.time()})
        else:
            os.write(self._file, b"\n")  # ends a line that a killed process left torn

    def close(self) -> None:
        """Close the stream file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the order, as JSON values."""
        curriculum = None if self._curriculum is None else self._curriculum.state_dict()
        reported = {"below": self._reported.below, "more": sorted(self._reported.more)}
        return {"stream": self.stream_id, "drawn": list(self._drawn), "curriculum": curriculum, "reported": reported}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the order of a state; draws that were made after it are repeated.

        Raises:
            ValueError: only one of the two orders comes from a curriculum.
        """
        if (state["curriculum"] is None) != (self._curriculum is None):
            raise ValueError("the state and the items must both come from a Curriculum, or neither")
        self.stream_id, self.is_resumed = state["stream"], True
        if self._curriculum is not None:
            self._curriculum.load_state_dict(state["curriculum"])
            reported = state.get("reported", {"below": 0, "more": []})  # not in older states
            self._reported = NumberSet(reported["below"], set(reported["more"]))
            self._repeat(list(state["drawn"]))

    def continue_newest(self) -> None:
        """Continue the newest stream of the store from its start; without one, this is a new stream."""
        files = [] if self._folder is None else sorted(self._folder.glob("*.jsonl"), key=_modified)
        if files:
            self.stream_id, self.is_resumed = files[-1].stem, True
            self._repeat([])

    def _repeat(self, drawn: list[int]) -> None:
        """Take over the draws of a state and of the stream file, and draw as often."""
        self._drawn = drawn
        if self._curriculum is None or self._folder is None:
            return
        written = _written_draws(self._folder / f"{self.stream_id}.jsonl", len(self._curriculum.items))
        for index in written[len(drawn) :]:
            self._curriculum.draw()  # so that the next draw uses the next random number
            self._drawn.append(index)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            os.write(self._file, json.dumps(line).encode() + b"\n")


def _modified(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _written_draws(path: Path, count: int) -> list[int]:
    """Return the draws of a stream file in their order, up to the first gap."""
    draws: dict[int, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, LookupError, TypeError):
                entry = json.loads(line)
                number, index = int(entry["number"]), int(entry["index"])
                if 0 <= index < count:
                    draws[number] = index
    drawn: list[int] = []
    while len(drawn) in draws:
        drawn.append(draws[len(drawn)])
    return drawn
