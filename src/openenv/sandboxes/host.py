"""The host that sandboxes and rollouts share with other processes: who owns what, and how much each may use.

Standard library only. Knows processes, folders and descriptors; must not know sandboxes.

- `ProcessOwner`: a label that names one process for good, on sandboxes, containers and control groups.
- `scratch`: folders that end with their process, and file locks.
- `sync_path`: what was written survives a power cut.
- `ConnectionQuota`, `limit_inside`: file descriptors, shared fairly.
- `listen_in`, `limit_terminals`: actions of root in the namespaces of a sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

try:
    import fcntl
except ImportError:  # this platform lacks flock: folders of dead processes stay, installations may run twice
    fcntl = None  # type: ignore[assignment]
with contextlib.suppress(ImportError):  # not there on every platform
    import resource

logger = logging.getLogger(__name__)

T = TypeVar("T")

# ---- process labels ----
#
# A PID alone is not a unique name: it is reused, and means another process in another container or machine. So a label
# is `<boot id>.<pid namespace>/<pid>/<start time>`.

CLOUD_OWNER_LABEL = "openenv-owner"
"""The label of resources in a cloud: `ProcessOwner.short`."""


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """A process, distinct from every other that had or will have its pid."""

    place: str
    """The boot of the machine and the PID namespace."""
    pid: int
    started: str

    @classmethod
    def current(cls) -> ProcessOwner:
        """Return this process."""
        return cls(_place(), os.getpid(), _start_time(os.getpid()) or "0")

    @classmethod
    def parse(cls, text: str) -> ProcessOwner | None:
        """Parse a label; None if it is not one."""
        parts = text.split("/")
        return cls(parts[0], int(parts[1]), parts[2]) if len(parts) == 3 and parts[1].isdigit() else None

    def __str__(self) -> str:
        return f"{self.place}/{self.pid}/{self.started}"

    @property
    def short(self) -> str:
        """The label for clouds, which allow few characters, and not many of them."""
        return f"{_digest(self.place)}-{self.pid}-{self.started}"

    @classmethod
    def parse_short(cls, text: str) -> ProcessOwner | None:
        """Parse a short label; None if it is malformed."""
        digest, _, rest = text.partition("-")
        pid, _, started = rest.partition("-")
        if not (pid.isdigit() and started.isdigit()):
            return None
        here = _place()
        return cls(here if _digest(here) == digest else digest, int(pid), started)

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine and visible from here."""
        return self.place == _place()

    def is_dead(self) -> bool:
        """Return whether the process has certainly ended; False if that cannot be determined from here."""
        if not self.is_here or self.started == "0":
            return False
        return _start_time(self.pid) != self.started


def _digest(place: str) -> str:
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return "unknown"


def _start_time(pid: int) -> str | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


# ---- scratch folders and file locks ----
#
# A lock ends with its process, even if the process is killed. So a folder without a lock can be removed.


def open_locked(path: Path) -> int:
    """Open or create a file, wait for its lock, and return the handle; closing it frees the lock."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def try_locked(path: Path) -> int | None:
    """Open or create a file and lock it; return the handle, or None if another process or thread has the lock."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(handle)
        if isinstance(exc, BlockingIOError):
            return None
        raise
    return handle


