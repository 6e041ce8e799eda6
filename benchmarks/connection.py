"""One session of the load generator, sans IO policy: bytes in, "a reply is whole" out.

Replies are measured, not decoded: only lengths are read, and bodies are gathered only while `keep` is set.
"""

from __future__ import annotations

import os
import socket
import struct

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
HEAD_BYTES = 48


def client_frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """Build a frame masked with a random key, so that a server cannot skip the unmasking."""
    size, key = len(payload), os.urandom(4)
    pad = (key * (size // 4 + 1))[:size]
    masked = (int.from_bytes(payload, "little") ^ int.from_bytes(pad, "little")).to_bytes(size, "little")
    if size < 126:
        head = struct.pack("!BB", 0x80 | opcode, 0x80 | size)
    elif size < 65536:
        head = struct.pack("!BBH", 0x80 | opcode, 0xFE, size)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, 0xFF, size)
    return head + key + masked


class Connection:
    """A socket with the little state needed to find the end of a reply."""

    __slots__ = (
        "body", "buf", "fields", "final", "head", "is_ws", "keep", "left",
        "ready", "recv", "request", "send", "sock", "t0", "upgraded",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, *, is_ws: bool, request: bytes) -> None:
        self.sock, self.send, self.recv = sock, sock.sendall, sock.recv
        self.is_ws = is_ws
        self.upgraded = not is_ws
        self.ready = False  # set up in full: may be put under load
        self.request = request
        self.keep = True  # gather whole bodies (set-up and first reply), not only heads
        self.buf = self.body = self.head = self.fields = b""
        self.left, self.final, self.t0 = 0, True, 0.0

    def feed(self, data: bytes) -> bool:
        """Take received bytes; return whether a reply is whole.

        Raises:
            ConnectionError: the server sent a close frame or something that is no reply.
        """
        if self.left:  # inside a long body
            if self.keep:
                self.body += data[: self.left]
            if len(data) < self.left:
                self.left -= len(data)
                return False
            data, self.left = data[self.left :], 0
            if self.final and not data:
                return True
            if self.final:
                raise ConnectionError("unexpected bytes after a reply")
        data = self.buf + data if self.buf else data
        self.buf = b""
        return self._frames(data) if self.is_ws else self._response(data)

    def feed_upgrade(self, data: bytes) -> bytes | None:
        """Take bytes of the upgrade response; return what followed it, or None while it is incomplete.

        Raises:
            ConnectionError: the upgrade was refused.
        """
        self.buf += data
        if b"\r\n\r\n" not in self.buf:
            return None
        if b" 101 " not in self.buf[:16]:
            raise ConnectionError(f"upgrade refused: {self.buf[:80]!r}")
        (self.fields, _, rest), self.buf = self.buf.partition(b"\r\n\r\n"), b""
        self.upgraded = True
        return rest

    def header(self, name: str) -> str | None:
        """Return a header of the last response gathered with `keep`."""
        for line in self.fields.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.lower().encode():
                return value.strip().decode("latin-1")
        return None

    def failed(self) -> bool:
        """Say whether the last reply was an error."""
        if not self.is_ws:
            return not self.head.startswith(b"200")
        return b'"error"' in self.head[:44] and b'"error":null' not in self.head

    def _frames(self, data: bytes) -> bool:
        while data:
            size, offset = (data[1] & 0x7F, 2) if len(data) > 1 else (0, 99)
            if size == 126:
                offset, size = 4, int.from_bytes(data[2:4], "big")
            elif size == 127:
                offset, size = 10, int.from_bytes(data[2:10], "big")
            if len(data) < offset:
                self.buf = data
                return False
            opcode = data[0] & 0x0F
            if opcode >= CLOSE:
                if len(data) < offset + size:
                    self.buf = data
                    return False
                self._control(opcode, data[offset : offset + size])
                data = data[offset + size :]
                continue
            self.final = bool(data[0] & 0x80)
            if opcode:
                self.head, self.body = data[offset : offset + HEAD_BYTES], b""
            if self.keep:
                self.body += data[offset : offset + size]
            if len(data) - offset < size:
                self.left = size - (len(data) - offset)
                return False
            data = data[offset + size :]
            if self.final:
                self.buf = data
                return True
        return False

    def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == CLOSE:
            raise ConnectionError(f"server closed: {payload[:80]!r}")
        if opcode == PING:
            self.send(client_frame(payload, PONG))

    def _response(self, data: bytes) -> bool:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self.buf = data
            return False
        at = data[:end].lower().find(b"content-length:")
        if at < 0:
            raise ConnectionError(f"no content-length in {data[:80]!r}")
        size = int(data[at + 15 : end].split(b"\r\n", 1)[0])
        self.head, self.final = data[9:12] + b" " + data[end + 4 : end + HEAD_BYTES], True
        self.body, self.fields = (data[end + 4 :], data[:end]) if self.keep else (b"", b"")
        self.left = size - (len(data) - end - 4)
        return not self.left
