"""One attempt at a shell line of a check: its result, and the traces that the verifier reads afterwards.

Verify lines and judged checks both build on it. Values, and one command in a sandbox.
"""

# An attempt over the agent's work ends in one of three ways:
#
#   it ended by itself          `crash` is None: exit code, reward file and traces decide
#   it was killed               `crash`: by a signal or the time limit. The check fails
#   its sandbox failed          `crash` and `is_lost`: tried once more, since accidents do not happen twice. If control
#                               attempts lose their sandboxes too, there is no verdict (`VerificationCase.is_broken`)

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from openenv.errors import SandboxGone
from openenv.rollout.tasks.commands import CommandResult, CommandRun, run_line
from openenv.rollout.verify.proof import Evidence
from openenv.rollout.verify.reward_file import WrittenReward
from openenv.sandboxes.base import Sandbox

KILLED = 137
"""The exit code of a process that signal 9 killed."""
REFUSED = 1
"""The exit code in the result of a line that exited with 0 but did not pass."""
_OUT_OF_MEMORY = "ran out of memory with its sandbox"

FileChange = tuple[str, Literal["inode", "date", "content", "entries"]]
"""The path of a verifier file or its folder, and the property that changed."""


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


class CheckCrash(Exception):
    """A part of a check loses its sandbox without the agent's work too: the task has no verdict."""

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