def sync_path(path: Path) -> None:
    """Wait until the disk has the content of a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file."""
    if fcntl is None:
        return False
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def scratch_root() -> Path:
    """Return the folder of all scratch folders of this user."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"openenv-rollouts-{user}"


@contextlib.contextmanager
def scratch(root: Path | None = None) -> Iterator[Path]:
    """Create a private folder and remove it at the end. First remove the folders of dead processes."""
    root = root or scratch_root()
    sweep(root)
    folder = root / secrets.token_hex(6)
    handle = _claim(root, folder.name)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        _remove(folder)
        (root / f"{folder.name}.lock").unlink(missing_ok=True)
        os.close(handle)
        with contextlib.suppress(OSError):  # another engine has a folder there
            root.rmdir()


def sweep(root: Path | None = None) -> list[Path]:
    """Remove the folders of dead processes, and return them."""
    root = root or scratch_root()
    removed: list[Path] = []
    if fcntl is None or not root.is_dir():
        return removed
    for path in sorted(root.glob("*.lock")):
        with contextlib.suppress(OSError), path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner lives
            folder = root / path.stem
            if folder.exists():
                _remove(folder)
                removed.append(folder)
            path.unlink(missing_ok=True)
    return removed


def _claim(root: Path, name: str) -> int:
    # Create and lock the file under a hidden name, so that a sweep never sees it unlocked.
    hidden = root / f".{name}"
    while True:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            handle = open_locked(hidden)
            break
        except FileNotFoundError:  # another process has just removed the empty root
            continue
    hidden.rename(root / f"{name}.lock")
    return handle


def _remove(folder: Path) -> None:
    def make_writable(function: object, path: str, error: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(Path(path).parent, 0o700)
            os.unlink(path)

    shutil.rmtree(folder, onerror=make_writable)
    if folder.exists():
        logger.warning("%s could not be removed", folder)


# ---- file descriptors ----
#
# A connection of an agent takes up to four: two in the relay of its sandbox, one in the capture proxy, one to the
# model's endpoint. Code in a sandbox opens as many as it likes, and a process without descriptors fails for every
# sandbox.

LOW = 4096
"""A limit below this is worth a note: it is enough for about a hundred sandboxes."""
_DEFAULT = 1024
_UNLIMITED = 1 << 40
_PER_CONNECTION = 4
_MOST_SHARED = 1024
_MOST_INSIDE = 65536


def _limits() -> tuple[int, int]:
    """Return the soft and the hard limit of this process."""
    try:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    except NameError:
        return _DEFAULT, _DEFAULT
    soft, hard = (_UNLIMITED if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def file_limit() -> int:
    """Return how many descriptors this process may have."""
    return _limits()[0]


def raise_file_limit() -> int:
    """Raise this process's limit as far as the system allows without further rights, and return the limit.

    For programs: a library must not change the limits of the process that it is used in.
    """
    with contextlib.suppress(NameError, ValueError, OSError):  # macOS reports a hard limit that it does not accept
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return file_limit()


def limit_inside(processes: int) -> int:
    """Return the limit for each process of a sandbox: all of them together get a quarter of the machine's descriptors.

    The kernel counts open files in all (`fs.file-max`), and a sandbox has memory for millions.
    """
    _, hard = _limits()
    return max(_DEFAULT, min(_machine_files() // 4 // processes, _MOST_INSIDE, hard))


@cache
def _machine_files() -> int:
    try:
        return int(Path("/proc/sys/fs/file-max").read_text())
    except (OSError, ValueError):
        return _UNLIMITED


class ConnectionQuota:
    """Divides connections among holders, such as sandboxes, so that none of them keeps another out.

    Every holder has `own` reserved places. Beyond these, places come from one pool; a holder gets at
    most half of it. With a limit of 1,024 descriptors and 4 places each:

        pool of 64 (a quarter of the descriptors)       A floods: 4 + 32, then it is refused
        own places: A 4 · B 4 · C 4 · ...               B, C, ...: 4 each, and the other half of the pool

    Usable from any thread.

    Args:
        own: The places that every holder has.
        shared: The size of the pool; by default a quarter of this process's descriptors.
        most: A limit for one holder, in addition to half of the pool.
    """

    def __init__(self, *, own: int = 4, shared: int | None = None, most: int = 128) -> None:
        if shared is None:
            shared = min(_MOST_SHARED, file_limit() // 4 // _PER_CONNECTION)
        self.own = own
        self.shared = shared
        self.most = max(own, min(most, own + shared // 2))
        """The number of places that one holder can have."""
        self._held: Counter[Hashable] = Counter()
        self._pooled = 0
        self._lock = threading.Lock()

    def take(self, holder: Hashable) -> bool:
        """Give the holder one more place, if there is one for it."""
        with self._lock:
            held = self._held[holder]
            if held >= self.own:
                if held >= self.most or self._pooled >= self.shared:
                    return False
                self._pooled += 1
            self._held[holder] = held + 1
            return True

    def release(self, holder: Hashable) -> None:
        """Take a place of the holder back."""
        with self._lock:
            held = self._held.pop(holder)
            self._pooled -= held > self.own
            if held > 1:
                self._held[holder] = held - 1

    def held(self, holder: Hashable) -> int:
        """Return how many places a holder has."""
        return self._held[holder]


# ---- namespaces of a sandbox, changed from outside ----
#
# Only root may do this. A short-lived thread enters, so that the rest of the process stays in its own namespaces.

_CLONE_FS, _CLONE_NEWNS, _CLONE_NEWNET = 0x200, 0x20000, 0x40000000
_MS_NOSUID, _MS_NOEXEC, _MS_REMOUNT = 2, 8, 32
_BACKLOG = 128
_TERMINALS = 64
# Of <linux/mount.h>. These system calls have the same numbers on all processors that local sandboxes support.
_FSCONFIG, _FSPICK = 431, 433
_FSPICK_EMPTY_PATH = 8
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_RECONFIGURE = 1, 7


def listen_in(namespace: Path, *, host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens inside a network namespace such as `/proc/PID/ns/net`.

    Raises:
        OSError: The namespace does not exist, this process may not enter it (root can), or the port is taken.
    """
    return _inside(namespace, _CLONE_NEWNET, lambda: socket.create_server((host, port), backlog=_BACKLOG))


