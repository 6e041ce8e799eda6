"""The agent's work tree on its way to the verifier: a tar file, read but never unpacked on the host.

Knows tar members, protected patterns and sizes. `merge` writes the archive that the verifier unpacks: the agent's
files, with everything protected as the setup left it. Must not know sandboxes.
"""

from __future__ import annotations

import io
import posixpath
import re
import sys
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from openenv.rollout.store.archives import (
    BROKEN_ARCHIVE,
    MAX_BYTES,
    MAX_MEMBERS,
    WORK,
    Archive,
    UnusableWorktree,
    add_files,
    clean_name,
    copy_member,
)
from openenv.rollout.tasks.task import as_bytes
from openenv.rollout.verify.lookups import (
    GIT_CONFIG,
    GIT_FILES,
    RUNNERS,
    SHARED_CONFIG,
    Lookups,
    Texts,
    ancestors,
    safe_git_config,
)
from openenv.sandboxes.base import WORKDIR

# What `merge` takes from the setup and not from the agent, and why:
#
#   conftest.py, *.pth, pytest.py ...   a protected pattern (`task.PROTECTED`): decides how Python and pytest start
#   tests/helper.py, lib/check.o        a folder of verify files is the verifier's alone if it is named like tests, or
#                                       if the setup has none there and neither instruction nor solution speak of it
#   grade.out                           a rule of the verifier's makefile builds it: it would be taken for up to date
#   test_mine.py                        pytest runs every test below its folder; only the verifier's tests count, and
#                                       tests that the setup left are as it left them
#   tests/test_it/__init__.py, tests.py would be imported in place of `tests/test_it.py`, or of the folder `tests`
#   random.py, app/json.py              shadows a module of Python or pytest where a check starts or lies
#   GNUmakefile, .npmrc, .git/hooks     steers a tool that the checks use (`lookups.FAMILIES`), or makes git run things
#   .venv/bin/python, node_modules/...  programs and libraries that the setup installed
#   answer -> tests/expected.txt        a link to a file that only the verifier has would reveal it to the agent's code
#   pyproject.toml with [tool.pytest]   changed by the agent and able to steer pytest: restored from the setup
#
# What the instruction or the solution names is the agent's to write. The import guard (`inside.py`) does for Python in
# the verifier's sandbox what no list of names can: installed modules come before those of the agent.
#
# The host reads the tar file member by member and writes another one. It never unpacks it: names with `..`, absolute
# names, devices and pipes are dropped because they are not copied.

_CONFIG_BYTES = 1024 * 1024
_BESIDE_PYTEST = frozenset(
    {"colorama", "exceptiongroup", "iniconfig", "packaging", "pluggy", "py", "pygments", "tomli"}
)
_MODULES = frozenset(sys.stdlib_module_names) | _BESIDE_PYTEST
_CODE = re.compile(r"py|pyc|(?:.*\.)?so")
_TEST = re.compile(r"test_.*\.py|.*_test\.(?:py|go)|.*\.(?:test|spec)\.[cm]?[jt]sx?|.*Tests?\.(?:java|kt)")
_TEST_FOLDER = re.compile(
    r"tests?|__tests__|specs?|.*[_-]tests?|tests?[_-].*|checks?|verif(?:y|ier|ication)|grad(?:er|ing)|judge",
    re.IGNORECASE,
)
_TEST_SCRIPT = re.compile(r"(?:run[_-]?)?(?:all[_-]?)?(?:tests?|checks?|verif(?:y|ier)|grader?)\.\w+", re.IGNORECASE)
_DOT = re.compile(r"\.")
_PROGRAMS = frozenset({"bin", ".bin", "Scripts", "sbin"})
_LANGUAGES = (
    # an ending of the verifier's files, and what an import could find in their place: json.cpython-311-x86.so
    (re.compile(r"pyi?"), re.compile(r"py[ciwd]?|(?:[\w-]+\.)?so")),
    (re.compile(r"[cm]?[jt]sx?"), re.compile(r"(?:d\.)?[cm]?[jt]sx?|json|node")),
    (re.compile(r"h|hh|hpp"), re.compile(r"(?:h|hh|hpp)\.gch")),
)
_MAX_LINKS = 40
"""As many links in a row as the kernel follows."""
_MAX_STEPS = 1_000_000


