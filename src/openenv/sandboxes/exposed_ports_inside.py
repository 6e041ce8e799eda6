"""Runs inside a sandbox: listens on a loopback port and carries its connections over standard input and output.

Its source is passed to `python3 -c`, so it imports nothing but the standard library and runs on Python 3.7.
A frame is one byte for its kind, four for the connection, four for the length, and that many bytes:

    READY  ->  listening                         OPEN   ->  a client connected
    DATA  <->  bytes of a connection             END   <->  one side is done sending
    CUT   <->  a side broke, or the host could not connect
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading

READY, OPEN, DATA, END, CUT = range(5)
HEAD = struct.Struct(">BII")
_CHUNK = 1 << 15
"""The most that one frame carries."""


class FrameTunnel:
    """One end of a tunnel, inside or on the host: its connections by number, and a thread that reads each of them.

        socket ──recv──> `send` ──> the other end           the other end ──> `feed` ──> `take` ──sendall──> socket

    A connection is closed when both of its directions have ended.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._sockets: dict[int, socket.socket] = {}
        self._read_ended: set[int] = set()
        self._write_ended: set[int] = set()

    def send(self, kind: int, number: int, body: bytes = b"") -> None:
        """Send a frame to the other end."""
        raise NotImplementedError

    def feed(self, data: bytes) -> None:
        """Take bytes of the other end, however they are cut, and handle each frame that is complete.

        Raises:
            ValueError: The other end breaks the protocol.
        """
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            kind, number, size = HEAD.unpack_from(self._buffer)
            if size > _CHUNK:  # else a header alone would have us keep 4 GB
                raise ValueError(f"a frame of {size} bytes")
            if len(self._buffer) < HEAD.size + size:
                return
            body = bytes(self._buffer[HEAD.size : HEAD.size + size])
            del self._buffer[: HEAD.size + size]
            self.take(kind, number, body)

    def take(self, kind: int, number: int, body: bytes) -> None:
        """Handle a frame of a connection."""
        end = self._sockets.get(number)
        if end is None:
            return
        try:
            if kind == DATA:
                end.sendall(body)
            elif kind == END:
                end.shutdown(socket.SHUT_WR)
            elif kind == CUT:
                cut(end)
        except OSError:
            cut(end)  # its reader then reports the end to the other side
        if kind in (END, CUT):
            self._end_half(number, self._write_ended)

    def add(self, number: int, end: socket.socket) -> None:
        """Begin to carry a connection."""
        self._sockets[number] = end
        threading.Thread(target=self._read, args=(number, end), name="tunnel", daemon=True).start()

    def cut_all(self) -> None:
        """Break every connection off: its reader ends and closes it."""
        for number, end in list(self._sockets.items()):
            cut(end)
            self._end_half(number, self._write_ended)

    def _read(self, number: int, end: socket.socket) -> None:
        last = END
        try:
            while True:
                data = end.recv(_CHUNK)
                if not data:
                    break
                self.send(DATA, number, data)
        except OSError:
            last = CUT
        self.send(last, number)
        self._end_half(number, self._read_ended)

    def _end_half(self, number: int, ended: set[int]) -> None:
        with self._lock:
            ended.add(number)
            # The socket stays open while its reader may still use it: a closed one's number goes to the next socket.
            if number in self._read_ended and number in self._write_ended:
                self._read_ended.discard(number)
                self._write_ended.discard(number)
                self._sockets.pop(number).close()
                self.closed(number)

    def closed(self, number: int) -> None:
        """Clean up after the end of a connection."""


def cut(end: socket.socket) -> None:
    """Break a connection off, which a thread that reads it notices at once."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


class StdioRelay(FrameTunnel):
    """The end inside; `openenv.sandboxes.exposed_ports.StdioTunnel` is the one on the host."""

    def __init__(self, source: int, sink: int) -> None:
        super().__init__()
        self._source = source
        self._sink = sink
        self._sending = threading.Lock()

    def run(self, port: int) -> None:
        """Carry connections until standard input ends."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self.send(READY, 0)
        while True:
            data = os.read(self._source, 1 << 16)
            if not data:
                return
            self.feed(data)

    def send(self, kind: int, number: int, body: bytes = b"") -> None:
        """Write a frame; frames of several threads must not mix."""
        frame = memoryview(HEAD.pack(kind, number, len(body)) + body)
        with self._sending:
            while frame:
                frame = frame[os.write(self._sink, frame) :]

    def _accept(self, listener: socket.socket) -> None:
        number = 0
        while True:
            end, _ = listener.accept()
            number += 1
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets[number] = end  # before the host knows of it: it may cut the connection at once
            self.send(OPEN, number)
            self.add(number, end)


if __name__ == "__main__":
    StdioRelay(0, 1).run(int(sys.argv[1]))
