"""Trees as tar streams: pack one, and unpack one so that no entry lands outside of it.

Also runs inside local sandboxes, as a single file: it imports nothing but the standard library. To import `tarfile`
takes as long as to start a sandbox (20 ms, `benchmarks/verify.py`), so this module packs trees and reads plain entries
without it.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False  # the name that type checkers know; importing it from typing would cost milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import IO

_CHUNK = 256 * 1024
_BLOCK = 512
_RECORD = 20 * _BLOCK
_NAME = 100
"""The length of names and link targets in a header."""
_READABLE, _ENTERABLE = 0o400, 0o500


def pack(root: str, stream: IO[bytes], *, force: bool = False, max_bytes: int | None = None) -> None:
    """Write the tree (or the single file) at `root`. Links stay links; devices, sockets and pipes are left out.

    Entries that vanish in the meantime are left out; unreadable entries raise ValueError.

    Args:
        root: The folder or file; OSError when it is missing.
        stream: Where to write to.
        force: Also read files without read permission, by granting it for a moment; the archive keeps their modes.
        max_bytes: Raise ValueError when the archive would be larger than this.
    """
    _Packing(stream, force, max_bytes).run(root)


class _Packing:
    """One run of `pack`."""

    def __init__(self, stream: IO[bytes], force: bool, max_bytes: int | None) -> None:
        self.stream = stream
        self.force = force
        self.max_bytes = max_bytes
        self.written = 0

    def run(self, root: str) -> None:
        """Add the tree at `root`; folders come before their content."""
        about = os.stat(root)
        if stat.S_ISREG(about.st_mode):
            self.add(root, os.path.basename(root), about)
            self.end()
            return
        pending = [("", about)]
        while pending:
            name, about = pending.pop()
            self.put(_header(f"{name or '.'}/", about, b"5"))
            for child, status in self.listed(os.path.join(root, name) if name else root, about):
                below = f"{name}/{child.name}" if name else child.name
                if stat.S_ISDIR(status.st_mode):
                    pending.append((below, status))
                else:
                    self.add(child.path, below, status)

        self.end()

    def put(self, header: bytes, content: _Padded | None = None) -> None:
        """Write one entry."""
        size = 0 if content is None else content.left
        if self.max_bytes is not None and self.written + len(header) + size > self.max_bytes:
            raise ValueError(f"the tree holds more than {self.max_bytes} bytes")
        self.stream.write(header)
        while content is not None and content.left:
            self.stream.write(content.read(min(content.left, _CHUNK)))
        self.stream.write(bytes(-size % _BLOCK))
        self.written += len(header) + size + -size % _BLOCK

    def end(self) -> None:
        """Write the end of the archive: two empty blocks, and more up to a whole record."""
        self.stream.write(bytes(2 * _BLOCK + -(self.written + 2 * _BLOCK) % _RECORD))

    def add(self, path: str, name: str, about: os.stat_result) -> None:
        """Add a file or a link; skip other kinds and vanished entries."""
        if stat.S_ISLNK(about.st_mode):
            try:
                target = os.readlink(path)
            except OSError:
                return
            self.put(_header(name, about, b"2", target=target))
        elif stat.S_ISREG(about.st_mode):
            try:
                fd = self.opened(path, about)
            except FileNotFoundError:
                return
            except OSError as error:
                raise ValueError(f"{name} cannot be read: {error.strerror}") from error
            try:
                size = os.fstat(fd).st_size
                self.put(_header(name, about, b"0", size=size), _Padded(fd, size))
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


def drop_root(path: Path) -> bool:
    """Leave the entry of the tree itself out of a tar file, so that unpacking sets no mode; return if it has others."""
    import tarfile

    copy, has_entries = path.with_suffix(".copy"), False
    with (
        tarfile.open(path, "r:", errors="surrogateescape") as old,
        tarfile.open(copy, "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as new,
    ):
        for member in old:
            if inner_name(member.name):
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
                has_entries = True
    copy.replace(path)
    return has_entries


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
    _Unpacking(root, keep_outer_links, max_bytes).run(stream)


class _Entry:
    """A file, folder or link of an archive."""

    def __init__(self, name: str, kind: str, *, mode: int, mtime: float, size: int, target: str) -> None:
        self.name, self.kind, self.mode, self.mtime, self.size, self.target = name, kind, mode, mtime, size, target
        self.read: Callable[[int], bytes] = lambda size: b""
        """Return the next bytes of a file's content; empty at its end."""