Kind = Literal["file", "folder", "link"]


@dataclass(slots=True)
class SetupTree:
    """The work folder as the setup left it: what is there, and the contents of files that steer tools."""

    files: set[str] = field(default_factory=set)
    """Files and links."""
    folders: set[str] = field(default_factory=set)
    links: dict[str, str] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)


class WorktreeGuard:
    """Decides what of the agent's tree must not reach the verifier of one task.

    Args:
        verify_files: What the verifier will lay over the tree.
        named: All texts of the task. A module or test that they name is the agent's to write, whatever it is called.
        root: Where the work folder is inside.
        protected: Patterns of the task; without any, only links to `verify_files` are kept away.
        setup: What the setup left.
        checks: The lines of the checks, and the verifier's files: they say which tools are used.
        asked: Instruction and solution: what they name is the agent's to write.
    """

    def __init__(
        self,
        verify_files: Mapping[str, str] | None = None,
        named: Sequence[str] = (),
        *,
        root: str = WORKDIR,
        protected: Sequence[str] = (),
        setup: SetupTree | None = None,
        checks: Sequence[str] = (),
        asked: Sequence[str] = (),
    ) -> None:
        self._root = root
        self._unclear = ("/proc/", "/dev/", "/tmp/", "/var/", "/run/", f"{posixpath.dirname(root)}/")
        texts = {posixpath.normpath(posixpath.join(root, file)): text for file, text in (verify_files or {}).items()}
        self._secrets = list(texts)
        self._steps = 0
        self.setup = setup or SetupTree()
        self.strict = bool(protected)
        self._patterns = Patterns(protected)
        self._texts = Texts(checks, asked, root=root)
        own = {path[len(root) + 1 :]: text for path, text in texts.items() if path.startswith(f"{root}/")}
        self._ours = set(own)
        self._named = Texts(asked=named, root=root)
        self._has_tests = any(_TEST.fullmatch(posixpath.basename(file)) for file in self._ours)
        self._own_folders = {
            folder for file in self._ours for folder in (_test_folder(file), self._new_folder(file)) if folder
        }
        self._setup_tests = {file for file in self.setup.files if self._is_setup_test(file)}
        self._places = _import_places(self._ours | self._setup_tests)
        above = {folder for file in self._ours for folder in ancestors(file)}
        self._lookups = Lookups(
            self._texts,
            files=self.setup.files | self.setup.folders | self._ours | above,
            runners={
                name: content.decode("utf-8", "replace")
                for name, content in self.setup.contents.items()
                if RUNNERS.fullmatch(name)
            },
            verify_files=own,
        )
        self._guarded = {"", *(posixpath.dirname(file) for file in self._ours), *self._texts.starts()}
        self._tool_folders = self._find_tool_folders()
        self._tool_stems: dict[str, set[str]] = {}
        self._libraries: set[str] = set()
        for name in self.setup.files | self.setup.folders if self._tool_folders else ():
            folder, base = posixpath.split(name)
            self._tool_stems.setdefault(folder, set()).add(base.split(".")[0])
            if posixpath.basename(folder) in self._lookups.folders:
                self._libraries.add(base)

    def covers(self, name: str, kind: Kind = "file") -> bool:
        """Return whether something is taken as the setup left it, also where the setup left nothing there."""
        if self._covers(name, kind):
            return True
        return kind == "link" and self._covers(f"{name}/x", "file")  # it may stand for a folder

    def _covers(self, name: str, kind: Kind) -> bool:
        if self._patterns.cover(name):
            return True
        if not self.strict:
            return False
        return (
            self._is_test(name)
            or self._takes_place(name, kind)
            or self._lookups.steers(name)
            or self._is_git(name, kind)
            or self._is_tool(name, kind)
        )

    def names_a_tool(self, content: bytes) -> bool:
        """Return whether a configuration could steer a tool of the checks."""
        return self._lookups.names_a_tool(content)

    def _is_agents(self, name: str) -> bool:
        """Return whether a text of the task wants this file from the agent."""
        if self._texts.asks_for(name):
            return True
        # A check that runs a test which neither setup nor verify files bring wants it from the agent.
        is_new_test = _TEST.fullmatch(posixpath.basename(name)) and name not in self._ours | self.setup.files
        return bool(is_new_test) and self._named.asks_for(name)

    def _is_test(self, name: str) -> bool:
        """Return whether this is a test that is not the agent's to write, or would be loaded with one."""
        if any(name == folder or name.startswith(f"{folder}/") for folder in self._own_folders):
            return not self._is_agents(name)
        folder, base = posixpath.split(name)
        if not folder and self._has_tests and base.startswith("__init__."):
            return True  # pytest runs the code of every package above a test
        if name in self._setup_tests:
            return True
        return self._has_tests and bool(_TEST.fullmatch(base)) and not self._named.asks_for(name)

    def _new_folder(self, file: str) -> str | None:
        """Return the outermost folder of a verify file that is there for the verifier alone, or None.

        One that the setup left may hold what the agent works on, and one that the task speaks of what it is to write.
        """
        new = [folder for folder in ancestors(file)[1:] if folder not in self.setup.folders]
        return new[0] if new and not any(map(self._texts.mentions, new)) else None

    def _is_setup_test(self, name: str) -> bool:
        """Return whether the checks run this file of the setup as a test; then it is the verifier's."""
        base = posixpath.basename(name)
        if self._texts.asks_for(name):
            return False
        if _TEST.fullmatch(base):
            return True
        return bool(_TEST_SCRIPT.fullmatch(base)) and any(base in text for text in self._texts.checks)

    def _takes_place(self, name: str, kind: Kind) -> bool:
        """Return whether an import would find this in the place of a file or folder of the verifier's."""
        parts = name.split("/")
        for at, part in enumerate(parts):
            places = self._places.get("/".join(parts[:at]))
            if places is None:
                continue
            is_last = at == len(parts) - 1
            stems = [] if is_last and kind == "file" else [(part, "")]
            if is_last and kind != "folder":
                stems += [(part[: dot.start()], part[dot.end() :]) for dot in _DOT.finditer(part)]
            for stem, ending in stems:
                place = places.get(stem)
                if place is not None and part not in place.names and place.takes(ending):
                    return not self._is_agents(name)
        return False

    def _is_git(self, name: str, kind: Kind) -> bool:
        if kind == "folder" and posixpath.basename(name) == ".git":
            return False
        return bool(GIT_FILES.fullmatch(name)) and not self._texts.asks_for(name)

    def _find_tool_folders(self) -> set[str]:
        if not self.strict:
            return set()
        return {
            folder
            for folder in self.setup.folders
            if posixpath.basename(folder) in self._lookups.folders or f"{folder}/pyvenv.cfg" in self.setup.files
        }

    def _is_tool(self, name: str, kind: Kind) -> bool:
        """Return whether this is a program or library that the setup installed, or takes the place of one."""
        if not self._tool_folders:
            return False
        if not any(above in self._tool_folders for above in (*ancestors(name), name)):
            # lib/node_modules/x is found before node_modules/x by a script in lib
            tools = self._lookups.folders
            return any(part in tools and below in self._libraries for part, below in pairwise(name.split("/")))
        folders, is_program = self.setup.folders, not _PROGRAMS.isdisjoint(name.split("/")[:-1])
        if self._texts.asks_for(name, by_path=True) and not is_program:
            return False
        if name in self.setup.files or name in folders:
            return name not in folders or kind != "folder"
        # An addition is the first part of its path that the setup does not have, in the last folder that it has.
        folder = max((above for above in ancestors(name) if above in folders), key=len, default="")
        added = name[len(folder) :].lstrip("/").split("/")[0]
        if is_program or added in _PROGRAMS or added == "node_modules" or added.startswith("."):
            return True
        return added.split(".")[0] in self._tool_stems.get(folder, ())

    def shadows(self, name: str, *, is_link: bool) -> bool:
        """Return whether Python would import this file instead of its own module, where checks start or lie.

        A module at the top that the setup left is the agent's to change.
        """
        if not self.strict:
            return False
        folder, base = posixpath.split(name)
        stem, dot, ending = base.partition(".")
        if (dot and not _CODE.fullmatch(ending)) or not (dot or is_link):
            return False
        if stem == "__init__":  # the module is the folder
            folder, stem = posixpath.split(folder)
        if folder not in self._guarded or stem not in _MODULES:
            return False
        return not (stem in self._named.modules or name in self.setup.files or self._is_agents(name))

    def reveals(self, name: str, links: Mapping[str, str]) -> bool:
        """Return whether a link leads to one of the verifier's files, a folder of theirs, or to an unknown place.

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
        """Resolve a path as the kernel would; `/proc` where the result is unknown on the host; None for a loop."""
        below = f"{self._root}/"
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
                    return "/proc"  # what lies there may be a link itself, and its parent anywhere
                resolved = resolved[:-1] or [""]
                continue
            here = f"{resolved[-1]}/{part}"
            if here == "/proc" or (here.startswith("/dev/") and here != "/dev/null"):
                return "/proc"  # what that is depends on the process
            target = links.get(here[len(below) :]) if here.startswith(below) else None
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


def _test_folder(file: str) -> str | None:
    """Return the first folder above a file that is named like one of tests, or None."""
    return next((above for above in ancestors(file) if _TEST_FOLDER.fullmatch(posixpath.basename(above))), None)


@dataclass(slots=True)
class _ImportPlace:
    """What lies under one name in a folder of the verifier's, and which endings could be imported in its place."""

    names: set[str] = field(default_factory=set)
    endings: list[re.Pattern[str]] = field(default_factory=list)

    def takes(self, ending: str) -> bool:
        """Return whether a file with this ending would be imported in its place; a folder, which has none, may be."""
        return not ending or any(pattern.fullmatch(ending) for pattern in self.endings)


