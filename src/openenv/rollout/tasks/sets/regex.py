"""Regular expressions: a pattern for codes of a described form, checked with other codes."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

_FILE = "pattern.txt"
_CHECK = """import json
import re
import sys

with open("pattern.txt") as file:
    pattern = file.read().strip()
with open("/home/user/checks/codes.json") as file:
    codes = json.load(file)
try:
    right = all((re.fullmatch(pattern, code) is not None) == valid for code, valid in codes)
except (re.error, OverflowError, RecursionError):
    right = False
sys.exit(0 if right and len(pattern) <= 200 else 1)
"""


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of a code: its description, its pattern, and a source of examples."""

    text: str
    pattern: str
    example: Callable[[Random], str]


def _letters(random: Random, alphabet: str, name: str, expression: str) -> _Part:
    low = random.randint(1, 3)
    high = low + random.randint(0, 2)
    count = f"{low}" if low == high else f"{low} to {high}"
    repeat = f"{{{low}}}" if low == high else f"{{{low},{high}}}"

    def example(source: Random) -> str:
        return "".join(source.choices(alphabet, k=source.randint(low, high)))

    return _Part(f"{count} {name}", expression + repeat, example)


def _choice(random: Random) -> _Part:
    options = random.sample(("web", "app", "db", "log", "tmp", "dev", "api"), 3)
    return _Part(f"one of {', '.join(options)}", f"(?:{'|'.join(options)})", lambda source: source.choice(options))


def _part(random: Random, kind: str) -> _Part:
    if kind == "choice":
        return _choice(random)
    alphabet, name, expression = {
        "digits": (string.digits, "digits", "[0-9]"),
        "upper": (string.ascii_uppercase, "capital letters from A to Z", "[A-Z]"),
        "lower": (string.ascii_lowercase, "small letters from a to z", "[a-z]"),
        "hex": (string.digits + "abcdef", "characters of 0-9 and a-f", "[0-9a-f]"),
    }[kind]
    return _letters(random, alphabet, name, expression)


def _mutant(random: Random, code: str) -> str:
    """Return a code with one mistake."""
    place = random.randrange(len(code))
    foreign = random.choice(string.ascii_letters + string.digits + "-_:#. ")
    # Removed, doubled, inserted, replaced.
    replacements = ("", code[place] * 2, foreign + code[place], foreign)
    return code[:place] + random.choice(replacements) + code[place + 1 :]


def _codes(random: Random, parts: list[_Part], separator: str) -> tuple[list[str], list[str]]:
    """Return valid and wrong codes."""
    reference = re.compile(re.escape(separator).join(part.pattern for part in parts))
    valid = [separator.join(part.example(random) for part in parts) for _ in range(24)]
    wrong: list[str] = []
    while len(wrong) < 24:
        code = _mutant(random, random.choice(valid))
        if reference.fullmatch(code) is None:
            wrong.append(code)
    return valid, wrong


def _draw(random: Random) -> Task:
    parts = [_part(random, kind) for kind in random.sample(("choice", "digits", "upper", "lower", "hex"), 3)]
    separator = random.choice("-_:#")
    valid, wrong = _codes(random, parts, separator)
    listed = "\n".join(f"{number}. {part.text}" for number, part in enumerate(parts, 1))
    cases = [[code, True] for code in valid[4:]] + [[code, False] for code in wrong[4:]]
    pattern = re.escape(separator).join(part.pattern for part in parts)
    return Task(
        instruction=f"""A valid code has {len(parts)} parts, joined by `{separator}`:

{listed}

Valid: {", ".join(valid[:4])}. Not valid: {", ".join(f"`{code}`" for code in wrong[:4])}.

Write a regular expression for Python's re.fullmatch into {_FILE}: it matches all valid codes and nothing else, and has
at most 200 characters.
""",
        verify=("python3 /home/user/checks/match.py",),
        verify_files={
            "/home/user/checks/match.py": _CHECK,
            "/home/user/checks/codes.json": json.dumps(cases, indent=0),
        },
        verify_timeout_s=20,  # a pattern that backtracks without end
        solution=(f"cat > {_FILE} <<'END'\n{pattern}\nEND",),
        metadata={"answer": _FILE},
    )


REGEX = TaskSet("regex", "a regular expression for codes of a described form", "isolated", _draw)
