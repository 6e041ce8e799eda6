"""A WebSocket connection for blocking code: send a text message, wait for the next one.

Knows sockets and frames; must not know what messages mean.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections import deque

from ..errors import ConnectFailed, RequestTimeout, SessionLost
from ..protocol.frames import (
    FrameError,
    FrameReader,
    Message,
    Opcode,
    close_payload,
    masked_control_frame,
    masked_text_frame,
)
from .flows import Unasked
from .handshake import Handshake
from .proxy import proxy_for, tunnel_request
from .url import Address
from .wire import READ_BYTES, ConnectionOptions, MaskKeys, closed_reason, oversize_reason


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

    def open(self) -> None:
        """Connect and shake hands.

        Raises:
            ConnectFailed: The server cannot be reached or refuses.
        """
        deadline = time.monotonic() + self._options.connect_timeout_s
        try:
            self._open(deadline)
        except ConnectFailed as exc:
            raise ConnectFailed(f"Failed to connect to {self._address.url}: {exc}") from None
        except (OSError, UnicodeError) as exc:
            raise ConnectFailed(f"Failed to connect to {self._address.url}: {exc}") from exc

    def _open(self, deadline: float) -> None:
        sock = self._dial()
        try:
            handshake = Handshake(self._address, self._options.headers)
            sock.sendall(handshake.request)
            while (rest := handshake.feed(self._read_before(sock, deadline))) is None:
                pass
        except BaseException:
            sock.close()
            raise
        self._socket = sock
        if rest:
            self._take(rest)

    def _dial(self) -> socket.socket:
        sock = self._dial_plain()
        if not self._address.secure:
            return sock
        try:
            return ssl.create_default_context().wrap_socket(sock, server_hostname=self._address.host)
        except BaseException:
            sock.close()
            raise

    def _dial_plain(self) -> socket.socket:
        """Connect, through a proxy where one is asked for; encryption is the caller's."""
        address, timeout = self._address, self._options.connect_timeout_s
        proxy = proxy_for(address)
        place = (address.host, address.port) if proxy is None else (proxy.host, proxy.port)
        sock = socket.create_connection(place, timeout=timeout)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if proxy is not None:
                sock.sendall(tunnel_request(address, proxy))
                answer = b""
                while b"\r\n\r\n" not in answer:
                    answer += self._read_before(sock, time.monotonic() + timeout)
                if b" 200" not in answer.split(b"\r\n", 1)[0]:
                    raise ConnectFailed(f"the proxy {proxy.host}:{proxy.port} refused: {answer[:100]!r}")
        except BaseException:
            sock.close()
            raise
        return sock

    @staticmethod
    def _read_before(sock: socket.socket, deadline: float) -> bytes:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        data = sock.recv(READ_BYTES)
        if not data:
            raise ConnectFailed("the server closed the connection during the handshake")
        return data

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
            self._set_timeout(sock, timeout_s)
            if payload is not None:
                sock.sendall(masked_text_frame(payload, self._keys.next()))
            while not self._messages:
                self._take(self._read(sock))
                if self._messages:
                    break
                if self._socket is None:
                    raise SessionLost(self.lost_reason)
                if deadline is not None:
                    self._set_timeout(sock, max(0.001, deadline - time.monotonic()))
        except TimeoutError:
            self._drop("a request timed out")
            raise RequestTimeout(f"No reply within {timeout_s} s; the episode is lost") from None
        except SessionLost:
            raise
        except (OSError, FrameError) as exc:
            self._drop(f"connection lost: {exc}")
            raise SessionLost(self.lost_reason) from exc
        except BaseException:  # an interrupt between request and reply: the next reply would be a stranger's
            self._drop("a request was interrupted")
            raise
        return self._messages.popleft()

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

    def _handle(self, message: Message) -> None:
        if message.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._messages.append(message.payload)
        elif message.opcode == Opcode.PING and self._socket is not None:
            self._socket.sendall(masked_control_frame(Opcode.PONG, message.payload, self._keys.next()))
        elif message.opcode == Opcode.CLOSE:
            self._drop(closed_reason(message.payload))
        elif message.opcode == Opcode.OVERSIZE:
            raise FrameError(1009, oversize_reason(message.size, self._options))

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
                if farewell is not None:
                    sock.sendall(masked_text_frame(farewell, self._keys.next()))
                sock.sendall(masked_control_frame(Opcode.CLOSE, close_payload(1000), self._keys.next()))
        self._drop("closed by the client")