def _import_places(files: Collection[str]) -> dict[str, dict[str, _ImportPlace]]:
    """Return the names that imports of these files go through: by folder, then by name without ending."""
    places: dict[str, dict[str, _ImportPlace]] = {}

    def add(path: str, stem: str, endings: Iterable[re.Pattern[str]]) -> None:
        folder, base = posixpath.split(path)
        place = places.setdefault(folder, {}).setdefault(stem, _ImportPlace())
        place.names.add(base)
        place.endings.extend(endings)

    for file in files:
        stem, ending = posixpath.splitext(posixpath.basename(file))
        found = [others for own, others in _LANGUAGES if own.fullmatch(ending[1:])]
        if found:
            add(file, stem, found)
        for above in ancestors(file)[1:]:
            add(above, posixpath.basename(above), found)
    return places


@dataclass(slots=True)
class Merged:
    """What `merge` changed in the agent's work tree; what the agent had left alone is not listed."""

    removed: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)


class Patterns:
    """Path patterns: `*` stays within a folder, `**` crosses them, a pattern covers a folder and all below it."""

    def __init__(self, patterns: Sequence[str]) -> None:
        # Readers may ignore the case: Python accepts `X.DIST-INFO`.
        self._regex = re.compile("|".join(_translate(pattern) for pattern in patterns) or r"(?!)", re.IGNORECASE)

    def cover(self, name: str) -> bool:
        """Return whether a relative path is covered."""
        return bool(self._regex.fullmatch(name))