def limit_terminals(pid: int, most: int = _TERMINALS, *, options: str | None = None) -> str | None:
    """Let the sandbox of a process have this many pseudo-terminals.

    The machine has a limit for all (`kernel.pty.max`), and each file system of terminals may use it up.

    Args:
        pid: The process.
        most: The limit.
        options: The result for another sandbox with equal mounts, which saves a look at them.

    Raises:
        OSError: The process does not exist, or this process may not do that (root can).
    """
    if options is None:
        mounted = _terminal_options(Path(f"/proc/{pid}/mountinfo").read_text())
        if mounted is None:
            return None
        options = f"{mounted},max={most}"  # repeat all options: options that are not named return to their defaults

    def remount() -> None:
        flags = _MS_REMOUNT | _MS_NOSUID | _MS_NOEXEC
        _check(_libc().mount(b"devpts", b"/dev/pts", b"devpts", flags, options.encode()))

    try:
        _set_terminal_options(pid, options)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        _inside(Path(f"/proc/{pid}/ns/mnt"), _CLONE_NEWNS, remount)  # Linux before 5.2, four times as slow
    return options


def _set_terminal_options(pid: int, options: str) -> None:
    if not hasattr(_libc(), "syscall"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    with contextlib.ExitStack() as stack:

        def opened(path: str, folder: int | None, flags: int = 0) -> int:
            flags |= os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            descriptor = os.open(path, flags, dir_fd=folder)
            stack.callback(os.close, descriptor)
            return descriptor

        # Step by step: a link inside must not lead to the terminals of this machine.
        terminals = opened(f"/proc/{pid}/root", None)
        for name in ("dev", "pts"):
            terminals = opened(name, terminals, os.O_NOFOLLOW)
        picked = _check(_libc().syscall(_FSPICK, terminals, b"", _FSPICK_EMPTY_PATH))
        stack.callback(os.close, picked)
        for option in options.split(","):
            name, _, value = option.partition("=")
            _check(_libc().syscall(_FSCONFIG, picked, _FSCONFIG_SET_STRING, name.encode(), value.encode(), 0))
        _check(_libc().syscall(_FSCONFIG, picked, _FSCONFIG_CMD_RECONFIGURE, None, None, 0))


def _terminal_options(mounts: str) -> str | None:
    """Return the options of the file system at /dev/pts, without `ro` and `rw`, which are flags."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[4] == "/dev/pts" and after.startswith("devpts "):
            options = after.split()[2].split(",")
            return ",".join(option for option in options if option not in ("ro", "rw"))
    return None


def _inside(namespace: Path, kind: int, work: Callable[[], T]) -> T:
    if not hasattr(_libc(), "setns"):
        raise OSError("this system has no namespaces")

    def enter_and_work() -> T:
        descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if kind == _CLONE_NEWNS:  # a thread that shares its working folder with others cannot change its mounts
                _check(_libc().unshare(_CLONE_FS))
            _check(_libc().setns(descriptor, kind))
        finally:
            os.close(descriptor)
        return work()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="namespace") as executor:
        return executor.submit(enter_and_work).result()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
