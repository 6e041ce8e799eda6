"""String programs: a Python program that reads lines and transforms each, checked with other lines."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from openenv.rollout.tasks.checks import Case, Check, case_check
from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import WORDS, source_of

_PROGRAM = "transform.py"


# The reference solutions: their sources become programs.
def _reverse_words(line: str) -> str:
    return " ".join(reversed(line.split()))


def _reverse_letters(line: str) -> str:
    return " ".join(word[::-1] for word in line.split())


def _without_vowels(line: str) -> str:
    return "".join(letter for letter in line if letter not in "aeiou")


def _sorted_words(line: str) -> str:
    return " ".join(sorted(line.split()))


def _first_occurrences(line: str) -> str:
    return " ".join(dict.fromkeys(line.split()))


def _rotated(line: str) -> str:
    return "".join(chr((ord(letter) - 97 + 13) % 26 + 97) if letter.isalpha() else letter for letter in line)


def _with_lengths(line: str) -> str:
    return " ".join(f"{word}{len(word)}" for word in line.split())


def _alternating(line: str) -> str:
    return " ".join(word.upper() if index % 2 else word for index, word in enumerate(line.split()))


_STEPS: dict[Callable[[str], str], str] = {
    _reverse_words: "reverse the order of the words",
    _reverse_letters: "reverse the letters of each word; the words keep their order",
    _without_vowels: "remove the letters a, e, i, o and u; leave everything else as it is",
    _sorted_words: "sort the words alphabetically",
    _first_occurrences: "keep only the first occurrence of each word",
    _rotated: "replace each letter by the one 13 places later in the alphabet; z is followed by a",
    _with_lengths: "append to each word its number of letters, so that `pear` becomes `pear4`",
    _alternating: "write every second word in capital letters, beginning with the second word",
}
"""Each function and its description in the instruction."""
_FIRST = (_reverse_words, _reverse_letters, _without_vowels, _sorted_words, _first_occurrences, _rotated)
"""Any of these may come first: its result has only lower-case letters and spaces."""
_LAST = (_reverse_words, _reverse_letters, _with_lengths, _alternating)


def _line(random: Random) -> str:
    words = random.choices(WORDS, k=random.randint(4, 7))
    return " ".join([*words, random.choice(words)])  # at least one word occurs twice


def _draw(random: Random) -> Task:
    first = random.choice(_FIRST)
    last = random.choice([function for function in _LAST if function is not first])

    def transform(line: str) -> str:
        return last(first(line))

    example, *hidden = (_line(random) for _ in range(6))
    program = f"import sys\n\n\n{source_of((first, last))}\n\nfor line in sys.stdin:\n"
    program += f"    print({last.__name__}({first.__name__}(line.strip())))\n"
    return Task(
        instruction=f"""Write the Python program {_PROGRAM}. It reads lines from standard input. Each line has words of
lower-case letters, separated by single spaces. For each line it does the following, in this order, and prints the
result:

1. {_STEPS[first]}
2. {_STEPS[last]}

For example, `{example}` becomes `{transform(example)}`.
""",
        verify=(_check(transform, hidden),),
        solution=(f"cat > {_PROGRAM} <<'END'\n{program}END",),
        metadata={"answer": _PROGRAM, "functions": [first.__name__, last.__name__]},
    )


def _check(transform: Callable[[str], str], lines: list[str]) -> Check:
    """Return a check with one line per case, and a case with several lines."""
    inputs = [f"{line}\n" for line in lines[1:]] + ["".join(f"{line}\n" for line in lines)]
    outputs = ["".join(f"{transform(line)}\n" for line in text.splitlines()) for text in inputs]
    return case_check(
        f"python3 {_PROGRAM}",
        tuple(Case(stdin=text, stdout=output) for text, output in zip(inputs, outputs, strict=True)),
    )


STRINGS = TaskSet("strings", "a Python program that transforms lines of text", "judged", _draw)
