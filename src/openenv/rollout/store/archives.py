"""Tar archives of homes and work folders: written by sandboxes, read on the host, never unpacked there.

Every archive may be forged, so `Archive` lists only files, folders and links with names below the root.
"""

# home archive                    content                           written by
#   a.txt                         the home                          `pack_home`, `join_home`
#   workdir/b.txt                 the work folder, even if it is    (the name `workdir` is fixed)
#                                 /app inside the sandbox
#
# work tree archive: the work folder alone, with names relative to it (`b.txt`).

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from openenv.errors import RolloutError
from openenv.sandboxes.base import Limits, Sandbox

MAX_BYTES = 512 * 1024 * 1024
MAX_MEMBERS = 100_000
WORK = "workdir"
"""The folder of home archives that holds the work folder."""
BROKEN_ARCHIVE = (tarfile.TarError, EOFError, ValueError, OverflowError)
"""The errors of `tarfile` for a forged or truncated archive."""


class UnusableWorktree(RolloutError):
    """The agent left a work tree that cannot be used."""

    code = "UNUSABLE_WORKTREE"


def worktree_limit(limits: Limits) -> int:
    """Return the size limit of a work tree: half of the memory or disk of a sandbox, so that checks have room."""
    return min(MAX_BYTES, min(limits.disk_mb, limits.memory_mb) * 1024 * 1024 // 2)


@dataclass(slots=True)
class WorktreeFiles:
    """The small text files of a work tree, and the names of the other files at the top."""

    texts: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def read_files(
    work: Path, *, root: str, max_files: int = 32, max_bytes: int = 65_536, max_chars: int = 8000
) -> WorktreeFiles:
    """Return the small text files in the first two levels of a packed work tree, by their path inside."""
    files = WorktreeFiles()
    try:
        with Archive(work, max_members=MAX_MEMBERS) as source:
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
    except (UnusableWorktree, *BROKEN_ARCHIVE):
        pass  # return the files that could be read
    return files


def files_of(archive: Path, *, max_bytes: int) -> dict[str, bytes]:
    """Return the regular files of a packed tree by their names.

    Raises:
        UnusableWorktree: the archive cannot be read, or its files exceed `max_bytes`.
    """
    files: dict[str, bytes] = {}
    try:
        with Archive(archive, max_members=MAX_MEMBERS) as source:
            for name, member in source.members:
                if member.isreg() or member.islnk():
                    content = source.read(source.file(member), max_bytes)
                    if content is None:
                        raise UnusableWorktree(f"'{name}' is too large")
                    files[name] = content
                    max_bytes -= len(content)
    except BROKEN_ARCHIVE as exc:
        raise UnusableWorktree(f"the tree cannot be read: {exc}") from exc
    return files


def write_archive(archive: Path, files: Mapping[str, bytes], *, mode: int, folder: str | None = None) -> None:
    """Write a tar file of regular files, and of `folder`, which may stay empty."""
    with tarfile.open(archive, "w:", format=tarfile.PAX_FORMAT) as out:
        add_files(out, files, mode=mode, folder=folder)


def add_files(
    out: tarfile.TarFile, files: Mapping[str, bytes], *, mode: int, folder: str | None, date: int = 0
) -> None:
    if folder is not None:
        entry = tarfile.TarInfo(folder)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        out.addfile(entry)
    for name, content in files.items():
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.mtime = len(content), mode, date
        out.addfile(entry, io.BytesIO(content))


def pack_home(sandbox: Sandbox, target: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Pack the home of a sandbox; in the archive the work folder is always at `workdir`.

    Raises:
        SandboxError: a tree is larger than `max_bytes`, or cannot be packed.
    """
    if _is_in_home(sandbox):
        sandbox.pack(sandbox.home, target)
        return
    home, work = target.with_suffix(".home.tar"), target.with_suffix(".work.tar")
    try:
        sandbox.pack(sandbox.home, home)
        sandbox.pack(sandbox.workdir, work, max_bytes=max_bytes)
        join_home(home, work, target)
    finally:
        home.unlink(missing_ok=True)
        work.unlink(missing_ok=True)


def join_home(home: Path, work: Path, target: Path) -> None:
    """Write one archive of a home and of a work folder outside of the home."""
    with tarfile.open(target, "w:", format=tarfile.PAX_FORMAT) as out:
        for archive, place in ((home, ""), (work, f"{WORK}/")):
            with Archive(archive) as source:
                for name, member in source.members:
                    if place or not f"{name}/".startswith(f"{WORK}/"):
                        copy_member(out, place + name, source, member)


def unpack_home(sandbox: Sandbox, archive: Path) -> None:
    """Unpack an archive of `pack_home` or `write_home` into a sandbox."""
    if _is_in_home(sandbox):
        sandbox.unpack(archive, sandbox.home)
        return
    places = {sandbox.home: ".home.tar", sandbox.workdir: ".work.tar"}
    for path, ending in places.items():
        part = archive.with_name(f"{archive.stem}-{sandbox.sandbox_id}{ending}")
        try:
            with tarfile.open(part, "w:", format=tarfile.PAX_FORMAT) as out, Archive(archive) as source:
                for name, member in source.members:
                    is_work = f"{name}/".startswith(f"{WORK}/")
                    below = name[len(WORK) + 1 :] if is_work else name
                    if below and is_work == (path == sandbox.workdir):
                        copy_member(out, below, source, member)
            sandbox.unpack(part, path)
        finally:
            part.unlink(missing_ok=True)


def _is_in_home(sandbox: Sandbox) -> bool:
    return sandbox.workdir.startswith(f"{sandbox.home}/")


_IN_MEMORY = 256 * 1024


class Archive:
    """An archive to read: its files, folders and links with names below the root."""

    def __init__(self, path: Path, *, max_members: int | None = None) -> None:
        # `tarfile` asks for its position around each header: in memory, that is no system call.
        content = io.BytesIO(path.read_bytes()) if path.stat().st_size <= _IN_MEMORY else None
        self._tar = tarfile.open(path, "r:", content)  # noqa: SIM115  closed in __exit__
        self._max_members = max_members
        self.members: list[tuple[str, tarfile.TarInfo]] = []
        self._files: dict[str, tarfile.TarInfo] = {}

    def __enter__(self) -> Archive:
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
            if self._max_members is not None and count > self._max_members:
                raise UnusableWorktree(f"the work tree holds more than {self._max_members} entries")
            if self._max_members is not None and parts > 20 * self._max_members:
                raise UnusableWorktree("the work tree has too many deep folders")
            name = clean_name(member.name)
            if name and (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                self.members.append((name, member))
                if member.isreg():
                    self._files[name] = member

    def __exit__(self, *exc_info: object) -> None:
        self._tar.close()

    def file(self, member: tarfile.TarInfo) -> tarfile.TarInfo:
        """Return the file itself, or the file that a hard link refers to."""
        if not member.islnk():
            return member
        try:
            return self._files[clean_name(member.linkname) or ""]
        except KeyError:
            raise UnusableWorktree(f"the work tree links '{member.name}' to nothing") from None

    def open(self, member: tarfile.TarInfo) -> IO[bytes]:
        stream = self._tar.extractfile(member)
        if stream is None:
            raise UnusableWorktree(f"the work tree's '{member.name}' is not a file")
        return stream

    def read(self, member: tarfile.TarInfo, max_bytes: int) -> bytes | None:
        """Return a file's content, or None if it is larger."""
        return None if member.size > max_bytes else self.open(member).read()


def copy_member(
    out: tarfile.TarFile, name: str, source: Archive, member: tarfile.TarInfo, *, before: int | None = None
) -> None:
    """Copy a member of an archive that `pack` wrote; for a hard link, copy the file it refers to."""
    entry = tarfile.TarInfo(name)
    member = source.file(member)
    entry.type, entry.mode = member.type, member.mode & 0o777
    entry.mtime = max(0, int(member.mtime)) if before is None else min(max(0, int(member.mtime)), before - 1)
    entry.linkname = member.linkname
    entry.size = member.size if member.isreg() else 0
    if member.isreg():
        entry.type = tarfile.REGTYPE
    out.addfile(entry, source.open(member) if member.isreg() else None)


def ancestors(name: str) -> list[str]:
    """Return the folders above a path, the root first as an empty name."""
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts))]


def clean_name(name: str) -> str | None:
    """Return a name relative to the root, or None for the root and for names outside of it."""
    if name.startswith("/") or "\0" in name:
        return None
    clean = posixpath.normpath(name)
    return None if clean in (".", "..") or clean.startswith("../") else clean
