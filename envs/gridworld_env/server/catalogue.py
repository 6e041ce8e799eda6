"""The tasks: maps by split and index, so that training and testing never share one. Knows seeds only."""

from __future__ import annotations

from typing_extensions import TypedDict

SPLITS = {"train": range(1000), "test": range(1_000_000, 1_000_100)}
"""The seeds of each split."""


class Task(TypedDict):
    """A map to solve; `reset(split=..., index=...)` or `reset(seed=...)` begins it."""

    split: str
    index: int
    seed: int


def seeds(split: str) -> range:
    """Return the seeds of a split.

    Raises:
        ValueError: There is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}: choose one of {', '.join(SPLITS)}")
    return SPLITS[split]


def task(split: str, index: int) -> Task:
    """Return one task.

    Raises:
        IndexError: The split has no such task.
    """
    if index < 0:
        raise IndexError(f"the tasks of a split are numbered from 0, not {index}")
    return Task(split=split, index=index, seed=seeds(split)[index])
