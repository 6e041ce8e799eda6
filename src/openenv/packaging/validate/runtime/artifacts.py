"""The bundle of a run on disk: the report, the plan, every message of the episode, and a checksum of each file."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..report import ValidationReport
from ..types import CheckStatus
from .contracts import RuntimeEvidence, RuntimePlan

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
    """Write what a run was and what was seen of it; what is not there is not written.

    Args:
        directory: Where to; it is made if it is missing.
        report: The report.
        plan: The episode that was planned.
        evidence: What was seen of it.
        provider: What ran the package.
        cleanup: What is known of the end of it.
    """
    directory.mkdir(parents=True, exist_ok=True)
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
    """Return a message as JSON; what is none, as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(document: Any) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
