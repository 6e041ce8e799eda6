"""The verifier: every check of a task in fresh sandboxes that the agent never touched, and the reward.

Knows tasks, sandboxes and archives. Must not know agents, models or stores, so that a stored work tree can be verified
again. `verify` is its only entry; the engine calls it and hands it to the phases of its rollouts.
"""

# task ──> cases ──> sandboxes ──> results ──> verdict ──> reward
#
#   agent's sandbox (closed before the verifier starts)
#        |
#        |  worktree.tar, made by the sandbox's own tar; the host reads it and never unpacks it
#        v
#   merged.tar = the agent's files; everything that could steer a check is as in the baseline (`worktree.py`)
#        |
#        v
#   verify line ("pytest -q"), each in a           judged check, in two sandboxes
#   fresh sandbox (`verify_lines.py`)              (`judged_checks.py`)
#   +-------------------------------------+        +-----------------------+       +---------------------------+
#   | baseline, merged.tar, verify_files; |        | `run`: baseline,      | data  | `judge`: baseline, all    |
#   | Python starts in the verifier's     |        | merged.tar, the files | ----> | verify_files, $OUTPUT     |
#   | place (`cases.VerifierPlace`).      |        | that `run` names      |       | (read-only).              |
#   | The agent's code runs in the same   |        +-----------------------+       | The agent's code is never |
#   | process tree as the check.          |          closed before `judge` starts  | here.                     |
#   +-------------------------------------+                                        +---------------------------+
#        |                                                                                |
#        +---------------------> exit code, reward file, traces <-------------------------+
#        v
#   result per check: passed, failed, or refused with a note      (`attempts.py`)
#        v
#   reward: the last valid reward file of a line, else the share of passed checks (a judge's score counts as its share)
#
# A crash, a timeout and an invalid reward are worth `Task.missing_reward`: an agent that writes no answer earns 0, not
# None. Only if the same check on the initial files differs from its validation did the infrastructure fail
# (`references.py`): then the task has no verdict (`grader_failed`).

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from openenv.errors import SandboxError
from openenv.rollout.store.verdict import Verdict, VerifierInput
from openenv.rollout.tasks.task import Task, Trust, weakest
from openenv.rollout.verify.attempts import CheckCrash, reads_reward_file
from openenv.rollout.verify.cases import SandboxNotStarted, VerificationCase
from openenv.rollout.verify.judged_checks import JudgedChecks
from openenv.rollout.verify.references import ReferenceRuns
from openenv.rollout.verify.trust import trust_of
from openenv.rollout.verify.verify_lines import LineChecks
from openenv.sandboxes.base import Sandboxes
from openenv.sandboxes.host import scratch


def verify(task: Task, backend: Sandboxes, given: VerifierInput) -> Verdict:
    """Run a task's checks over a work tree.

    Raises:
        SandboxError: a sandbox did not start. If one dies later, the verdict says so.
        RolloutCancelled: `given.cancel` was used.
    """
    if not task.verify:
        return Verdict()
    trusts = _trusts(task, backend)
    verdict = Verdict(trust=weakest(trusts))
    references = ReferenceRuns(given.references, has_solution=bool(task.solution))
    try:
        folders = scratch() if given.folder is None else nullcontext(given.folder)
        with folders as folder, VerificationCase(task, backend, given, folder) as case:
            lines = LineChecks(case, references, reads_file=reads_reward_file(task, given.baseline))
            _run_checks(case, trusts, lines, partial(JudgedChecks, case, references), verdict)
            if verdict.crash is None:
                _set_reward(verdict, lines)
            else:
                verdict.crash += references.explanation
    except SandboxNotStarted as exc:
        raise exc.error from exc
    except (SandboxError, OSError) as exc:
        verdict.crash = f"the verifier failed: {exc}"
    verdict.facts = list(references.noted.values())
    given.cancel.check()
    return verdict


def _trusts(task: Task, backend: Sandboxes) -> list[Trust]:
    """Return the trust level of each check. Without isolation the agent's code may still run beside every check."""
    if "isolation" not in backend.features:
        return ["shared"] * len(task.verify)
    return [trust_of(check, task)[0] for check in task.verify]


def _run_checks(
    case: VerificationCase,
    trusts: list[Trust],
    lines: LineChecks,
    new_judged: Callable[[], JudgedChecks],
    verdict: Verdict,
) -> None:
    """Run the checks in order, until one of them crashes."""
    checks = case.task.verify
    judged: JudgedChecks | None = None  # most tasks have lines only
    for number, check in enumerate(checks):
        label = f"check {number + 1} of {len(checks)}: "
        case.begin(check, None if number + 1 == len(checks) else checks[number + 1])
        try:
            if isinstance(check, str):
                result = lines.run(number, check, trusts[number])
            else:
                judged = judged or new_judged()
                result = judged.run(number, check, lambda text, label=label: case.report(f"{label}{text}"))  # type: ignore[misc]
        except CheckCrash as exc:
            part = f"verify line {number + 1}" if isinstance(check, str) else f"{exc.part} of check {number + 1}"
            result, verdict.crash = exc.result, f"{part} {exc}"
        verdict.sandbox_id = case.first_sandbox_id
        name = "" if isinstance(check, str) else str(check)
        verdict.results.append(result.model_copy(update={"trust": trusts[number], "name": name}))
        if verdict.crash is not None:
            return
        why = "" if result.note is None else f" ({result.note})"
        case.report(f"{label}exit code {result.exit_code}{why}")


def _set_reward(verdict: Verdict, lines: LineChecks) -> None:
    scores = [float(result.exit_code == 0) if result.score is None else result.score for result in verdict.results]
    share = sum(scores) / len(scores)
    written = lines.reward(share)
    verdict.reward = share if written is None else written
    verdict.rewards = dict(lines.written) if written is not None else {}
    verdict.ignored_reward_file = lines.ignored_file
