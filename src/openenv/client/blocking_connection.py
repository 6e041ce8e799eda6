"""A WebSocket connection on a plain socket, for code without an event loop.

The protocol itself is `websocket.WebSocket`. Knows sockets; must not know what messages mean.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence

from ..errors import AccessDenied, ConnectFailed, RequestTimeout, SessionLost
from .flows import UnexpectedMessage
from .options import ConnectionOptions
from .tcp import READ_BYTES, connect_failure, open_socket, read_before
from .url import Address
from .websocket import WebSocket

_SENT_AT_ONCE = 65_536  # what fits into the system's buffers needs no time to be sent


class BlockingConnection:
    """A connection for one thread at a time; the caller holds a lock.

    Args:
        address: Where the server is.
        options: How to connect.
        subprotocols: What to offer instead of what the options say.
        read_bytes: How much to read at once.
    """

    def __init__(
        self,
        address: Address,
        options: ConnectionOptions,
        subprotocols: Sequence[str] | None = None,
        *,
        read_bytes: int = READ_BYTES,
    ) -> None:
        self.address = address
        self._options = options
        self._subprotocols = options.subprotocols if subprotocols is None else subprotocols
        self.websocket = WebSocket(options, time.monotonic())
        self._socket: socket.socket | None = None
        self._timeout_s: float | None = -1.0
        # How long one read may wait: a v2 connection can be replaced, so it is checked while a request waits.
        self._longest_wait_s: float | None = None
        # Whether the frame that is being sent may be half out. Bytes sent after it would be read as the rest of it.
        self._is_torn = False
        # A buffer of our own: a fresh one for each read costs more than the read.
        self._buffer = memoryview(bytearray(read_bytes))

    @property
    def is_open(self) -> bool:
        """Whether the connection can still be used, as far as is known."""
        return self._socket is not None

    @property
    def lost_reason(self) -> str:
        """Why it is closed."""
        return self.websocket.lost or "connection closed"

    def open(self, limit_s: float | None = None) -> None:
        """Connect and shake hands, within the options' limit or this one.

        Raises:
            ConnectFailed: The server cannot be reached or refuses.
            AccessDenied: The server requires another token.
        """
        timeout_s = self._options.connect_timeout_s
        if limit_s is not None:
            timeout_s = min(timeout_s, limit_s)
        try:
            self._open(timeout_s)
        except AccessDenied:
            raise
        except ConnectFailed as exc:
            raise connect_failure(self.address, exc, timeout_s) from None
        except (OSError, UnicodeError) as exc:
            raise connect_failure(self.address, exc, timeout_s) from exc

    def _open(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._socket = sock = open_socket(self.address, timeout_s)
        try:
            sock.sendall(self.websocket.start(self.address, self._subprotocols))
            while self.websocket.is_connecting:
                self._feed(read_before(sock, deadline))
        except BaseException:
            self.drop("not connected")
            raise
        interval, timeout = self._options.ping_interval_s, self._options.ping_timeout_s
        if self.websocket.subprotocol is not None and interval is not None:
            self._longest_wait_s = interval if timeout is None else min(interval, timeout)

    # -- one request and its reply --------------------------------------------------------------------------------

    def exchange(self, payload: bytes | None, timeout_s: float | None) -> bytes:
        """Send a message, unless it is None, and wait for the next one.

        Raises:
            RequestTimeout: No message came in time; the connection is dropped.
            SessionLost: The connection broke.
            UnexpectedMessage: A message was there before this request; nothing was sent.
        """
        messages = self.websocket.messages
        if messages:
            if payload is not None:
                raise UnexpectedMessage(messages.popleft().payload)
            return messages.popleft().payload
        sock = self._socket
        if sock is None:
            raise SessionLost(self.lost_reason)
        try:
            self._exchange(sock, payload, timeout_s)
            return messages.popleft().payload
        except TimeoutError:
            self._give_up("a request timed out")
            raise RequestTimeout(f"No reply within {timeout_s} s; the episode is lost") from None
        except SessionLost:
            raise
        except OSError as exc:
            self.drop(f"connection lost: {exc}")
            raise SessionLost(self.lost_reason) from exc
        except BaseException:  # an interrupt between request and reply: the next reply would be that of another request
            self._give_up("a request was interrupted")
            raise

    def _exchange(self, sock: socket.socket, payload: bytes | None, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        longest_s = self._longest_wait_s
        wait_s = timeout_s if longest_s is None or (timeout_s is not None and timeout_s < longest_s) else longest_s
        if payload is not None:
            self._set_timeout(sock, wait_s if len(payload) < _SENT_AT_ONCE else timeout_s)
            self._is_torn = True
            sock.sendall(self.websocket.text(payload))
            self._is_torn = False
        while True:
            self._set_timeout(sock, wait_s)
            try:
                self._read(sock)
            except TimeoutError:
                if self.websocket.subprotocol is None or (deadline is not None and time.monotonic() >= deadline):
                    raise
                self._check(sock)
            if self.websocket.messages:
                return
            if self._socket is None:
                raise SessionLost(self.lost_reason)
            if deadline is not None:
                left_s = max(0.001, deadline - time.monotonic())
                wait_s = left_s if longest_s is None else min(left_s, longest_s)

    def _set_timeout(self, sock: socket.socket, timeout_s: float | None) -> None:
        if timeout_s != self._timeout_s:  # saves a system call per request
            sock.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def _read(self, sock: socket.socket) -> None:
        """Read once."""
        self._feed(bytes(self._buffer[: sock.recv_into(self._buffer)]))

    def _feed(self, data: bytes) -> None:
        replies = self.websocket.feed(data, time.monotonic())
        if replies and self._socket is not None:
            self._socket.sendall(replies)
        if self.websocket.lost is not None:
            self.drop(self.websocket.lost)

    # -- between requests -----------------------------------------------------------------------------------------

    def keep_alive(self) -> None:
        """Answer pings and send our own while no request runs; never blocks."""
        sock = self._socket
        if sock is None:
            return
        try:
            self._set_timeout(sock, 0)
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
                self._read(sock)
            self._check(sock)
        except OSError as exc:
            self.drop(f"connection lost: {exc}")

    def _check(self, sock: socket.socket) -> None:
        """Ping a server that has been silent for long; drop one that did not answer."""
        interval = self._options.ping_interval_s
        if self._socket is None or interval is None:
            return
        ping = self.websocket.check(time.monotonic(), interval)
        if ping:
            sock.sendall(ping)
        elif self.websocket.lost is not None:
            self.drop(self.websocket.lost)

    # -- hanging up -----------------------------------------------------------------------------------------------

    def close(self, last_message: bytes | None = None) -> None:
        """Send a last message, the close message and a close frame; never raises."""
        self._say_goodbye(1.0, last_message)
        self.drop("closed by the client")

    def release(self, reason: str) -> None:
        """Hang up for a client that was garbage collected: send the close message if that needs no waiting."""
        if self.websocket.close_message is not None:
            self._say_goodbye(0.0, None)
        self.drop(reason)

    def _say_goodbye(self, timeout_s: float, last_message: bytes | None) -> None:
        sock = self._socket
        if sock is not None and not self._is_torn:
            with contextlib.suppress(OSError):
                sock.settimeout(timeout_s)
                sock.sendall(self.websocket.goodbye(last_message))

    def _give_up(self, reason: str) -> None:
        """Drop the connection, unless there is a close message to send, which `close` does."""
        if self.websocket.close_message is None or self._is_torn:
            self.drop(reason)

    def drop(self, reason: str) -> None:
        """Close this process's end without a message; a process that it was forked from may go on with it."""
        self.websocket.lose(reason)
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()
