"""The work tree on its way to the verifier: `merge` combines the agent's files with the baseline, file by file.

Knows archives and the guard. Must not know sandboxes. No archive is ever unpacked on the host.
"""

# agent's worktree.tar ──┐                                      merged.tar
#                        ├─ `_AgentTree.copy`: allowed files ──────> answer.py, data/...
#                        │
# baseline.tar ──────────┴─ `_Baseline.restore`: guarded files ────> conftest.py, tests/... as after the setup
#
# merged.tar and the verifier's files then become the home of a sandbox (`write_home`).
#
# Archives may be forged. So every member is copied with a new header that keeps only kind, mode, date, size and target;
# names with `..`, absolute names, devices and pipes are dropped (`store/archives.py`). Links are replaced by copies
# first (`TreeWithoutLinks`), so that the guard decides about the names and contents that the verifier would see.

from __future__ import annotations

import bisect
import copy
import io
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openenv.rollout.store.archives import (
    BROKEN_ARCHIVE,
    MAX_BYTES,
    MAX_MEMBERS,
    WORK,
    Archive,
    UnusableWorktree,
    add_files,
    ancestors,
    clean_name,
    copy_member,
)
from openenv.rollout.tasks.task import PROTECTED, Task, as_bytes, as_texts
from openenv.rollout.verify.lookups import GIT_CONFIG, RUNNERS, SHARED_CONFIG, safe_git_config
from openenv.rollout.verify.worktree_guard import Kind, SetupTree, WorktreeGuard, WorktreeRules, plan_guard

_CONFIG_BYTES = 1024 * 1024


@dataclass(slots=True)
class Merged:
    """The changes that `merge` made to the agent's work tree. Files that equal the baseline are not listed."""

    removed: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)


def rules_of(task: Task, root: str) -> WorktreeRules:
    """Return the rules of a task about its work tree."""
    files = dict(task.verify_sources)
    for check in task.verify:
        files |= {} if isinstance(check, str) else check.files
    return WorktreeRules(
        protected=tuple(dict.fromkeys((*PROTECTED, *task.protected))) if task.protected else (),
        keeps_links=task.keeps_links,
        verify_files=files,
        named=task.texts(),
        checks=(*task.verify_texts(), *files.values()),
        asked=(task.instruction, *task.solution, *as_texts(task.solution_files).values()),
        setup=(*task.setup, *task.files, *as_texts(task.files).values()),
        root=root,
    )


def merge_for(task: Task, work: Path, baseline: Path | None, target: Path, *, root: str, max_bytes: int) -> Merged:
    """Write an agent's work tree for the verifier of a task; see `merge`.

    Raises:
        UnusableWorktree: the work tree cannot be read, or is larger than `max_bytes`.
    """
    return merge(work, baseline, target, rules_of(task, root), max_bytes=max_bytes)


def merge(
    work: Path, baseline: Path | None, target: Path, rules: WorktreeRules, *, max_bytes: int = MAX_BYTES
) -> Merged:
    """Write the work tree for the verifier.

    Args:
        work: The agent's work tree, as packed.
        baseline: The home after the setup, or None for a task without setup.
        target: The archive to write.
        rules: The rules of the task.

    Raises:
        UnusableWorktree: the work tree cannot be read, or is larger than `max_bytes`.
    """
    merged = Merged()
    try:
        setup = _Baseline(baseline)
        with tarfile.open(target, "w:", format=tarfile.PAX_FORMAT) as out:
            writer = _Writer(out, max_bytes)
            max_entries = MAX_MEMBERS + len(setup.tree.files)
            with Archive(work, max_members=max_entries) as source:
                if not source.members and not setup.tree.files and not setup.tree.folders:
                    return merged  # nothing to guard
                guard = plan_guard(rules, setup.tree)
                agents = _AgentTree(source, setup, guard, max_entries=max_entries)
                merged.removed.extend(agents.copy(writer))
                merged.restored.extend(setup.restore(writer, agents))
    except BROKEN_ARCHIVE as exc:
        raise UnusableWorktree(f"the work tree cannot be read: {exc}") from exc
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierHome:
    """The home of a verifier's sandbox.

    Args:
        baseline: The home after the setup, or None.
        worktree: The merged work tree; None for the work folder of the baseline.
        files: The verifier's files below the home. Files and links in their way are left out.
        empty: A folder below the home that exists and is empty.
        date: The date of `files`; all other files get an earlier one. So make and compilers consider the agent's
            builds of them outdated and build again; the agent cannot choose the dates.
    """

    baseline: Path | None
    worktree: Path | None
    files: Mapping[str, str]
    empty: str
    date: int


