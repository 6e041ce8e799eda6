"""Dates: differences, offsets, and weekdays of a month, as ISO dates or numbers of days."""

from __future__ import annotations

import shlex
from datetime import date, timedelta
from random import Random

from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import ANSWER, answer_line, write_line

_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ORDINALS = ("first", "second", "third", "fourth")
_MONTHS = shlex.split(  # not by locale
    "January February March April May June July August September October November December"
)


def _day(random: Random) -> date:
    return date(random.randint(1900, 2099), 1, 1) + timedelta(days=random.randint(0, 364))


def _question(random: Random) -> tuple[str, str]:
    """Return a question and its answer."""
    day = _day(random)
    kind = random.choice(("between", "offset", "weekday", "leap"))
    if kind == "between":
        other = day + timedelta(days=random.randint(100, 9999))
        return f"How many days after {day} is {other}?", str((other - day).days)
    if kind == "offset":
        days = random.choice((-1, 1)) * random.randint(50, 3000)
        direction = "after" if days > 0 else "before"
        return f"Which date is {abs(days)} days {direction} {day}? Write it as YYYY-MM-DD.", str(
            day + timedelta(days=days)
        )
    weekday = random.randrange(7)
    if kind == "weekday":
        first = day.replace(day=1)
        number = random.randrange(4)
        answer = first + timedelta(days=(weekday - first.weekday()) % 7 + 7 * number)
        question = f"Which date is the {_ORDINALS[number]} {_WEEKDAYS[weekday]} of {_MONTHS[day.month - 1]} {day.year}?"
        return f"{question} Write it as YYYY-MM-DD.", str(answer)
    answer = day + timedelta(days=1)
    while (answer.month, answer.day, answer.weekday()) != (2, 29, weekday):
        answer += timedelta(days=1)
    return f"Which is the next 29 February after {day} that is a {_WEEKDAYS[weekday]}? Write it as YYYY-MM-DD.", str(
        answer
    )


def _draw(random: Random) -> Task:
    question, answer = _question(random)
    return Task(
        instruction=f"{question} Write the answer into {ANSWER}, and nothing else. The calendar is the Gregorian one.",
        verify=(answer_line(answer),),
        solution=(write_line(answer),),
        metadata={"answer": ANSWER},
    )


DATES = TaskSet("dates", "a date, or a number of days", "isolated", _draw)