def merge(
    work: Path,
    baseline: Path | None,
    target: Path,
    *,
    protected: Sequence[str],
    verify_files: Mapping[str, str] | None = None,
    named: Sequence[str] = (),
    checks: Sequence[str] = (),
    asked: Sequence[str] = (),
    root: str = WORKDIR,
    prefix: str = WORK,
    max_bytes: int = MAX_BYTES,
) -> Merged:
    """Write the work tree as the verifier is to see it.

    Args:
        work: The agent's work tree, as packed.
        baseline: The home as the setup left it, with the work folder at `prefix`; None when there was no setup.
        target: The archive to write.
        protected: Patterns below the work folder that are taken from `baseline` only.
        verify_files: What the verifier will lay over the tree; a link of the agent that leads to one is dropped. What
            else goes is in `WorktreeGuard`, unless nothing is `protected`.
        named: All texts of the task: modules and tests that they name are the agent's to write.
        checks: Those that say which tools the checks use: their lines, and the verifier's files.
        asked: Those that say what the agent is to write: instruction and solution.
        root: Where the work folder is inside.

    Raises:
        UnusableWorktree: it is no archive, or larger than `max_bytes`.
    """
    merged = Merged()
    try:
        setup = _Baseline(baseline, prefix)
        guard = WorktreeGuard(
            verify_files, named, root=root, protected=protected, setup=setup.tree, checks=checks, asked=asked
        )
        with tarfile.open(target, "w:", format=tarfile.PAX_FORMAT) as out:
            writer = _Writer(out, max_bytes)
            with Archive(work, max_members=MAX_MEMBERS + len(setup.tree.files)) as source:
                agents = _AgentTree(source, setup, guard)
                merged.removed.extend(agents.copy(writer))
                merged.restored.extend(setup.restore(writer, agents))
    except BROKEN_ARCHIVE as exc:
        raise UnusableWorktree(f"the work tree cannot be read: {exc}") from exc
    return merged


