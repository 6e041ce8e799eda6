"""One attempt at a check and its traces: how it ended, its proof, and its reward file.

Knows tasks, runs of shell lines, and one file of a sandbox. Must not know how checks are judged.
"""

# ~/logs/verifier/reward.txt     0.75                           one number
# ~/logs/verifier/reward.json    {"tests": 3, "style": 0.5}     several; `Task.reward_key` chooses one
#
# The text file is read first, unless the task's files name `reward.json`: then the agent's code, if a check runs it,
# could add a reward.txt that hides the verifier's reward.json.

from __future__ import annotations

import json
import math
import mmap
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone
from openenv.rollout.store.verdict import CheckFacts, Ending, FileChange
from openenv.rollout.tasks.task import CommandResult, CommandRun, Task, as_texts, run_line
from openenv.sandboxes.base import Sandbox

KILLED = 137
"""The exit code of a process that signal 9 killed."""
REFUSED = 1
"""The exit code in the result of a line that exited with 0 but did not pass."""
_OUT_OF_MEMORY = "ran out of memory with its sandbox"
_MAX_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class WrittenReward:
    """The content of a reward file; `value` is None unless it is a number in the task's range."""

    text: str
    value: float | None
    file: str = ""
    """Its path inside the sandbox."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """All finite numbers in the file, by name."""


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


# -- the reward file --------------------------------------------------------------------------------------------------


def invalid_reward(written: WrittenReward, task: Task) -> str:
    """Return the reason why a reward file does not count."""
    low, high = task.reward_range
    return f"wrote {written.text} as its reward; it must be a number from {low:g} to {high:g}"


def reads_reward_file(task: Task, baseline: Path | None = None) -> bool:
    """Return whether a reward file counts: `Task.reward_file` says so, or the task or its baseline names the file."""
    if task.reward_file is not None:
        return task.reward_file
    texts = [*task.verify_texts(), *task.setup, *task.verify_sources.values(), *as_texts(task.files).values()]
    if any("reward.txt" in text for text in texts):
        return True
    return baseline is not None and _contains(baseline, b"reward.txt")


def _contains(archive: Path, name: bytes) -> bool:
    if not archive.stat().st_size:  # an empty file cannot be mapped
        return False
    with archive.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(name) >= 0


def read_reward(sandbox: Sandbox, task: Task) -> WrittenReward | None:
    """Return the content of a sandbox's reward file, or None if no file exists.

    Raises:
        SandboxGone: the sandbox ended.
    """
    path = posixpath.join(sandbox.home, task.reward_path)
    numbers = posixpath.splitext(path)[0] + ".json"
    named = (*task.verify_texts(), *task.verify_sources.values())
    for file in (numbers, path) if any("reward.json" in text for text in named) else (path, numbers):
        try:
            content = sandbox.read_bytes(file, max_bytes=_MAX_BYTES)
        except FileNotFoundError:
            continue
        except SandboxGone:
            raise
        except (SandboxError, OSError) as exc:
            return WrittenReward(f"an unreadable file ({exc})", None, file)
        text = content.decode("utf-8", "replace").strip()
        low, high = task.reward_range
        rewards: dict[str, float] = {}
        try:
            rewards = _rewards_of_json(text) if file != path else {"reward": float(text)}
            value = _chosen_reward(rewards, task.reward_key)
        except (ValueError, OverflowError, RecursionError):  # integers beyond floats, and values nested too deeply
            value = math.nan
        # NaN fails both comparisons, so it becomes None as well.
        reward = value if low <= value <= high else None
        finite = {name: each for name, each in rewards.items() if math.isfinite(each)}
        return WrittenReward(repr(text[:80]), reward, file, finite)
    return None


def _rewards_of_json(text: str) -> dict[str, float]:
    """Return the numbers of a `reward.json`.

    Raises:
        ValueError: the file holds anything but a number, or an object of numbers.
    """
    value = json.loads(text)
    rewards = value if isinstance(value, dict) else {"reward": value}
    if not all(type(each) in (int, float) for each in rewards.values()):
        raise ValueError("every value must be a number")
    return {name: float(each) for name, each in rewards.items()}


def _chosen_reward(rewards: Mapping[str, float], key: str | None) -> float:
    """Return the reward that `Task.reward_key` names. Several rewards are never combined into a new one.

    Raises:
        ValueError: the file has no such reward.
    """
    if key is None:
        key = next(iter(rewards)) if len(rewards) == 1 else "reward"
    for name in (key, *(part.strip() for part in key.split(","))):
        if name in rewards:
            return rewards[name]
    raise ValueError(f"the file has no reward {key}")
