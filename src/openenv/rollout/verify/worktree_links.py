"""The links of an agent's work tree: each is replaced by a copy of its target, kept, or dropped.

Knows packed names and link targets. Must not know the guard's rules, tasks or sandboxes.
"""

# A link shows a check different content than the file that the agent had, or redirects what a check writes:
# `answer.txt -> /proc/self/cmdline` contains the line "42" while `grep -qx 42 answer.txt` runs. So the verifier sees
# only links of the setup, and links that the task declares (`Task.keeps_links`):
#
#   the agent left                                   the verifier sees
#   latest -> data/v2         (in the tree)          latest/...: a copy of the folder; links in it are replaced as well
#   answer.txt -> out/1.txt                          answer.txt: a copy of the file, with its mode
#   copy.txt = a hard link                           a file of its own
#   x -> /etc/passwd, /proc/..., nowhere, a FIFO     nothing
#   up -> .., loop -> loop, a/x -> ../b, b/y -> ../a nothing: the copy would contain itself
#   latest -> data/v1         (as the setup left it) the link
#   env/bin/python -> /usr/bin/python3               the link: a copy of a program does not find its libraries
#   node_modules/.bin/tool -> ../tool/cli.js         the link, for the same reason
#
# n folders that each link twice to the next one have 2^n files. Therefore every visited entry counts towards the limit
# of entries, every copied byte towards the limit of bytes, and a path may pass 40 links, as in the kernel.

from __future__ import annotations

import bisect
import copy
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from openenv.rollout.store.archives import Archive, UnusableWorktree, clean_name

_MAX_LINKS = 40
"""The kernel follows this many links in a path."""
_MAX_STEPS = 1_000_000
_MAX_NAME = 3000
"""Characters of a copy's name; the kernel's limit for paths is 4096."""
_INTERPRETER = re.compile(r"(?:.*/)?bin/python[\d.]*", re.DOTALL)
_PROGRAM = re.compile(r"((?:.*/)?node_modules/)\.bin/[^/]+", re.DOTALL)


class LinkResolver:
    """Resolves links of a packed tree as the kernel would, within a number of steps for the whole tree.

    Args:
        root: The work folder inside the sandbox.
        links: The links of the tree by their names, with their targets.
    """

    def __init__(self, root: str, links: Mapping[str, str]) -> None:
        self._below, self._links = f"{root}/", links
        self._steps = 0

    def resolve(self, path: str) -> str | None:
        """Return the end of a path; `/proc` if the host cannot know it; None for a loop.

        Raises:
            UnusableWorktree: the tree has more links than can be followed.
        """
        below = self._below
        resolved: list[str] = [""]
        remaining = path.split("/")[::-1]
        followed = 0
        while remaining:
            self._steps += 1
            if self._steps > _MAX_STEPS:
                raise UnusableWorktree("the work tree has too many links to follow")
            part = remaining.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if not below.startswith(f"{resolved[-1]}/") and not f"{resolved[-1]}/".startswith(below):
                    return "/proc"  # outside of the tree a folder may be a link, and its parent anywhere
                resolved = resolved[:-1] or [""]
                continue
            here = f"{resolved[-1]}/{part}"
            if here == "/proc" or (here.startswith("/dev/") and here != "/dev/null"):
                return "/proc"  # these paths depend on the process
            target = self._links.get(here[len(below) :]) if here.startswith(below) else None
            if target is None:
                resolved.append(here)
                continue
            followed += 1
            if followed > _MAX_LINKS:
                return None
            if target.startswith("/"):
                resolved = [""]
            remaining.extend(target.split("/")[::-1])
        return resolved[-1] or "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRules:
    """The rules for the links of one work tree.

    Args:
        root: The work folder inside the sandbox.
        setup: The links of the setup by their names, with their targets.
        declares: Whether the task declares a link.
        reveals: Whether the end of a link is a place that no link may lead to.
        max_entries: The number of entries that the tree may have with all copies.
    """

    root: str
    setup: Mapping[str, str]
    declares: Callable[[str], bool]
    reveals: Callable[[str | None], bool]
    max_entries: int


@dataclass(frozen=True, slots=True)
class _Visit:
    """An entry to visit: its name in the result, its name in the tree, and the folders whose copies contain it."""

    name: str
    source: str
    chain: tuple[str, ...] = ()


