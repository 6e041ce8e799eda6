"""One WebSocket connection, twice: for an event loop and for blocking code.

Each sends a text message and waits for the next one. Knows sockets and frames; must not know what messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

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

_READ = 65_536


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to connect and how long to wait; times in seconds."""

    connect_timeout_s: float = 10.0
    message_timeout_s: float | None = 60.0
    max_message_bytes: int = 100 * 1024 * 1024
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float | None = 20.0
    headers: Mapping[str, str] = field(default_factory=dict)


class MaskKeys:
    """Random mask keys (RFC 6455, 5.3), fetched from the system many at a time."""

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


def _closed_reason(payload: bytes) -> str:
    code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else 1005
    text = payload[2:].decode("utf-8", "replace")
    return f"the server closed the connection with code {code}" + (f": {text}" if text else "")


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
        self._buffer = memoryview(bytearray(_READ))

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
            sock = self._dial()
        except OSError as exc:
            raise ConnectFailed(f"Failed to connect to {self._address.authority}: {exc}") from exc
        try:
            handshake = Handshake(self._address, self._options.headers)
            sock.sendall(handshake.request)
            while (rest := handshake.feed(self._read_before(sock, deadline))) is None:
                pass
        except BaseException as exc:
            sock.close()
            if isinstance(exc, OSError) and not isinstance(exc, ConnectFailed):
                raise ConnectFailed(f"Failed to connect to {self._address.authority}: {exc}") from exc
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
        data = sock.recv(_READ)
        if not data:
            raise ConnectFailed("the server closed the connection during the handshake")
        return data

    def exchange(self, payload: bytes, timeout_s: float | None) -> bytes:
        """Send a message and wait for the next one.

        Raises:
            RequestTimeout: It did not come in time; the connection is dropped.
            SessionLost: The connection broke.
            Unasked: A message was there already.
        """
        if self._messages:
            raise Unasked(self._messages.popleft())
        sock = self._socket
        if sock is None:
            raise SessionLost(self.lost_reason)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._set_timeout(sock, timeout_s)
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
            self._drop(_closed_reason(message.payload))
        elif message.opcode == Opcode.OVERSIZE:
            raise FrameError(1009, f"a reply of {message.size} bytes is over the limit")

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


_READ_BUFFERS: WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview] = WeakKeyDictionary()


def _read_buffer(loop: asyncio.AbstractEventLoop) -> memoryview:
    """A buffer to read into. Loops that read and deliver in one go share one among their connections."""
    if hasattr(loop, "_proactor"):
        return memoryview(bytearray(_READ))
    buffer = _READ_BUFFERS.get(loop)
    if buffer is None:
        buffer = _READ_BUFFERS[loop] = memoryview(bytearray(_READ))
    return buffer