def write_home(
    target: Path,
    *,
    baseline: Path | None,
    worktree: Path | None,
    files: Mapping[str, str],
    empty: str,
    date: int,
    prefix: str = WORK,
) -> SetupTree:
    """Write the home of a verifier's sandbox as one archive, and return what the setup left in the work folder.

    Args:
        target: The archive to write.
        baseline: The home as the setup left it, or None.
        worktree: The work folder, in place of the one in `baseline`; None for that one.
        files: The verifier's files below the home: nothing that lies in their way is written.
        empty: A folder below the home that is there and holds nothing.
        date: When this is: the verifier's files are from now, all others from before. What make or a compiler would
            build of the verifier's files is older than they are, whatever date the agent set.
    """
    setup = SetupTree()
    folders = {above for name in (*files, f"{empty}/x") for above in ancestors(name)}

    def is_free(name: str, member: tarfile.TarInfo) -> bool:
        if name in files or (name in folders and not member.isdir()):
            return False
        return not any(above in files or above == empty for above in ancestors(name))

    with tarfile.open(target, "w:", format=tarfile.PAX_FORMAT) as out:
        if baseline is not None:
            with Archive(baseline) as source:
                for name, member in source.members:
                    folder, _, below = name.partition("/")
                    if folder == prefix and below:
                        (setup.folders if member.isdir() else setup.files).add(below)
                    if is_free(name, member) and (worktree is None or folder != prefix):
                        copy_member(out, name, source, member, before=date)
        if worktree is not None:
            with Archive(worktree) as source:
                for below, member in source.members:
                    if is_free(f"{prefix}/{below}", member):
                        copy_member(out, f"{prefix}/{below}", source, member, before=date)
        add_files(out, {name: as_bytes(text) for name, text in files.items()}, mode=0o644, folder=empty, date=date)
    return setup


class _Writer:
    """Writes members to an archive and counts what they hold."""

    def __init__(self, out: tarfile.TarFile, max_bytes: int) -> None:
        self._out = out
        self._left = max_bytes
        self.files: set[str] = set()
        """Regular files, which hard links may name: one to a symbolic link is a link that `_refuses` never saw."""

    def copy(self, name: str, source: Archive, member: tarfile.TarInfo) -> None:
        """Copy a member; of a hard link, the file that it stands for."""
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
        if member.isreg():
            self.files.add(name)
        else:  # a forged archive may have a file and a link of one name
            self.files.discard(name)

    def write(self, name: str, content: bytes) -> None:
        """Add a file."""
        entry = tarfile.TarInfo(name)
        entry.mode, entry.size = 0o644, len(content)
        self._out.addfile(entry, io.BytesIO(content))
        self.files.add(name)

    def link(self, name: str, target: str) -> None:
        """Add a hard link to a member that was written."""
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = tarfile.LNKTYPE, target
        self._out.addfile(entry)
        self.files.add(name)


