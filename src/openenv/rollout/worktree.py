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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from openenv.errors import RolloutError
from openenv.sandboxes.base import WORKDIR, Limits

# What `merge` removes from the agent's tree, and why:
#
#   conftest.py, *.pth, pytest.py ...   a protected pattern (`task.PROTECTED`): decides how Python and pytest start
#   random.py, tests/json.py            shadows a module of Python or pytest where a check starts or lies; a name
#                                       that the task's texts mention is the agent's to write
#   test_mine.py                        pytest runs every test below its folder; only the verifier's tests count
#   answer -> tests/expected.txt        a link to a file that only the verifier has would reveal it to the agent's code
#   pyproject.toml with [tool.pytest]   changed by the agent and able to steer pytest: restored from the baseline
#
# The host reads the tar file member by member and writes another one. It never unpacks it: names with `..`, absolute
# names, devices and pipes are dropped because they are not copied.

MAX_BYTES = 512 * 1024 * 1024
MAX_MEMBERS = 100_000
MAX_PARTS = 2_000_000
"""Parts of all names together: every pattern is tried at each of them."""
_PYTEST_CONFIG = frozenset({"pyproject.toml", "setup.cfg"})
_CONFIG_BYTES = 1024 * 1024
_BESIDE_PYTEST = frozenset(
    {"colorama", "exceptiongroup", "iniconfig", "packaging", "pluggy", "py", "pygments", "tomli"}
)
_MODULES = frozenset(sys.stdlib_module_names) | _BESIDE_PYTEST
_CODE = re.compile(r"py|pyc|(?:.*\.)?so")
_TEST = re.compile(r"test_.*\.py|.*_test\.py")
_TEST_FOLDER = re.compile(r"tests?.*|.*[_-]tests?|checks?|verif.*|grad.*", re.IGNORECASE)
_NAMED = re.compile(r"(?<![\w.-])([A-Za-z_]\w*)(?:/[\w/]*)?\.py\b")
_NAMED_FILE = re.compile(r"[\w-]+\.py\b")
_BROKEN_ARCHIVE = (tarfile.TarError, EOFError, ValueError, OverflowError)
"""What `tarfile` raises on a forged or torn one."""
_MAX_LINKS = 40
"""As many links in a row as the kernel follows."""
_MAX_STEPS = 1_000_000


class UnusableWorktree(RolloutError):
    """The agent left a work tree that cannot be taken over."""

    code = "UNUSABLE_WORKTREE"


class WorktreeGuard:
    """Decides what must not reach the verifier of one task, beyond the patterns that the task protects.

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
        """Return whether a file is taken as the setup left it: other tests, and what makes their folder a package."""
        folder, base = posixpath.split(name)
        if folder in self._test_folders and base.startswith("__init__."):
            return True
        return self._has_tests and base not in self._files and bool(_TEST.fullmatch(base))

    def shadows(self, name: str, *, is_link: bool, known: Collection[str] = ()) -> bool:
        """Return whether Python would import this file instead of its own module, where checks start or lie.

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


def _test_folders(file: str) -> list[str]:
    """Return the folders above a file from the first on that is named like one of tests."""
    parts = posixpath.dirname(file).split("/")
    for start, part in enumerate(parts):
        if _TEST_FOLDER.fullmatch(part):
            return ["/".join(parts[: end + 1]) for end in range(start, len(parts))]
    return []


def worktree_limit(limits: Limits) -> int:
    """Return how large a work tree may be, so that a verifier with these limits has room left beside it."""
    return min(MAX_BYTES, min(limits.disk_mb, limits.memory_mb) * 1024 * 1024 // 2)


@dataclass(slots=True)
class Merged:
    """What `merge` changed in the agent's work tree."""

    removed: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)


@dataclass(slots=True)
class WorktreeFiles:
    """The small text files of a work tree, and the names of the other files at the top."""

    texts: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


class Patterns:
    """Path patterns: `*` stays within a folder, `**` crosses them, a pattern covers a folder and all below it."""

    def __init__(self, patterns: Sequence[str], guard: WorktreeGuard | None = None) -> None:
        # Readers may ignore the case: Python accepts `X.DIST-INFO`.
        self._regex = re.compile("|".join(_translate(pattern) for pattern in patterns) or r"(?!)", re.IGNORECASE)
        self._guard = guard

    def cover(self, name: str, *, folder: bool = False) -> bool:
        """Return whether a relative path is covered; `folder` when names below it can be reached through it."""
        if self._guard is not None and self._guard.covers(name):
            return True
        return bool(self._regex.fullmatch(name) or (folder and self._regex.fullmatch(f"{name}/x")))


