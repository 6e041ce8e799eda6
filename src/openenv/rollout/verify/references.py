"""The reference runs of a task's checks, which tell the agent's failures from the infrastructure's.

Knows facts of checks, not how to run them.
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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from openenv.rollout.store.verdict import CheckFacts, References

Reference = Literal["setup", "solved"]
"""Files that no agent changed."""
_PROBES: Final = 2
"""Runs on the initial files that must all fail before the infrastructure is to blame."""


@dataclass(slots=True)
class ReferenceRuns:
    """The facts of each check over files that no agent changed: from the validation, or else from a run when needed.

    Args:
        validated: The facts from the validation of the task.
        has_solution: Whether the task has a solution.
    """

    validated: References
    has_solution: bool
    noted: dict[int, CheckFacts] = field(default_factory=dict)
    """The facts of each check over the verified files, which are a reference in a validation."""
    explanation: str = ""
    """Why the infrastructure is to blame, if a check on the initial files differs from its validation."""
    _others: dict[tuple[int, Reference], CheckFacts] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[Reference, ...]:
        """The files that no agent changed."""
        return ("setup", "solved") if self.has_solution else ("setup",)

    def facts(self, number: int, source: Reference, run: Callable[[Reference], CheckFacts]) -> CheckFacts:
        """Return the facts of a check on a reference; run it if they are unknown."""
        facts = self._validated(number, source) or self._others.get((number, source))
        if facts is None and source == self.validated.validates:
            facts = self.noted.get(number)
        if facts is None:
            facts = self._others[number, source] = run(source)
        return facts

    def _validated(self, number: int, source: Reference) -> CheckFacts | None:
        facts = self.validated.setup if source == "setup" else self.validated.solved
        return facts[number] if number < len(facts) else None

    def is_broken(self, number: int, facts: CheckFacts, run: Callable[[Reference], CheckFacts]) -> bool:
        """Return whether the infrastructure kept a check from a verdict, and not the agent's work."""
        before = self._validated(number, "setup")
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
