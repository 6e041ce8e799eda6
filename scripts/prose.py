"""Count awkward phrases in docstrings, comments, messages and Markdown, per 1,000 words, and compare with the limits.

usage: python scripts/prose.py [--show] [PATH ...]

Without paths, checks each group of `[tool.prose]` in pyproject.toml and exits with 1 above its limit of phrases or of
words. With paths, prints the figures of those. --show prints each place. A figure says where to look: rewrite the
sentence, not the match.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]

# Each rule names the better form. They match structures that read as translated, not single words of a taste.
_SUBJECT = r"(?:the|a|an|it|this|that|they|we|you|each|one|its|their)"
_VERB = r"(?:is|are|was|were|has|had|does|did|do|can|may|must|to|runs|comes|came|cannot)"
RULES = {
    "clause instead of a noun ('what it needs' -> 'its needs')": rf"\bwhat (?:{_SUBJECT}|{_VERB}|such)\b",
    "'is no X' -> 'is not an X'": r"\b(?:is|are|was|were) no (?!longer\b|more\b|need\b|way\b|such\b)\w",
    "'where it ...' as a condition -> 'if'": r"\bwhere (?:there|it|a|an|the|no|one|they|this|that|nothing|something)\b",
    "'by which', 'whose' -> a new sentence": r"\b(?:(?:from|by|with|in|of|for|after|before|under) which|whose)\b",
    "'those of', 'that of' -> repeat the noun": r"\b(?:those (?:of|that|which|with|in|from)|that of (?:the|a|an))\b",
    "doubled possessive ('of its own', 'of X's')": r"\bof (?:(?:its|their|your|our|his) own|(?:the )?\w+'s)\b",
    "'such a', 'so many as', 'so is' -> plain order": (
        r"\b(?:such (?:an?|ones?|as (?:are|have))|so (?:much|many) (?:of|as)"
        r"|so (?:is|does))\b"
    ),
    "'otherwise than', 'will do' -> 'different', 'is enough'": (
        r"\b(?:otherwise than|(?:an)?other than before|will do|no other)\b"
    ),
    "'whichever', 'nobody', 'anew', 'elsewhere'": (
        r"\b(?:what|which|who|where)ever\b|\b(?:nobody|somebody|anew|its kin|elsewhere)\b"
    ),
}
_RULES = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in RULES.items()}
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]+")
_DIRECTIVES = ("type:", "noqa", "!", "pragma")


@dataclass
class Count:
    """The words and matches of some files."""

    words: int = 0
    matches: Counter[str] = field(default_factory=Counter)
    places: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Matches per 1,000 words."""
        return 1000 * sum(self.matches.values()) / max(1, self.words)


def count(paths: list[Path]) -> Count:
    """Count the matches in files, and in the Python and Markdown files of folders."""
    total = Count()
    for file in _files(paths):
        source = file.read_text(encoding="utf-8", errors="replace")
        for line, text in _python_prose(source) if file.suffix == ".py" else _markdown_prose(source):
            total.words += len(_WORD.findall(text))
            for name, rule in _RULES.items():
                for match in rule.finditer(text):
                    total.matches[name] += 1
                    at = line + text[: match.start()].count("\n")
                    around = " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())
                    total.places.append(f"{file}:{at}: {name}: ...{around}...")
    return total


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in (".py", ".md"))
        else:
            yield path


def _python_prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings, attribute docstrings, messages of exceptions, and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for part in ast.walk(node.exc):
                # A single word is a name or an option, not a message.
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield part.lineno, part.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("# ")
        if token.type == tokenize.COMMENT and not text.startswith(_DIRECTIVES):
            yield token.start[0], text


def _markdown_prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text outside of code blocks; inline code and link targets become a neutral word."""
    in_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            in_code = not in_code
        elif not in_code:
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", " X ", line)


def main() -> int:
    """Print the figures; return 1 if a group is above its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--show", action="store_true", help="print each place")
    arguments = parser.parse_args()
    groups: dict[str, dict[str, Any]] = {"paths": {"paths": arguments.paths, "limit": None}}
    if not arguments.paths:
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["prose"]
    failed = False
    for name, group in groups.items():
        result = count([ROOT / path for path in group["paths"]])
        if arguments.show:
            print(*result.places, sep="\n")
        limit = group["limit"]
        is_over = limit is not None and result.rate > limit
        most = group.get("words")
        is_long = most is not None and result.words > most
        failed |= is_over or is_long
        bound = "" if limit is None else f", limit {limit:g}{': too many' if is_over else ''}"
        print(f"{name}: {result.rate:.1f} awkward phrases per 1,000 words ({result.words} words){bound}")
        if is_long:
            print(f"  {result.words - most} words above the limit of {most}: cut repetition")
        if is_over or limit is None:
            for rule, number in result.matches.most_common():
                print(f"  {1000 * number / max(1, result.words):5.1f}  {rule}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
