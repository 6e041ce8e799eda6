"""Results of checks and the report of a package, as JSON; the hash of the sources that a report is about."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .manifest import NormalizedManifest, NormalizedManifestV2
from .types import CheckStatus, Level, ReportVerdict, SignatureKind, ValidationLane
from .types import Lane as Lane
from .types import Verdict as Verdict

_NOT_SOURCE = frozenset({".git", "__pycache__", ".venv", ".worktrees", "outputs", ".pytest_cache"})
_NOT_APPLICABLE = "applicable"
_CHUNK = 1 << 20


class CheckOutcome(BaseModel):
    """The outcome of a check."""

    model_config = ConfigDict(extra="forbid")
    check_id: str = Field(pattern=r"^[a-z_]+\.[a-z_]+$")
    status: CheckStatus
    measured: dict[str, Any] = Field(default_factory=dict)
    evidence: list[str] = Field(default_factory=list)
    remediation: str | None = None
    duration_s: float = Field(ge=0)

    @property
    def applies(self) -> bool:
        """False: skipped, because there is nothing here that it is about."""
        return self.status is not CheckStatus.SKIP or self.measured.get(_NOT_APPLICABLE) is not False


CheckResult = CheckOutcome  # the published name


class ValidationReport(BaseModel):
    """The outcome of all checks of a package."""

    model_config = ConfigDict(extra="forbid")
    report_schema_version: Literal["1"]
    target: str
    source_digest: str
    signature: SignatureKind
    manifest: NormalizedManifest | None
    policy_version: str
    lane: ValidationLane
    levels_run: list[Level]
    results: list[CheckOutcome]
    verdict: ReportVerdict

    @property
    def passed(self) -> bool:
        """Whether nothing is known to be wrong."""
        return self.verdict is not ReportVerdict.FAIL


class ValidationReportV2(ValidationReport):
    """The report of checks that served the package, or of a package that says how it is run."""

    report_schema_version: Literal["2"]  # type: ignore[assignment]
    manifest: NormalizedManifestV2 | NormalizedManifest | None


def write_report(report: ValidationReport, path: Path | None = None) -> str:
    """Return a report as JSON, and write it to a file if there is a path; missing folders are made."""
    text = report.model_dump_json(indent=2) + "\n"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    return text


def skipped(check_id: str, reason: str, *, applies: bool = True) -> CheckOutcome:
    """Return the outcome of a check that was not made."""
    measured = {} if applies else {_NOT_APPLICABLE: False}
    return CheckOutcome(
        check_id=check_id, status=CheckStatus.SKIP, measured=measured, evidence=[reason], duration_s=0.0
    )


def source_digest(package_root: Path) -> str:
    """Return a hash of all source files: names and contents; of a link, where it points."""
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(package_root).as_posix(), path) for path in _sources(package_root)):
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
        if path.is_symlink():
            digest.update(os.fsencode(os.readlink(path)))
        else:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        digest.update(b"\0")
    return digest.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    if folder.is_file():
        yield folder
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_SOURCE and not name.endswith(".egg-info")]
        for path in (Path(place, name) for name in files):
            if path.is_symlink() or path.is_file():
                yield path