def merge(
    work: Path,
    baseline: Path | None,
    target: Path,
    *,
    protected: Sequence[str],
    verify_files: Collection[str] = (),
    named: Sequence[str] = (),
    root: str = WORKDIR,
    prefix: str = "workdir",
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
        named: Texts of the task: what they name is the agent's to write.
        root: Where the work folder is inside.

    Raises:
        UnusableWorktree: it is no archive, or larger than `max_bytes`.
    """
    guard = WorktreeGuard(verify_files, named, root=root, strict=bool(protected))
    patterns = Patterns(protected, guard)
    merged = Merged()
    try:
        with tarfile.open(target, "w:", format=tarfile.PAX_FORMAT) as out:
            writer = _Writer(out, max_bytes)
            setup = _Baseline(baseline, prefix, patterns, watch_config=bool(protected))
            with _Archive(work) as source:
                merged.removed.extend(_AgentTree(source, patterns, setup, guard).copy(writer))
            merged.restored.extend(setup.restore(writer))
    except _BROKEN_ARCHIVE as exc:
        raise UnusableWorktree(f"the work tree cannot be read: {exc}") from exc
    return merged


def read_files(
    work: Path, *, root: str, max_files: int = 32, max_bytes: int = 65_536, max_chars: int = 8000
) -> WorktreeFiles:
    """Return the small text files in the first two levels of a packed work tree, by their path inside."""
    files = WorktreeFiles()
    try:
        with _Archive(work) as source:
            members = {name: member for name, member in source.members if member.isreg() and name.count("/") < 2}
            for name in sorted(members)[:max_files]:
                path = posixpath.join(root, name)
                content = source.read(members[name], max_bytes)
                try:
                    if content is None:
                        raise ValueError("too large")
                    files.texts[path] = content.decode()[:max_chars]
                except ValueError:
                    files.others.append(path)
    except (UnusableWorktree, *_BROKEN_ARCHIVE):
        pass  # the files that were read are shown
    return files


def files_of(archive: Path, *, max_bytes: int) -> dict[str, bytes]:
    """Return the regular files of a packed tree by their names.

    Raises:
        UnusableWorktree: it is no archive, or its files hold more than `max_bytes`.
    """
    files: dict[str, bytes] = {}
    try:
        with _Archive(archive) as source:
            for name, member in source.members:
                if member.isreg() or member.islnk():
                    content = source.read(source.file(member), max_bytes)
                    if content is None:
                        raise UnusableWorktree(f"'{name}' is too large")
                    files[name] = content
                    max_bytes -= len(content)
    except _BROKEN_ARCHIVE as exc:
        raise UnusableWorktree(f"the tree cannot be read: {exc}") from exc
    return files


def write_archive(archive: Path, files: Mapping[str, bytes], *, mode: int, folder: str | None = None) -> None:
    """Write a tar file of regular files, and of a folder that is there even where no file lies in it."""
    with tarfile.open(archive, "w:", format=tarfile.PAX_FORMAT) as out:
        if folder is not None:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            out.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            out.addfile(entry, io.BytesIO(content))


class _Archive:
    """An archive that is only read: its files, folders and links with names that stay below the root."""

    def __init__(self, path: Path) -> None:
        self._tar = tarfile.open(path, "r:")  # noqa: SIM115  closed in __exit__
        self.members: list[tuple[str, tarfile.TarInfo]] = []
        self._files: dict[str, tarfile.TarInfo] = {}

    def __enter__(self) -> _Archive:
        try:
            self._list()
        except BaseException:
            self._tar.close()
            raise
        return self

    def _list(self) -> None:
        count = parts = 0
        while (member := self._tar.next()) is not None:
            count += 1
            parts += member.name.count("/")
            if count > MAX_MEMBERS:
                raise UnusableWorktree(f"the work tree holds more than {MAX_MEMBERS} entries")
            if parts > MAX_PARTS:
                raise UnusableWorktree("the work tree has too many deep folders")
            name = _clean(member.name)
            if name and (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                self.members.append((name, member))
                if member.isreg():
                    self._files[name] = member

    def __exit__(self, *exc_info: object) -> None:
        self._tar.close()

    def file(self, member: tarfile.TarInfo) -> tarfile.TarInfo:
        """Return the file itself, or the one that a hard link stands for."""
        if not member.islnk():
            return member
        try:
            return self._files[_clean(member.linkname) or ""]
        except KeyError:
            raise UnusableWorktree(f"the work tree links '{member.name}' to nothing") from None

    def open(self, member: tarfile.TarInfo) -> IO[bytes]:
        stream = self._tar.extractfile(member)
        if stream is None:
            raise UnusableWorktree(f"the work tree's '{member.name}' is no file")
        return stream

    def read(self, member: tarfile.TarInfo, max_bytes: int) -> bytes | None:
        """Return a file's content, or None when it is larger."""
        return None if member.size > max_bytes else self.open(member).read()


class _Writer:
    """Writes members to an archive and counts what they hold."""

    def __init__(self, out: tarfile.TarFile, max_bytes: int) -> None:
        self._out = out
        self._left = max_bytes
        self.files: set[str] = set()
        """Regular files, which hard links may name: one to a symbolic link is a link that `_refuses` never saw."""

    def copy(self, name: str, source: _Archive, member: tarfile.TarInfo) -> None:
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

    def link(self, name: str, target: str) -> None:
        """Add a hard link to a member that was written."""
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = tarfile.LNKTYPE, target
        self._out.addfile(entry)
        self.files.add(name)


class _Baseline:
    """What the setup left: which of its files are protected, and their content."""

    def __init__(self, archive: Path | None, prefix: str, patterns: Patterns, *, watch_config: bool) -> None:
        self._archive, self._prefix, self._patterns = archive, prefix, patterns
        self._configs: dict[str, bytes] = {}
        self._taken_back: set[str] = set()
        self.links: dict[str, str] = {}
        self.names: set[str] = set()
        self.parents: set[str] = set()
        self.watch_config = watch_config
        if archive is not None:
            with _Archive(archive) as source:
                for name, member in self._work_files(source):
                    self.names.add(name)
                    if member.issym():
                        self.links[name] = member.linkname
                    if watch_config and posixpath.basename(name) in _PYTEST_CONFIG and member.isreg():
                        self._configs[name] = source.read(member, _CONFIG_BYTES) or b""
                    if patterns.cover(name) and not member.isdir():
                        self.parents.update(_ancestors(name))

    def refuses_config(self, name: str, content: bytes | None) -> bool:
        """Return whether the agent may have steered pytest with this file; the setup's is restored then.

        Args:
            content: What the agent made of it; None where that is too large or a link, and cannot be judged.
        """
        before = self._configs.get(name)
        if content is not None and (content == before or not _may_steer_pytest(content)):
            return False
        if before is not None:
            self._taken_back.add(name)
        return True

    def restore(self, writer: _Writer) -> Iterator[str]:
        if self._archive is None:
            return
        with _Archive(self._archive) as source:
            for name, member in self._work_files(source):
                if not member.isdir() and (self._patterns.cover(name) or name in self._taken_back):
                    writer.copy(name, source, member)
                    yield name

    def _work_files(self, source: _Archive) -> Iterator[tuple[str, tarfile.TarInfo]]:
        start = f"{self._prefix}/"
        for name, member in source.members:
            if name.startswith(start):
                yield name[len(start) :], member


class _AgentTree:
    """What the agent left: which of its files may reach the verifier."""

    def __init__(self, source: _Archive, patterns: Patterns, baseline: _Baseline, guard: WorktreeGuard) -> None:
        self._source, self._patterns, self._baseline, self._guard = source, patterns, baseline, guard
        self._links = {name: member.linkname for name, member in reversed(source.members) if member.issym()}

    def copy(self, writer: _Writer) -> Iterator[str]:
        """Copy what may reach the verifier; yield the names of the files and links that may not."""
        below = _Below(self._links)
        seen: set[str] = set()
        for name, member in self._source.members:
            if name in seen or name in below:
                continue  # only a forged archive has a link twice, or something below one
            if member.isdir():
                if name in self._baseline.parents or not self._patterns.cover(name):
                    writer.copy(name, self._source, member)
                continue
            if member.issym():
                seen.add(name)
            if self._refuses(name, member):
                yield name
            elif member.islnk() and (target := _clean(member.linkname)) in writer.files:
                writer.link(name, str(target))
            else:
                writer.copy(name, self._source, member)

    def _refuses(self, name: str, member: tarfile.TarInfo) -> bool:
        is_link, baseline = member.issym(), self._baseline
        if self._patterns.cover(name, folder=is_link):
            return True
        # A file where the setup has a folder of protected files would take their place.
        if name in baseline.parents or self._guard.shadows(name, is_link=is_link, known=baseline.names):
            return True
        if is_link and baseline.links.get(name) != member.linkname and self._guard.reveals(name, self._links):
            return True
        if not baseline.watch_config or posixpath.basename(name) not in _PYTEST_CONFIG:
            return False
        content = None if is_link else self._source.read(self._source.file(member), _CONFIG_BYTES)
        return baseline.refuses_config(name, content)


def _clean(name: str) -> str | None:
    """Return a name relative to the root, or None for the root itself and for what is not below it."""
    if name.startswith("/") or "\0" in name:
        return None
    clean = posixpath.normpath(name)
    return None if clean in (".", "..") or clean.startswith("../") else clean


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


def _ancestors(name: str) -> list[str]:
    parts = name.split("/")[:-1]
    return ["/".join(parts[: end + 1]) for end in range(len(parts))]


def _may_steer_pytest(content: bytes) -> bool:
    # An escape in a TOML key could spell the word, so that counts too.
    return b"pytest" in content.lower() or b"\\u" in content.lower() or b"\\x" in content.lower()


def _translate(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    known = {"**/": r"(?:[^/]+/)*", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    return "(?s:" + "".join(known.get(part, re.escape(part)) for part in parts) + ")"
