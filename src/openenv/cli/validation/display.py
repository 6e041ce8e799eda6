"""Results for people: what passed in a line, what did not with the reason and what to do. Knows terminals only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .policy import RULE
from .report import Report, Result
from .running import Criterion, RunningReport

if TYPE_CHECKING:
    from rich.console import Console

_MARKS = {"pass": "[green]✓[/]", "fail": "[red]✗[/]", "warn": "[yellow]![/]", "skip": "[dim]–[/]", "error": "[red]✗[/]"}
_STYLES = {"pass": "dim", "fail": "red", "warn": "yellow", "skip": "dim", "error": "red"}
_VERDICTS = {"pass": "[green]pass[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
_WIDTH = max(len(check_id) for check_id in RULE)


class Display:
    """Shows results as they come, and then what follows from them."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console = console
        self._verbose = verbose

    def result(self, result: Result) -> None:
        """Show the result of a check of a package."""
        rule = RULE[result.check_id]
        kind = "warn" if result.status == "fail" and rule.severity == "warn" else result.status
        self._line(kind, result.check_id, rule.says, result.evidence, result.remediation)

    def criterion(self, one: Criterion) -> None:
        """Show what came of a question to a running server."""
        kind = "pass" if one.passed else "fail" if one.required else "warn"
        self._line(kind, one.id, one.description, (one.details,) if one.details else (), one.mend)

    def summary(self, report: Report, seconds: float) -> None:
        """Show the verdict on a package."""
        counts = {name: sum(one.status == name for one in report.results) for name in ("pass", "skip", "fail", "error")}
        words = {"pass": "passed", "skip": "skipped", "fail": "failed", "error": "could not be done"}
        told = ", ".join(f"{counts[name]} {words[name]}" for name in counts if counts[name] or name == "fail")
        note = ""
        if report.verdict == "warn" and not counts["fail"] and not counts["error"]:
            note = "; nothing failed, but what is skipped is not known to be good"
        self._console.print(f"\n{told} in {seconds:.1f} s. Verdict: {_VERDICTS[report.verdict]}{note}", soft_wrap=True)

    def running_summary(self, report: RunningReport) -> None:
        """Show the verdict on a running server."""
        failed = [one for one in report.criteria if not one.passed]
        told = f"{len(report.criteria) - len(failed)} passed, {len(failed)} failed"
        verdict = "fail" if not report.passed else "warn" if failed else "pass"
        where = f"{report.mode} mode, {report.profile}"
        self._console.print(f"\n{told} ({where}). Verdict: {_VERDICTS[verdict]}", soft_wrap=True)

    def _line(self, kind: str, name: str, says: str, evidence: Sequence[str], mend: str | None) -> None:
        from rich.markup import escape

        self._console.print(f"{_MARKS[kind]} {name:<{_WIDTH}}  {says}", soft_wrap=True)
        if kind == "pass" and not self._verbose:
            return
        for text in evidence:
            for line in text.splitlines():
                self._console.print(f"    [{_STYLES[kind]}]{escape(line)}[/]", soft_wrap=True)
        for index, line in enumerate((mend or "").splitlines()):
            self._console.print(f"    {'mend: ' if index == 0 else '      '}{escape(line)}", soft_wrap=True)