class LoopConnection(asyncio.BufferedProtocol):
    """A connection on an event loop. One exchange at a time; the caller holds a lock."""

    def __init__(self, address: Address, options: ConnectionOptions) -> None:
        self._address = address
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(options.max_message_bytes, masked=False)
        self._messages: deque[bytes] = deque()
        self._handshake: Handshake | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._lost: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._last_heard = self._loop.time()
        self._pinged_at: float | None = None
        self._keys = MaskKeys()
        self._buffer = _read_buffer(self._loop)

    @property
    def is_open(self) -> bool:
        """Whether the connection can still be used, as far as is known."""
        return self._transport is not None and self._lost is None

    @property
    def lost_reason(self) -> str:
        """Why it is closed."""
        return self._lost or "connection closed"

    def last_words(self) -> bytes | None:
        """Return a message that came before anybody asked, once."""
        return self._messages.popleft() if self._messages else None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that this connection lives on."""
        return self._loop

    async def open(self) -> None:
        """Connect and shake hands.

        Raises:
            ConnectFailed: The server cannot be reached or refuses.
        """
        try:
            await asyncio.wait_for(self._open(), self._options.connect_timeout_s)
        except (OSError, asyncio.TimeoutError) as exc:
            self._drop("not connected")
            if isinstance(exc, ConnectFailed):
                raise
            detail = str(exc) or f"no answer within {self._options.connect_timeout_s} s"
            raise ConnectFailed(f"Failed to connect to {self._address.authority}: {detail}") from exc
        except BaseException:
            self._drop("not connected")
            raise

    async def _open(self) -> None:
        address = self._address
        self._handshake = Handshake(address, self._options.headers)
        context = ssl.create_default_context() if address.secure else None
        hostname = address.host if address.secure else None
        if proxy_for(address) is None:
            await self._loop.create_connection(
                lambda: self, address.host, address.port, ssl=context, server_hostname=hostname
            )
        else:
            # The tunnel is dug in a thread: it is rare, and short.
            blocking = BlockingConnection(address, self._options)
            sock = await self._loop.run_in_executor(None, blocking._dial_plain)
            sock.setblocking(False)
            await self._loop.create_connection(lambda: self, sock=sock, ssl=context, server_hostname=hostname)
        assert self._transport is not None
        self._transport.write(self._handshake.request)
        while self._handshake is not None:
            await self._change()
        self._schedule_ping()

    async def exchange(self, payload: bytes, timeout_s: float | None) -> bytes:
        """Send a message and wait for the next one.

        Raises:
            RequestTimeout: It did not come in time; the connection is dropped.
            SessionLost: The connection broke.
            Unasked: A message was there already.
        """
        if self._messages:
            raise Unasked(self._messages.popleft())
        if self._transport is None or self._lost is not None:
            raise SessionLost(self.lost_reason)
        self._transport.write(masked_text_frame(payload, self._keys.next()))
        if timeout_s is not None:
            self._set_deadline(self._loop.time() + timeout_s)
        try:
            while not self._messages:
                if self._lost is not None:
                    raise SessionLost(self._lost)
                await self._change()
        except TimeoutError:
            self._drop("a request timed out")
            raise RequestTimeout(f"No reply within {timeout_s} s; the episode is lost") from None
        except asyncio.CancelledError:  # the next reply would belong to this request
            self._drop("a request was cancelled")
            raise
        finally:
            self._deadline = None
        return self._messages.popleft()

    def _change(self) -> asyncio.Future[None]:
        """Return a future for the next thing that happens on the connection."""
        waiter = self._waiter = self._loop.create_future()
        return waiter

    def _set_deadline(self, deadline: float) -> None:
        """Note until when a reply may come. One timer serves many requests: it is moved only when it fires."""
        self._deadline = deadline
        timer = self._deadline_timer
        if timer is None or timer.when() > deadline:
            if timer is not None:
                timer.cancel()
            self._deadline_timer = self._loop.call_at(deadline, self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        self._deadline_timer = None
        if self._deadline is None:
            return
        if self._loop.time() < self._deadline:
            self._set_deadline(self._deadline)
        else:
            self._wake(TimeoutError())

    def _wake(self, error: BaseException | None = None) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def _schedule_ping(self) -> None:
        interval = self._options.ping_interval_s
        if interval is not None and self.is_open:
            self._timer = self._loop.call_later(interval, self._ping_if_quiet)

    def _ping_if_quiet(self) -> None:
        interval, limit, now = self._options.ping_interval_s, self._options.ping_timeout_s, self._loop.time()
        unanswered = self._pinged_at is not None and self._pinged_at > self._last_heard
        if unanswered and limit is not None and self._pinged_at is not None and now - self._pinged_at >= limit:
            self._drop("the server does not answer pings")
            return
        if self._transport is not None and interval is not None and now - self._last_heard >= interval / 2:
            if not unanswered:
                self._pinged_at = now
            self._transport.write(masked_control_frame(Opcode.PING, b"", self._keys.next()))
        self._schedule_ping()

    def _drop(self, reason: str) -> None:
        self._lost = self._lost or reason
        for timer in (self._timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._wake()

    async def close(self, farewell: bytes | None = None) -> None:
        """Say goodbye and hang up; never raises."""
        transport, self._transport = self._transport, None
        if transport is not None and not transport.is_closing():
            if farewell is not None:
                transport.write(masked_text_frame(farewell, self._keys.next()))
            transport.write(masked_control_frame(Opcode.CLOSE, close_payload(1000), self._keys.next()))
            transport.close()
        self._drop("closed by the client")

    # -- asyncio.BufferedProtocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where to read to."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read."""
        self._take(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool:
        """A server that has shut its side is gone."""
        return False

    def _take(self, data: bytes) -> None:
        """Finish the handshake, or cut the bytes into messages."""
        self._last_heard = self._loop.time()
        try:
            if self._handshake is not None:
                rest = self._handshake.feed(data)
                if rest is None:
                    return
                self._handshake = None
                self._wake()
                if not rest:
                    return
                data = rest
            for message in self._reader.feed(data):
                self._handle(message)
        except ConnectFailed as exc:
            self._wake(exc)
        except FrameError as exc:
            self._drop(f"connection lost: {exc}")

    def _handle(self, message: Message) -> None:
        if message.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._messages.append(message.payload)
            self._wake()
        elif message.opcode == Opcode.PING and self._transport is not None:
            self._transport.write(masked_control_frame(Opcode.PONG, message.payload, self._keys.next()))
        elif message.opcode == Opcode.CLOSE:
            self._drop(_closed_reason(message.payload))
        elif message.opcode == Opcode.OVERSIZE:
            raise FrameError(1009, f"a reply of {message.size} bytes is over the limit")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits."""
        if self._handshake is not None:
            self._wake(ConnectFailed("the server closed the connection during the handshake"))
        self._drop("the server closed the connection" if exc is None else f"connection lost: {exc}")
