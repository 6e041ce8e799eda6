"""Checks whether this process can be forked: threads, tasks, processes, descriptors, memory and folders prevent it.

A copy by fork(2) has only the calling thread, and it shares descriptors and memory maps with its original. An
environment that depends on these cannot be copied, and the text names the obstacle. Linux only. Knows the kernel's view
of this process; must not know sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
import sys
import tempfile
import threading
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

COPY_NAME: Final = "openenv-copy"
"""The name of a copy's main thread in the kernel, for `ps` and for the original."""
_OUR_THREADS: Final = ("openenv-", "asyncio_")  # idle between calls, and started again when needed
_TOOLS: Final = "openenv.env.tools.execution"
_HARMLESS_DEVICES: Final = frozenset({"/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty"})
_STDIO: Final = 3
# 7f12c8a00000-7f12c8a21000 rw-s 00000000 00:01 1042 /dev/zero (deleted)
_SHARED_MEMORY: Final = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ rw.s [0-9a-f]+ \S+ \d+ *(.*)$", re.MULTILINE)
# <linux/fs.h>: PROCMAP_QUERY, sizeof(struct procmap_query), and WRITABLE, SHARED and COVERING_OR_NEXT_VMA of its flags
_QUERY_MAPPING: Final = 0xC0686611
_QUERY_SIZE: Final = 104
_SHARED_AND_WRITABLE: Final = 0x02 | 0x08 | 0x10


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that this process reads, with its offset."""

    fd: int
    path: str
    flags: int
    offset: int


def is_possible() -> bool:
    """Return whether processes can be copied on this system."""
    return sys.platform == "linux" and hasattr(os, "fork") and hasattr(os, "pidfd_open")


def obstacle(
    own_tasks: Collection[asyncio.Task[Any] | None], own_descriptors: Collection[int], own_copies: Collection[int]
) -> str | None:
    """Return the obstacle to copying this process and its environments, as text; None if it can be copied.

    Call this in the thread of the event loop while the environment is idle.

    Args:
        own_tasks: Tasks of the worker itself.
        own_descriptors: Descriptors of the worker itself.
        own_copies: The ids of processes that it has forked.
    """
    problem = _threads() or _tasks(own_tasks) or _folders()
    if problem is None and sys.platform == "linux":  # these need /proc
        problem = _processes(own_copies) or _descriptors(own_descriptors) or _memory()
    return problem


def _threads() -> str | None:
    ours = (threading.main_thread(), threading.current_thread())
    for thread in threading.enumerate():
        if thread not in ours and not thread.name.startswith(_OUR_THREADS):
            return f"it runs a thread ({thread.name}), which a copy of the process would not have"
    return None


def _tasks(own: Collection[asyncio.Task[Any] | None]) -> str | None:
    loops = [asyncio.get_running_loop(), *tool_loops()]
    others = [task for loop in loops for task in asyncio.all_tasks(loop) if task not in own]
    if others:
        return f"it runs a task on the event loop ({others[0].get_name()}), which a copy of the process would not have"
    return None


def tool_loops() -> list[asyncio.AbstractEventLoop]:
    """Return the event loop of tools, if this process has one."""
    tools = sys.modules.get(_TOOLS)
    background = getattr(tools, "TOOL_LOOP", None)
    loop = None if background is None or background._pid != os.getpid() else background._loop
    return [] if loop is None else [loop]


def _processes(copies: Collection[int]) -> str | None:
    for thread in os.listdir("/proc/self/task"):
        for pid in _content(f"/proc/self/task/{thread}/children").split():
            if int(pid) in copies:
                continue
            name = _content(f"/proc/{int(pid)}/comm").decode("utf-8", "replace").strip()
            if name != COPY_NAME:  # a copy of an ended copy has this name
                return f"it has started another process ({name or int(pid)}), which copies would share"
    return None


def _descriptors(own: Collection[int]) -> str | None:
    for fd, path in open_descriptors():
        if fd < _STDIO or fd in own:
            continue
        try:
            mode, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError:  # the descriptor of the listing itself
            continue
        access = flags & os.O_ACCMODE
        if stat.S_ISSOCK(mode):
            return "it has a connection (a socket), which copies would share"
        if stat.S_ISFIFO(mode):
            return "it has a pipe, which copies would share"
        if stat.S_ISCHR(mode) and path not in _HARMLESS_DEVICES:
            return f"it uses the device {path}, which copies would share"
        is_log = access == os.O_WRONLY and flags & os.O_APPEND  # lines of all copies: shared output, no state
        if stat.S_ISREG(mode) and access != os.O_RDONLY and not is_log:
            return f"it has a file open for writing ({path}), which copies would share"
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode) or stat.S_ISDIR(mode)):
            return f"it has a descriptor of the kernel ({path}), which copies would share"
    return None


def _memory() -> str | None:
    """Find memory that stays shared after a fork: `multiprocessing.Array`, /dev/shm, a mapped file."""
    if not _may_share_memory():
        return None
    shared = _SHARED_MEMORY.search(_content("/proc/self/maps"))
    if shared is None:
        return None
    place = shared[1].decode("utf-8", "replace").strip() or "anonymous"
    return f"it uses shared memory ({place}), which copies would share"


# The kernel writes a line for each of some 300 mappings, which took half of the time of all checks.
def _may_share_memory() -> bool:
    """Return False if the kernel finds no shared and writable mapping; True also if it cannot look for one."""
    query = struct.pack("QQQ", _QUERY_SIZE, _SHARED_AND_WRITABLE, 0).ljust(_QUERY_SIZE, b"\0")
    maps = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(maps, _QUERY_MAPPING, query)
    except OSError as exc:  # ENOTTY before Linux 6.11
        return exc.errno != errno.ENOENT
    finally:
        os.close(maps)
    return True


def _folders() -> str | None:
    # A copy that is closed would remove the folder of its original.
    registry: Any = getattr(weakref.finalize, "_registry", {})
    for info in list(registry.values()):
        owner = getattr(getattr(info, "func", None), "__self__", None)
        if owner is tempfile.TemporaryDirectory:
            folder = info.args[0] if info.args else ""
            return f"it keeps files in a temporary folder ({folder}), which copies would share"
    return None


# -- descriptors --------------------------------------------------------------------------------------------------


def open_descriptors() -> Iterator[tuple[int, str]]:
    """Yield the descriptors of this process with their targets."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield int(name), os.readlink(f"/proc/self/fd/{name}")


