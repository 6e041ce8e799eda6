"""A worker's link to its server: messages to it from any thread, and whether it still lives.

Log records and tool events are forwarded as they occur. Knows messages and the server's process; must not know
sessions.
"""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import os
import select
import socket
import threading
from dataclasses import dataclass
from typing import Any, Final

from openenv.env.tools.source import ToolEvents

from ...base import NotSendable
from ..messages import MessageKind, encode_message, pack, pack_error

_COPIES_AT_ONCE: Final = 250  # the kernel sends at most 253 descriptors with one message


@dataclass(frozen=True, slots=True)
class ServerHandle:
    """The server's process: a worker must not outlive it. Copies of a worker are not children of the server."""

    pid: int
    descriptor: int | None  # a pidfd, if the system has them
    is_parent: bool = True

    @classmethod
    def open(cls, pid: int) -> ServerHandle:
        """Return the handle of this process's parent."""
        try:
            return cls(pid, os.pidfd_open(pid))
        except (AttributeError, OSError):
            return cls(pid, None)

    @property
    def has_ended(self) -> bool:
        """Whether the server has ended."""
        if self.is_parent:
            return os.getppid() != self.pid
        if self.descriptor is not None:
            return bool(select.select([self.descriptor], [], [], 0)[0])
        try:
            os.kill(self.pid, 0)
        except OSError:
            return True
        return False


class ReplySender:
    """Sends messages to the server; may be used from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, kind: MessageKind, number: int = 0, payload: bytes = b"") -> None:
        """Send a message. A lost server is ignored here, because the host notices it."""
        data = encode_message(kind, number, payload)
        with self._lock:
            try:
                self._socket.sendall(data)
            except OSError:
                return

    def send_copies(self, number: int, pids: list[int], sockets: list[socket.socket]) -> None:
        """Send the process ids of copies, and the server's ends of their sockets."""
        for start in range(0, len(pids), _COPIES_AT_ONCE):
            end = start + _COPIES_AT_ONCE
            data = encode_message(MessageKind.COPIES, number, pack(pids[start:end]))
            descriptors = [sock.fileno() for sock in sockets[start:end]]
            with self._lock:
                try:
                    sent = socket.send_fds(self._socket, [data], descriptors)
                    self._socket.sendall(data[sent:])
                except OSError:
                    return

    def send_result(self, number: int, result: Any) -> None:
        """Send a result, or an error if it cannot be pickled."""
        if type(result) is bytes:
            self.send(MessageKind.BYTES, number, result)
            return
        try:
            payload = pack(result)
        except Exception as exc:
            self.send_error(number, NotSendable(f"a {type(result).__name__} cannot be sent by a worker process: {exc}"))
        else:
            self.send(MessageKind.VALUE, number, payload)

    def send_error(self, number: int, error: BaseException) -> None:
        """Send an exception."""
        self.send(MessageKind.ERROR, number, pack_error(error))


class ForwardedLog(logging.handlers.QueueHandler):
    """Forwards log records to the server; its handlers format and store them."""

    def __init__(self, replies: ReplySender) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.replies = replies

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record."""
        self.replies.send(MessageKind.LOG, payload=pack(vars(record)))


class ForwardedEvents(ToolEvents):
    """Forwards a tool's events to the server at once, so that they arrive before its result."""

    def __init__(self, replies: ReplySender, number: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(lambda *_: None, loop=loop)
        self._replies = replies
        self._number = number

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Forward progress."""
        self._replies.send(MessageKind.EVENT, self._number, pack(("progress", (progress, total, message))))

    def log(self, level: str, logger: str | None, data: Any) -> None:
        """Forward a log message; send data as text if it cannot be pickled."""
        try:
            payload = pack(("log", (level, logger, data)))
        except Exception:
            payload = pack(("log", (level, logger, repr(data))))
        self._replies.send(MessageKind.EVENT, self._number, payload)