_KINDS = {b"0": "file", b"1": "hard link", b"2": "link", b"5": "folder"}


def _entries(stream: IO[bytes]) -> Iterator[_Entry]:
    """Yield the entries of a tar stream, compressed or not; other kinds than file, folder and link are left out.

    Raises:
        ValueError: The stream is not an archive, or it ends too early.
    """
    while True:
        block = _read(stream, _BLOCK)
        if block == bytes(_BLOCK):
            return
        entry = _plain_entry(block)
        if entry is None:  # names that are long or not ASCII, large numbers; a compressed archive, or none
            yield from _other_entries(_Rest(block, stream))
            return
        content = _Content(stream, entry.size)
        entry.read = content.read
        yield entry
        content.skip()


def _plain_entry(block: bytes) -> _Entry | None:
    """Read a header of tar's original kinds; None for headers with extensions and for other blocks."""
    kind = _KINDS.get(block[156:157])
    mode, size, mtime, checksum = (_octal(block[start:end]) for start, end in _NUMBERS)
    if kind is None or mode is None or size is None or mtime is None or block[257:262] != b"ustar":
        return None
    # The sum of all bytes, with blanks in place of the sum itself (POSIX 1003.1, "ustar Interchange Format").
    if sum(block[:148]) + 8 * 32 + sum(block[156:]) != checksum:
        return None
    name, target, prefix = (block[start:end].split(b"\0", 1)[0] for start, end in ((0, 100), (157, 257), (345, 500)))
    if prefix and block[262:263] != b"\0":  # GNU's, which has something else there
        return None
    path = os.fsdecode(prefix + b"/" + name if prefix else name)
    size = size if kind == "file" else 0
    return _Entry(path, kind, mode=mode, mtime=mtime, size=size, target=os.fsdecode(target))


_NUMBERS = ((100, 108), (124, 136), (136, 148), (148, 156))


def _octal(field: bytes) -> int | None:
    digits = field.strip(b" \0")
    return int(digits, 8) if digits.isdigit() and b"8" not in digits and b"9" not in digits else None


def _other_entries(stream: _Rest) -> Iterator[_Entry]:
    """Yield the entries of an archive that takes the whole library to read."""
    import tarfile
    from functools import partial

    def refusing(read: Callable[[int], bytes], size: int) -> bytes:
        try:
            return read(size)
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(f"this is not a readable archive: {error}") from error

    try:
        with tarfile.open(fileobj=stream, mode="r|*", errors="surrogateescape") as archive:  # type: ignore[call-overload]
            for member in archive:
                kind = "file" if member.isreg() else _KINDS.get(member.type)
                if kind is None:
                    continue
                size = member.size if kind == "file" else 0
                entry = _Entry(
                    member.name, kind, mode=member.mode, mtime=member.mtime, size=size, target=member.linkname
                )
                if kind == "file" and (file := archive.extractfile(member)) is not None:
                    entry.read = partial(refusing, file.read)
                yield entry
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"this is not a readable archive: {error}") from error


