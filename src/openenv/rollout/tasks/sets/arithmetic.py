"""Arithmetic: the value of an integer expression with two to five numbers."""

from __future__ import annotations

from random import Random

from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import ANSWER, answer_line, write_line

_MIN_VALUE = 50  # smaller values could be guessed, and a line cannot compare negative ones


def _expression(random: Random, count: int) -> tuple[str, int]:
    """Return an expression of `count` numbers, and its value."""
    if count == 1:
        number = random.randint(2, 99)
        return str(number), number
    split = random.randint(1, count - 1)
    left, left_value = _expression(random, split)
    right, right_value = _expression(random, count - split)
    operator = random.choice("++--*")
    # Every part with an operator is in parentheses, so that the order of operations is explicit.
    left = left if split == 1 else f"({left})"
    right = right if count - split == 1 else f"({right})"
    values = {"+": left_value + right_value, "-": left_value - right_value, "*": left_value * right_value}
    return f"{left} {operator} {right}", values[operator]


def _draw(random: Random) -> Task:
    count = random.randint(2, 5)
    text, value = _expression(random, count)
    while value < _MIN_VALUE:
        text, value = _expression(random, count)
    return Task(
        instruction=f"What is {text}? Write the number into {ANSWER}, and nothing else.",
        verify=(answer_line(str(value)),),
        solution=(write_line(str(value)),),
        metadata={"answer": ANSWER, "numbers": count},
    )


ARITHMETIC = TaskSet("arithmetic", "the value of an expression with 2 to 5 integers", "isolated", _draw)
