"""The tasks on the site. Whether one is done is read from what forms have sent, or from the agent's answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypedDict

from browser_env.server.site import CATEGORIES, DEPARTMENTS, LANGUAGES, Site

SPLITS = {"train": range(20), "test": range(1000, 1005)}
"""The seeds of each split; every kind of task is there with each seed."""


class Task(TypedDict):
    """A task of a split; `reset(split=..., index=...)` or `reset(task_id=..., seed=...)` begins it."""

    split: str
    index: int
    task_id: str
    seed: int
    instruction: str


@dataclass(frozen=True, slots=True)
class Goal:
    """What is asked, and what proves it: the only record of a form, or an answer."""

    instruction: str
    record: dict[str, str] | None = None
    answer: str | None = None

    def judge(self, records: list[dict[str, Any]], answer: str | None) -> float | None:
        """Return 1.0 for done, 0.0 for done wrongly, None while neither is so."""
        if self.answer is not None:
            return None if answer is None else float(answer.strip().rstrip(".").lower() == self.answer.lower())
        if records:
            return float(records == [self.record])
        return None if answer is None else 0.0


def _order(site: Site, chance: random.Random) -> Goal:
    product, quantity = chance.choice(site.products), chance.randint(2, 9)
    record = {"form": "orders", "product": product.name, "quantity": str(quantity)}
    return Goal(f"In the shop, order the {product.name.lower()}: {quantity} pieces, with one order.", record)


def _cheapest(site: Site, chance: random.Random) -> Goal:
    category = chance.choice(list(CATEGORIES))
    product = min((one for one in site.products if one.category == category), key=lambda one: one.price)
    record = {"form": "orders", "product": product.name, "quantity": "1"}
    return Goal(f"In the shop, order one piece of the cheapest product of the category {category}.", record)


def _message(site: Site, chance: random.Random) -> Goal:
    department = chance.choice(DEPARTMENTS[1:])
    email, order = f"visitor{chance.randint(10, 99)}@mail.test", chance.randint(100, 999)
    text = f"Where is order {order}?"
    record = {"form": "messages", "department": department, "email": email, "message": text, "copy": "yes"}
    return Goal(f"Write to {department} from {email}: “{text}” Ask for a copy.", record)


def _settings(site: Site, chance: random.Random) -> Goal:
    language = chance.choice(LANGUAGES[1:])
    return Goal(
        f"In the settings, choose {language} and cancel the newsletter.", {"form": "settings", "language": language}
    )


def _phone(site: Site, chance: random.Random) -> Goal:
    person = chance.choice(site.people)
    return Goal(f"What is the phone number of {person.name}? Answer with the number.", answer=person.phone)


def _count(site: Site, chance: random.Random) -> Goal:
    department = chance.choice(DEPARTMENTS)
    count = sum(person.department == department for person in site.people)
    return Goal(f"How many people of the staff work in {department}? Answer with the number.", answer=str(count))


KINDS: dict[str, Callable[[Site, random.Random], Goal]] = {
    "order": _order,
    "cheapest": _cheapest,
    "message": _message,
    "settings": _settings,
    "phone": _phone,
    "count": _count,
}


def make_goal(task_id: str, site: Site, seed: int) -> Goal:
    """Return the goal of a task on the site of a seed.

    Raises:
        ValueError: There is no such task.
    """
    if task_id not in KINDS:
        raise ValueError(f"there is no task {task_id!r}: choose one of {', '.join(KINDS)}")
    return KINDS[task_id](site, random.Random(f"{task_id} {seed}"))


def count_tasks(split: str) -> int:
    """Count the tasks of a split.

    Raises:
        ValueError: There is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}: choose one of {', '.join(SPLITS)}")
    return len(SPLITS[split]) * len(KINDS)


def find_task(split: str, index: int) -> Task:
    """Return one task.

    Raises:
        IndexError: The split has no such task.
    """
    if not 0 <= index < count_tasks(split):
        raise IndexError(f"{split} has tasks 0 to {count_tasks(split) - 1}, not {index}")
    task_id, seed = list(KINDS)[index % len(KINDS)], SPLITS[split][index // len(KINDS)]
    instruction = make_goal(task_id, Site(seed), seed).instruction
    return Task(split=split, index=index, task_id=task_id, seed=seed, instruction=instruction)
