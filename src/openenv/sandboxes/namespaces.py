"""What root does in the namespaces of a sandbox from outside: open a port, limit its terminals.

Both enter a namespace with a short-lived thread, so that the rest of the process stays in its namespace.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CLONE_FS, _CLONE_NEWNS, _CLONE_NEWNET = 0x200, 0x20000, 0x40000000
_MS_NOSUID, _MS_NOEXEC, _MS_REMOUNT = 2, 8, 32
_BACKLOG = 128
_TERMINALS = 64


def listen_in(namespace: Path, *, host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens inside a network namespace such as `/proc/PID/ns/net`.

    Raises:
        OSError: The namespace does not exist, this process may not enter it (root can), or the port is taken.
    """
    return _inside(namespace, _CLONE_NEWNET, lambda: socket.create_server((host, port), backlog=_BACKLOG))


def limit_terminals(pid: int, most: int = _TERMINALS) -> None:
    """Let the sandbox of a process have this many pseudo-terminals.

    The machine has a limit for all (`kernel.pty.max`), and each file system of terminals may use it up.

    Raises:
        OSError: The process does not exist, or this process may not do that (root can).
    """
    options = _terminal_options(Path(f"/proc/{pid}/mountinfo").read_text())
    if options is None:
        return

    def remount() -> None:
        flags = _MS_REMOUNT | _MS_NOSUID | _MS_NOEXEC
        # Repeat all options: options that are not named return to their defaults.
        _check(_libc().mount(b"devpts", b"/dev/pts", b"devpts", flags, f"{options},max={most}".encode()))

    _inside(Path(f"/proc/{pid}/ns/mnt"), _CLONE_NEWNS, remount)


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


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
