"""`expose` for boxes whose network cannot be entered from here: connections travel over a command's standard streams.

Knows the frames of `stdio_relay`, which runs inside and needs `python3` there. Needs no network at all between the two.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from openenv.sandboxes import stdio_relay
from openenv.sandboxes.base import Stream
from openenv.sandboxes.stdio_relay import CUT, DATA, END, HEAD, OPEN, READY

_CHUNK = 1 << 15
_BATCH = 1 << 18
_CONNECT_S = 10.0


def relay_source() -> str:
    """Return the program that runs inside."""
    return Path(stdio_relay.__file__).read_text()


class StdioTunnel:
    """The host's end: give `received` what comes out of the relay, and pour `frames` into it."""

    def __init__(self, target: Path) -> None:
        self.ready = threading.Event()
        self._target = target
        self._outgoing: queue.Queue[bytes | None] = queue.Queue(maxsize=256)
        self._buffer = bytearray()
        self._ends: dict[int, socket.socket] = {}
        self._closed = False

    def frames(self) -> Iterator[bytes]:
        """Yield what goes into the relay, as much at once as there is, until the tunnel is closed."""
        frame = self._outgoing.get()
        while frame is not None:
            batch = bytearray(frame)
            try:
                while len(batch) < _BATCH and (frame := self._outgoing.get_nowait()) is not None:
                    batch += frame
            except queue.Empty:
                pass
            yield bytes(batch)
            if frame is not None:
                frame = self._outgoing.get()

    def received(self, stream: Stream, data: bytes) -> None:
        """Take what came out of the relay."""
        if stream == "stderr" or self._closed:
            return
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            kind, number, size = HEAD.unpack_from(self._buffer)
            if len(self._buffer) < HEAD.size + size:
                return
            body = bytes(self._buffer[HEAD.size : HEAD.size + size])
            del self._buffer[: HEAD.size + size]
            self._take(kind, number, body)

    def close(self) -> None:
        """Cut every connection and end the relay's input."""
        self._closed = True
        for end in list(self._ends.values()):
            _cut(end)
        while True:
            try:
                self._outgoing.put_nowait(None)
                return
            except queue.Full:  # nobody reads it any more: make room for the end
                self._outgoing.get()

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == READY:
            self.ready.set()
        elif kind == OPEN:
            self._open(number)
        end = self._ends.get(number)
        if end is None:
            return
        try:
            if kind == DATA:
                end.sendall(body)
            elif kind == END:
                end.shutdown(socket.SHUT_WR)
        except OSError:
            _cut(end)  # its follower then tells the other side

    def _open(self, number: int) -> None:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.settimeout(_CONNECT_S)
            end.connect(str(self._target))
            end.settimeout(None)
        except OSError:  # nobody listens there: the caller inside sees its connection close
            end.close()
            self._put(CUT, number)
            return
        self._ends[number] = end
        threading.Thread(target=self._follow, args=(number, end), name="tunnel", daemon=True).start()

    def _follow(self, number: int, end: socket.socket) -> None:
        with end:
            try:
                while data := end.recv(_CHUNK):
                    self._put(DATA, number, data)
                self._put(END, number)
            except OSError:
                self._put(CUT, number)
            self._ends.pop(number, None)

    def _put(self, kind: int, number: int, body: bytes = b"") -> None:
        frame = HEAD.pack(kind, number, len(body)) + body
        while not self._closed:
            try:
                self._outgoing.put(frame, timeout=1)
            except queue.Full:
                continue
            return


def _cut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
