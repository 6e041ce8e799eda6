"""Settings of tools: which configuration files of the agent a check must not find.

Knows names, places and the texts of a task. Must not know archives, sandboxes or particular tools.
"""

# A tool reads settings that nobody mentions: prove reads .proverc, R reads .Rprofile. There are too many tools for a
# list, but their settings share names and places:
#
#   name                                                place                     counts as settings
#   .proverc, .cargo/config.toml, pylintrc, a.conf.js   any folder                always
#   deno.json, phpunit.xml, ruff.toml                   any folder                if a check runs deno, phpunit, ruff
#   uv.toml, bun.lock, tsconfig.json, Justfile          of a check, or above      if the agent added it
#   config.json, settings.toml, pets.yaml               any folder                never: data of the agent's programs
#
# A text of the task that mentions a file makes it the agent's: `pyproject.toml` in the instruction, `data.ini` in a
# check, `.env` in the setup. If the setup has the file, only instruction and solution count: a check that mentions it
# relies on it.

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Sequence

_ALWAYS = re.compile(r"\..+|.*[a-z]rc|.+\.(?:config|conf|workspace)\.\w+|.+-toolchain", re.IGNORECASE)
_STRICT = re.compile(
    r".+\.(?:toml|ini|cfg|conf|config|lock|properties|props|targets|neon|rules)|[a-z]+file(?:\.py)?", re.IGNORECASE
)
_DATA = re.compile(r".+\.(?:json[c5]?|xml|ya?ml)(?:\.dist)?", re.IGNORECASE)
_TOOLISH = re.compile(r".+[-_]?(?:config|conf|rc|lock|settings|workspace|project|manifest)", re.IGNORECASE)
_GENERIC = re.compile(
    r"(?:.*[-_])?(?:config|conf|settings|options|defaults?|data|params|parameters)(?:[-_].*)?|"
    r"(?:pro|log|out|in|read|write|text|data|temp|tmp|input|output|re)file",
    re.IGNORECASE,
)
_GIT = frozenset({".gitignore", ".gitattributes", ".gitmodules", ".gitkeep", ".mailmap"})
"""Files that cannot make git run a command, because its configuration comes from the baseline (`lookups.py`)."""
_WORD = re.compile(r"[\w.+-]+")
_STARTERS = "if then do else exec run npx time env xargs sudo".replace(" ", "|")
_COMMAND = re.compile(  # a lookahead, because in `npx turbo test` both `npx` and `turbo` are programs
    rf"(?=(?:^|[;&|(!`{{]|\b(?:{_STARTERS})\b|-m)[ \t]*(?:\w+=\S*[ \t]+)*([\w./+-]+))", re.MULTILINE
)


class Settings:
    """Decides which files of a tree are settings that the checks must not find.

    Args:
        lines: The shell lines of the checks, and the scripts that they run.
        asked: Instruction and solution.
        texts: All texts of the task, its setup included.
        places: The folders that checks start or lie in.
        setup: The files of the setup.
    """

    def __init__(
        self,
        *,
        lines: Iterable[str],
        asked: Sequence[str],
        texts: Sequence[str],
        places: Iterable[str],
        setup: Collection[str],
    ) -> None:
        self._programs = {posixpath.basename(match[1]).lower() for line in lines for match in _COMMAND.finditer(line)}
        self._asked, self._mentioned = _words(asked), _words(texts)
        self._places = {above for place in places for above in (place, *_above(place))} | {""}
        self._setup = setup

    def cover(self, name: str) -> bool:
        """Return whether this file comes from the baseline, or not at all if the baseline lacks it."""
        folder, base = posixpath.split(name)
        hidden = [part for part in name.split("/") if part.startswith(".")]
        if ".git" in hidden or base in _GIT or base == "__init__.py":
            return False
        if "node_modules" in name.split("/")[:-1]:
            return False  # the layouts of package managers; `lookups.py` protects the programs in it
        if not self._is_setting(folder, base, bool(hidden), is_new=name not in self._setup):
            return False
        words = self._asked if name in self._setup else self._mentioned
        return words.isdisjoint(part.lower() for part in (base, *hidden))

    def _is_setting(self, folder: str, base: str, is_hidden: bool, *, is_new: bool) -> bool:
        if is_hidden or _ALWAYS.fullmatch(base):
            return True
        is_strict, is_data = _STRICT.fullmatch(base), _DATA.fullmatch(base)
        if not is_strict and not is_data:
            return False
        stem = base.split(".")[0].lower()
        if {stem, re.sub(r"[-_.]?(?:config|conf|rc)$", "", stem)} & self._programs:
            return True
        if not is_new or folder not in self._places or _GENERIC.fullmatch(stem):
            return False
        return bool(is_strict or _TOOLISH.fullmatch(stem))


def _words(texts: Iterable[str]) -> set[str]:
    return {word.lower().rstrip(".,:") for text in texts for word in _WORD.findall(text)}


def _above(folder: str) -> list[str]:
    parts = folder.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts))]
