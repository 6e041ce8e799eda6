"""Results of checks, and the report that is made of them. Knows its JSON; must not know how a check is done."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .manifest import SIGNATURE, Manifest
from .policy import RULE, Status, Verdict, verdict

_NOT_SOURCE = frozenset({".git", "__pycache__", ".venv", ".worktrees", "outputs", ".pytest_cache"})


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a check."""

    check_id: str
    status: Status
    evidence: tuple[str, ...] = ()
    remediation: str | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0

    def json(self) -> dict[str, Any]:
        """Return it as a report holds it."""
        return {
            "check_id": self.check_id,
            "status": self.status,
            "measured": self.measured,
            "evidence": list(self.evidence),
            "remediation": self.remediation,
            "duration_s": self.duration_s,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What came of all checks of a package."""

    target: Path
    policy: str
    results: tuple[Result, ...]
    manifest: Manifest | None = None

    @property
    def verdict(self) -> Verdict:
        """What follows from the results."""
        return verdict((one.check_id, one.status) for one in self.results)

    def json(self) -> dict[str, Any]:
        """Return the report."""
        done = {RULE[one.check_id].level for one in self.results if one.status != "skip"}
        return {
            "report_schema_version": "1" if self.policy == "v1" else "2",
            "target": str(self.target),
            "source_digest": source_digest(self.target),
            "signature": SIGNATURE,
            "manifest": None if self.manifest is None else self.manifest.report(),
            "policy_version": self.policy,
            "lane": "local",
            "levels_run": sorted(done | {1}),
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
