"""The client's side of a WebSocket (RFC 6455), sans IO: handshake, frames, pings, close message.

`AsyncConnection` and `BlockingConnection` move its bytes. Must not know sockets, loops, or what messages mean.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import AccessDenied, ConnectFailed, Forbidden
from ..protocol.frames import (
    FrameError,
    FrameReader,
    Opcode,
    WebSocketMessage,
    close_payload,
    masked_control_frame,
    masked_frame,
)
from ..protocol.json_values import decode
from .options import ConnectionOptions
from .url import Address

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_HEAD_LIMIT = 65_536
_TRANSIENT = frozenset({"502", "503", "504"})  # what proxies answer for a server that is still starting
_NOT_LOADED = "NOT_LOADED"  # the server runs, but its environment does not import: waiting does not help


class Handshake:
    """The opening handshake (section 4.1): writes the request and checks the response.

    Args:
        address: Where the server is.
        headers: Further headers.
        subprotocols: What to offer, the preferred one first; `subprotocol` is the server's choice.
    """

    def __init__(
        self, address: Address, headers: Mapping[str, str] | None = None, subprotocols: Sequence[str] = ()
    ) -> None:
        self.subprotocol: str | None = None
        self._subprotocols = subprotocols
        self._shows_token = any(name.lower() == "authorization" for name in headers or {})
        self._key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            f"GET {address.target} HTTP/1.1",
            f"Host: {address.authority}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {self._key}",
            "Sec-WebSocket-Version: 13",
        ]
        if subprotocols:
            lines.append(f"Sec-WebSocket-Protocol: {', '.join(subprotocols)}")
        for name, value in (headers or {}).items():
            if any(char in name + value for char in "\r\n"):
                raise ValueError(f"header {name!r} contains a line break")
            lines.append(f"{name}: {value}")
        self.request = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        self._head = bytearray()

    def feed(self, data: bytes) -> bytes | None:
        """Take in bytes of the response; return what follows its head once that is complete, else None.

        Raises:
            ConnectFailed: The server refused, or does not speak WebSocket.
            AccessDenied: The server requires another token.
        """
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > _HEAD_LIMIT:
                raise ConnectFailed("the server's answer has an endless head")
            return None
        head, rest = bytes(self._head[:end]).decode("latin-1"), bytes(self._head[end + 4 :])
        self._check(head, rest)
        return rest

    def _check(self, head: str, rest: bytes) -> None:
        status_line, *lines = head.split("\r\n")
        parts = status_line.split(" ", 2)
        status = parts[1] if len(parts) > 1 else "?"
        if status != "101":
            if (denied := _denied(status, rest, shows_token=self._shows_token)) is not None:
                raise denied
            body = _object(rest)
            detail = body.get("detail") or rest[:200].decode("utf-8", "replace").strip()
            raise ConnectFailed(
                f"the server answered {status_line!r} to the WebSocket handshake. {detail}".strip(),
                is_transient=status in _TRANSIENT and body.get("code") != _NOT_LOADED,
            )
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        expected = base64.b64encode(hashlib.sha1((self._key + _GUID).encode()).digest()).decode()
        if headers.get("sec-websocket-accept") != expected:
            raise ConnectFailed("the server's WebSocket handshake is wrong (Sec-WebSocket-Accept)")
        chosen = headers.get("sec-websocket-protocol")
        if self._subprotocols and chosen is not None and chosen not in self._subprotocols:
            raise ConnectFailed(f"the server chose the subprotocol {chosen!r}, which was not offered")
        self.subprotocol = chosen


def _denied(status: str, body: bytes, *, shows_token: bool) -> AccessDenied | None:
    """Return the error for a refused token and what to do about it; None where access is not the problem.

    A server without the route answers 403 as well, but with an empty body.
    """
    if status not in ("401", "403"):
        return None
    data = _object(body)
    if status == "403" and not data:
        return None
    detail = data.get("detail") or body[:200].decode("utf-8", "replace").strip()
    if isinstance(role := data.get("role"), str):
        return Forbidden(role, f"{detail} Connect with a token of another role: token=, or OPENENV_TOKEN.")
    advice = ""
    if status == "401":
        advice = "Check token= and OPENENV_TOKEN." if shows_token else "Pass token=, or set OPENENV_TOKEN."
    return AccessDenied(f"the server refused the connection with status {status}. {detail} {advice}".strip())


def _object(body: bytes) -> dict[str, Any]:
    try:
        content = decode(body)
    except ValueError:  # cut short, or a proxy's HTML page
        return {}
    return content if isinstance(content, dict) else {}


class WebSocket:
    """One WebSocket connection of a client, sans IO: bytes in; messages, and bytes to send, out.

    Both shells (`AsyncConnection`, `BlockingConnection`) drive it in the same way:

        start() -> CONNECTING --- feed(b"HTTP/1.1 101 ...") ---> OPEN --- close frame, broken framing, lose() ---> LOST
                       |                                           |                                                ^
                       +-- feed() raises ConnectFailed             +------ check(): no pong in time ---------------+

    In LOST, `lost` says why, and `messages` may still hold what arrived before: the server usually says why it hangs
    up. The shell closes its socket as soon as it sees `lost`.

    Args:
        options: Limits and ping times.
        now: The time in seconds, of the clock that `feed` and `check` use.
    """

    __slots__ = (
        "_handshake",
        "_keys",
        "_options",
        "_pinged_at",
        "_reader",
        "close_message",
        "is_fatal",
        "last_heard",
        "lost",
        "messages",
        "subprotocol",
    )

    def __init__(self, options: ConnectionOptions, now: float) -> None:
        self._options = options
        self._handshake: Handshake | None = None
        self._reader = FrameReader(options.max_message_bytes, masked=False)
        self._keys = MaskKeys()
        self._pinged_at: float | None = None
        self.subprotocol: str | None = None
        self.messages: deque[WebSocketMessage] = deque()
        self.last_heard = now
        self.lost: str | None = None
        # Whether a new connection would break in the same way: a reply over the limit is as long the next time.
        self.is_fatal = False
        # Sent when the client hangs up, also where it is garbage collected and has no time to think. A v2 session
        # outlives its connection: without this message it would keep its slot for the whole grace period.
        self.close_message: bytes | None = None

    def start(self, address: Address, subprotocols: Sequence[str]) -> bytes:
        """Begin the handshake and return its request."""
        self._handshake = Handshake(address, self._options.headers, subprotocols)
        return self._handshake.request

    @property
    def is_connecting(self) -> bool:
        """Whether the handshake is not complete yet."""
        return self._handshake is not None

    def lose(self, reason: str) -> None:
        """Record why the connection is of no use any more; the first reason counts."""
        self.lost = self.lost or reason

    def feed(self, data: bytes, now: float) -> bytes:
        """Take in what the server sent (nothing means that it closed the connection); return bytes to send back.

        Raises:
            ConnectFailed: The handshake failed.
            AccessDenied: The server requires another token.
        """
        if not data:
            self.lose("the server closed the connection")
            return b""
        self.last_heard = now
        if self._handshake is not None:
            rest = self._handshake.feed(data)
            if rest is None:
                return b""
            self.subprotocol = self._handshake.subprotocol
            self._handshake = None
            if not rest:
                return b""
            data = rest
        payload = self._reader.whole(data)
        if payload is not None:  # nearly every read is one short message
            self.messages.append(WebSocketMessage(data[0] & 0x0F, payload))
            return b""
        replies = b""
        try:
            for message in self._reader.feed(data):
                opcode = message.opcode
                if opcode == Opcode.TEXT or opcode == Opcode.BINARY:
                    self.messages.append(message)
                elif opcode == Opcode.PING:  # 5.5.3: the pong repeats the ping's payload
                    replies += masked_control_frame(Opcode.PONG, message.payload, self._keys.next())
                elif opcode == Opcode.CLOSE:
                    self.lose(closed_reason(message.payload))
                elif opcode == Opcode.OVERSIZE:
                    self.is_fatal = True
                    limit = self._options.max_message_bytes / (1024 * 1024)
                    self.lose(
                        f"connection lost: a reply of {message.size} bytes is over the limit "
                        f"(max_message_size_mb={limit:g})"
                    )
                    break
        except FrameError as exc:
            self.lose(f"connection lost: {exc}")
        return replies

    def text(self, payload: bytes) -> bytes:
        """Return a text frame."""
        return masked_frame(0x81, payload, self._keys.next())

    def binary(self, payload: bytes) -> bytes:
        """Return a binary frame."""
        return masked_frame(0x82, payload, self._keys.next())

    def check(self, now: float, quiet_s: float) -> bytes:
        """Return a ping to send if the server was silent for that long; lose it if it left the last ping unanswered."""
        if self._pinged_at is not None and self._pinged_at >= self.last_heard:
            limit = self._options.ping_timeout_s
            if limit is not None and now - self._pinged_at >= limit:
                self.lose("the server does not answer pings")
        elif now - self.last_heard >= quiet_s:
            self._pinged_at = now
            return masked_control_frame(Opcode.PING, b"", self._keys.next())
        return b""

    def goodbye(self, last_message: bytes | None = None) -> bytes:
        """Return the frames of a hang-up: a last message, the close message, and the close frame (5.5.1)."""
        texts, self.close_message = (last_message, self.close_message), None
        frames = [self.text(text) for text in texts if text is not None]
        frames.append(masked_control_frame(Opcode.CLOSE, close_payload(1000), self._keys.next()))
        return b"".join(frames)


class MaskKeys:
    """Random mask keys (5.3), fetched from the system many at a time: one system call per frame would be felt."""

    __slots__ = ("_at", "_pool")

    def __init__(self) -> None:
        self._pool = b""
        self._at = 0

    def next(self) -> bytes:
        """Return four random bytes."""
        if self._at >= len(self._pool):
            self._pool = os.urandom(1024)
            self._at = 0
        self._at += 4
        return self._pool[self._at - 4 : self._at]


def closed_reason(payload: bytes) -> str:
    """Say what a close frame means; 1005 stands for a frame without a code (7.1.5)."""
    code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else 1005
    text = payload[2:].decode("utf-8", "replace")
    return f"the server closed the connection with code {code}" + (f": {text}" if text else "")
