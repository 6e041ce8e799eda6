"""One WebSocket connection of a `VectorEnv`: messages of protocol v2 in and out, over either protocol.

A codec writes the messages as v2, and a connection carries many sessions. `V1Format` writes them as v1, and a
connection is one session. The rest of this package need not know which one is used. Must not know slots.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Iterable, Mapping
from secrets import token_hex
from typing import Any, Final

from openenv.errors import ConnectFailed, EnvironmentFactoryError, SessionCapacityError, SessionError, SessionLost
from openenv.protocol.client_sessions import ClientSession, error_from_frame
from openenv.protocol.codec import BY_NAME, JSON, Codec
from openenv.protocol.frames import Opcode
from openenv.protocol.json_values import decode

from ..network import Address, ConnectionOptions
from ..websocket import BlockingConnection

_READ_BYTES: Final = 256 * 1024  # replies to a batch are long
_SESSION_ENDS: Final = (SessionCapacityError, EnvironmentFactoryError, SessionError, SessionLost)
_UNEXPECTED: Final = "the server sent an unexpected message"
_NO_QUEUE: Final = (
    "Each slot takes a session of its own, and a server without protocol v2 has no queue for them: wait_s does not "
    "help. One of openenv 0.10 takes as many as create_app(max_concurrent_envs=...) says, by default 1."
)


class V1Format:
    """Protocol v1 with the interface of a codec: writes messages of v2 as v1, and reads the answers back as v2.

    A connection is one session, which ends with it. v1 has no ids, but the server answers each request once and in
    order, so they are counted. `open` is sent as a request for the state: it changes nothing, and any answer shows that
    the server has made the session, or why not. `close` has no answer; the server hangs up. Example:

        v2 message                                     v1 frame sent            v1 frame received -> v2 message
        {"type": "open", "id": 1}                      {"type": "state"}        {"type": "state"} -> opened, id 1
        {"type": "batch", "requests": [step, id 2]}    {"type": "step", ...}    observation       -> observation, id 2
    """

    name = "v1"
    is_binary = False

    def __init__(self) -> None:
        self._session = token_hex(8)  # the pool finds slots by session; the server gives its session no name
        self._writer = ClientSession()
        self._unanswered: deque[tuple[str, int]] = deque()
        self._is_open = False
        # Whether the connection is of no use any more: its only session has ended.
        self.is_over = False

    def encode(self, message: Mapping[str, Any]) -> bytes:
        """Write a message's request: an `open`, or the only request of a batch."""
        if message["type"] == "open":
            self._unanswered.append(("open", message["id"]))
            return self._writer.request("state")
        (request,) = message["requests"]
        if request["type"] != "close":
            self._unanswered.append((request["type"], request["id"]))
        return self._writer.request(request["type"], request.get("data"))

    def decode(self, payload: bytes, *, binary: bool, max_bytes: int) -> dict[str, Any]:
        """Read an answer and add the id of its request.

        An unexpected message ends the session, because the next answer might belong to an earlier request.

        Raises:
            ValueError: The payload is not a valid message.
        """
        message = decode(payload)
        if not isinstance(message, dict) or not isinstance(message.get("data"), dict):
            raise ValueError(f"not an OpenEnv frame: {str(message)[:200]}")
        data = message["data"]
        error = error_from_frame(data) if message.get("type") == "error" else None
        self.is_over = isinstance(error, _SESSION_ENDS)
        if not self._unanswered and self._is_open:
            self.is_over = True
            reason = _UNEXPECTED if error is None else getattr(error, "reason", None) or str(error)
            return {"type": "event", "event": "detached", "session": self._session, "reason": reason}
        # A server that is full says so before it is asked: that answers the `open`, which is the first request.
        kind, request_id = self._unanswered.popleft() if self._unanswered else ("open", 1)
        if kind != "open":
            return {"type": message.get("type"), "id": request_id, "session": self._session, "data": data}
        if self.is_over:
            if data.get("code") == SessionCapacityError.code:
                data = {**data, "message": f"{data.get('message', '')} {_NO_QUEUE}".strip()}
            return {"type": "error", "id": request_id, "data": data}
        self._is_open = True
        # No token: the session cannot be resumed.
        return {"type": "opened", "id": request_id, "session": self._session, "token": "", "last_id": 0}


