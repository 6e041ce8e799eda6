"""A WebSocket connection of a `VectorEnv`: messages of protocol v2 out, whatever has come in.

It never waits for a reply; who waits on several connections selects on them. What goes over the wire is its dialect's
business, and that may be protocol v1. Knows sockets and frames; must not know what messages mean.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Final

from ...errors import (
    AccessDenied,
    ConnectFailed,
    EnvironmentFactoryError,
    SessionCapacityError,
    SessionError,
    SessionLost,
)
from ...protocol.client_sessions import ClientSession, error_from_frame
from ...protocol.codec import BY_NAME, JSON, Codec
from ...protocol.frames import (
    FrameError,
    FrameReader,
    Opcode,
    WebSocketMessage,
    close_payload,
    masked_binary_frame,
    masked_control_frame,
    masked_text_frame,
)
from ...protocol.json_values import decode
from ..options import ConnectionOptions, MaskKeys, closed_reason, oversize_reason
from ..tcp import connect_failure, open_socket, read_before
from ..url import Address
from ..websocket import Handshake

# vector_dialect: What a connection of a `VectorEnv` speaks: protocol v2, which carries many sessions, or v1, where it
# is one itself.
#
# The fleet asks in the words of v2; a dialect says the same in those of its server, and reads the answers back. So
# nothing else has to know which of them it is. Sans IO: knows messages and payloads, must not know sockets or slots.


_ENDS: Final = (SessionCapacityError, EnvironmentFactoryError, SessionError, SessionLost)
_UNASKED: Final = "the server sent a message that nobody asked for"
_NO_QUEUE: Final = (
    "Each slot takes a session of its own, and a server without protocol v2 has no queue for them: wait_s does not "
    "help. One of openenv 0.10 takes as many as create_app(max_concurrent_envs=...) says, by default 1."
)


class WireFormat(ABC):
    """One way to ask sessions on a connection, and to read what they answer."""

    name: str
    """What is shown of it: the subprotocol, or `v1`."""
    is_binary: bool = False
    """Whether messages are sent in binary frames."""
    is_session: bool = False
    """Whether a connection is one session, that ends with it; otherwise it carries many, that outlive it."""
    is_over: bool = False
    """Whether the connection is of no use any more: its only session has ended."""

    @abstractmethod
    def encode(self, messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
        """Return payloads of frames that say the same as these messages of protocol v2."""

    @abstractmethod
    def decode(self, payload: bytes, *, binary: bool, max_bytes: int) -> dict[str, Any]:
        """Return the message of protocol v2 that says the same as the payload of a frame.

        Raises:
            ValueError: It is no message.
        """


class Multiplexed(WireFormat):
    """Protocol v2, in one of its encodings."""

    def __init__(self, codec: Codec) -> None:
        self.name = codec.name
        self.is_binary = codec.is_binary
        self._codec = codec

    def encode(self, messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
        """Write messages as they are."""
        return [self._codec.encode(message) for message in messages]

    def decode(self, payload: bytes, *, binary: bool, max_bytes: int) -> dict[str, Any]:
        """Read a message as it is."""
        return self._codec.decode(payload, binary=binary, max_bytes=max_bytes)


class SingleSession(WireFormat):
    """Protocol v1: no ids, but every request is answered once and in order, so that ids are told by counting.

    `open` is a request for the state: it begins nothing, and whatever is answered shows that the server has made the
    session, or why not. `close` has no answer; the server hangs up.
    """

    name = "v1"
    is_session = True

    def __init__(self) -> None:
        self._session = token_hex(8)  # for those who tell sessions apart by name; the server gives none
        self._writer = ClientSession()
        self._asked: deque[tuple[str, int]] = deque()
        self._is_open = False

    def encode(self, messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
        """Write what the messages ask for, a frame for each request."""
        payloads = []
        for message in messages:
            if message["type"] == "open":
                self._asked.append(("open", message["id"]))
                payloads.append(self._writer.request("state"))
                continue
            for request in message["requests"]:
                if request["type"] != "close":
                    self._asked.append((request["type"], request["id"]))
                payloads.append(self._writer.request(request["type"], request.get("data")))
        return payloads

    def decode(self, payload: bytes, *, binary: bool, max_bytes: int) -> dict[str, Any]:
        """Read an answer, and say which request it is for.

        A message that nobody asked for ends the session: the next answer might not be that of the next request.
        """
        message = decode(payload)
        if not isinstance(message, dict) or not isinstance(message.get("data"), dict):
            raise ValueError(f"not an OpenEnv frame: {str(message)[:200]}")
        data = message["data"]
        error = error_from_frame(data) if message.get("type") == "error" else None
        self.is_over = isinstance(error, _ENDS)
        if not self._asked and self._is_open:
            self.is_over = True
            reason = _UNASKED if error is None else getattr(error, "reason", None) or str(error)
            return {"type": "event", "event": "detached", "session": self._session, "reason": reason}
        kind, request_id = self._asked.popleft() if self._asked else ("open", 1)
        if kind != "open":
            return {"type": message.get("type"), "id": request_id, "session": self._session, "data": data}
        if self.is_over:
            return {"type": "error", "id": request_id, "data": _advised(data)}
        self._is_open = True
        return {"type": "opened", "id": request_id, "session": self._session}


def _advised(data: dict[str, Any]) -> dict[str, Any]:
    """Add to a refusal for lack of room what helps against it."""
    if data.get("code") != SessionCapacityError.code:
        return data
    return {**data, "message": f"{data.get('message', '')} {_NO_QUEUE}".strip()}


def agreed(chosen: str | None, offered: Sequence[str], *, insists: bool) -> WireFormat:
    """Return the dialect of a connection.

    Args:
        chosen: The subprotocol that the server has chosen, if any.
        offered: Those that it could choose from.
        insists: Whether nothing but protocol v2 will do.

    Raises:
        ConnectFailed: The server has chosen none, and v1 will not do.
    """
    if chosen is not None:
        return Multiplexed(BY_NAME[chosen])
    if insists:
        raise ConnectFailed(
            f"the server does not speak {' or '.join(offered)}. One of openenv 0.10 or before has no protocol v2: "
            "protocol='auto' uses a socket for each session with it"
        )
    if offered and JSON.name not in offered:
        raise ConnectFailed(
            f"the server does not speak {' or '.join(offered)}. codec='json' and codec='auto' work with servers that "
            "have no MessagePack, and with those of openenv 0.10 and before"
        )
    return SingleSession()


_READ_BYTES: Final = 256 * 1024  # replies to a batch are long


class ConnectionBroken(Exception):
    """The connection is gone; its sessions need not be."""


class VectorConnection:
    """A connection, and what is spoken on it.

    Args:
        address: Where the server is.
        options: How to connect.
        subprotocols: What to offer, the preferred one first; a server that takes none of them speaks protocol v1.
    """

    def __init__(self, address: Address, options: ConnectionOptions, subprotocols: Sequence[str]) -> None:
        self.address = address
        self._options = options
        self._subprotocols = subprotocols
        self.dialect: WireFormat | None = None
        self._socket: socket.socket | None = None
        self._reader = FrameReader(options.max_message_bytes, masked=False)
        self._messages: list[dict[str, Any]] = []
        self._keys = MaskKeys()
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._last_heard = 0.0
        self._pinged_at: float | None = None
        self._last_id = 0
        self.bytes_sent = 0
        self.bytes_received = 0

    @property
    def is_open(self) -> bool:
        """Whether the connection can still be used, as far as is known."""
        return self._socket is not None

    @property
    def has_messages(self) -> bool:
        """Whether messages wait to be taken."""
        return bool(self._messages)

    def fileno(self) -> int:
        """Return what to select on."""
        return -1 if self._socket is None else self._socket.fileno()

    def next_id(self) -> int:
        """Return a fresh id for a request that concerns no session."""
        self._last_id += 1
        return self._last_id

    def open(self, limit_s: float | None = None) -> None:
        """Connect and agree on an encoding, within the client's limit or that one.

        Raises:
            ConnectFailed: The server cannot be reached, refuses, or does not speak what it must.
            AccessDenied: It asks for another token.
        """
        timeout_s = self._options.connect_timeout_s
        if limit_s is not None:
            timeout_s = min(timeout_s, limit_s)
        try:
            self._open(timeout_s)
        except AccessDenied:
            raise
        except ConnectionBroken as exc:
            raise connect_failure(self.address, ConnectFailed(str(exc), is_transient=True), timeout_s) from None
        except ConnectFailed as exc:
            raise connect_failure(self.address, exc, timeout_s) from None
        except (OSError, ValueError, FrameError) as exc:
            raise connect_failure(self.address, exc, timeout_s) from exc

    def _open(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        sock = open_socket(self.address, timeout_s)
        try:
            handshake = Handshake(self.address, self._options.headers, self._subprotocols)
            sock.sendall(handshake.request)
            while (rest := handshake.feed(read_before(sock, deadline))) is None:
                pass
            insists = self._options.protocol == "v2"
            self.dialect = agreed(handshake.subprotocol, self._subprotocols, insists=insists)
            sock.settimeout(self._options.message_timeout_s)
        except BaseException:
            sock.close()
            raise
        self._socket = sock
        self._last_heard = time.monotonic()
        if rest:
            try:
                self._take(rest)
            except ConnectionBroken:
                if not self._messages:  # or it says why the server has hung up
                    raise

    def send(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Send messages, all in one write.

        Raises:
            ConnectionBroken: They may or may not have arrived.
        """
        sock, dialect = self._socket, self.dialect
        if sock is None or dialect is None:
            raise ConnectionBroken("connection closed")
        frame = masked_binary_frame if dialect.is_binary else masked_text_frame
        data = b"".join([frame(payload, self._keys.next()) for payload in dialect.encode(messages)])
        try:
            sock.sendall(data)
            self.bytes_sent += len(data)
        except BaseException as exc:
            self._drop()  # half a message may have gone out
            if isinstance(exc, OSError):
                raise ConnectionBroken(f"connection lost: {exc}") from exc
            raise

    def receive(self) -> None:
        """Read once what has come; call it when the socket is readable.

        Raises:
            ConnectionBroken: The connection is gone.
        """
        sock = self._socket
        if sock is None:
            raise ConnectionBroken("connection closed")
        try:
            while True:
                size = sock.recv_into(self._buffer)
                self._take(bytes(self._buffer[:size]))
                if self._socket is None or not (isinstance(sock, ssl.SSLSocket) and sock.pending()):
                    return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except (OSError, FrameError, ValueError) as exc:
            self._drop()
            raise ConnectionBroken(f"connection lost: {exc}") from exc

    def take(self) -> list[dict[str, Any]]:
        """Return the messages that have come."""
        messages, self._messages = self._messages, []
        return messages

    def ping_if_quiet(self) -> None:
        """Ask a server that has been silent for long whether it is still there.

        Raises:
            ConnectionBroken: It did not answer the last time.
        """
        sock = self._socket
        interval, limit, now = self._options.ping_interval_s, self._options.ping_timeout_s, time.monotonic()
        if sock is None or interval is None or now - self._last_heard < interval:
            return
        if self._pinged_at is None or self._pinged_at < self._last_heard:
            self._pinged_at = now
            self._send_control(Opcode.PING, b"")
        elif limit is not None and now - self._pinged_at > limit:
            self._drop()
            raise ConnectionBroken("the server does not answer pings")

    def tend(self) -> None:
        """Answer pings while nobody uses the connection; never blocks.

        Raises:
            ConnectionBroken: The connection is gone.
        """
        sock = self._socket
        if sock is None:
            return
        sock.settimeout(0)
        try:
            self.receive()
            self.ping_if_quiet()
        finally:
            if self._socket is not None:
                sock.settimeout(self._options.message_timeout_s)

    def _take(self, data: bytes) -> None:
        if not data:
            self._drop()
            raise ConnectionBroken("the server closed the connection")
        self._last_heard = time.monotonic()
        self.bytes_received += len(data)
        for message in self._reader.feed(data):
            self._handle(message)

    def _handle(self, message: WebSocketMessage) -> None:
        if message.opcode in (Opcode.TEXT, Opcode.BINARY):
            dialect = self.dialect
            assert dialect is not None
            limit = self._options.max_message_bytes
            binary = message.opcode == Opcode.BINARY
            self._messages.append(dialect.decode(message.payload, binary=binary, max_bytes=limit))
            if dialect.is_over:
                self._drop()
                raise ConnectionBroken("the server ended the session")
        elif message.opcode == Opcode.PING:
            self._send_control(Opcode.PONG, message.payload)
        elif message.opcode == Opcode.CLOSE:
            self._drop()
            raise ConnectionBroken(closed_reason(message.payload))
        elif message.opcode == Opcode.OVERSIZE:
            raise FrameError(1009, oversize_reason(message.size, self._options))

    def _send_control(self, opcode: Opcode, payload: bytes) -> None:
        if self._socket is not None:
            self._socket.sendall(masked_control_frame(opcode, payload, self._keys.next()))

    def _drop(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    def close(self) -> None:
        """Hang up; never raises."""
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.settimeout(1.0)
                self._send_control(Opcode.CLOSE, close_payload(1000))
        self._drop()

    def abandon(self) -> None:
        """Close this process's end without a word; the process that opened it may go on with it."""
        self._drop()
