"""`reverify`: verify a stored rollout again, without its model and agent, and add the verdict to the store."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from typing_extensions import Unpack

from openenv.errors import RolloutError, StoreError
from openenv.rollout.progress import Cancellation, OnProgress, Reporter
from openenv.rollout.run.engine import named_backend
from openenv.rollout.store.archives import MAX_BYTES, UnusableWorktree
from openenv.rollout.store.outcome import NO_CHECKS, Outcome, Status
from openenv.rollout.store.store import Record, RolloutStore, check_verdict_name
from openenv.rollout.store.verdict import Verdict, VerifierInput
from openenv.rollout.tasks.checks import AS_STORED, runs_nothing
from openenv.rollout.tasks.task import Check, Task, sandbox_spec
from openenv.rollout.verify.lint import require_trust
from openenv.rollout.verify.verifier import verify
from openenv.rollout.verify.worktree import merge_for
from openenv.sandboxes.base import WORKDIR, Sandboxes
from openenv.sandboxes.host import scratch

_SCORED: frozenset[Status] = frozenset({"ok", "grader_failed", "policy_failed", "truncated"})
"""Statuses of rollouts whose agent ran, so that a new verdict may give them a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVerdict:
    """How a verification differs from the one in the rollout."""

    lines: Sequence[str | Check] | None = None
    """Verify lines, or checks, that replace the task's."""
    verify_files: Mapping[str, str | bytes] | None = None
    """Files that replace the task's `verify_files`."""
    task: Task | None = None
    """A task that replaces the stored one; the verifier reads only its own part of it."""
    verdict: str | None = None
    """The name of the verdict, the same for all rollouts verified together; by default a new ID."""

    def __post_init__(self) -> None:
        if self.verdict is not None:
            check_verdict_name(self.verdict)

    def task_to_verify(self, stored: Task) -> Task:
        """Return the stored task with the replacements.

        Raises:
            RolloutError: a verify line is blank or a comment.
        """
        changes: dict[str, object] = {}
        if self.lines is not None:
            changes["verify"] = tuple(self.lines)
        if self.verify_files is not None:
            changes["verify_files"] = dict(self.verify_files)
        # Validate with the rules for stored tasks: the instruction of an old task may be empty, and is not used here.
        task = Task.model_validate({**(self.task or stored).model_dump(), **changes}, context=AS_STORED)
        if any(map(runs_nothing, task.verify_texts())):
            raise RolloutError("A verify line is blank or a comment: it would pass whatever the agent did")
        return task


class NewVerdictArguments(TypedDict, total=False):
    """The fields of `NewVerdict` as keyword arguments; mypy compares both lists."""

    lines: Sequence[str | Check] | None
    verify_files: Mapping[str, str | bytes] | None
    task: Task | None
    verdict: str | None


def reverify(
    store: RolloutStore,
    rollout_id: str,
    *,
    sandbox: str | Sandboxes = "local",
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
    **changes: Unpack[NewVerdictArguments],
) -> Outcome:
    """Verify a stored rollout again, without model and agent, and add the verdict to the store.

    The store still reports the first verdict by default; `verdict="last"`, or the name of this one, selects another.

    Args:
        store: The store of the rollout.
        rollout_id: Its ID; a unique prefix is enough.
        sandbox: A backend or its name.
        on_progress: Called with each event.
        cancel: Ends the verification early.
        changes: The fields of `NewVerdict`: `lines`, `verify_files` or `task` replace parts of the stored task,
            `verdict` names the verdict.

    Raises:
        StoreError: the rollout does not exist, has no work tree, or has a verdict of that name.
        RolloutError: a verify line is blank or a comment.
        TrustError: a check has a lower trust level than the task's `min_trust`.
        RolloutCancelled: it was cancelled; nothing was stored.
    """
    new = NewVerdict(**changes)
    first = store.history(rollout_id)[-1]  # the rollout itself: its status says how the agent ended
    worktree, baseline = _stored_trees(store, first)
    task = new.task_to_verify(first.task)
    backend = named_backend(sandbox)
    require_trust(task, None, isolated="isolation" in backend.features)
    backend.check()
    backend.require(sandbox_spec(task, verifies=True))
    reporter = Reporter(first.rollout_id, on_progress)
    started_at = time.time()
    with scratch() as folder, reporter.during("verify", "verifying in a fresh sandbox"):
        given = VerifierInput(
            worktree=_merged(worktree, baseline, folder, task),
            baseline=baseline,
            cancel=cancel or Cancellation(),
            report=reporter.say,
        )
        result = verify(task, backend, given)
    outcome = _outcome(first, result, backend, reporter, started_at)
    store.add_verification(outcome, task, verdict=new.verdict)
    return outcome


def _stored_trees(store: RolloutStore, first: Record) -> tuple[Path | None, Path | None]:
    """Return the archives of the agent's work tree and of the task's initial files."""
    worktree = store.file(first.rollout_id, "worktree.tar")
    baseline = store.file(first.rollout_id, "baseline.tar")
    # If the agent's tree could not be taken, the initial files are verified, as in the rollout.
    if worktree is None and not _has_lost_worktree(first.outcome):
        raise StoreError(
            f"No work tree was kept of rollout '{first.rollout_id}': it ended as {first.outcome.status} in the "
            f"{first.outcome.phase} phase"
        )
    return worktree, baseline


def _has_lost_worktree(outcome: Outcome) -> bool:
    # Earlier versions wrote no mark, and lost a tree only in the collect phase.
    return "lost_worktree" in outcome.metadata or (outcome.status == "policy_failed" and outcome.phase == "collect")


def _merged(worktree: Path | None, baseline: Path | None, folder: Path, task: Task) -> Path | None:
    """Write the verifier's view of the work tree into the folder; None if there is no usable tree."""
    if worktree is None:
        return None
    target = folder / "merged.tar"
    try:
        merge_for(task, worktree, baseline, target, root=task.workdir or WORKDIR, max_bytes=MAX_BYTES)
    except UnusableWorktree:  # as in the rollout itself, the initial files are verified
        return None
    return target


def _outcome(first: Record, verdict: Verdict, backend: Sandboxes, reporter: Reporter, started_at: float) -> Outcome:
    before = first.outcome
    # Only the verifier ran again, so only its part of the status can change: a truncated agent stays truncated.
    status, phase, reason = before.status, before.phase, before.reason
    if status in ("ok", "grader_failed"):
        if verdict.crash is not None:
            status, phase, reason = "grader_failed", "verify", verdict.crash
        elif _has_lost_worktree(before):
            status, phase, reason = "policy_failed", "collect", "the work tree could not be taken"
        else:
            status, phase, reason = "ok", "done", None if verdict.results else NO_CHECKS
    return before.model_copy(
        update={
            "status": status,
            "phase": phase,
            "reason": reason,
            "reward": verdict.reward if status in _SCORED else None,
            "trust": verdict.trust,
            "verify_results": verdict.results,
            "sandbox": backend.name,
            "sandbox_id": verdict.sandbox_id,
            "started_at": started_at,
            "wall_s": reporter.elapsed_s,
            "phase_s": dict(reporter.phase_s),
        }
    )
