"""The verdict of a task's checks, and the input of the verifier, which it shares with the phases of a rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from openenv.rollout.progress import Cancellation
from openenv.rollout.tasks.task import CommandResult, Task, Trust
from openenv.sandboxes.base import HOME, Sandboxes


@dataclass(slots=True)
class Verdict:
    """The results of all checks and the reward."""

    results: list[CommandResult] = field(default_factory=list)
    reward: float | None = None
    crash: str | None = None
    """Why a task with checks has no reward: a check loses its sandbox without the agent's work, too."""
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
        home: The path of the home inside the sandboxes.
    """

    worktree: Path | None
    baseline: Path | None
    home: str = HOME
    cancel: Cancellation = field(default_factory=Cancellation)
    report: Callable[[str], None] = _ignore


Verify = Callable[[Task, Sandboxes, VerifierInput], Verdict]
"""The type of `openenv.rollout.verify.verifier.verify`, which the engine hands to the phases of its rollouts."""
