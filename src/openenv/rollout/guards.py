"""Guards: what an agent's work tree must not bring to a verifier, beyond the patterns that a task protects.

Knows names, links and the texts of a task. Python looks for modules where it is started and beside the script that it
runs, pytest runs every test it finds, and a link may lead to an answer that only the verifier has: a file of the agent
in such a place would decide over the checks without solving anything.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Collection, Mapping, Sequence

from openenv.errors import RolloutError
from openenv.sandboxes.base import WORKDIR

_BESIDE_PYTEST = frozenset(
    {"colorama", "exceptiongroup", "iniconfig", "packaging", "pluggy", "py", "pygments", "tomli"}
)
_MODULES = frozenset(sys.stdlib_module_names) | _BESIDE_PYTEST
_CODE = re.compile(r"py|pyc|(?:.*\.)?so")
_TEST = re.compile(r"test_.*\.py|.*_test\.py")
_TEST_FOLDER = re.compile(r"tests?.*|.*[_-]tests?|checks?|verif.*|grad.*", re.IGNORECASE)
_NAMED = re.compile(r"(?<![\w.-])([A-Za-z_]\w*)(?:/[\w/]*)?\.py\b")
_NAMED_FILE = re.compile(r"[\w-]+\.py\b")
_MAX_LINKS = 40
"""As many links in a row as the kernel follows."""
_MAX_STEPS = 1_000_000


class UnusableWorktree(RolloutError):
    """The agent left a work tree that cannot be taken over."""

    code = "UNUSABLE_WORKTREE"


class Guard:
    """What is to be kept from the verifier of one task.

    Args:
        verify_files: What the verifier will lay over the tree.
        named: Texts of the task. A module or test that they name is the agent's to write, whatever it is called.
        root: Where the work folder is inside.
        strict: Whether anything is protected at all; if not, only links to `verify_files` are kept away.
    """

    def __init__(
        self,
        verify_files: Collection[str] = (),
        named: Sequence[str] = (),
        *,
        root: str = WORKDIR,
        strict: bool = True,
    ) -> None:
        relative = [posixpath.normpath(file) for file in verify_files if not file.startswith("/")]
        self._root = root
        self._unclear = ("/proc/", "/dev/", "/tmp/", "/var/", "/run/", f"{posixpath.dirname(root)}/")
        self._secrets = [posixpath.normpath(posixpath.join(root, file)) for file in verify_files]
        self._guarded = {"", *(posixpath.dirname(file) for file in relative)} if strict else set()
        self._test_folders = {folder for file in relative for folder in _test_folders(file)} if strict else set()
        self._has_tests = strict and any(_TEST.fullmatch(posixpath.basename(file)) for file in relative)
        if self._has_tests:
            self._test_folders.add("")  # pytest runs the code of every package above a test
        texts = [re.sub(rf"[\w./~-]*{re.escape(posixpath.basename(root))}/", "", text) for text in named]
        self._modules = {match[1] for text in texts for match in _NAMED.finditer(text)}
        self._files = {match[0] for text in named for match in _NAMED_FILE.finditer(text)}
        self._steps = 0

    def covers(self, name: str) -> bool:
        """Say whether a file is taken as the setup left it: other tests, and what makes a package of their folder."""
        folder, base = posixpath.split(name)
        if folder in self._test_folders and base.startswith("__init__."):
            return True
        return self._has_tests and base not in self._files and bool(_TEST.fullmatch(base))

    def shadows(self, name: str, *, is_link: bool, known: Collection[str] = ()) -> bool:
        """Say whether Python would find this file before a module of its own, where checks are started or lie.

        Args:
            known: What the setup left: a module at the top that was there before is the agent's to change.
        """
        folder, base = posixpath.split(name)
        stem, dot, ending = base.partition(".")
        if (dot and not _CODE.fullmatch(ending)) or not (dot or is_link):
            return False
        if stem == "__init__":  # the module is the folder
            folder, stem = posixpath.split(folder)
        if folder not in self._guarded or stem not in _MODULES:
            return False
        return bool(folder) or not (stem in self._modules or name in known)

    def reveals(self, name: str, links: Mapping[str, str]) -> bool:
        """Say whether a link leads to one of the verifier's files, a folder of theirs, or where nobody can tell.

        Raises:
            UnusableWorktree: there are more links than can be followed.
        """
        if not self._secrets:
            return False
        end = self._followed(f"{self._root}/{name}", links)
        if end is None:
            return False
        above = "/" if end == "/" else f"{end}/"
        if any(secret == end or secret.startswith(above) for secret in self._secrets):
            return True
        return not above.startswith(f"{self._root}/") and above.startswith(self._unclear) and end != "/dev/null"

    def _followed(self, path: str, links: Mapping[str, str]) -> str | None:
        """Return what a path stands for; `/proc` where that cannot be told from here; None for a loop."""
        below = f"{self._root}/"
        found: list[str] = [""]
        waiting = path.split("/")[::-1]
        followed = 0
        while waiting:
            self._steps += 1
            if self._steps > _MAX_STEPS:
                raise UnusableWorktree("the work tree has too many links to follow")
            part = waiting.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if not below.startswith(f"{found[-1]}/") and not f"{found[-1]}/".startswith(below):
                    return "/proc"  # what lies there may be a link itself, and its parent anywhere
                found = found[:-1] or [""]
                continue
            here = f"{found[-1]}/{part}"
            if here == "/proc" or (here.startswith("/dev/") and here != "/dev/null"):
                return "/proc"  # what that is depends on the process
            target = links.get(here[len(below) :]) if here.startswith(below) else None
            if target is None:
                found.append(here)
                continue
            followed += 1
            if followed > _MAX_LINKS:
                return None
            if target.startswith("/"):
                found = [""]
            waiting.extend(target.split("/")[::-1])
        return found[-1] or "/"


def _test_folders(file: str) -> list[str]:
    """Return the folders above a file from the first on that is named like one of tests."""
    parts = posixpath.dirname(file).split("/")
    for start, part in enumerate(parts):
        if _TEST_FOLDER.fullmatch(part):
            return ["/".join(parts[: end + 1]) for end in range(start, len(parts))]
    return []
