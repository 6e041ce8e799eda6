"""The Task API of an environment as a mixin: name the splits, count and build tasks; the listing methods follow.

    class Sums(TaskCatalogue[dict[str, int]], Environment[Add, Sum, State]):
        SPLITS = {"train": range(1000), "test": range(1000, 1100)}   # disjoint seeds

        def num_tasks(self, split: str) -> int:
            return len(self.SPLITS[split])

        def get_task(self, split: str, index: int) -> dict[str, int]:
            return {"seed": self.SPLITS[split][index]}

The server offers the five methods of `TaskProvider` over HTTP. An environment may also define them without this mixin.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import ClassVar, Generic, TypeVar

TaskT = TypeVar("TaskT")


class TaskCatalogue(Generic[TaskT]):
    """Lists the tasks of each split. Put it before `Environment` among the base classes."""

    SPLITS: ClassVar[Collection[str]] = ()
    """The names of the splits; a mapping from names to data works too."""

    @abstractmethod
    def num_tasks(self, split: str) -> int:
        """Count the tasks of a split."""

    @abstractmethod
    def get_task(self, split: str, index: int) -> TaskT:
        """Return one task."""

    def list_splits(self) -> list[str]:
        """Name the splits."""
        return list(self.SPLITS)

    def list_tasks(self, split: str) -> list[TaskT]:
        """List the tasks of a split."""
        return self.get_task_range(split)

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[TaskT]:
        """Return the tasks from `start` up to but without `stop`; None means the first or the end."""
        return [self.get_task(split, index) for index in range(self.num_tasks(split))[start:stop]]
