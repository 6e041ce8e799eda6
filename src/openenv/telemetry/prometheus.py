"""Histograms that cost their writers almost nothing: values are kept as they come and sorted many at a time.

Sorting a few hundred floats at once is several times cheaper than finding the bucket of each. Several series that are
always written together share one list. Thread-safe. Knows numbers only.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

_BATCH = 256

# 1 µs to 100 s, three to a decade.
SECONDS = (*(digit * 10.0**power for power in range(-6, 2) for digit in (1, 2, 5)), 100.0)


class Distribution(NamedTuple):
    """What a histogram has seen so far; `counts[i]` values were at most `bounds[i]`."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    observed: int


class Histograms:
    """Several histograms that get one value each at a time.

    Args:
        width: How many there are.
        bounds: Upper bounds of the buckets, in ascending order.
    """

    def __init__(self, width: int, bounds: Sequence[float] = SECONDS) -> None:
        self._width = width
        self._bounds = tuple(bounds)
        self._counts = [[0] * len(self._bounds) for _ in range(width)]
        self._totals = [0.0] * width
        self._count = 0
        self._lock = threading.Lock()
        self._pending: list[float] = []

    def observe(self, *values: float) -> None:
        """Take in one value for each histogram."""
        pending = self._pending
        pending += values  # at once, so that values of different threads never mix
        if len(pending) >= _BATCH * self._width:
            self._fold()

    def read(self) -> list[Distribution]:
        """Return each histogram's distribution."""
        with self._lock:
            self._take_in()
            return [
                Distribution(self._bounds, tuple(counts), total, self._count)
                for counts, total in zip(self._counts, self._totals, strict=True)
            ]

    def _fold(self) -> None:
        if self._lock.acquire(blocking=False):  # if another thread is at it already, the values are in good hands
            try:
                self._take_in()
            finally:
                self._lock.release()

    def _take_in(self) -> None:
        """Sort what has come into the buckets; the caller holds the lock. Others may go on appending."""
        pending, width = self._pending, self._width
        size = len(pending)
        taken = pending[:size]
        del pending[:size]
        self._count += size // width
        for index in range(width):
            values = sorted(taken[index::width])
            self._totals[index] += sum(values)
            counts = self._counts[index]
            for place, bound in enumerate(self._bounds):
                counts[place] += bisect_right(values, bound)


# exposition: Writing the Prometheus text format, version 0.0.4. Knows the format; must not know what is measured.


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FamilyType = Literal["counter", "gauge", "histogram"]
Labels = Mapping[str, str]


class Family:
    """One metric: its name, what it means, and its lines."""

    __slots__ = ("help", "lines", "name", "type")

    def __init__(self, name: str, type: FamilyType, help: str) -> None:
        self.name = name
        self.type = type
        self.help = help
        self.lines: list[str] = []

    def add(self, value: float, labels: Labels | None = None) -> Family:
        """Add a value."""
        self.lines.append(_line(self.name, labels or {}, value))
        return self

    def add_distribution(self, seen: Distribution, labels: Labels) -> Family:
        """Add a histogram."""
        for bound, count in zip(seen.bounds, seen.counts, strict=True):
            self.lines.append(_line(f"{self.name}_bucket", {**labels, "le": f"{bound:g}"}, count))
        self.lines.append(_line(f"{self.name}_bucket", {**labels, "le": "+Inf"}, seen.observed))
        self.lines.append(_line(f"{self.name}_sum", labels, seen.total))
        self.lines.append(_line(f"{self.name}_count", labels, seen.observed))
        return self


def render(families: Iterable[Family]) -> bytes:
    """Write families as text."""
    parts: list[str] = []
    for family in families:
        parts.append(f"# HELP {family.name} {_escape(family.help, quotes=False)}")
        parts.append(f"# TYPE {family.name} {family.type}")
        parts += family.lines
    return ("\n".join(parts) + "\n").encode()


def _line(name: str, labels: Labels, value: float) -> str:
    shown = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}"


def _escape(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
