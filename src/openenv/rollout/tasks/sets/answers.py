"""What several sets share: a check of a one-line answer, words for texts, and the source of a reference solution."""

from __future__ import annotations

import inspect
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

ANSWER = "answer.txt"
_LINTER_COMMENT = re.compile(r" *# (?:type|noqa)\b.*")
WORDS = shlex.split(
    """amber anchor autumn basket beacon bridge candle canyon castle cedar copper coral cotton desert dragon ember
    falcon feather forest garden ginger glacier hammer harbor honey island jacket jungle kettle lantern lemon
    marble meadow mirror moss needle ocean olive orchid oyster paper pebble pepper pillow planet pocket prairie
    quarry rabbit ribbon river saddle saffron shadow silver summer sunset thistle thunder timber tunnel valley
    velvet violet walnut willow window winter"""
)
NAMES = shlex.split("Ada Ben Cleo Dan Ella Finn Gia Hugo Ines Jon Kira Leo Mona Nils Olga Pia Quin Rosa Sam Tara")


def answer_line(text: str, path: str = ANSWER) -> str:
    """Return a verify line: the whole file is this text. A file that lists all candidates does not pass."""
    return f'[ "$(cat {path})" = {shlex.quote(text)} ]'


def write_line(text: str, path: str = ANSWER) -> str:
    """Return a shell line that writes a text and a line end to a file."""
    return f"printf '%s\\n' {shlex.quote(text)} > {path}"


def source_of(functions: Iterable[Callable[..., Any]]) -> str:
    """Return the source of functions as the text of a module, without comments for our linters."""
    sources = (textwrap.dedent(inspect.getsource(function)) for function in functions)
    return "\n\n".join(_LINTER_COMMENT.sub("", source) for source in sources)
