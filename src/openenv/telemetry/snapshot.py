"""Reads a server's metrics back: a `Snapshot` of one moment, and the difference of two.

Knows the text format and the names of the metrics; must not know how they are fetched or shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: -?\d+)?")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"(?:,|$)')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the text format."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """Read the samples of a text.

    Raises:
        ValueError: A line is not a sample.
    """
    samples = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"not a metric: {line[:80]!r}")
        labels = {name: _unescape(value) for name, value in _LABEL.findall(match[2] or "")}
        samples.append(Sample(match[1], labels, float(match[3])))
    return samples


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), text)


CallKey = tuple[str, str]  # operation, phase
Buckets = Sequence[tuple[float, float]]  # bound, how many were at most that


class NotOurs(ValueError):
    """The text is not the metrics of an OpenEnv server."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The metrics of one moment."""

    info: Mapping[str, str]
    values: Mapping[str, float]
    sessions: Mapping[str, int]
    errors: Mapping[str, int]
    calls: Mapping[CallKey, Buckets]

    def value(self, name: str) -> float:
        """Return a metric without labels, 0 where there is none."""
        return self.values.get(name, 0.0)

    def quantile(self, operation: str, phase: str, share: float, *, since: Snapshot | None = None) -> float | None:
        """Estimate a quantile of a call's times, in seconds; None where there was no call.

        Args:
            operation: The kind of call.
            phase: Which part of it.
            share: 0.5 for the median.
            since: Count only what came after an earlier reading.
        """
        buckets = self.calls.get((operation, phase), ())
        earlier = dict(since.calls.get((operation, phase), ())) if since is not None else {}
        return quantile([(bound, count - earlier.get(bound, 0.0)) for bound, count in buckets], share)


def read_snapshot(text: str) -> Snapshot:
    """Read a response of `/metrics`.

    Raises:
        NotOurs: It is not an OpenEnv server's.
    """
    try:
        samples = parse(text)
    except ValueError as exc:
        raise NotOurs(str(exc)) from exc
    info = next((sample.labels for sample in samples if sample.name == "openenv_info"), None)
    if info is None:
        raise NotOurs("there is no openenv_info among the metrics")
    return Snapshot(
        info=info,
        values={sample.name: sample.value for sample in samples if not sample.labels},
        sessions=_by_label(samples, "openenv_sessions", "state"),
        errors=_by_label(samples, "openenv_errors_total", "code"),
        calls=_buckets(samples),
    )


def quantile(buckets: Buckets, share: float) -> float | None:
    """Estimate a quantile from cumulative counts, as if values were spread evenly inside a bucket."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    wanted, lower, below = share * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            if bound == float("inf") or count == below:
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return lower


def _by_label(samples: Sequence[Sample], name: str, label: str) -> dict[str, int]:
    return {sample.labels[label]: int(sample.value) for sample in samples if sample.name == name}


def _buckets(samples: Sequence[Sample]) -> dict[CallKey, Buckets]:
    buckets: defaultdict[CallKey, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        if sample.name == "openenv_call_seconds_bucket":
            key = (sample.labels["operation"], sample.labels["phase"])
            buckets[key].append((float(sample.labels["le"]), sample.value))
    return dict(buckets)
