"""Prometheus metrics: histograms that are cheap to write, and the text format, version 0.0.4.

Knows numbers and the format; must not know the meaning of metrics.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FamilyType = Literal["counter", "gauge", "histogram"]
Labels = Mapping[str, str]

_BATCH = 256

# 1 µs to 100 s, three to a decade.
SECONDS = (*(digit * 10.0**power for power in range(-6, 2) for digit in (1, 2, 5)), 100.0)


class Distribution(NamedTuple):
    """A histogram's values so far; `counts[i]` of them were at most `bounds[i]`."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    observed: int


class Histograms:
    """Several histograms that get one value each at a time, from any thread.

    Writing one only appends to a list, shared by all. The values are sorted into buckets a few hundred at a time, which
    costs several times less than finding the bucket of each.

    Args:
        width: The number of histograms.
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
        """Add one value to each histogram."""
        pending = self._pending
        pending += values  # one operation, so that values of different threads never mix
        if len(pending) >= _BATCH * self._width:
            self._fold()

    def read(self) -> list[Distribution]:
        """Return each histogram's distribution."""
        with self._lock:
            self._sort_pending()
            return [
                Distribution(self._bounds, tuple(counts), total, self._count)
                for counts, total in zip(self._counts, self._totals, strict=True)
            ]

    def _fold(self) -> None:
        if self._lock.acquire(blocking=False):  # else another thread is sorting already
            try:
                self._sort_pending()
            finally:
                self._lock.release()

    def _sort_pending(self) -> None:
        """Sort the pending values into the buckets; the caller holds the lock, other threads may append meanwhile."""
        pending, width = self._pending, self._width
        size = len(pending)
        batch = pending[:size]
        del pending[:size]
        self._count += size // width
        for index in range(width):
            values = sorted(batch[index::width])
            self._totals[index] += sum(values)
            counts = self._counts[index]
            for place, bound in enumerate(self._bounds):
                counts[place] += bisect_right(values, bound)


@dataclass(slots=True)
class Family:
    """One metric: name, type, help text and lines."""

    name: str
    type: FamilyType
    help: str
    lines: list[str] = field(default_factory=list)

    def add(self, value: float, labels: Labels | None = None) -> Family:
        """Add a value."""
        self.lines.append(_line(self.name, labels or {}, value))
        return self

    def add_all(self, label: str, values: Iterable[tuple[str, float]]) -> Family:
        """Add values, one for each value of a label."""
        for name, value in values:
            self.add(value, {label: name})
        return self

    def add_distribution(self, distribution: Distribution, labels: Labels) -> Family:
        """Add a histogram."""
        for bound, count in zip(distribution.bounds, distribution.counts, strict=True):
            self.lines.append(_line(f"{self.name}_bucket", {**labels, "le": f"{bound:g}"}, count))
        self.lines.append(_line(f"{self.name}_bucket", {**labels, "le": "+Inf"}, distribution.observed))
        self.lines.append(_line(f"{self.name}_sum", labels, distribution.total))
        self.lines.append(_line(f"{self.name}_count", labels, distribution.observed))
        return self


def render(families: Iterable[Family]) -> bytes:
    """Write families as text."""
    parts: list[str] = []
    for family in families:
        parts.append(f"# HELP {family.name} {_escape(family.help, quotes=False)}")
        parts.append(f"# TYPE {family.name} {family.type}")
        parts += family.lines
    return ("\n".join(parts) + "\n").encode()


Combine = Callable[[float, float], float]


def merge(texts: Iterable[bytes], merged_by: Mapping[str, Combine] | None = None) -> bytes:
    """Merge the metrics of several processes: add values with the same name and labels.

    Args:
        texts: Results of `render`, or parts of them.
        merged_by: Functions for families that must not be added, by name.
    """
    heads: dict[str, list[str]] = {}  # HELP and TYPE, by family, in the order of the first text that has it
    values: dict[str, dict[str, float]] = {}
    for text in texts:
        family = ""
        for line in _lines(text):
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if len(known) < 2 and line not in known:
                    known.append(line)
                continue
            series, _, value = line.rpartition(" ")
            number, own = float(value), values.setdefault(family, {})
            combine = (merged_by or {}).get(family)
            if series not in own:
                own[series] = number
            else:
                own[series] = own[series] + number if combine is None else combine(own[series], number)
    lines: list[str] = []
    for family, head in heads.items():
        lines += head
        lines += [f"{series} {_number(value)}" for series, value in values.get(family, {}).items()]
    return ("\n".join(lines) + "\n").encode() if lines else b""


def counters(text: bytes) -> bytes:
    """Return the counters and histograms of a text, to keep after a process has ended."""
    kept: list[str] = []
    is_kept = False
    held: list[str] = []
    for line in _lines(text):
        if line.startswith("# HELP "):
            held, is_kept = [line], False
        elif line.startswith("# TYPE "):
            is_kept = line.endswith((" counter", " histogram"))
            if is_kept:
                kept += [*held, line]
        elif is_kept:
            kept.append(line)
    return ("\n".join(kept) + "\n").encode() if kept else b""


def _lines(text: bytes) -> list[str]:
    return [line for line in text.decode().split("\n") if line]  # not `splitlines`: labels may have other line ends


def _number(value: float) -> str:
    return repr(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _line(name: str, labels: Labels, value: float) -> str:
    shown = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}"


def _escape(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
