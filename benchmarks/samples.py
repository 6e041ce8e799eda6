"""What was measured: one sample per measurement, and medians over rounds. Knows nothing of how it was measured."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

# directories of this machine have no place in a report: keep the last part of a path
DIRECTORIES = re.compile(r"(?<![\w:/])(?:/[\w.+-]+)+/(?=[\w.+-])")


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one subject in one case of one section in one round."""

    section: str
    subject: str
    case: str
    round: int
    values: dict[str, float] = field(default_factory=dict)
    failure: str = ""


class Samples:
    """All samples of a run."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self.all = list(samples)

    def add(self, sample: Sample) -> None:
        """Keep a sample."""
        self.all.append(sample)

    def of(self, section: str, subject: str, case: str) -> list[Sample]:
        """Return the samples of all rounds."""
        return [s for s in self.all if (s.section, s.subject, s.case) == (section, subject, case)]

    def values(self, section: str, subject: str, *, case: str, metric: str) -> list[float]:
        """Return a figure of each round that has it."""
        return [s.values[metric] for s in self.of(section, subject, case) if metric in s.values]

    def median(self, section: str, subject: str, *, case: str, metric: str) -> float | None:
        """Return the median over rounds, or None when no round has the figure."""
        values = self.values(section, subject, case=case, metric=metric)
        return statistics.median(values) if values else None

    def worst(self, section: str, subject: str, *, case: str, metric: str) -> float | None:
        """Return the highest figure of any round."""
        return max(self.values(section, subject, case=case, metric=metric), default=None)

    def failure(self, section: str, subject: str, case: str) -> str:
        """Return the first failure of that case or of the server's start, or an empty string."""
        tried = self.of(section, subject, case) + self.of(section, subject, "start")
        return next((s.failure for s in tried if s.failure), "")

    def cases(self, section: str) -> list[str]:
        """Return a section's cases in the order they were measured."""
        return list(dict.fromkeys(s.case for s in self.all if s.section == section and s.case != "start"))

    def sections(self) -> list[str]:
        """Return the sections that were measured."""
        return list(dict.fromkeys(s.section for s in self.all))

    def dump(self) -> list[dict[str, Any]]:
        """Return the samples as JSON-ready objects."""
        return [asdict(sample) for sample in self.all]


def without_directories(text: str) -> str:
    """Reduce absolute paths in a text to their last part."""
    return DIRECTORIES.sub("", text)


def numbers(report: dict[str, Any]) -> dict[str, float]:
    """Keep the numeric entries of a report."""
    return {name: value for name, value in report.items() if isinstance(value, int | float)}
