"""Verifying again: new verify lines over a stored work tree, without a model and without the agent.

Knows the store and the verifier. The first verdict stays; the new one is another record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from openenv.errors import StoreError
from openenv.rollout.engine import named_backend
from openenv.rollout.outcome import Outcome, Status
from openenv.rollout.progress import Cancellation, OnProgress, Reporter
from openenv.rollout.scratch import scratch
from openenv.rollout.store import Record, RolloutStore
from openenv.rollout.task import Check, Task
from openenv.rollout.verifier import Verdict, verify
from openenv.rollout.worktree import UnusableWorktree, merge
from openenv.sandboxes.base import Sandboxes

_SCORED: frozenset[Status] = frozenset({"ok", "grader_failed", "policy_failed", "truncated"})
"""What may have a reward: an agent that ran, whatever it or the verifier made of it."""


def reverify(
    store: RolloutStore,
    rollout_id: str,
    *,
    lines: Sequence[str | Check] | None = None,
    verify_files: Mapping[str, str] | None = None,
    task: Task | None = None,
    sandbox: str | Sandboxes = "local",
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> Outcome:
    """Verify a stored rollout again, in a fresh sandbox, and append what came of it to the store.

    Args:
        store: Where the rollout is.
        rollout_id: Which one; the beginning of its id will do.
        lines: Verify lines, or checks, in place of the task's.
        verify_files: Files in place of the task's `verify_files`.
        task: A whole task in place of the stored one; of it only what the verifier reads counts.
        sandbox: A backend or its name.

    Raises:
        StoreError: there is no such rollout, or no work tree was kept of it.
        RolloutCancelled: it was cancelled; nothing was stored.
    """
    first = store.history(rollout_id)[-1]
    worktree, baseline = _kept(store, first)
    asked = task or first.task
    changes: dict[str, object] = {}
    if lines is not None:
        changes["verify"] = tuple(lines)
    if verify_files is not None:
        changes["verify_files"] = dict(verify_files)
    asked = Task.model_validate({**asked.model_dump(), **changes})
    backend = named_backend(sandbox)
    backend.check()
    reporter = Reporter(first.rollout_id, on_progress)
    started_at = time.time()
    with scratch() as folder, reporter.during("verify", "verifying in a fresh sandbox"):
        verdict = verify(
            asked,
            backend,
            worktree=_merged(worktree, baseline, folder, asked),
            baseline=baseline,
            cancel=cancel,
            report=reporter.say,
        )
    outcome = _outcome(first, verdict, backend, reporter, started_at)
    store.add_verification(outcome, asked)
    return outcome


def _kept(store: RolloutStore, first: Record) -> tuple[Path | None, Path | None]:
    worktree = store.file(first.rollout_id, "worktree.tar")
    baseline = store.file(first.rollout_id, "baseline.tar")
    if worktree is None and not (first.outcome.status == "policy_failed" and first.outcome.phase == "collect"):
        raise StoreError(
            f"No work tree was kept of rollout '{first.rollout_id}': it ended as {first.outcome.status} in the "
            f"{first.outcome.phase} phase"
        )
    return worktree, baseline


def _merged(worktree: Path | None, baseline: Path | None, folder: Path, task: Task) -> Path | None:
    if worktree is None:
        return None
    target = folder / "merged.tar"
    try:
        merge(
            worktree,
            baseline,
            target,
            protected=task.protected,
            verify_files=task.verify_files,
            named=task.texts(),
        )
    except UnusableWorktree:  # as in the rollout itself: what the setup left is verified
        return None
    return target


def _outcome(first: Record, verdict: Verdict, backend: Sandboxes, reporter: Reporter, started_at: float) -> Outcome:
    before = first.outcome
    status, phase, reason = before.status, before.phase, before.reason
    if status in ("ok", "grader_failed"):
        crashed = verdict.crash is not None
        status, phase, reason = ("grader_failed", "verify", verdict.crash) if crashed else ("ok", "done", None)
    return before.model_copy(
        update={
            "status": status,
            "phase": phase,
            "reason": reason,
            "reward": verdict.reward if status in _SCORED else None,
            "verify_results": verdict.results,
            "sandbox": backend.name,
            "sandbox_id": verdict.sandbox_id,
            "started_at": started_at,
            "wall_s": reporter.elapsed_s,
            "phase_s": dict(reporter.phase_s),
        }
    )
