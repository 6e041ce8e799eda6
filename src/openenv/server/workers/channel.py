"""Messages between the workers of a server, including handed-over connections.

Each worker has one socket for reading, and all others write to it. The supervisor creates both ends and keeps them
open, so a replaced worker loses no message. A message arrives whole or not at all. A message too large for a packet
travels in a file, and the packet carries the file's descriptor. Must not know the meaning of messages.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final

logger = logging.getLogger(__name__)

_HEAD: Final = struct.Struct("<BBHI")  # kind, whether the payload is in a file, the sender, the number of a question
_PACKET: Final = 32 * 1024  # socket buffers hold at least a few of these
_READS: Final = 64  # messages per pass of the loop; then connections have their turn
_ASK_S: Final = 2.0
_BUFFER_BYTES: Final = 1024 * 1024


class PeerMessageKind(IntEnum):
    """The kinds of messages."""

    CONNECTION = 1  # a connection to serve, and the bytes read from it
    WAKE = 2  # clients that wait for a slot should try again
    EVICT = 3  # make room: evict a soft session
    ASK = 4
    ANSWER = 5


def message_pair() -> tuple[socket.socket, socket.socket]:
    """Return the reading and the writing end of a message socket."""
    try:
        reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:  # this system has no SEQPACKET
        reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end, option in ((reader, socket.SO_RCVBUF), (writer, socket.SO_SNDBUF)):
        end.setblocking(False)
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return reader, writer


class PeerMessage:
    """A message. The receiver owns its descriptors."""

    __slots__ = ("descriptors", "kind", "number", "payload", "sender")

    def __init__(self, kind: PeerMessageKind, sender: int, number: int, payload: bytes, descriptors: list[int]) -> None:
        self.kind = kind
        self.sender = sender
        self.number = number
        self.payload = payload
        self.descriptors = descriptors


def receive(reader: socket.socket) -> PeerMessage | None:
    """Return the next message; None if it cannot be read.

    Raises:
        BlockingIOError: No message has arrived.
    """
    data, ancillary, flags, _ = reader.recvmsg(_HEAD.size + _PACKET, socket.CMSG_SPACE(2 * array.array("i").itemsize))
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    fds = list(descriptors)
    try:
        number, is_in_file, sender, question = _HEAD.unpack_from(data)
        payload = data[_HEAD.size :]
        if is_in_file:
            payload = _read_file(fds.pop())
        return PeerMessage(PeerMessageKind(number), sender, question, payload, fds)
    except (struct.error, ValueError, IndexError, OSError):
        # The process has no free descriptors, so the kernel dropped the message's (`MSG_CTRUNC`).
        logger.exception("a message of another worker could not be read (%d)", flags)
        for fd in fds:
            os.close(fd)
        return None


def _read_file(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


def _file_of(payload: bytes) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("openenv-message")
        with open(os.dup(fd), "wb") as file:
            file.write(payload)
        return fd
    with tempfile.TemporaryFile() as file:
        file.write(payload)
        file.flush()
        return os.dup(file.fileno())


class PeerChannel:
    """One worker's end: a socket to read from, and one socket per worker to write to.

    Args:
        index: This worker.
        reader: Receives its messages.
        writers: Send messages to each worker, by index.
        answer: Answers a question of another worker.
    """

    def __init__(
        self, index: int, reader: socket.socket, writers: Sequence[socket.socket], answer: Callable[[str], bytes]
    ) -> None:
        self._index = index
        self._reader = reader
        self._writers = writers
        self._answer = answer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsent: dict[int, deque[tuple[bytes, list[int]]]] = {}
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._last_question = 0
        self.handlers: dict[PeerMessageKind, Callable[[PeerMessage], None]] = {}

    def begin(self) -> None:
        """Read on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader.fileno(), self._read)

    def end(self) -> None:
        """Stop reading. Later messages wait for the worker's next process, or are dropped if there is none."""
        if self._loop is not None:
            self._loop.remove_reader(self._reader.fileno())
            for other in list(self._unsent):
                self._loop.remove_writer(self._writers[other].fileno())
            self._loop = None
        for messages in self._unsent.values():
            for _, descriptors in messages:
                _close(descriptors)
        self._unsent.clear()

    # -- sending --------------------------------------------------------------------------------------------------

    def send(
        self,
        index: int,
        kind: PeerMessageKind,
        payload: bytes = b"",
        descriptors: Sequence[int] = (),
        number: int = 0,
    ) -> None:
        """Send a message to a worker, from any thread. The caller keeps its descriptors."""
        is_in_file = len(payload) > _PACKET
        fds = list(descriptors)
        file = _file_of(payload) if is_in_file else -1
        packet = _HEAD.pack(kind, is_in_file, self._index, number) + (b"" if is_in_file else payload)
        if is_in_file:
            fds.append(file)
        try:
            if index in self._unsent or not self._send(index, packet, fds):
                self._queue(index, packet, [os.dup(fd) for fd in fds])
        finally:
            if is_in_file:
                os.close(file)

    def _send(self, index: int, packet: bytes, descriptors: Sequence[int]) -> bool:
        """Send now; return whether the socket had room."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._writers[index].sendmsg([packet], rights)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            if exc.errno not in (errno.EAGAIN, errno.ENOBUFS):
                raise
            return False
        return True

    def _queue(self, index: int, packet: bytes, descriptors: list[int]) -> None:
        loop = self._loop
        if loop is None:  # the server has ended
            _close(descriptors)
            return
        loop.call_soon_threadsafe(self._add_unsent, index, packet, descriptors)

    def _add_unsent(self, index: int, packet: bytes, descriptors: list[int]) -> None:
        loop = self._loop
        if loop is None:
            _close(descriptors)
            return
        if index not in self._unsent:
            self._unsent[index] = deque()
            loop.add_writer(self._writers[index].fileno(), self._send_more, index)
        self._unsent[index].append((packet, descriptors))

    def _send_more(self, index: int) -> None:
        assert self._loop is not None
        messages = self._unsent[index]
        while messages:
            packet, descriptors = messages[0]
            if not self._send(index, packet, descriptors):
                return
            messages.popleft()
            _close(descriptors)
        del self._unsent[index]
        self._loop.remove_writer(self._writers[index].fileno())

    # -- receiving ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        for _ in range(_READS):
            try:
                message = receive(self._reader)
            except (BlockingIOError, InterruptedError):
                return
            if message is not None:
                try:
                    self._handle(message)
                except Exception:  # one bad message must not stop the reader
                    logger.exception("a message of worker %d could not be handled", message.sender)
                    _close(message.descriptors)

    def _handle(self, message: PeerMessage) -> None:
        if message.kind is PeerMessageKind.ANSWER:
            question = self._questions.pop(message.number, None)
            if question is not None and not question.done():
                question.set_result(message.payload)
        elif message.kind is PeerMessageKind.ASK:
            answer = self._answer(message.payload.decode())
            self.send(message.sender, PeerMessageKind.ANSWER, answer, number=message.number)
        else:
            self.handlers[message.kind](message)

    # -- questions ------------------------------------------------------------------------------------------------

    async def ask(self, others: Sequence[int], question: str) -> list[bytes]:
        """Ask other workers; return the answers that arrive in time. A worker may be busy or die meanwhile."""
        loop = asyncio.get_running_loop()
        waiting: list[asyncio.Future[bytes]] = []
        numbers: list[int] = []
        for other in others:
            self._last_question = (self._last_question + 1) & 0xFFFF_FFFF
            self._questions[self._last_question] = future = loop.create_future()
            waiting.append(future)
            numbers.append(self._last_question)
            self.send(other, PeerMessageKind.ASK, question.encode(), number=self._last_question)
        if waiting:
            await asyncio.wait(waiting, timeout=_ASK_S)
        for number in numbers:
            self._questions.pop(number, None)
        return [future.result() for future in waiting if future.done()]


def _close(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
