"""The reward file of a check: whether a task uses one, its path, and which number counts.

Knows tasks and one file of a sandbox. Must not know which check wrote it.
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone
from openenv.rollout.tasks.task import Task, as_texts
from openenv.sandboxes.base import Sandbox

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
