"""A server that costs next to nothing: blocking sockets that answer every text frame with the same observation.

It lets a client's own cost be seen. It knows the upgrade and frame lengths; it never looks into a message except to
find `close`. Standard library only, loopback only.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import socket
import socketserver

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
OBSERVATION = {"observation": {"metadata": {}, "echoed": "x" * 100}, "reward": 1.0, "done": False}
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n" + b'{"status":"healthy"}'
MISSING = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
CLOSE = b"\x88\x02\x03\xe8"


def text_frame(payload: bytes) -> bytes:
    """Build an unmasked text frame of 126 to 65,535 bytes."""
    return b"\x81\x7e" + len(payload).to_bytes(2, "big") + payload


REPLY = text_frame(json.dumps({"type": "observation", "data": OBSERVATION}, separators=(",", ":")).encode())


def unmask(data: bytes, key: bytes) -> bytes:
    """Undo the client's mask."""
    return bytes(byte ^ key[i % 4] for i, byte in enumerate(data))


class StubHandler(socketserver.BaseRequestHandler):
    """Serve one connection: requests for /health, then frames once upgraded."""

    request: socket.socket

    def handle(self) -> None:
        """Answer plain requests until one asks for an upgrade."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = b""
        while True:
            while b"\r\n\r\n" not in buffer:
                data = self.request.recv(65536)
                if not data:
                    return
                buffer += data
            head, _, buffer = buffer.partition(b"\r\n\r\n")
            fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
            key = {name.lower(): value for name, value in fields.items()}.get(b"sec-websocket-key")
            if key:
                accept = base64.b64encode(hashlib.sha1(key.strip() + GUID).digest())
                self.request.sendall(
                    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                    b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
                )
                self.frames(buffer)
                return
            self.request.sendall(HEALTHY if b" /health " in head else MISSING)

    def frames(self, buffer: bytes) -> None:
        """Answer each text frame with the prepared reply until either side closes."""
        while True:
            size = self.frame_size(buffer)
            while len(buffer) < size:
                data = self.request.recv(65536)
                if not data:
                    return
                buffer += data
                size = self.frame_size(buffer)
            frame, buffer = buffer[:size], buffer[size:]
            opcode = frame[0] & 0x0F
            if opcode == 8:
                self.request.sendall(CLOSE)
                return
            # a close request is short; longer messages need not be unmasked
            if opcode == 1 and size < 32 and b'"close"' in unmask(frame[6:], frame[2:6]):
                self.request.sendall(CLOSE)
                return
            if opcode in (1, 2):
                self.request.sendall(REPLY)
            elif opcode == 9:
                body = unmask(frame[6:], frame[2:6])
                self.request.sendall(bytes((0x8A, len(body))) + body)

    @staticmethod
    def frame_size(buffer: bytes) -> int:
        """Return the size of the first masked frame, or more than is there while that is unknown."""
        if len(buffer) < 10:
            length = buffer[1] & 0x7F if len(buffer) > 1 else 127
            return 6 + length if length < 126 else 10
        length = buffer[1] & 0x7F
        if length < 126:
            return 6 + length
        if length == 126:
            return 8 + int.from_bytes(buffer[2:4], "big")
        return 14 + int.from_bytes(buffer[2:10], "big")


class StubServer(socketserver.ThreadingTCPServer):
    """One blocking thread per connection: the shortest way from a request to its reply."""

    allow_reuse_address = True
    daemon_threads = True


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    with StubServer(("127.0.0.1", parser.parse_args().port), StubHandler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