def write_home(target: Path, home: VerifierHome) -> SetupTree:
    """Write the home of a verifier's sandbox as an archive, and return the baseline's names in the work folder."""
    setup, files = SetupTree(), home.files
    folders = {above for name in (*files, f"{home.empty}/x") for above in ancestors(name)}

    def is_free(name: str, member: tarfile.TarInfo) -> bool:
        if name in files or (name in folders and not member.isdir()):
            return False
        return not any(above in files or above == home.empty for above in ancestors(name))

    with tarfile.open(target, "w:", format=tarfile.PAX_FORMAT) as out:
        if home.baseline is not None:
            with Archive(home.baseline) as source:
                for name, member in source.members:
                    folder, _, below = name.partition("/")
                    if folder == WORK and below:
                        (setup.folders if member.isdir() else setup.files).add(below)
                    if is_free(name, member) and (home.worktree is None or folder != WORK):
                        copy_member(out, name, source, member, before=home.date)
        if home.worktree is not None:
            with Archive(home.worktree) as source:
                for below, member in source.members:
                    if is_free(f"{WORK}/{below}", member):
                        copy_member(out, f"{WORK}/{below}", source, member, before=home.date)
        contents = {name: as_bytes(text) for name, text in files.items()}
        add_files(out, contents, mode=0o644, folder=home.empty, date=home.date)
    return setup


class _Writer:
    """Writes members to an archive and counts their bytes."""

    def __init__(self, out: tarfile.TarFile, max_bytes: int) -> None:
        self._out = out
        self._left = max_bytes

    def copy(self, name: str, source: Archive, member: tarfile.TarInfo) -> None:
        """Copy a member; for a hard link, copy the file it refers to."""
        if member.islnk():
            member = source.file(member)
        # A new header: only kind, mode, time, size and target of a possibly forged one are kept.
        entry = tarfile.TarInfo(name)
        entry.mode, entry.mtime = member.mode & 0o755 | 0o600, max(0, int(member.mtime))
        content = None
        if member.isreg():
            entry.size, content = member.size, source.open(member)
        elif member.isdir():
            entry.type, entry.mode = tarfile.DIRTYPE, entry.mode | 0o700
        else:
            entry.type, entry.linkname = tarfile.SYMTYPE, member.linkname
        self._left -= entry.size
        if self._left < 0:
            raise UnusableWorktree("the work tree is too large")
        self._out.addfile(entry, content)

    def write(self, name: str, content: bytes) -> None:
        """Add a file."""
        entry = tarfile.TarInfo(name)
        entry.mode, entry.size = 0o644, len(content)
        self._out.addfile(entry, io.BytesIO(content))


class _Baseline:
    """The baseline: which of its files the verifier sees, and the contents of files that steer tools."""

    def __init__(self, archive: Path | None) -> None:
        self._archive = archive
        self._taken_back: set[str] = set()
        self.stamps: dict[str, _Stamp] = {}
        self.tree = SetupTree()
        if archive is None:
            return
        with Archive(archive) as source:
            for name, member in self._work_files(source):
                if member.isdir():
                    self.tree.folders.add(name)
                    continue
                self.tree.files.add(name)
                self.stamps[name] = _stamp(member)
                if member.issym():
                    self.tree.links[name] = member.linkname
                elif _steers(name):
                    self.tree.contents[name] = source.read(source.file(member), _CONFIG_BYTES) or b""

    def parents(self, guard: WorktreeGuard) -> set[str]:
        """Return the folders of the files that the guard restores."""
        return {above for name in self.tree.files if guard.covers(name) for above in ancestors(name)}

    def refuses_config(self, name: str, content: bytes | None, guard: WorktreeGuard) -> bool:
        """Return whether the agent may have steered a tool with this file; if so, the baseline's is restored.

        Args:
            content: The agent's version; None if it is too large or a link, and cannot be judged.
        """
        before = self.tree.contents.get(name)
        if content is not None and content == before:
            return False
        if content is not None and not guard.names_a_tool(content) and not guard.names_a_tool(before or b""):
            return False
        if before is not None:
            self._taken_back.add(name)
        return True

    def restore(self, writer: _Writer, agents: _AgentTree) -> Iterator[str]:
        """Write the guarded files that the agent changed or removed; yield their names."""
        if self._archive is None:
            return
        with Archive(self._archive) as source:
            for name, member in self._work_files(source):
                if not agents.leaves_to_setup(name, _kind(member)) and name not in self._taken_back:
                    continue
                writer.copy(name, source, member)
                if not member.isdir() and agents.stamps.get(name) != self.stamps[name]:
                    yield name

    def _work_files(self, source: Archive) -> Iterator[tuple[str, tarfile.TarInfo]]:
        start = f"{WORK}/"
        for name, member in source.members:
            if name.startswith(start):
                yield name[len(start) :], member


