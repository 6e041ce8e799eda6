"""Verification: every check of a task, in fresh sandboxes that the agent never touched, and the reward they earn.

Knows the two kinds of checks and what they are worth together. Must not know agents, models or stores: what was stored
can be verified again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone
from openenv.rollout.case import REWARD_FILE as REWARD_FILE
from openenv.rollout.case import Case, NotStarted
from openenv.rollout.case import clean_environment as clean_environment
from openenv.rollout.judging import JudgeCrash, run_and_judge
from openenv.rollout.lines import LineCrash, Lines
from openenv.rollout.outcome import CommandResult
from openenv.rollout.progress import Cancellation
from openenv.rollout.scratch import scratch
from openenv.rollout.task import Task
from openenv.sandboxes.base import HOME, Sandboxes


@dataclass(slots=True)
class Verdict:
    """What the verifier found. `crash` says why there is no reward although there are checks."""

    results: list[CommandResult] = field(default_factory=list)
    reward: float | None = None
    crash: str | None = None
    sandbox_id: str = ""
    ignored_reward_file: bool = False
    """A reward file was written, but the task does not say that it counts, or code of the agent may have written it."""


def verify(
    task: Task,
    backend: Sandboxes,
    *,
    worktree: Path | None,
    baseline: Path | None,
    home: str = HOME,
    cancel: Cancellation | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Verdict:
    """Run a task's checks over a work tree.

    Args:
        worktree: The merged work tree; None leaves the work folder as the setup made it.
        baseline: The home as the setup left it, or None.
        home: Where the home is inside.

    Raises:
        SandboxError: a sandbox of the verifier did not start. One that dies later is a `crash`.
    """
    verdict = Verdict()
    if not task.verify:
        return verdict
    case = Case(task, backend, worktree, baseline, home, cancel or Cancellation())
    try:
        with scratch() as folder, Lines(case, folder) as lines:
            _run_checks(case, lines, folder, verdict, report)
            verdict.sandbox_id = verdict.sandbox_id or lines.sandbox_id
            if verdict.crash is None:
                _decide(lines, verdict, reads_file=reads_reward_file(task, baseline))
    except NotStarted as exc:
        raise exc.error from exc
    except SandboxGone as exc:
        verdict.crash = f"the verifier's sandbox ended: {exc.reason}"
    except (SandboxError, OSError) as exc:
        verdict.crash = f"the verifier's sandbox failed: {exc}"
    case.cancel.check()
    return verdict


def reads_reward_file(task: Task, baseline: Path | None = None) -> bool:
    """Say whether a reward file counts for this task: when it says so, or it or what its setup left names the file."""
    if task.reward_file is not None:
        return task.reward_file
    texts = [*task.verify_texts(), *task.setup, *task.verify_files.values(), *task.files.values()]
    if any("reward.txt" in text for text in texts):
        return True
    return baseline is not None and _names_reward_file(baseline)


def _run_checks(case: Case, lines: Lines, folder: Path, verdict: Verdict, report: Callable[[str], None]) -> None:
    checks = case.task.verify
    for number, check in enumerate(checks, 1):
        try:
            if isinstance(check, str):
                result = lines.run(check)
            else:
                said = partial(_said, report, f"check {number} of {len(checks)}: ")
                result, sandbox_id = run_and_judge(case, check, folder, said)
                verdict.sandbox_id = verdict.sandbox_id or sandbox_id
        except LineCrash as exc:
            verdict.results.append(exc.result)
            verdict.crash = f"verify line {number} {exc}"
            return
        except JudgeCrash as exc:
            verdict.results.append(exc.result)
            verdict.crash = f"the judge of check {number} {exc}"
            return
        verdict.results.append(result)
        why = "" if result.note is None else f" ({result.note})"
        report(f"check {number} of {len(checks)}: exit code {result.exit_code}{why}")


def _said(report: Callable[[str], None], start: str, message: str) -> None:
    report(start + message)


def _decide(lines: Lines, verdict: Verdict, *, reads_file: bool) -> None:
    given = lines.reward()
    if given is not None and reads_file and not lines.refused:
        verdict.reward = given
        return
    verdict.ignored_reward_file = given is not None
    scores = [float(one.exit_code == 0) if one.score is None else one.score for one in verdict.results]
    verdict.reward = sum(scores) / len(scores)


def _names_reward_file(archive: Path) -> bool:
    name, before = b"reward.txt", b""
    with archive.open("rb") as file:
        while chunk := file.read(1024 * 1024):
            if name in before + chunk:
                return True
            before = chunk[-len(name) :]
    return False
