"""The tasks: notes to begin with and notes to end with, made from a seed. Knows neither tools nor rewards."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

TASK_NOTE = "task"
_THINGS = ("lamp", "chair", "kettle", "carpet", "mirror", "clock", "shelf", "vase")
_ERRANDS = ("call the dentist", "water the plants", "return the books", "fix the bicycle", "pay the rent", "buy bread")
_PLACES = ("Lisbon", "Oslo", "Kyoto", "Quito", "Tunis", "Perth")


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Args:
        id: Its name in the catalogue.
        seed: What it was made from.
        notes: The notes to begin with, by title.
        wanted: The notes to end with; None for one that must be gone. All others must stay as they are.
    """

    id: str
    seed: int
    notes: Mapping[str, str]
    wanted: Mapping[str, str | None]

    @property
    def instruction(self) -> str:
        """What to do."""
        return self.notes[TASK_NOTE]


def make_task(task_id: str, seed: int) -> Task:
    """Make a task of the catalogue.

    Raises:
        ValueError: There is no such task.
    """
    if task_id not in CATALOGUE:
        raise ValueError(f"there is no task {task_id!r}: choose one of {', '.join(CATALOGUE)}")
    return CATALOGUE[task_id](random.Random(f"{task_id} {seed}"), seed)


def draw_task(seed: int) -> Task:
    """Make any task of the catalogue."""
    return make_task(random.Random(seed).choice(list(CATALOGUE)), seed)


def _sum_prices(chance: random.Random, seed: int) -> Task:
    things = chance.sample(_THINGS, 4)
    prices = [chance.randint(2, 99) for _ in things]
    notes = {
        TASK_NOTE: "Add up the three prices in the notes that begin with 'inbox' and write the sum, as a number and "
        "nothing else, into a note called 'total'. Leave all other notes as they are.",
        **{f"inbox {n + 1}": f"The {things[n]} costs {prices[n]} euros." for n in range(3)},
        "old offer": f"The {things[3]} used to cost {prices[3]} euros.",
    }
    return Task("sum_prices", seed, notes, {"total": str(sum(prices[:3]))})


def _file_draft(chance: random.Random, seed: int) -> Task:
    chosen, other = chance.sample(_PLACES, 2)
    text = f"In {chosen} we stayed for {chance.randint(2, 14)} days and saw {chance.randint(2, 30)} churches."
    notes = {
        TASK_NOTE: f"Move the text of the draft about {chosen}, word by word, into a note called 'letter', and delete "
        "that draft. Leave all other notes as they are.",
        "draft 1": text,
        "draft 2": f"In {other} it rained.",
    }
    if chance.random() < 0.5:
        notes["draft 1"], notes["draft 2"] = notes["draft 2"], notes["draft 1"]
    draft = next(title for title, written in notes.items() if written == text)
    return Task("file_draft", seed, notes, {"letter": text, draft: None})


def _clear_done(chance: random.Random, seed: int) -> Task:
    errands = chance.sample(_ERRANDS, 5)
    done = set(chance.sample(range(5), 2))
    notes = {
        TASK_NOTE: "Delete every note that begins with the word DONE. Leave all other notes as they are.",
        **{f"errand {n + 1}": f"{'DONE' if n in done else 'OPEN'}: {errand}" for n, errand in enumerate(errands)},
    }
    return Task("clear_done", seed, notes, {f"errand {n + 1}": None for n in sorted(done)})


CATALOGUE: Mapping[str, Callable[[random.Random, int], Task]] = {
    "sum_prices": _sum_prices,
    "file_draft": _file_draft,
    "clear_done": _clear_done,
}