class _AgentTree:
    """The agent's tree: which of its files may reach the verifier."""

    def __init__(self, source: Archive, baseline: _Baseline, guard: WorktreeGuard, *, max_entries: int) -> None:
        self._source, self._baseline, self._guard = source, baseline, guard
        self._parents = baseline.parents(guard)
        self._tree = TreeWithoutLinks(
            source,
            LinkRules(
                root=guard.root,
                setup=baseline.tree.links,
                declares=guard.declares,
                reveals=guard.reveals,
                max_entries=max_entries,
            ),
        )
        self._repositories = {name for name, member in source.members if member.isdir() and name.endswith(".git")}
        self._written: set[str] = set()
        self.stamps = {name: _stamp(member) for name, member in source.members if not member.isdir()}

    def copy(self, writer: _Writer) -> Iterator[str]:
        """Copy the files that may reach the verifier; yield the names of the others, unless they equal the baseline."""
        for name, member, is_dropped in self._tree.entries():
            if member.isdir():
                if name in self._parents or not self._guard.covers(name, "folder"):
                    writer.copy(name, self._source, member)
                continue
            if is_dropped or self._refuses(name, member):
                if _stamp(member) != self._baseline.stamps.get(name):
                    yield name
            elif self._guard.strict and GIT_CONFIG.fullmatch(name):
                content = self._source.read(self._source.file(member), _CONFIG_BYTES) or b""
                writer.write(name, safe_git_config(content, self._baseline.tree.contents.get(name, b"")))
                self._written.add(name)
            else:
                writer.copy(name, self._source, member)

    def leaves_to_setup(self, name: str, kind: Kind) -> bool:
        """Return whether a path is restored from the baseline."""
        folder, dot_git, _ = name.partition(".git/")
        if dot_git and f"{folder}.git" not in self._repositories:
            return False  # the agent removed the whole repository: a part of one is useless
        if self._guard.strict and GIT_CONFIG.fullmatch(name):
            return name not in self._written
        return self._guard.covers(name, kind)

    def _refuses(self, name: str, member: tarfile.TarInfo) -> bool:
        guard, baseline, kind = self._guard, self._baseline, _kind(member)
        if guard.covers(name, kind):
            return True
        # A file instead of a folder with protected files would replace them.
        if name in self._parents or guard.shadows(name, is_link=kind == "link"):
            return True
        if not guard.strict:
            return False
        if kind == "link" and GIT_CONFIG.fullmatch(name):
            return True
        if posixpath.basename(name) not in SHARED_CONFIG:
            return False
        content = None if kind == "link" else self._source.read(self._source.file(member), _CONFIG_BYTES)
        return baseline.refuses_config(name, content, guard)


_Stamp = tuple[bytes, int, int, str]


def _stamp(member: tarfile.TarInfo) -> _Stamp:
    """Return a fingerprint of a member. It can be forged, so it only decides which files are reported."""
    return member.type, member.size, int(member.mtime), member.linkname


def _kind(member: tarfile.TarInfo) -> Kind:
    if member.isdir():
        return "folder"
    return "link" if member.issym() else "file"


def _steers(name: str) -> bool:
    """Return whether the guard needs the content of a baseline file."""
    if posixpath.basename(name) in SHARED_CONFIG or GIT_CONFIG.fullmatch(name):
        return True
    return name.count("/") < 2 and bool(RUNNERS.fullmatch(name))  # not in every installed package


# ---- links: replaced by a copy of the target, kept, or dropped ----
#
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
