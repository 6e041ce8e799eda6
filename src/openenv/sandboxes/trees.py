"""Trees as tar streams: pack one, and unpack one so that no entry lands outside of it.

Also runs inside local sandboxes, as a single file: it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import stat
import tarfile
from typing import IO, cast

_CHUNK = 256 * 1024
_READABLE, _ENTERABLE = 0o400, 0o500


def pack(root: str, stream: IO[bytes], *, force: bool = False, max_bytes: int | None = None) -> None:
    """Write the tree (or the single file) at `root`. Links stay links; devices, sockets and pipes are left out.

    What vanishes in the meantime is left out; what cannot be read raises ValueError.

    Args:
        root: The folder or file; OSError when it is missing.
        stream: Where to write to.
        force: Also read files without read permission, by granting it for a moment; the archive keeps their modes.
        max_bytes: Raise ValueError when the archive would be larger than this.
    """
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, errors="surrogateescape") as archive:
        _Packing(archive, force, max_bytes).run(root)


class _Packing:
    """One run of `pack`."""

    def __init__(self, archive: tarfile.TarFile, force: bool, max_bytes: int | None) -> None:
        self.archive = archive
        self.force = force
        self.max_bytes = max_bytes

    def run(self, root: str) -> None:
        """Add what is at `root`; folders come before what they hold."""
        about = os.stat(root)
        if stat.S_ISREG(about.st_mode):
            self.add(root, os.path.basename(root), about)
            return
        pending = [("", about)]
        while pending:
            name, about = pending.pop()
            self.put(_entry(name or ".", about, tarfile.DIRTYPE))
            for child, status in self.listed(os.path.join(root, name) if name else root, about):
                below = f"{name}/{child.name}" if name else child.name
                if stat.S_ISDIR(status.st_mode):
                    pending.append((below, status))
                else:
                    self.add(child.path, below, status)

    def put(self, entry: tarfile.TarInfo, content: _Padded | None = None) -> None:
        """Write one entry."""
        if self.max_bytes is not None and self.archive.offset + tarfile.BLOCKSIZE + entry.size > self.max_bytes:
            raise ValueError(f"the tree holds more than {self.max_bytes} bytes")
        self.archive.addfile(entry, cast("IO[bytes] | None", content))

    def add(self, path: str, name: str, about: os.stat_result) -> None:
        """Add a file or a link; skip anything else, and what is gone."""
        if stat.S_ISLNK(about.st_mode):
            link = _entry(name, about, tarfile.SYMTYPE)
            try:
                link.linkname = os.readlink(path)
            except OSError:
                return
            self.put(link)
        elif stat.S_ISREG(about.st_mode):
            try:
                fd = self.opened(path, about)
            except FileNotFoundError:
                return
            except OSError as error:
                raise ValueError(f"{name} cannot be read: {error.strerror}") from error
            try:
                entry = _entry(name, about, tarfile.REGTYPE)
                entry.size = os.fstat(fd).st_size
                self.put(entry, _Padded(fd, entry.size))
            finally:
                os.close(fd)

    def opened(self, path: str, about: os.stat_result) -> int:
        """Open a file, also one without read permission if that is wanted."""
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            return os.open(path, flags)
        except PermissionError:
            if not self.force:
                raise
        os.chmod(path, stat.S_IMODE(about.st_mode) | _READABLE)  # the owner may always do that
        fd = os.open(path, flags)
        os.fchmod(fd, stat.S_IMODE(about.st_mode))
        return fd

    def listed(self, path: str, about: os.stat_result) -> list[tuple[os.DirEntry[str], os.stat_result]]:
        """Return the entries of a folder with their status, by name."""
        try:
            if self.force and about.st_mode & _ENTERABLE != _ENTERABLE:
                os.chmod(path, stat.S_IMODE(about.st_mode) | _ENTERABLE)
            with os.scandir(path) as listing:
                children = sorted(listing, key=lambda entry: entry.name)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ValueError(f"a folder cannot be read: {error.strerror}") from error
        listed = []
        for child in children:
            try:
                listed.append((child, child.stat(follow_symlinks=False)))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ValueError(f"{child.name} cannot be read: {error.strerror}") from error
        return listed


def unpack(stream: IO[bytes], root: str, *, keep_outer_links: bool = True, max_bytes: int | None = None) -> None:
    """Unpack a tar stream below `root`, which is made when it is missing.

    Raises ValueError for an invalid archive, and for entries that would land outside, by their name or through a link.
    Set-id bits, owners, devices and pipes are dropped.

    Args:
        stream: The archive, compressed or not.
        root: The folder.
        keep_outer_links: Keep symbolic links that point out of the tree; otherwise they are left out.
        max_bytes: Raise ValueError when the files hold more than this.
    """
    try:
        _Unpacking(root, keep_outer_links, max_bytes).run(stream)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"this is not a readable archive: {error}") from error


class _Unpacking:
    """One run of `unpack`."""

    def __init__(self, root: str, keep_outer_links: bool, max_bytes: int | None) -> None:
        os.makedirs(root, exist_ok=True)
        self.root = os.path.realpath(root)
        self.keep_outer_links = keep_outer_links
        self.left = max_bytes
        self.folders = {""}
        self.modes: dict[str, int] = {}
        self.links: list[tuple[str, str]] = []

    def run(self, stream: IO[bytes]) -> None:
        """Make files and folders first and links last, so that no entry is written through a link of the archive."""
        with tarfile.open(fileobj=stream, mode="r|*", errors="surrogateescape") as archive:
            for member in archive:
                self.add(archive, member)
        for name, target in self.links:
            self.clear(name)
            os.symlink(target, self.path(name))
        for name in sorted(self.modes, reverse=True):
            os.chmod(self.path(name), self.modes[name])

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Make one entry."""
        name = inner_name(member.name)
        if member.isdir():
            self.enter(name)
            self.modes[name] = member.mode & 0o777
            return
        if not name:
            raise ValueError("the archive has a file without a name")
        if member.issym():
            self.enter(os.path.dirname(name))
            if self.keep_outer_links or _stays_inside(name, member.linkname):
                self.links.append((name, member.linkname))
        elif member.islnk():
            source = inner_name(member.linkname)
            self.enter(os.path.dirname(name))
            self.enter(os.path.dirname(source))
            self.clear(name)
            os.link(self.path(source), self.path(name), follow_symlinks=False)
        elif member.isreg():
            self.enter(os.path.dirname(name))
            self.copy(archive, member, name)

    def copy(self, archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> None:
        """Make one regular file."""
        if self.left is not None:
            self.left -= member.size
            if self.left < 0:
                raise ValueError("the archive holds more than is allowed")
        self.clear(name)
        source = archive.extractfile(member)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(self.path(name), flags, 0o600), "wb", buffering=0) as file:
            while source is not None and (data := source.read(_CHUNK)):
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            os.fchmod(file.fileno(), member.mode & 0o777)
        os.utime(self.path(name), (member.mtime, member.mtime))

    def enter(self, name: str) -> None:
        """Make sure that a folder of the tree exists and is a folder, not a link to one."""
        if name in self.folders:
            return
        self.enter(os.path.dirname(name))
        path = self.path(name)
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise ValueError(f"{name!r} is in the way of a folder of the archive") from None
        self.folders.add(name)

    def clear(self, name: str) -> None:
        """Remove a file or link that an entry replaces."""
        try:
            os.unlink(self.path(name))
        except FileNotFoundError:
            pass

    def path(self, name: str) -> str:
        """Return where an entry lies."""
        return os.path.join(self.root, name) if name else self.root


class _Padded:
    """A file that yields exactly the size in its tar header, even if it shrinks or grows while it is read."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.left = fd, size

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, zeros where the file became shorter."""
        wanted = self.left if size < 0 else min(size, self.left)
        data = os.read(self.fd, wanted)
        if len(data) < wanted and not data:
            data = bytes(wanted)
        self.left -= len(data)
        return data if len(data) == wanted else data + self.read(wanted - len(data))


def _entry(name: str, about: os.stat_result, kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.mode = stat.S_IMODE(about.st_mode)
    entry.mtime = int(about.st_mtime)
    return entry


def inner_name(name: str) -> str:
    """Return the name of an entry in its plain form, empty for the tree itself; ValueError if it lies outside."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise ValueError(f"the archive's entry {name!r} lies outside of it")
    return "/".join(parts)


def _stays_inside(name: str, target: str) -> bool:
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    # The folder of an entry is a real one, so leading dots climb as written; after a name (a link?) they need not.
    return not target.startswith("/") and ".." not in parts[climbs:] and climbs <= name.count("/")