class VectorConnection(BlockingConnection):
    """A blocking connection that never waits for a reply: the pool selects on several of them.

    A broken connection closes itself, as `is_open` and `lost_reason` show; `take` still returns earlier messages.
    """

    def __init__(self, address: Address, options: ConnectionOptions) -> None:
        super().__init__(address, options, read_bytes=_READ_BYTES)
        self.format: Codec | V1Format | None = None
        self._decoded: list[dict[str, Any]] = []
        self._last_id = 0
        self.bytes_sent = 0
        self.bytes_received = 0

    @property
    def has_messages(self) -> bool:
        """Whether messages wait to be taken."""
        return bool(self._decoded)

    def fileno(self) -> int:
        """Return the socket's file descriptor, for `select`."""
        return -1 if self._socket is None else self._socket.fileno()

    def next_id(self) -> int:
        """Return a new id for a request that concerns no session."""
        self._last_id += 1
        return self._last_id

    def _open(self, timeout_s: float) -> None:
        try:
            super()._open(timeout_s)
        except ValueError as exc:
            raise ConnectFailed(str(exc)) from exc
        self.format = self._negotiated_format()
        self._decode()
        if not self.is_open and not self.has_messages:  # a message would say why the server has hung up
            raise ConnectFailed(self.lost_reason, is_transient=True)

    def _negotiated_format(self) -> Codec | V1Format:
        """Return the server's codec, or v1 if the server chose none and the options allow v1."""
        chosen, offered = self.websocket.subprotocol, self._options.subprotocols
        if chosen is not None:
            return BY_NAME[chosen]
        if self._options.protocol == "v2":
            raise ConnectFailed(
                f"the server does not speak {' or '.join(offered)}. One of openenv 0.10 or before has no protocol v2: "
                "protocol='auto' uses a socket for each session with it"
            )
        if offered and JSON.name not in offered:
            raise ConnectFailed(
                f"the server does not speak {' or '.join(offered)}. codec='json' and codec='auto' work with servers "
                "that have no MessagePack, and with those of openenv 0.10 and before"
            )
        return V1Format()

    def _read(self, sock: socket.socket) -> int:
        size = super()._read(sock)
        self.bytes_received += size
        self._decode()
        return size

    def _decode(self) -> None:
        """Decode received messages. At once, not in `take`: an unexpected v1 message ends the connection."""
        wire_format, messages = self.format, self.websocket.messages
        if wire_format is None:
            return
        limit = self._options.max_message_bytes
        while messages:
            message = messages.popleft()
            binary = message.opcode == Opcode.BINARY
            try:
                self._decoded.append(wire_format.decode(message.payload, binary=binary, max_bytes=limit))
            except ValueError as exc:
                messages.clear()
                self.drop(f"connection lost: {exc}")
            if isinstance(wire_format, V1Format) and wire_format.is_over:
                self.drop("the server ended the session")

    def send(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Send messages in one write. If the connection breaks, they may or may not have arrived."""
        sock, wire_format = self._socket, self.format
        if sock is None or wire_format is None:
            return
        frame = self.websocket.binary if wire_format.is_binary else self.websocket.text
        data = b"".join([frame(wire_format.encode(message)) for message in messages])
        try:
            self._set_timeout(sock, self._options.message_timeout_s)
            sock.sendall(data)
            self.bytes_sent += len(data)
        except BaseException as exc:
            self.drop(f"connection lost: {exc}")  # half a message may have gone out
            if not isinstance(exc, OSError):
                raise

    def receive(self) -> None:
        """Read the received bytes once; call it when the socket is readable."""
        sock = self._socket
        if sock is None:
            return
        try:
            self._read(sock)
            # TLS reads whole records: bytes that are already decrypted do not make the socket readable.
            while self._socket is not None and isinstance(sock, ssl.SSLSocket) and sock.pending():
                self._read(sock)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError as exc:
            self.drop(f"connection lost: {exc}")

    def decoded(self, reply: bytes) -> dict[str, Any]:
        """Read a reply inside another message.

        Raises:
            ValueError: It is not a valid message.
        """
        assert self.format is not None
        return self.format.decode(reply, binary=True, max_bytes=self._options.max_message_bytes)

    def take(self) -> list[dict[str, Any]]:
        """Return the messages that have come."""
        decoded, self._decoded = self._decoded, []
        return decoded

    def check(self) -> None:
        """Ping a server after a long silence; drop the connection if the last ping was not answered."""
        if self._socket is not None:
            try:
                self._check(self._socket)
            except OSError as exc:
                self.drop(f"connection lost: {exc}")