class _Content:
    """The content of one file in a tar stream, and the padding after it."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream, self._left, self._padding = stream, size, -size % _BLOCK

    def read(self, size: int) -> bytes:
        """Return the next bytes; empty at the end."""
        data = self._stream.read(min(size, self._left))
        if not data and self._left:
            raise ValueError("this is not a readable archive: it ends in the middle of a file")
        self._left -= len(data)
        return data

    def skip(self) -> None:
        """Skip the unread rest."""
        while self.read(_CHUNK):
            pass
        _read(self._stream, self._padding)


class _Rest:
    """A stream after its first bytes were read."""

    def __init__(self, start: bytes, stream: IO[bytes]) -> None:
        self._start, self._stream = start, stream

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        data, self._start = self._start[:size], self._start[size:]
        return data + self._stream.read(size - len(data))


def _read(stream: IO[bytes], size: int) -> bytes:
    """Return the given number of bytes, fewer only at the end."""
    data = b""
    while len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data


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
        for entry in _entries(stream):
            self.add(entry)
        for name, target in self.links:
            self.clear(name)
            os.symlink(target, self.path(name))
        for name in sorted(self.modes, reverse=True):
            os.chmod(self.path(name), self.modes[name])

    def add(self, entry: _Entry) -> None:
        """Make one entry."""
        name = inner_name(entry.name)
        if entry.kind == "folder":
            self.enter(name)
            self.modes[name] = entry.mode & 0o777
            return
        if not name:
            raise ValueError("the archive has a file without a name")
        if entry.kind == "link":
            self.enter(os.path.dirname(name))
            if self.keep_outer_links or _stays_inside(name, entry.target):
                self.links.append((name, entry.target))
        elif entry.kind == "hard link":
            source = inner_name(entry.target)
            self.enter(os.path.dirname(name))
            self.enter(os.path.dirname(source))
            self.clear(name)
            os.link(self.path(source), self.path(name), follow_symlinks=False)
        else:
            self.enter(os.path.dirname(name))
            self.copy(entry, name)

    def copy(self, entry: _Entry, name: str) -> None:
        """Make one regular file."""
        if self.left is not None:
            self.left -= entry.size
            if self.left < 0:
                raise ValueError("the archive holds more than is allowed")
        self.clear(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(self.path(name), flags, 0o600), "wb", buffering=0) as file:
            while data := entry.read(_CHUNK):
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            os.fchmod(file.fileno(), entry.mode & 0o777)
        os.utime(self.path(name), (entry.mtime, entry.mtime))

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
        """Return the path of an entry."""
        return os.path.join(self.root, name) if name else self.root


class _Padded:
    """A file that yields exactly the size in its tar header, even if it shrinks or grows while it is read."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.left = fd, size

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; zeros if the file has become shorter."""
        wanted = self.left if size < 0 else min(size, self.left)
        data = os.read(self.fd, wanted)
        if len(data) < wanted and not data:
            data = bytes(wanted)
        self.left -= len(data)
        return data if len(data) == wanted else data + self.read(wanted - len(data))


def _header(name: str, about: os.stat_result, kind: bytes, *, size: int = 0, target: str = "") -> bytes:
    """Return the header of an entry in GNU's format; names and targets without room in it get entries before it."""
    path, link = os.fsencode(name), os.fsencode(target)
    mode = stat.S_IMODE(about.st_mode)
    header = _block(path, kind, mode=mode, size=size, mtime=int(about.st_mtime), link=link)
    for text, long_kind in ((path, b"L"), (link, b"K")):
        if len(text) > _NAME:
            length = len(text) + 1
            header = _block(b"././@LongLink", long_kind, size=length) + text + bytes(1 + -length % _BLOCK) + header
    return header


def _block(path: bytes, kind: bytes, *, mode: int = 0, size: int = 0, mtime: int = 0, link: bytes = b"") -> bytes:
    # The old GNU format (https://www.gnu.org/software/tar/manual/html_node/Standard.html). The sum counts itself as
    # eight blanks. Owners are left out.
    start = path[:_NAME].ljust(_NAME, b"\0") + b"%07o\0" % mode + 2 * b"0000000\0" + _number(size) + _number(mtime)
    rest = kind + link[:_NAME].ljust(_NAME, b"\0") + b"ustar  "
    checksum = sum(start) + 8 * 32 + sum(rest)
    return (start + b"%06o\0 " % checksum + rest).ljust(_BLOCK, b"\0")


def _number(value: int) -> bytes:
    """Return a size or date: octal digits, or in binary if there are too many digits or a sign."""
    if 0 <= value < 8**11:
        return b"%011o\0" % value
    return (b"\x80" if value >= 0 else b"\xff") + value.to_bytes(11, "big", signed=True)


def inner_name(name: str) -> str:
    """Return the name of an entry in normal form, empty for the tree itself; raise ValueError if it lies outside."""
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
