"""Ciphers: decode a text whose encoding and key are given."""

from __future__ import annotations

import base64
from random import Random
from string import ascii_lowercase

from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import ANSWER, WORDS, answer_line, write_line


def _shifted(text: str, shifts: list[int]) -> str:
    """Move each letter forward by the next shift; other characters stay and use no shift."""
    letters, number = [], 0
    for letter in text:
        if letter in ascii_lowercase:
            letters.append(ascii_lowercase[(ascii_lowercase.index(letter) + shifts[number % len(shifts)]) % 26])
            number += 1
        else:
            letters.append(letter)
    return "".join(letters)


def _rails(text: str, count: int) -> str:
    """Write a text down and up on `count` rails, and read the rails one after the other."""
    period = 2 * (count - 1)
    rails = [""] * count
    for index, letter in enumerate(text):
        place = index % period
        rails[min(place, period - place)] += letter
    return "".join(rails)


def _encoded(random: Random, text: str) -> tuple[str, str]:
    """Return an encoded text and the description of its encoding."""
    kind = random.choice(("caesar", "vigenere", "rails", "reversed", "base64", "hex"))
    if kind == "caesar":
        shift = random.randint(2, 24)
        description = (
            f"a Caesar cipher: each letter was moved {shift} places forward in the alphabet (z is followed by a)"
        )
        return _shifted(text, [shift]), description
    if kind == "vigenere":
        key = random.choice(WORDS)
        description = (
            f"a Vigenère cipher with the key `{key}` (a moves a letter by 0, b by 1); spaces use no key letter"
        )
        return _shifted(text, [ascii_lowercase.index(letter) for letter in key]), description
    if kind == "rails":
        count = random.randint(2, 4)
        description = f"a rail fence cipher with {count} rails; the spaces were written as underscores first"
        return _rails(text.replace(" ", "_"), count), description
    if kind == "reversed":
        return text[::-1], "its letters in reverse order"
    if kind == "base64":
        return base64.b64encode(text.encode()).decode(), "Base64"
    return text.encode().hex(), "hexadecimal ASCII codes"


def _draw(random: Random) -> Task:
    text = " ".join(random.sample(WORDS, random.randint(3, 5)))
    encoded, description = _encoded(random, text)
    return Task(
        instruction=f"""This text of small letters and single spaces was encoded with {description}:

{encoded}

Decode it, and write the text into {ANSWER}.
""",
        verify=(answer_line(text),),
        solution=(write_line(text),),
        metadata={"answer": ANSWER},
    )


CIPHERS = TaskSet("ciphers", "a text decoded from a described cipher", "isolated", _draw)