class TreeWithoutLinks:
    """The entries of a packed work tree after the replacement of its links."""

    def __init__(self, archive: Archive, rules: LinkRules) -> None:
        self._rules = rules
        self._entries: dict[str, tarfile.TarInfo] = {}
        for name, member in archive.members:
            self._entries.setdefault(name, member)  # only a forged archive has a name twice
        links = {name: member.linkname for name, member in self._entries.items() if member.issym()}
        for name, member in self._entries.items():
            target = links.get(clean_name(member.linkname) or "") if member.islnk() else None
            if target is not None:  # tar stores the second name of a link as a hard link
                entry = copy.copy(member)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                self._entries[name], links[name] = entry, target
        self._resolver = LinkResolver(rules.root, links)
        unusable = _BelowOthers(self._entries)  # only a forged archive has a file below a file or a link
        self._names = sorted(name for name in self._entries if name not in unusable)
        self._ends: dict[str, str | None] = {}

    def entries(self) -> Iterator[tuple[str, tarfile.TarInfo, bool]]:
        """Yield each entry: its name, its member, and whether it is dropped.

        Raises:
            UnusableWorktree: the tree is too large with the copies.
        """
        visited = 0
        usable = set(self._names)
        for first in self._entries:
            if first not in usable:
                continue
            pending = [_Visit(first, first)]
            while pending:
                visit = pending.pop()
                visited += 1
                if len(visit.name) > _MAX_NAME and visit.chain:
                    raise UnusableWorktree("the links of the work tree lead to names that are too long")
                member = self._entries[visit.source]
                if not member.issym() or self._keeps(visit, member):
                    yield visit.name, member, False
                    continue
                target = self._target(visit)
                if target is None:
                    yield visit.name, member, True
                    continue
                yield visit.name, self._entries.get(target) or _folder(target), False
                chain = (*visit.chain, posixpath.dirname(visit.source), target)
                below = self._below(target)
                if visited + len(pending) + len(below) > self._rules.max_entries:
                    raise UnusableWorktree(
                        f"the work tree holds more than {self._rules.max_entries} entries with copies of linked folders"
                    )
                names = (self._names[at] for at in reversed(below))
                pending.extend(_Visit(visit.name + name[len(target) :], name, chain) for name in names)

    def _target(self, visit: _Visit) -> str | None:
        """Return the entry whose copy replaces a link, or None to drop the link."""
        end, root = self._end(visit.source), f"{self._rules.root}/"
        if end is None or not end.startswith(root) or len(visit.chain) > 2 * _MAX_LINKS:
            return None
        target = end[len(root) :]
        # A copy of a folder above the link, or above a folder that is being copied, would contain itself.
        if any(f"{folder}/".startswith(f"{target}/") for folder in (*visit.chain, posixpath.dirname(visit.source))):
            return None
        member = self._entries.get(target)
        if member is None:
            return target if self._below(target) else None
        return None if member.issym() else target

    def _keeps(self, visit: _Visit, link: tarfile.TarInfo) -> bool:
        name, target = visit.source, link.linkname
        if visit.name == name:
            if self._rules.setup.get(name) == target:
                return True
            if self._rules.declares(name):
                return not self._rules.reveals(self._end(name))
        return self._is_of_program(visit.name, name, target) and not self._rules.reveals(self._end(name))

    def _is_of_program(self, name: str, source: str, target: str) -> bool:
        """Return whether a program behind this link would not run as a copy."""
        end, root = self._end(source) or "", f"{self._rules.root}/"
        environment = posixpath.dirname(source if target == "lib" else posixpath.dirname(source))
        if posixpath.join(environment, "pyvenv.cfg") in self._entries:
            if target == "lib" and posixpath.basename(source) == "lib64":
                return True
            is_interpreter = _INTERPRETER.fullmatch(source) and _INTERPRETER.fullmatch(end)
            return bool(is_interpreter) and (target == end or "/" not in target)
        of_program = _PROGRAM.fullmatch(source)
        if of_program is None or not _PROGRAM.fullmatch(name) or not target.startswith("../"):
            return False
        member = self._entries.get(end[len(root) :])
        return end.startswith(root + of_program[1]) and member is not None and not (member.isdir() or member.issym())

    def _end(self, name: str) -> str | None:
        if name not in self._ends:
            self._ends[name] = self._resolver.resolve(f"{self._rules.root}/{name}")
        return self._ends[name]

    def _below(self, folder: str) -> range:
        """Return the positions of the entries below a folder in `_names`."""
        start, end = (bisect.bisect_left(self._names, folder + mark) for mark in "/0")  # "0" comes after "/"
        return range(start, end)


def _folder(name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    return entry


class _BelowOthers:
    """The names below an entry that is not a folder; each folder is looked up once."""

    def __init__(self, entries: Mapping[str, tarfile.TarInfo]) -> None:
        self._entries = entries
        self._answers = {"": False}

    def __contains__(self, name: str) -> bool:
        folder = posixpath.dirname(name)
        missing = []
        while folder not in self._answers:
            missing.append(folder)
            folder = posixpath.dirname(folder)
        answer = self._answers[folder]
        for folder in reversed(missing):
            member = self._entries.get(folder)
            answer = self._answers[folder] = answer or (member is not None and not member.isdir())
        return answer