class _Baseline:
    """What the setup left: which of its files the verifier sees, and their content."""

    def __init__(self, archive: Path | None, prefix: str) -> None:
        self._archive, self._prefix = archive, prefix
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
        """Return the folders of files that are restored in any case."""
        return {above for name in self.tree.files if guard.covers(name) for above in ancestors(name)}

    def refuses_config(self, name: str, content: bytes | None, guard: WorktreeGuard) -> bool:
        """Return whether the agent may have steered a tool with this file; the setup's is restored then.

        Args:
            content: What the agent made of it; None where that is too large or a link, and cannot be judged.
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
        """Write what the agent could not change or remove; yield the names of the files."""
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
        start = f"{self._prefix}/"
        for name, member in source.members:
            if name.startswith(start):
                yield name[len(start) :], member


class _AgentTree:
    """What the agent left: which of its files may reach the verifier."""

    def __init__(self, source: Archive, baseline: _Baseline, guard: WorktreeGuard) -> None:
        self._source, self._baseline, self._guard = source, baseline, guard
        self._parents = baseline.parents(guard)
        self._links = {name: member.linkname for name, member in reversed(source.members) if member.issym()}
        self._repositories = {name for name, member in source.members if member.isdir() and name.endswith(".git")}
        self._written: set[str] = set()
        self.stamps = {name: _stamp(member) for name, member in source.members if not member.isdir()}

    def copy(self, writer: _Writer) -> Iterator[str]:
        """Copy what may reach the verifier; yield the names of the files and links that may not."""
        below = _Below(self._links)
        seen: set[str] = set()
        for name, member in self._source.members:
            if name in seen or name in below:
                continue  # only a forged archive has a link twice, or something below one
            if member.isdir():
                if name in self._parents or not self._guard.covers(name, "folder"):
                    writer.copy(name, self._source, member)
                continue
            if member.issym():
                seen.add(name)
            if self._refuses(name, member):
                if self.stamps[name] != self._baseline.stamps.get(name):
                    yield name
            elif self._guard.strict and GIT_CONFIG.fullmatch(name):
                content = self._source.read(self._source.file(member), _CONFIG_BYTES) or b""
                writer.write(name, safe_git_config(content, self._baseline.tree.contents.get(name, b"")))
                self._written.add(name)
            elif member.islnk() and (target := clean_name(member.linkname)) in writer.files:
                writer.link(name, str(target))
            else:
                writer.copy(name, self._source, member)

    def leaves_to_setup(self, name: str, kind: Kind) -> bool:
        """Return whether something is restored from the setup."""
        folder, dot_git, _ = name.partition(".git/")
        if dot_git and f"{folder}.git" not in self._repositories:
            return False  # the agent removed the whole repository: a part of it would be none
        if self._guard.strict and GIT_CONFIG.fullmatch(name):
            return name not in self._written
        return self._guard.covers(name, kind)

    def _refuses(self, name: str, member: tarfile.TarInfo) -> bool:
        guard, baseline, kind = self._guard, self._baseline, _kind(member)
        if guard.covers(name, kind):
            return True
        # A file where the setup has a folder of protected files would take their place.
        if name in self._parents or guard.shadows(name, is_link=kind == "link"):
            return True
        if kind == "link" and baseline.tree.links.get(name) != member.linkname and guard.reveals(name, self._links):
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
    """Return what tells a file that was changed from one that was not; for the report only, since it can be forged."""
    return member.type, member.size, int(member.mtime), member.linkname


def _kind(member: tarfile.TarInfo) -> Kind:
    return "folder" if member.isdir() else "link" if member.issym() else "file"


def _steers(name: str) -> bool:
    """Return whether the content of a file of the setup has to be known."""
    if posixpath.basename(name) in SHARED_CONFIG or GIT_CONFIG.fullmatch(name):
        return True
    return name.count("/") < 2 and bool(RUNNERS.fullmatch(name))  # not those of everything that was installed


class _Below:
    """The names that lie below a link; each folder is looked up once."""

    def __init__(self, links: Collection[str]) -> None:
        self._links = links
        self._known = {"": False}

    def __contains__(self, name: str) -> bool:
        folder = posixpath.dirname(name)
        above = []
        while folder not in self._known:
            above.append(folder)
            folder = posixpath.dirname(folder)
        answer = self._known[folder]
        for folder in reversed(above):
            answer = self._known[folder] = answer or folder in self._links
        return answer


def _translate(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    known = {"**/": r"(?:[^/]+/)*", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    return "(?s:" + "".join(known.get(part, re.escape(part)) for part in parts) + ")"
