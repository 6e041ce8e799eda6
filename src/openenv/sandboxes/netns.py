"""A listening socket in another network namespace, made from outside: nothing inside has to run for it.

Knows Linux. A thread that ends right after enters the namespace, so that the rest of the process stays where it is.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_BACKLOG = 128


def listen_in(namespace: Path, *, host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens inside a network namespace such as `/proc/PID/ns/net`.

    Raises:
        OSError: no such namespace, no right to enter it (it takes root), or the port is taken.
    """
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def enter() -> None:
        try:
            made.append(_listen(namespace, host, port))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=enter, name="netns", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _listen(namespace: Path, host: str, port: int) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "setns"):
        raise OSError("this system has no network namespaces")
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
