"""A WebSocket connection for blocking code: send a text message, wait for the next one.

Knows sockets and frames; must not know what messages mean.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections import deque

from ..errors import AccessDenied, ConnectFailed, RequestTimeout, SessionLost
from ..protocol.frames import (
    FrameError,
    FrameReader,
    Opcode,
    WebSocketMessage,
    close_payload,
    masked_control_frame,
    masked_text_frame,
)
from .flows import Unasked
from .options import READ_BYTES, ConnectionOptions, MaskKeys, closed_reason, oversize_reason
from .tcp import connect_failure, open_socket, read_before
from .url import Address
from .websocket import Handshake

_SENT_AT_ONCE = 65_536  # what fits into the system's buffers needs no time to be sent


class BlockingConnection:
    """A connection for code without an event loop. Not for two threads at once; the caller holds a lock."""

    def __init__(self, address: Address, options: ConnectionOptions) -> None:
        self._address = address
        self._options = options
        self._socket: socket.socket | None = None
        self._reader = FrameReader(options.max_message_bytes, masked=False)
        self._messages: deque[bytes] = deque()
        self._lost: str | None = None
        self._last_heard = time.monotonic()
        self._pinged_at: float | None = None
        self._keys = MaskKeys()
        self._timeout_s: float | None = -1.0
        self._is_torn = False
        self._will: bytes | None = None
        self.subprotocol: str | None = None
        self.is_hopeless = False
        # A buffer of our own: a fresh one for each read costs more than the read.
        self._buffer = memoryview(bytearray(READ_BYTES))

    @property
    def is_open(self) -> bool:
        """Whether the connection can still be used, as far as is known."""
        return self._socket is not None

    @property
    def lost_reason(self) -> str:
        """Why it is closed."""
        return self._lost or "connection closed"

    def last_words(self) -> bytes | None:
        """Return a message that came before anybody asked, once."""
        return self._messages.popleft() if self._messages else None

    def leave_will(self, payload: bytes | None) -> None:
        """Say what the server is told when we hang up, also when nobody finds the time to."""
        self._will = payload

    def open(self, limit_s: float | None = None) -> None:
        """Connect and shake hands, within the client's limit or that one.

        Raises:
            ConnectFailed: The server cannot be reached or refuses.
            AccessDenied: It asks for another token.
        """
        timeout_s = self._options.connect_timeout_s
        if limit_s is not None:
            timeout_s = min(timeout_s, limit_s)
        try:
            self._open(timeout_s)
        except AccessDenied:
            raise
        except ConnectFailed as exc:
            raise connect_failure(self._address, exc, timeout_s) from None
        except (OSError, UnicodeError) as exc:
            raise connect_failure(self._address, exc, timeout_s) from exc

    def _open(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        sock = open_socket(self._address, timeout_s)
        try:
            handshake = Handshake(self._address, self._options.headers, self._options.subprotocols)
            sock.sendall(handshake.request)
            while (rest := handshake.feed(read_before(sock, deadline))) is None:
                pass
        except BaseException:
            sock.close()
            raise
        self._socket = sock
        self.subprotocol = handshake.subprotocol
        if rest:
            self._take(rest)

    def exchange(self, payload: bytes | None, timeout_s: float | None) -> bytes:
        """Send a message, unless it is None, and wait for the next one.

        Raises:
            RequestTimeout: It did not come in time; the connection is dropped.
            SessionLost: The connection broke.
            Unasked: A message was there already.
        """
        if self._messages:
            return self._early(payload)
        sock = self._socket
        if sock is None:
            raise SessionLost(self.lost_reason)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            wait_s = self._longest_wait_s(timeout_s)
            if payload is not None:
                self._is_torn = True
                self._set_timeout(sock, wait_s if len(payload) < _SENT_AT_ONCE else timeout_s)
                sock.sendall(masked_text_frame(payload, self._keys.next()))
                self._is_torn = False
            while True:
                self._set_timeout(sock, wait_s)
                self._receive(sock, deadline)
                if self._messages:
                    break
                if self._socket is None:
                    raise SessionLost(self.lost_reason)
                if deadline is not None:
                    wait_s = self._longest_wait_s(max(0.001, deadline - time.monotonic()))
        except TimeoutError:
            self._give_up("a request timed out")
            raise RequestTimeout(f"No reply within {timeout_s} s; the episode is lost") from None
        except SessionLost:
            raise
        except (OSError, FrameError) as exc:
            self._drop(f"connection lost: {exc}")
            raise SessionLost(self.lost_reason) from exc
        except BaseException:  # an interrupt between request and reply: the next reply would be a stranger's
            self._give_up("a request was interrupted")
            raise
        return self._messages.popleft()

    def _longest_wait_s(self, timeout_s: float | None) -> float | None:
        """How long to wait in one go: where a lost connection can be replaced, it is checked while we wait."""
        options, interval = self._options, self._options.ping_interval_s
        if self.subprotocol is None or interval is None:
            return timeout_s
        if options.ping_timeout_s is not None and options.ping_timeout_s < interval:
            interval = options.ping_timeout_s
        return interval if timeout_s is None or timeout_s > interval else timeout_s

    def _receive(self, sock: socket.socket, deadline: float | None) -> None:
        try:
            data = self._read(sock)
        except TimeoutError:
            if self.subprotocol is None or (deadline is not None and time.monotonic() >= deadline):
                raise
            self._ping_if_quiet(sock)
        else:
            self._take(data)

    def _early(self, payload: bytes | None) -> bytes:
        """Return a message that was there already, where it is more of what was asked for."""
        message = self._messages.popleft()
        if payload is not None:
            raise Unasked(message)
        return message

    def _set_timeout(self, sock: socket.socket, timeout_s: float | None) -> None:
        if timeout_s != self._timeout_s:  # saves a system call per request
            sock.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def _read(self, sock: socket.socket) -> bytes:
        return bytes(self._buffer[: sock.recv_into(self._buffer)])

    def keep_alive(self) -> None:
        """Answer pings and send our own while nobody uses the connection; never blocks."""
        sock = self._socket
        if sock is None:
            return
        try:
            self._set_timeout(sock, 0)
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
                self._take(self._read(sock))
            self._ping_if_quiet(sock)
        except (OSError, FrameError) as exc:
            self._drop(f"connection lost: {exc}")

    def _ping_if_quiet(self, sock: socket.socket) -> None:
        interval, limit, now = self._options.ping_interval_s, self._options.ping_timeout_s, time.monotonic()
        if self._socket is None or interval is None or now - self._last_heard < interval:
            return
        if self._pinged_at is None or self._pinged_at < self._last_heard:
            self._pinged_at = now
            sock.sendall(masked_control_frame(Opcode.PING, b"", self._keys.next()))
        elif limit is not None and now - self._pinged_at > limit:
            self._drop("the server does not answer pings")

    def _take(self, data: bytes) -> None:
        if not data:
            self._drop("the server closed the connection")
            return
        self._last_heard = time.monotonic()
        for message in self._reader.feed(data):
            self._handle(message)

    def _handle(self, message: WebSocketMessage) -> None:
        if message.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._messages.append(message.payload)
        elif message.opcode == Opcode.PING and self._socket is not None:
            self._socket.sendall(masked_control_frame(Opcode.PONG, message.payload, self._keys.next()))
        elif message.opcode == Opcode.CLOSE:
            self._drop(closed_reason(message.payload))
        elif message.opcode == Opcode.OVERSIZE:
            self.is_hopeless = True  # it would be as long the next time
            raise FrameError(1009, oversize_reason(message.size, self._options))

    def _give_up(self, reason: str) -> None:
        """Drop the connection, unless there is still something to say on it; `close` does that."""
        if self._will is None or self._is_torn:
            self._drop(reason)

    def let_go(self, reason: str) -> None:
        """Hang up for a client that nobody has any more: tell the server if that can be done at once."""
        sock = self._socket
        if sock is not None and self._will is not None:
            with contextlib.suppress(OSError):
                sock.settimeout(0)
                self._say_goodbye(sock, None)
        self._drop(reason)

    def abandon(self, reason: str) -> None:
        """Close this process's end of the connection without a word; another process may go on with it."""
        self._drop(reason)

    def _drop(self, reason: str) -> None:
        self._lost = self._lost or reason
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    def close(self, farewell: bytes | None = None) -> None:
        """Say goodbye and hang up; never raises."""
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.settimeout(1.0)
                self._say_goodbye(sock, farewell)
        self._drop("closed by the client")

    def _say_goodbye(self, sock: socket.socket, farewell: bytes | None) -> None:
        if self._is_torn:  # whatever came now would be read as the rest of a message
            return
        will, self._will = self._will, None
        frames = [masked_text_frame(text, self._keys.next()) for text in (farewell, will) if text is not None]
        frames.append(masked_control_frame(Opcode.CLOSE, close_payload(1000), self._keys.next()))
        sock.sendall(b"".join(frames))
