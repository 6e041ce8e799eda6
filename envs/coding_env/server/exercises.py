"""The exercises: functions to write, by split, and how a solution is scored.

A solution runs by itself in a fresh sandbox, which gets arguments and returns results. The expected results never leave
the host, so no code can read them.
"""

from __future__ import annotations

import json
import random
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypedDict

from openenv.sandboxes import Sandboxes, SandboxSpec

from .interpreter import InterpreterLimits

HIDDEN_CALLS = 20

_CALLER = """
import json, os, sys
results = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
job = json.load(sys.stdin)
names = {"__name__": "solution"}
exec(compile(job["code"], "solution.py", "exec"), names)
answers = []
for arguments in job["calls"]:
    try:
        answers.append([json.loads(json.dumps(names[job["function"]](*arguments)))])
    except Exception:
        answers.append([])
os.write(results, json.dumps(answers).encode())
"""
"""Calls the function of a solution inside; text that the solution prints is dropped."""

Arguments = list[Any]
Chance = random.Random


@dataclass(frozen=True, slots=True)
class Exercise:
    """A function to write: its specification, a solution, and random arguments for it."""

    function: str
    text: str
    solve: Callable[..., Any]
    arguments: Callable[[Chance], Arguments]

    @property
    def instruction(self) -> str:
        """The instruction for the agent, with an example."""
        example = self.arguments(Chance(self.function))
        call = ", ".join(repr(value) for value in example)
        return (
            f"Write a Python function `{self.function}` that {self.text}. For example, `{self.function}({call})` "
            f"returns `{self.solve(*example)!r}`. Try code as often as you like; then submit the whole function."
        )


class Task(TypedDict):
    """An exercise of a split; `reset(split=..., index=...)` or `reset(task_id=...)` begins it."""

    split: str
    index: int
    task_id: str
    instruction: str


def _numbers(chance: Chance, most: int = 12) -> list[int]:
    return [chance.randint(-50, 50) for _ in range(chance.randint(0, most))]


def _words(chance: Chance, most: int = 8) -> list[str]:
    return ["".join(chance.choices("abcd", k=chance.randint(1, 4))) for _ in range(chance.randint(0, most))]


def _text(chance: Chance) -> str:
    return "".join(chance.choices("aab b(){}[]", k=chance.randint(0, 14)))


def _is_balanced(text: str) -> bool:
    opened: list[str] = []
    for character in text:
        if character in "([{":
            opened.append(character)
        elif character in ")]}" and (not opened or "([{".index(opened.pop()) != ")]}".index(character)):
            return False
    return not opened


def _run_lengths(text: str) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for character in text:
        if runs and runs[-1][0] == character:
            runs[-1][1] += 1
        else:
            runs.append([character, 1])
    return runs


