"""One attempt at a check and its traces, and the reference runs that tell the agent's failures from others.

Knows runs of shell lines. Must not know how checks are judged.
"""

# An attempt over the agent's work ends in one of these ways:
#
#   ended               exit code, reward file and traces decide
#   invalid             its reward file has no number in the range
#   killed, hung        by a signal, or at the time limit
#   lost                its sandbox failed. It is tried once more, since accidents do not happen twice
#
# All but the first give no verdict: the check earns `Task.missing_reward`. The agent may be the cause, so the exception
# must not depend on it: the same check on the initial files, in a fresh sandbox, is further from a verdict now than it
# was when the task was validated. Then the infrastructure failed, and the rollout has no reward (`CheckCrash`).
#
#   validation, before any agent     after an agent                                    reward
#   initial files: ended             killed; initial files now: ended                  missing
#   initial files: ended             killed; initial files now, twice: hung            None
#   initial files: killed            hung                                              missing: as without an answer
#   not validated                    lost; initial files and solution now: lost        None
#
# Twice, so that a check that is only flaky does not discard an agent's failures.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from openenv.errors import SandboxGone
from openenv.rollout.store.verdict import CheckFacts, Ending, FileChange, References
from openenv.rollout.tasks.task import CommandResult, CommandRun, run_line
from openenv.rollout.verify.reward_file import WrittenReward
from openenv.sandboxes.base import Sandbox

KILLED = 137
"""The exit code of a process that signal 9 killed."""
REFUSED = 1
"""The exit code in the result of a line that exited with 0 but did not pass."""
_OUT_OF_MEMORY = "ran out of memory with its sandbox"
_PROBES = 2
"""Runs on the initial files that must all fail before the infrastructure is to blame."""

Reference = Literal["setup", "solved"]
"""Files that no agent changed."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The proof of a line, as the host read it."""

    seen: bool = False
    """Whether a proof began. If not, the line hides its environment from the proof module."""
    problem: str | None = None
    """Why the line is not proven, or None if it is."""


@dataclass(frozen=True, slots=True)
class LineRun(CommandRun):
    """One run of a check's shell line, and its traces."""

    evidence: Evidence | None = None
    """The proof that the line reached its end, if it had to prove that."""
    written: WrittenReward | None = None
    """The reward file after the line."""
    left_processes: bool = False
    """Whether a process of the line outlived it."""
    changes: frozenset[FileChange] = frozenset()
    """The verifier files that changed while the line ran."""
    is_lost: bool = False
    """Whether its sandbox failed, which may be an accident."""
    part: str = "judge"
    """The part of a `Check` that this is."""

    def facts(self, *, reads_file: bool) -> CheckFacts:
        """Return the facts that are compared with other runs of the line."""
        ending: Ending = "ended"
        if self.is_lost:
            ending = "lost"
        elif self.crash is not None:
            ending = "hung" if self.timed_out else "killed"
        elif reads_file and self.written is not None and self.written.value is None:
            ending = "invalid"
        note = self.crash
        if ending == "invalid" and self.written is not None:
            note = f"wrote {self.written.text} as its reward"
        return CheckFacts(
            ending=ending,
            note=note or "",
            writes_reward=self.written is not None,
            proves=self.evidence is not None and self.evidence.seen,
            changes=tuple(sorted(self.changes)),
        )


class CheckCrash(Exception):
    """The infrastructure fails a part of a check: the task has no verdict."""

    def __init__(self, why: str, result: CommandResult, *, part: str = "the judge") -> None:
        super().__init__(why)
        self.result = result
        self.part = part


def attempt_line(
    sandbox: Sandbox, line: str, *, timeout: float, envs: Mapping[str, str], cmd: str | None = None
) -> LineRun:
    """Run a check's line; the result shows `cmd` instead of `line` if it is set."""
    ran = run_line(sandbox, line, timeout=timeout, envs=envs, cmd=cmd)
    return LineRun(ran.result, ran.crash, ran.timed_out)


def lost_line(line: str, error: Exception) -> LineRun:
    """Return the run of a line after an error of its sandbox.

    Running out of memory is never an accident: the line would do it again.
    """
    if isinstance(error, SandboxGone) and "memory" in error.reason:
        return LineRun(CommandResult(cmd=line, exit_code=KILLED), _OUT_OF_MEMORY)
    return LineRun(CommandResult(cmd=line, exit_code=KILLED), f"lost its sandbox: {error}", is_lost=True)


def retry_lost(attempt: Callable[[], LineRun]) -> LineRun:
    """Make an attempt, and one more if its sandbox failed."""
    first = attempt()
    return attempt() if first.is_lost else first


class ReferenceRuns:
    """The facts of each check over files that no agent changed: from the validation, or else from a run when needed.

    Args:
        validated: The facts from the validation of the task.
        has_solution: Whether the task has a solution.
    """

    def __init__(self, validated: References, *, has_solution: bool) -> None:
        self._validates = validated.validates
        self._validated: dict[tuple[int, Reference], CheckFacts] = {}
        self._validated |= {(number, "setup"): facts for number, facts in enumerate(validated.setup)}
        self._validated |= {(number, "solved"): facts for number, facts in enumerate(validated.solved)}
        self._others: dict[tuple[int, Reference], CheckFacts] = {}
        self.sources: tuple[Reference, ...] = ("setup", "solved") if has_solution else ("setup",)
        """The files that no agent changed."""
        self.noted: dict[int, CheckFacts] = {}
        """The facts of each check over the verified files."""
        self.explanation = ""
        """Why the infrastructure is to blame, if a check on the initial files differs from its validation."""

    def note(self, number: int, facts: CheckFacts) -> None:
        """Note the facts of a check over the verified files, which are a reference in a validation."""
        before = self.noted.get(number, facts)
        self.noted[number] = facts.model_copy(update={"proves": facts.proves or before.proves})
        if self._validates is not None:
            self._others[number, self._validates] = self.noted[number]

    def facts(self, number: int, source: Reference, run: Callable[[Reference], CheckFacts]) -> CheckFacts:
        """Return the facts of a check on a reference; run it if they are unknown."""
        facts = self._validated.get((number, source)) or self._others.get((number, source))
        if facts is None:
            facts = self._others[number, source] = run(source)
        return facts

    def is_broken(self, number: int, facts: CheckFacts, run: Callable[[Reference], CheckFacts]) -> bool:
        """Return whether the infrastructure kept a check from a verdict, and not the agent's work."""
        before = self._validated.get((number, "setup"))
        if before is None:
            # The initial files are not enough: if the task is to repair a program that kills its machine, every check
            # of it does so there.
            is_lost = facts.ending == "lost"
            return is_lost and all(self.facts(number, source, run).ending == "lost" for source in self.sources)
        if facts.distance <= before.distance:
            return False
        for _ in range(_PROBES):
            now = run("setup")
            if now.distance <= before.distance:
                return False
        self.explanation = (
            f". On the initial files it now {now.note or now.ending}, unlike when the task was validated: the "
            "sandboxes have changed. If you changed them, remove the folder `checks` in OPENENV_CACHE to validate again"
        )
        return True
