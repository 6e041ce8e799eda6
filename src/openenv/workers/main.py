"""The beginning and the end of a worker process.

Started by the process runner with one end of a socket pair; ends when the server says so, or is gone. Knows processes,
signals and logging; what happens in between is the host's.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import logging
import logging.handlers
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from ..runners.process.messages import HEADER, MessageKind, WorkerSetup, pack, pack_error, unpack
from .host import Line, SessionHost
from .modules import install

_ENDING_S = 3.0


class SentLog(logging.handlers.QueueHandler):
    """Hands log records to the server, whose handlers decide how they look and where they go."""

    def __init__(self, line: Line) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._line = line

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record."""
        self._line.send(MessageKind.LOG, payload=pack(vars(record)))


def main() -> None:
    """Run a worker; the number of its socket is the last argument."""
    sock = socket.socket(fileno=int(sys.argv[-1]))
    sock.set_inheritable(False)
    # The server ends its workers itself. Handlers, not SIG_IGN: that would be passed on to an environment's programs.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _left_to_the_server)
    faulthandler.enable()  # a crash says where it happened
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # or a crash would take with it what was printed
    setup = _read_setup(sock)
    if setup is None:
        return
    line = Line(sock)
    _send_logs(line, setup)
    try:
        sys.path[:] = setup.path
        sys.argv[:] = ["openenv-worker"]
        install(setup.files, setup.main)
        factory = unpack(setup.factory)
    except BaseException as exc:
        line.send(MessageKind.FAILED, payload=pack_error(exc))
        sys.exit(1)
    asyncio.run(SessionHost(sock, factory, parent=setup.parent).run())
    # A thread that an environment has left behind must not keep the process.
    threading.Thread(target=_end_anyway, daemon=True).start()


def _left_to_the_server(*_: Any) -> None:
    """Do nothing."""


def _read_setup(sock: socket.socket) -> WorkerSetup | None:
    header = _read(sock, HEADER.size)
    if header is None:
        return None
    size, kind, _ = HEADER.unpack(header)
    payload = _read(sock, size)
    if payload is None or kind != MessageKind.SETUP:
        return None
    setup: WorkerSetup = unpack(payload)
    return setup


def _read(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return None
        data += more
    return bytes(data)


def _send_logs(line: Line, setup: WorkerSetup) -> None:
    logging.getLogger().addHandler(SentLog(line))
    for name, level in setup.levels.items():
        logging.getLogger(name or None).setLevel(level)


def _end_anyway() -> None:
    time.sleep(_ENDING_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
