"""Writing the Prometheus text format, version 0.0.4. Knows the format; must not know what is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from .histogram import Distribution

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
