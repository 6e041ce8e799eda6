"""The verdict of a task's checks, and the input of the verifier, which it shares with the phases of a rollout.

Also the reference runs of a task: each check over files that no agent changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from openenv.rollout.progress import Cancellation
from openenv.rollout.tasks.task import CommandResult, Task, Trust
from openenv.sandboxes.base import HOME, Sandboxes

Source = Literal["work", "setup", "solved"]
"""The files that a check runs over: the agent's work, the initial files, or these with the task's solution."""
FileChange = tuple[str, Literal["inode", "date", "content", "entries"]]
"""The path of a verifier file or its folder, and the property that changed."""
Ending = Literal["ended", "invalid", "killed", "hung", "lost"]
"""How a check ended: by itself, with an invalid reward, by a signal, at its time limit, or with its sandbox."""


class CheckFacts(BaseModel):
    """One run of a check: how it ended, and its traces. The run of an agent's work is compared with them."""

    model_config = ConfigDict(frozen=True)

    ending: Ending
    note: str = ""
    """Why it gave no verdict."""
    writes_reward: bool = False
    """Whether it wrote a reward file, valid or not."""
    proves: bool = False
    """Whether it began to prove that it reaches its end."""
    changes: tuple[FileChange, ...] = ()
    """The verifier files that it changes."""

    @property
    def distance(self) -> int:
        """The distance from a verdict: 0 for a verdict, 1 for a check without one, 2 for a lost sandbox."""
        return {"ended": 0, "lost": 2}.get(self.ending, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The facts of each check, in their order, from the validation of the task. Empty if it was not validated."""

    setup: tuple[CheckFacts, ...] = ()
    solved: tuple[CheckFacts, ...] = ()
    validates: Literal["setup", "solved"] | None = None
    """Set in a validation: the files to verify are such a reference themselves."""


@dataclass(slots=True)
class Verdict:
    """The results of all checks and the reward."""

    results: list[CommandResult] = field(default_factory=list)
    reward: float | None = None
    crash: str | None = None
    """Why a task with checks has no reward: the infrastructure failed a check, also without the agent's work."""
    facts: list[CheckFacts] = field(default_factory=list)
    """The facts of each check over the verified files."""
    sandbox_id: str = ""
    trust: Trust | None = None
    """The trust level of the weakest check."""
    rewards: dict[str, float] = field(default_factory=dict)
    """All numbers of the reward file that counts, by name."""
    ignored_reward_file: bool = False
    """A check wrote a reward file that does not count: the task does not use one, or the agent may have written it."""


def _ignore(message: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierInput:
    """One work tree to verify, and how to report and cancel.

    Args:
        worktree: The archive that `worktree.merge_for` wrote; None verifies the baseline.
        baseline: The home after the setup, or None.
        references: The facts of the checks from the validation of the task.
        home: The path of the home inside the sandboxes.
        folder: A folder of the host for temporary files, which the caller removes; None for a new one.
        places: A folder of the host for files that verifications share; it outlives their sandboxes. None shares none.
    """

    worktree: Path | None
    baseline: Path | None
    references: References = field(default_factory=References)
    home: str = HOME
    folder: Path | None = None
    places: Path | None = None
    cancel: Cancellation = field(default_factory=Cancellation)
    report: Callable[[str], None] = _ignore


Verify = Callable[[Task, Sandboxes, VerifierInput], Verdict]
"""The type of `openenv.rollout.verify.verifier.verify`, which the engine hands to the phases of its rollouts."""
