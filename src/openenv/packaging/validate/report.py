"""Results of checks, the report of a package, and the bundle of a run on disk with a checksum of each file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .manifest import NormalizedManifest, NormalizedManifestV2
from .recording import RuntimeEvidence, RuntimePlan
from .rules import CheckStatus, Level, ReportVerdict, SignatureKind, ValidationLane

# Tools create these; they must not change the digest of the sources.
_NOT_SOURCE = frozenset({".git", "__pycache__", ".venv", ".worktrees", "outputs", ".pytest_cache"})
_NOT_APPLICABLE = "applicable"
# Files may be large models; the digest never holds a whole one.
_CHUNK = 1 << 20


UNMET = "unmet dependency: "
"""How the reason begins if a check was skipped because another one did not pass."""


# Models forbid extra fields, so that a misspelled one fails instead of vanishing.
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

    @property
    def unmet(self) -> str | None:
        """The check or the step whose failure led to this skip, if one did."""
        reasons = [line.removeprefix(UNMET) for line in self.evidence if line.startswith(UNMET)]
        return reasons[0] if reasons and self.status is CheckStatus.SKIP else None


CheckResult = CheckOutcome  # the published name


class ValidationReport(BaseModel):
    """The outcome of all checks of a package."""

    model_config = ConfigDict(extra="forbid")
    # Readers choose the model by this version.
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
    # Ends with a line break, as text files do.
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
    """Return a hash of all source files: names and contents, or the target of a link."""
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(package_root).as_posix(), path) for path in _sources(package_root)):
        # Separators keep "ab" + "c" apart from "a" + "bc".
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
        # A link counts by its target's name. Following it could leave the package.
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
        # In place, so that `os.walk` does not enter them.
        folders[:] = [name for name in folders if name not in _NOT_SOURCE and not name.endswith(".egg-info")]
        for path in (Path(place, name) for name in files):
            if path.is_symlink() or path.is_file():
                yield path


_SUMS = "SHA256SUMS"
_TRACE = "collector-trace.json"


def write_runtime_bundle(
    directory: Path,
    report: ValidationReport,
    *,
    plan: RuntimePlan | None = None,
    evidence: RuntimeEvidence | None = None,
    provider: dict[str, Any] | None = None,
    cleanup: Any = None,
) -> None:
    """Write the files of a run; absent parts get no file.

    Args:
        directory: Where to; it is made if it is missing.
        report: The report.
        plan: The episode that was planned.
        evidence: The record of the episode.
        provider: What ran the package.
        cleanup: The end of the container, as the provider reports it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Static checks need no run and are listed in the report only.
    requested = [result for result in report.results if not result.check_id.startswith("static.")]
    plan_json = None if plan is None else plan.model_dump(mode="json")
    documents: dict[str, Any] = {
        "coverage.json": {
            "requested_runtime_checks": [result.check_id for result in requested],
            "executed": [result.check_id for result in report.results if result.status is not CheckStatus.SKIP],
            "incomplete": [result.check_id for result in report.results if result.status is CheckStatus.SKIP],
        },
        "report.json": report.model_dump(mode="json"),
        "run-manifest.json": {
            "bundle_schema_version": "1",
            "manifest_schema_version": None if report.manifest is None else report.manifest.manifest_schema_version,
            "plan_digest": None if plan_json is None else hashlib.sha256(_text(plan_json)).hexdigest(),
            "policy_version": report.policy_version,
            "source_digest": report.source_digest,
            "provider": provider,
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
    }
    if cleanup is not None:
        documents["cleanup.json"] = cleanup
    if plan_json is not None:
        documents["runtime-plan.json"] = plan_json
    if evidence is not None:
        documents["collector-evidence.json"] = _described(evidence)
        documents[_TRACE] = [
            {**asdict(one), "request_json": _parsed(one.request_json), "response_json": _parsed(one.response_json)}
            for one in evidence.exchanges
        ]
    # Checksums let a reader notice files that were edited later.
    sums = []
    for name, document in documents.items():
        text = _text(document)
        (directory / name).write_bytes(text)
        sums.append(f"{hashlib.sha256(text).hexdigest()}  {name}\n")
    (directory / _SUMS).write_text("".join(sums), encoding="ascii")


def _described(evidence: RuntimeEvidence) -> dict[str, Any]:
    schemas = (evidence.observation_schema_json, evidence.reset_observation_schema_json)
    of_steps, of_reset = (None if schema is None else _parsed(schema) for schema in schemas)
    return {
        "evidence_schema_version": "1",
        "complete": evidence.failure_phase is None,
        "failure_phase": evidence.failure_phase,
        "failure_reason": evidence.failure_reason,
        "schema_available": of_steps is not None,
        "observation_schema": of_steps,
        "reset_schema_available": of_reset is not None,
        "reset_observation_schema": of_reset,
        "trace_file": _TRACE,
    }


def _parsed(text: str) -> Any:
    """Parse a message as JSON; return invalid JSON unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(document: Any) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
