"""Results of checks, the JSON report of a package, and how both are shown in a terminal."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .manifest import SIGNATURE, Manifest
from .rules import RULE, Status, Verdict, verdict

if TYPE_CHECKING:
    from rich.console import Console

    from .running_server import Criterion, RunningReport


_NOT_SOURCE = frozenset({".git", "__pycache__", ".venv", ".worktrees", "outputs", ".pytest_cache"})


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a check."""

    check_id: str
    status: Status
    evidence: tuple[str, ...] = ()
    remediation: str | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0
    applies: bool = True  # false: skipped, because there is nothing here that it is about

    def json(self) -> dict[str, Any]:
        """Return the result as an entry of the report."""
        return {
            "check_id": self.check_id,
            "status": self.status,
            "measured": self.measured if self.applies else {**self.measured, "applicable": False},
            "evidence": list(self.evidence),
            "remediation": self.remediation,
            "duration_s": self.duration_s,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of all checks of a package."""

    target: Path
    policy: str
    results: tuple[Result, ...]
    manifest: Manifest | None = None

    @property
    def verdict(self) -> Verdict:
        """What follows from the results."""
        not_applicable = {one.check_id for one in self.results if not one.applies}
        return verdict(((one.check_id, one.status) for one in self.results), not_applicable)

    @property
    def passed(self) -> bool:
        """Whether nothing is known to be wrong."""
        return self.verdict != "fail"

    def json(self) -> dict[str, Any]:
        """Return the report."""
        levels = {RULE[one.check_id].level for one in self.results if one.status != "skip"}
        return {
            "report_schema_version": "1" if self.policy == "v1" else "2",
            "target": str(self.target),
            "source_digest": source_digest(self.target),
            "signature": SIGNATURE,
            "manifest": None if self.manifest is None else self.manifest.report(),
            "policy_version": self.policy,
            "lane": "local",
            "levels_run": sorted(levels | {1}),
            "results": [one.json() for one in self.results],
            "verdict": self.verdict,
        }


def source_digest(folder: Path) -> str:
    """Return a hash of all source files: names and contents."""
    digest = hashlib.sha256()
    for path in sorted(_sources(folder), key=lambda path: path.relative_to(folder).as_posix()):
        digest.update(path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape") + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOT_SOURCE and not name.endswith(".egg-info"))
        for name in files:
            path = Path(place, name)
            if path.is_file() and not path.is_symlink():
                yield path


_MARKS = {
    "pass": "[green]✓[/]",
    "fail": "[red]✗[/]",
    "warn": "[yellow]![/]",
    "skip": "[yellow]?[/]",
    "n/a": "[dim]–[/]",
    "error": "[red]✗[/]",
}
_STYLES = {"pass": "dim", "fail": "red", "warn": "yellow", "skip": "yellow", "n/a": "dim", "error": "red"}
_VERDICTS = {"pass": "[green]pass[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
_WIDTH = max(len(check_id) for check_id in RULE)


class Display:
    """Prints results as they come, and then the verdict."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console = console
        self._verbose = verbose

    def result(self, result: Result) -> None:
        """Print the result of a check of a package."""
        rule = RULE[result.check_id]
        kind: str = "warn" if result.status == "fail" and rule.severity == "warn" else result.status
        if not result.applies:
            kind = "n/a"
        self._line(kind, result.check_id, rule.says, result.evidence, result.remediation)

    def criterion(self, one: Criterion) -> None:
        """Print the result of a check of a running server."""
        kind = "pass" if one.passed else "fail" if one.required else "warn"
        self._line(kind, one.id, one.description, (one.details,) if one.details else (), one.fix)

    def summary(self, report: Report, seconds: float) -> None:
        """Print the verdict on a package."""
        words = {"pass": "passed", "fail": "failed", "error": "could not be made", "skip": "skipped"}
        counts = {name: sum(one.status == name and one.applies for one in report.results) for name in words}
        tally = ", ".join(f"{counts[name]} {words[name]}" for name in counts if counts[name] or name == "fail")
        if aside := sum(not one.applies for one in report.results):
            tally += f", {aside} not applicable"
        note = ""
        if report.verdict == "warn" and not counts["fail"] and not counts["error"]:
            note = "; nothing failed, but skipped checks prove nothing"
        self._console.print(f"\n{tally} in {seconds:.1f} s. Verdict: {_VERDICTS[report.verdict]}{note}", soft_wrap=True)

    def running_summary(self, report: RunningReport) -> None:
        """Print the verdict on a running server."""
        failed = [one for one in report.criteria if not one.passed]
        tally = f"{len(report.criteria) - len(failed)} passed, {len(failed)} failed"
        verdict = "fail" if not report.passed else "warn" if failed else "pass"
        where = f"{report.mode} mode, {report.profile}"
        self._console.print(f"\n{tally} ({where}). Verdict: {_VERDICTS[verdict]}", soft_wrap=True)

    def _line(self, kind: str, name: str, says: str, evidence: Sequence[str], fix: str | None) -> None:
        from rich.markup import escape

        self._console.print(f"{_MARKS[kind]} {name:<{_WIDTH}}  {says}", soft_wrap=True)
        if kind in ("pass", "n/a") and not self._verbose:
            return
        for text in evidence:
            for line in text.splitlines():
                self._console.print(f"    [{_STYLES[kind]}]{escape(line)}[/]", soft_wrap=True)
        for index, line in enumerate((fix or "").splitlines()):
            self._console.print(f"    {'fix: ' if index == 0 else '     '}{escape(line)}", soft_wrap=True)