def loop_descriptors(loop: asyncio.AbstractEventLoop) -> set[int]:
    """Return the descriptors of an asyncio loop; empty for other loops."""
    parts = [getattr(loop, name, None) for name in ("_selector", "_ssock", "_csock")]
    return {part.fileno() for part in parts if part is not None}


def close_copied_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Close the descriptors of a loop in a copied process, without changing the shared epoll instance.

    `loop.close()` would remove the loop's sockets from it, and the original would no longer wake up.
    """
    for name in ("_selector", "_ssock", "_csock"):
        part = getattr(loop, name, None)
        if part is not None:
            part.close()


def open_files() -> list[OpenFile]:
    """Return the regular files that this process reads: a copy would share the offset of the same descriptor."""
    files = []
    for fd, path in open_descriptors():
        with contextlib.suppress(OSError):
            if fd >= _STDIO and stat.S_ISREG(os.fstat(fd).st_mode):
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                if flags & os.O_ACCMODE == os.O_RDONLY:
                    files.append(OpenFile(fd, path, flags, os.lseek(fd, 0, os.SEEK_CUR)))
    return files


def reopen(file: OpenFile) -> None:
    """Give a copy a separate offset in a file, with the same descriptor; works for deleted files, too."""
    fd = os.open(f"/proc/self/fd/{file.fd}", file.flags & ~os.O_CREAT | os.O_CLOEXEC)
    try:
        os.lseek(fd, file.offset, os.SEEK_SET)
        os.dup2(fd, file.fd, inheritable=os.get_inheritable(file.fd))
    finally:
        os.close(fd)


def _content(path: str) -> bytes:
    """Return the content of a file of /proc; empty if it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    content = bytearray()
    try:
        with contextlib.suppress(OSError):
            while part := os.read(fd, 1 << 20):
                content += part
    finally:
        os.close(fd)
    return bytes(content)
