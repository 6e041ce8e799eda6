"""Evidence about agents and providers: the checks of one result, and tables of recorded evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .contract import to_trace_entries
from .models import HarborRolloutResult

# The columns of the table, in its order.
PROVIDERS = ("openai", "anthropic", "hf", "vllm")
STATUSES = frozenset(
    {"not_run", "in_progress", "failed", "blocked", "eval_pass", "capture_and_reader_pass", "optimizer_pass"}
)
# One status for each of PROVIDERS; only vLLM returns tokens, so only it can reach optimizer_pass.
_STABLE = ["eval_pass", "eval_pass", "eval_pass", "optimizer_pass"]


def evaluate_eval_capture(result: HarborRolloutResult) -> dict[str, bool]:
    """Check the result of an evaluation; it passes if all values are True."""
    try:
        exports = len(to_trace_entries(result)) > 0
        is_refused = False
    except ValueError:
        exports, is_refused = False, True
    return {
        "rollout_completed": result.ok,
        "verifier_graded": result.reward is not None,
        "model_calls_captured": result.n_turns > 0,
        "eval_label": result.rollout_type == "eval",
        "no_training_export": is_refused and not exports and result.n_trainable_tokens == 0,
        "no_capture_fatal": not any("[FATAL]" in finding for finding in result.findings),
    }


def qualification_rows(harnesses: Sequence[str], report: Mapping[str, Any] | None = None) -> list[list[str]]:
    """Return for each agent its recorded status with each of `PROVIDERS`.

    Raises:
        ValueError: the report has a cell twice, an unknown provider or status, or a pass without evidence.
    """
    statuses: dict[tuple[str, str], str] = {}
    for cell in _cells(report):
        key = (str(cell.get("harness")), str(cell.get("provider")))
        # Two cells for one pair would make the table depend on their order.
        if key in statuses:
            raise ValueError("duplicate harness/provider evidence")
        _check_cell(cell)
        statuses[key] = cell.get("status", "not_run")
    return [
        [name, *(statuses.get((name, provider), "not_run") for provider in PROVIDERS)] for name in sorted(harnesses)
    ]


def harness_maturity_rows(harnesses: Sequence[str], report: Mapping[str, Any] | None = None) -> list[list[str]]:
    """Return for each agent `stable`, `experimental` or `unstable`, and why."""
    rows = []
    for name, *statuses in qualification_rows(harnesses, report):
        # Stable requires every provider, unstable none; anything in between is experimental.
        if statuses == _STABLE:
            rows.append([name, "stable", "It passes with every provider, training included."])
        elif all(status in ("failed", "blocked") for status in statuses):
            rows.append([name, "unstable", "It passes with no provider."])
        else:
            rows.append([name, "experimental", "It was not tried, or does not pass, with every provider."])
    return rows


def qualification_details(report: Mapping[str, Any] | None = None) -> list[list[str]]:
    """Return for each recorded cell its model, versions, tasks, training evidence and files."""
    qualification_rows([], report)
    rows = []
    for cell in _cells(report):
        # Nothing to show for cells without a run.
        if cell.get("status", "not_run") == "not_run":
            continue
        # Configuration of the run; evidence that an optimizer used its tokens.
        settings, proof = cell.get("configuration") or {}, cell.get("optimizer_evidence") or {}
        # Training evidence may stem from an older version of the agent.
        is_current = proof.get("matches_current_captures") is True
        captures = "current captures" if is_current else "previous captures only"
        rows.append(
            [
                str(cell.get("harness", "")),
                cell["provider"],
                cell["status"],
                settings.get("model") or (proof.get("model") if is_current else "") or "not recorded",
                _versions(cell, settings),
                str(cell.get("tasks_completed", "not recorded")),
                str(settings.get("acp_profile") or settings.get("nemo_profile") or ""),
                f"{captures}: {proof.get('scope', '')}" if proof else "not validated",
                str(proof.get("revision", "")),
                "; ".join(map(str, cell.get("evidence") or [])),
                str(cell.get("reason") or ""),
            ]
        )
    return sorted(rows)


def _cells(report: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    return list((report or {}).get("cells") or [])


def _check_cell(cell: Mapping[str, Any]) -> None:
    status = cell.get("status", "not_run")
    if cell.get("provider") not in PROVIDERS:
        raise ValueError(f"unknown qualification provider: {cell.get('provider')}")
    if status not in STATUSES:
        raise ValueError(f"unknown qualification status: {status}")
    # A pass without a file is a claim.
    if status.endswith("pass") and not cell.get("evidence"):
        raise ValueError("qualification pass requires evidence")
    proof = cell.get("optimizer_evidence") or {}
    rows = proof.get("rows")
    is_proven = (
        cell.get("optimizer_validated") is True
        and proof.get("matches_current_captures") is True
        and all(proof.get(name) for name in ("result", "inputs", "scope", "model", "revision"))
        and isinstance(rows, int)
        and rows > 0
    )
    if status == "optimizer_pass" and not is_proven:
        raise ValueError("optimizer pass requires matching, scoped optimizer evidence")


def _versions(cell: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    pinned = (settings.get("version_pins") or {}).get(cell.get("harness"))
    # The pinned version may differ from the version that actually ran.
    versions = {
        str(item["observed_version"]) for item in cell.get("capture_provenance") or [] if item.get("observed_version")
    }
    text = f"pinned: {pinned}" if pinned else "pin not recorded"
    return f"{text}; observed: {', '.join(sorted(versions))}" if versions else text
