"""Runs inside a sandbox: listens on a loopback port and carries its connections over standard input and output.

Its source is passed to `python3 -c`, so it imports nothing but the standard library and runs on Python 3.7.
A frame is one byte for its kind, four for the connection, four for the length, and that many bytes:

    READY  ->  listening                         OPEN   ->  a client connected
    DATA  <->  bytes of a connection             END   <->  one side is done sending
    CUT    <-  the host could not connect, or its side broke
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


class StdioRelay:
    """The inner end of a tunnel; `openenv.sandboxes.relay.StdioTunnel` is the outer one."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._lock = threading.Lock()
        self._ends: dict[int, socket.socket] = {}
        self._half: set[int] = set()

    def run(self, port: int) -> None:
        """Carry connections until standard input ends."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self._send(READY, 0)
        while True:
            head = self._read(HEAD.size)
            if head is None:
                return
            kind, number, size = HEAD.unpack(head)
            body = self._read(size)
            if body is None:
                return
            self._take(kind, number, body)

    def _accept(self, listener: socket.socket) -> None:
        number = 0
        while True:
            end, _ = listener.accept()
            number += 1
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends[number] = end
            self._send(OPEN, number)
            threading.Thread(target=self._follow, args=(number, end), daemon=True).start()

    def _follow(self, number: int, end: socket.socket) -> None:
        try:
            while True:
                data = end.recv(_CHUNK)
                if not data:
                    break
                self._send(DATA, number, data)
        except OSError:
            pass
        self._send(END, number)
        self._finish_half(number)

    def _finish_half(self, number: int) -> None:
        """Close a connection when both directions have ended."""
        with self._lock:
            if number in self._half:
                self._half.discard(number)
                self._ends.pop(number).close()
            else:
                self._half.add(number)

    def _take(self, kind: int, number: int, body: bytes) -> None:
        end = self._ends.get(number)
        if end is None:
            return
        try:
            if kind == DATA:
                end.sendall(body)
            elif kind == END:
                end.shutdown(socket.SHUT_WR)
            elif kind == CUT:
                end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        if kind in (END, CUT):
            self._finish_half(number)

    def _send(self, kind: int, number: int, body: bytes = b"") -> None:
        frame = memoryview(HEAD.pack(kind, number, len(body)) + body)
        with self._lock:
            while frame:
                frame = frame[os.write(self._sink, frame) :]

    def _read(self, size: int) -> bytes | None:
        parts = []
        while size:
            data = os.read(self._source, min(size, 1 << 16))
            if not data:
                return None
            parts.append(data)
            size -= len(data)
        return b"".join(parts)


if __name__ == "__main__":
    StdioRelay(0, 1).run(int(sys.argv[1]))
