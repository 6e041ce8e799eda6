"""Small repositories with a failing test: one of three modules has a bug, and hidden tests check all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from openenv.rollout.tasks.checks import python_check
from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import WORDS, source_of


# ---- the modules: correct functions, whose sources become files ----
def merge_ranges(ranges):  # type: ignore[no-untyped-def]
    """Merge [start, end] ranges that overlap or touch; return them sorted."""
    merged = []  # type: ignore[var-annotated]
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def to_roman(number):  # type: ignore[no-untyped-def]
    """Return a number from 1 to 3999 as a Roman numeral."""
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    symbols = ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"]
    result = ""
    for value, symbol in zip(values, symbols):  # noqa: B905
        while number >= value:
            result += symbol
            number -= value
    return result


def wrap_text(text, width):  # type: ignore[no-untyped-def]
    """Break a text into lines of at most `width` characters, between words."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = line + " " + word if line else word
    if line:
        lines.append(line)
    return lines


def moving_average(values, size):  # type: ignore[no-untyped-def]
    """Return the mean of each window of `size` values, rounded to 2 digits."""
    averages = []
    for start in range(len(values) - size + 1):
        window = values[start : start + size]
        averages.append(round(sum(window) / size, 2))
    return averages


def find_insertion(items, target):  # type: ignore[no-untyped-def]
    """Return the first index at which `target` keeps the sorted list sorted."""
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle
    return low


def top_words(text, count):  # type: ignore[no-untyped-def]
    """Return the most frequent words with their counts; equal ones in alphabetical order."""
    counts = {}  # type: ignore[var-annotated]
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [list(item) for item in ranked[:count]]


def rotate_grid(rows):  # type: ignore[no-untyped-def]
    """Rotate a grid by 90 degrees clockwise."""
    height, width = len(rows), len(rows[0])
    return [[rows[height - 1 - r][c] for r in range(height)] for c in range(width)]


def run_lengths(text):  # type: ignore[no-untyped-def]
    """Return the runs of equal characters as [character, length] pairs."""
    runs = []  # type: ignore[var-annotated]
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return runs


# ---- their bugs and arguments ----
@dataclass(frozen=True, slots=True)
class _Module:
    """A function, its bugs as pairs of texts, arguments for which every bug shows, and a source of more arguments."""

    function: Callable[..., Any]
    bugs: tuple[tuple[str, str], ...]
    revealing: tuple[tuple[Any, ...], ...]
    arguments: Callable[[Random], tuple[Any, ...]]

    @property
    def name(self) -> str:
        return self.function.__name__


def _text(random: Random) -> str:
    return " ".join(random.choices(random.sample(WORDS, 5), k=random.randint(8, 14)))


def _ranges(random: Random) -> list[list[int]]:
    starts = [random.randint(0, 40) for _ in range(random.randint(3, 7))]
    return [[start, start + random.randint(1, 9)] for start in starts]


MODULES = (
    _Module(
        merge_ranges,
        (("start <= merged", "start < merged"), ("max(merged[-1][1], end)", "end"), ("sorted(ranges)", "ranges")),
        (([[1, 3], [3, 5]],), ([[1, 9], [2, 4]],), ([[5, 6], [1, 2]],)),
        lambda random: (_ranges(random),),
    ),
    _Module(
        to_roman,
        (("number >= value", "number > value"), ("90, 50, 40", "90, 50, 45"), ('"IX", "V", "IV"', '"IX", "V", "IIII"')),
        ((5,), (44,), (4,)),
        lambda random: (random.randint(1, 3999),),
    ),
    _Module(
        wrap_text,
        (
            ("len(line) + 1 + len(word)", "len(line) + len(word)"),
            ("> width", ">= width"),
            ("line = word\n", 'line = ""\n'),
        ),
        (("aa bb cc", 4), ("aa bb", 5), ("aaa bbb ccc", 3)),
        lambda random: (_text(random), random.randint(10, 30)),
    ),
    _Module(
        moving_average,
        (("- size + 1", "- size"), ("start + size]", "start + size - 1]"), (", 2)", ", 1)")),
        (([1, 2, 4, 9], 2), ([5, 1, 1], 3)),
        lambda random: ([random.randint(0, 99) for _ in range(random.randint(5, 9))], random.randint(2, 4)),
    ),
    _Module(
        find_insertion,
        (("< target", "<= target"), ("len(items)\n", "len(items) - 1\n"), ("low, high = 0", "low, high = 1")),
        (([1, 3, 3, 5], 3), ([1, 2], 9), ([4, 6], 1)),
        lambda random: (sorted(random.choices(range(30), k=random.randint(4, 12))), random.randint(-1, 31)),
    ),
    _Module(
        top_words,
        (("(-item[1], item[0])", "-item[1]"), (".lower()", ""), ("ranked[:count]", "ranked[: count - 1]")),
        (("b a b a", 2), ("Tea tea", 1), ("c c a", 2)),
        lambda random: (_text(random), random.randint(2, 4)),
    ),
    _Module(
        rotate_grid,
        (("height - 1 - r", "r"), ("[c] for r", "[width - 1 - c] for r"), ("rows[0])\n", "rows)\n")),
        (([[1, 2, 3], [4, 5, 6]],), ([[1, 2], [3, 4], [5, 6]],)),
        lambda random: ([[random.randint(0, 9) for _ in range(3)] for _ in range(random.randint(2, 5))],),
    ),
    _Module(
        run_lengths,
        (("[letter, 1]", "[letter, 0]"), ("[1] += 1", "[1] += 2"), ("runs[-1][0] == letter", "letter in dict(runs)")),
        (("aab",), ("aba",)),
        lambda random: ("".join(random.choices("abc", k=random.randint(6, 16))),),
    ),
)

