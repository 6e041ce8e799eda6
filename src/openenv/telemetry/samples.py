"""Reading the Prometheus text format back: its samples, one by one. Knows the format only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: -?\d+)?")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"(?:,|$)')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line that was read."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """Read samples back.

    Raises:
        ValueError: A line is no sample.
    """
    samples = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line.strip())
        if found is None:
            raise ValueError(f"not a metric: {line[:80]!r}")
        labels = {name: _unescape(value) for name, value in _LABEL.findall(found[2] or "")}
        samples.append(Sample(found[1], labels, float(found[3])))
    return samples


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), text)
