"""Task sets: `task_set("arithmetic")` draws as many tasks as wanted from seeds, without a network or a dataset.

A set registers in the entry-point group `openenv.task_sets`, so that other packages can add some:

    [project.entry-points."openenv.task_sets"]
    my-set = "my_package.my_set:MY_SET"

Knows values only. The sets of this package are in `sets/`, one file each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from openenv._lazy import load_plugin, plugin_names
from openenv.errors import RolloutError
from openenv.rollout.tasks.task import Task, Trust

TASK_SETS = "openenv.task_sets"  # entry points: objects of `TaskSet`
SET_PREFIX = "set:"
DEFAULT_COUNT = 10
"""The number of tasks in a run that names only a set."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """A source of similar tasks. The same seed and number give the same task, on every machine.

    Args:
        name: Its registered name, the beginning of each task ID.
        description: One line about the work and the answer.
        trust: The trust level of all its tasks.
        draw: Makes a task with a solution from a source of random numbers, and takes every choice from it.
        needs: Programs that the sandbox must have besides a shell and Python.
    """

    name: str
    description: str
    trust: Trust
    draw: Callable[[Random], Task]
    needs: tuple[str, ...] = ()

    def task(self, number: int, *, seed: int = 0) -> Task:
        """Return one task; its ID is NAME-SEED-NUMBER. Draws no other tasks."""
        # The name is part of the seed: otherwise two sets would make the same choices.
        task = self.draw(Random(f"{self.name} {seed} {number}"))
        # The host does not know the sandbox's programs. The failed setup line names the missing one.
        guards = [f"command -v {each} > /dev/null || {{ echo 'needs {each}' >&2; exit 1; }}" for each in self.needs]
        return task.model_copy(
            update={
                "task_id": f"{self.name}-{seed}-{number}",
                "setup": (*guards, *task.setup),
                "min_trust": self.trust,
                "metadata": {**task.metadata, "task_set": self.name},
            }
        )

    def tasks(self, count: int = DEFAULT_COUNT, *, seed: int = 0) -> list[Task]:
        """Return the first tasks of a seed.

        Raises:
            ValueError: The count is negative.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0, not {count}")
        return [self.task(number, seed=seed) for number in range(count)]

    def endless(self, *, seed: int = 0) -> Iterator[Task]:
        """Yield the tasks of a seed without end, for `openenv.train.rollouts`."""
        return (self.task(number, seed=seed) for number in itertools.count())


def task_set_names() -> list[str]:
    """Return the names of the installed task sets, such as `arithmetic`."""
    return plugin_names(TASK_SETS)


def task_set(name: str) -> TaskSet:
    """Return a task set by its registered name.

    Raises:
        RolloutError: No installed package registers the name, or its entry point is not a `TaskSet`.
    """
    try:
        chosen = load_plugin(TASK_SETS, name, kind="task set")
    except LookupError as exc:
        raise RolloutError(str(exc.args[0])) from None
    if not isinstance(chosen, TaskSet):
        raise RolloutError(f"the entry point '{name}' in {TASK_SETS} is a {type(chosen).__name__}, not a TaskSet")
    return chosen