_TEST = """import unittest

from {package}.{name} import {name}


class Test{number}(unittest.TestCase):
{tests}

if __name__ == "__main__":
    unittest.main()
"""
# The modules are called in a sandbox without this file, and their results arrive as data.
_HIDDEN = """import json
import sys

{imports}

with open("checks/cases.json") as file:
    cases = json.load(file)
functions = {{{functions}}}
sys.exit(0 if all(functions[name](*arguments) == result for name, arguments, result in cases) else 1)
"""


def broken_source(module: _Module, bug: tuple[str, str]) -> str:
    """Return the source of a module with one of its bugs."""
    right, wrong = bug
    return module_source(module).replace(right, wrong, 1)


def module_source(module: _Module) -> str:
    """Return the source of a correct module."""
    return source_of([module.function])


def _tests(module: _Module, package: str, number: int) -> str:
    """Return the repository's own test of a module."""
    tests = []
    for index, arguments in enumerate(module.revealing, 1):
        call = f"{module.name}({', '.join(map(repr, arguments))})"
        result = module.function(*arguments)
        tests.append(f"    def test_{index}(self):\n        self.assertEqual({call}, {result!r})\n")
    return _TEST.format(package=package, name=module.name, number=number, tests="\n".join(tests))


def _draw(random: Random) -> Task:
    package = random.choice(WORDS)
    chosen = random.sample(MODULES, 3)
    broken = chosen[0]
    bug = random.choice(broken.bugs)
    modules = sorted(chosen, key=lambda module: module.name)
    files = {"README.md": f"# {package}\n\nRun the tests with `python3 -m unittest discover -s tests -t .`\n"}
    files[f"{package}/__init__.py"] = files["tests/__init__.py"] = ""
    cases = []
    for number, module in enumerate(modules, 1):
        path = f"{package}/{module.name}.py"
        files[path] = broken_source(module, bug) if module is broken else module_source(module)
        files[f"tests/test_{module.name}.py"] = _tests(module, package, number)
        # The known cases alone could be answered by a table.
        for arguments in (*module.revealing, *(module.arguments(random) for _ in range(10))):
            cases.append([module.name, arguments, module.function(*arguments)])
    imports = "\n".join(f"from {package}.{module.name} import {module.name}" for module in modules)
    functions = ", ".join(f'"{module.name}": {module.name}' for module in modules)
    path = f"{package}/{broken.name}.py"
    return Task(
        instruction=f"""A test of the package {package} fails. README.md says how to run the tests. Find the bug and fix
it; change neither tests nor names. The functions must be correct for other arguments as well.
""",
        files=files,
        verify=(python_check("checks/functions.py", of=(package,)),),
        verify_files={
            "checks/functions.py": _HIDDEN.format(imports=imports, functions=functions),
            "checks/cases.json": json.dumps(cases),
        },
        solution=(f"cat > {path} <<'END'\n{module_source(broken)}END",),
        metadata={"answer": path, "bug": f"{broken.name}: {bug[1]}"},
    )


REPAIR = TaskSet("repair", "a bug in a small repository with a failing test", "judged", _draw)