def _merge(spans: list[list[int]]) -> list[list[int]]:
    merged: list[list[int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def _longest_rise(numbers: list[int]) -> int:
    longest = current = 0
    for place, number in enumerate(numbers):
        current = current + 1 if place and number > numbers[place - 1] else 1
        longest = max(longest, current)
    return longest


def _primes(limit: int) -> list[int]:
    return [number for number in range(2, limit) if all(number % factor for factor in range(2, int(number**0.5) + 1))]


def _spans(chance: Chance) -> list[list[int]]:
    starts = [chance.randint(0, 30) for _ in range(chance.randint(0, 6))]
    return [[start, start + chance.randint(1, 8)] for start in starts]


def _caesar(text: str, shift: int) -> str:
    letters = string.ascii_lowercase
    return text.translate(str.maketrans(letters, letters[shift % 26 :] + letters[: shift % 26]))


def _edit_distance(first: str, second: str) -> int:
    row = list(range(len(second) + 1))
    for above, one in enumerate(first, start=1):
        previous, row[0] = row[0], above
        for place, other in enumerate(second, start=1):
            previous, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, previous + (one != other))
    return row[-1]


_TRAIN = (
    Exercise(
        "sum_of_squares",
        "adds the squares of a list of integers",
        lambda x: sum(n * n for n in x),
        lambda c: [_numbers(c)],
    ),
    Exercise(
        "second_largest",
        "returns the second largest of the distinct integers in a list, or None if there is none",
        lambda x: sorted(set(x))[-2] if len(set(x)) > 1 else None,
        lambda c: [_numbers(c, 5)],
    ),
    Exercise(
        "rotate",
        "moves the elements of a list `n` places to the right, the last ones to the front; `n` may exceed its length",
        lambda x, n: x[-(n % len(x)) :] + x[: -(n % len(x))] if x else [],
        lambda c: [_numbers(c, 6), c.randint(0, 9)],
    ),
    Exercise(
        "is_balanced",
        "returns whether the brackets (), [] and {} in a text are closed in order; other characters do not matter",
        _is_balanced,
        lambda c: [_text(c)],
    ),
    Exercise(
        "run_lengths",
        "returns a list of [character, count] for the runs of equal characters in a text",
        _run_lengths,
        lambda c: ["".join(c.choices("ab", k=c.randint(0, 10)))],
    ),
    Exercise(
        "most_common",
        "returns the most frequent word of a list, of several the alphabetically first one, or None without words",
        lambda x: min(x, key=lambda word: (-Counter(x)[word], word)) if x else None,
        lambda c: [_words(c)],
    ),
    Exercise(
        "caesar",
        "moves each lowercase letter of a text `n` places on in the alphabet, from z on to a; `n` may be negative",
        _caesar,
        lambda c: ["".join(c.choices("abc xyz!", k=c.randint(0, 12))), c.randint(-30, 30)],
    ),
    Exercise("primes_below", "lists the prime numbers below `n`", _primes, lambda c: [c.randint(0, 60)]),
    Exercise(
        "transpose",
        "swaps the rows and columns of a matrix, a list of rows of equal length",
        lambda x: [list(column) for column in zip(*x, strict=True)],
        lambda c: [[[c.randint(0, 9) for _ in range(3)] for _ in range(c.randint(1, 4))]],
    ),
    Exercise(
        "longest_rise",
        "returns the length of the longest stretch of a list in which each integer is greater than the one before",
        _longest_rise,
        lambda c: [_numbers(c)],
    ),
)
_TEST = (
    Exercise(
        "merge_spans",
        "joins overlapping or touching spans, a list of [start, end], and returns the joined spans in order",
        _merge,
        lambda c: [_spans(c)],
    ),
    Exercise(
        "edit_distance",
        "returns how many insertions, removals and replacements of characters turn one text into another, at least",
        _edit_distance,
        lambda c: ["".join(c.choices("abc", k=c.randint(0, 6))), "".join(c.choices("abc", k=c.randint(0, 6)))],
    ),
    Exercise(
        "to_roman",
        "writes an integer from 1 to 3999 as a Roman numeral",
        lambda n: "".join(
            digits[n // 10**power % 10]
            for power, digits in (
                (3, ["", "M", "MM", "MMM"]),
                (2, ["", "C", "CC", "CCC", "CD", "D", "DC", "DCC", "DCCC", "CM"]),
                (1, ["", "X", "XX", "XXX", "XL", "L", "LX", "LXX", "LXXX", "XC"]),
                (0, ["", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"]),
            )
        ),
        lambda c: [c.randint(1, 3999)],
    ),
    Exercise(
        "group_anagrams",
        "sorts words into groups that have the same letters; the words of a group and the groups are in order",
        lambda x: sorted(
            sorted(w for w in x if sorted(w) == key) for key in [list(k) for k in {tuple(sorted(w)) for w in x}]
        ),
        lambda c: [_words(c, 10)],
    ),
)
SPLITS = {"train": _TRAIN, "test": _TEST}


def exercises(split: str) -> tuple[Exercise, ...]:
    """Return the exercises of a split.

    Raises:
        ValueError: There is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    return SPLITS[split]


def task(split: str, index: int) -> Task:
    """Return one task.

    Raises:
        IndexError: The split has no such task.
    """
    if not 0 <= index < len(exercises(split)):
        raise IndexError(f"{split} has tasks 0 to {len(exercises(split)) - 1}, not {index}")
    exercise = exercises(split)[index]
    return Task(split=split, index=index, task_id=exercise.function, instruction=exercise.instruction)


def find_exercise(task_id: str) -> Exercise:
    """Return the exercise of a task.

    Raises:
        ValueError: There is no such task.
    """
    by_id = {exercise.function: exercise for split in SPLITS.values() for exercise in split}
    if task_id not in by_id:
        raise ValueError(f"unknown task {task_id!r}: choose one of {', '.join(by_id)}")
    return by_id[task_id]


def score(code: str, exercise: Exercise, *, backend: Sandboxes, limits: InterpreterLimits, seed: int = 0) -> float:
    """Return the share of hidden calls that a solution answers correctly.

    Raises:
        SandboxError: The sandbox failed, so that nothing can be said about the solution.
    """
    chance = Chance(f"{exercise.function} {seed}")
    calls = [exercise.arguments(chance) for _ in range(HIDDEN_CALLS)]
    job = json.dumps({"code": code, "function": exercise.function, "calls": calls}).encode()
    expected = [[json.loads(json.dumps(exercise.solve(*arguments)))] for arguments in calls]
    with backend.open(SandboxSpec(limits=limits.sandbox, timeout_s=limits.step_s + 60)) as sandbox:
        result = sandbox.exec(["python3", "-c", _CALLER], stdin=job, timeout=limits.step_s, max_output=1_000_000)
    try:
        answers = json.loads(result.stdout)
    except (ValueError, RecursionError):
        return 0.0
    if result.exit_code != 0 or not isinstance(answers, list):
        return 0.0
    # JSON has one kind of number for 1 and true, Python compares them as equal.
    right = [_text_of(a) == _text_of(e) for a, e in zip(answers, expected, strict=False)]
    return sum(right) / len(expected)


def _text_of(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
