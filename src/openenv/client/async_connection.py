"""A WebSocket connection on an event loop: send a text message, wait for the next one.

Knows transports and frames; must not know what messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from weakref import WeakKeyDictionary

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
from .tcp import connect_failure, open_plain_socket, proxy_for
from .url import Address
from .websocket import Handshake

_READ_BUFFERS: WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview] = WeakKeyDictionary()


def _read_buffer(loop: asyncio.AbstractEventLoop) -> memoryview:
    """A buffer to read into. Loops that read and deliver in one go share one among their connections."""
    if hasattr(loop, "_proactor"):
        return memoryview(bytearray(READ_BYTES))
    buffer = _READ_BUFFERS.get(loop)
    if buffer is None:
        buffer = _READ_BUFFERS[loop] = memoryview(bytearray(READ_BYTES))
    return buffer


class AsyncConnection(asyncio.BufferedProtocol):
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
        self._will: bytes | None = None
        self.subprotocol: str | None = None
        self.is_hopeless = False

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

    def leave_will(self, payload: bytes | None) -> None:
        """Say what the server is told when we hang up, also when nobody finds the time to."""
        self._will = payload

    async def open(self, limit_s: float | None = None) -> None:
        """Connect and shake hands, within the client's limit or that one.

        Raises:
            ConnectFailed: The server cannot be reached or refuses.
            AccessDenied: It asks for another token.
        """
        timeout_s = self._options.connect_timeout_s
        if limit_s is not None:
            timeout_s = min(timeout_s, limit_s)
        try:
            await asyncio.wait_for(self._open(timeout_s), timeout_s)
        except AccessDenied:
            self._drop("not connected")
            raise
        except ConnectFailed as exc:
            self._drop("not connected")
            raise connect_failure(self._address, exc, timeout_s) from None
        except (OSError, UnicodeError, asyncio.TimeoutError) as exc:
            self._drop("not connected")
            raise connect_failure(self._address, exc, timeout_s) from exc
        except BaseException:
            self._drop("not connected")
            raise

    async def _open(self, timeout_s: float) -> None:
        address = self._address
        handshake = self._handshake = Handshake(address, self._options.headers, self._options.subprotocols)
        context = ssl.create_default_context() if address.secure else None
        hostname = address.host if address.secure else None
        if proxy_for(address) is None:
            await self._loop.create_connection(
                lambda: self, address.host, address.port, ssl=context, server_hostname=hostname
            )
        else:
            # The tunnel is dug in a thread: it is rare, and short.
            sock = await self._loop.run_in_executor(None, open_plain_socket, address, timeout_s)
            sock.setblocking(False)
            await self._loop.create_connection(lambda: self, sock=sock, ssl=context, server_hostname=hostname)
        assert self._transport is not None
        self._transport.write(handshake.request)
        while self._handshake is not None:
            await self._change()
        self.subprotocol = handshake.subprotocol
        self._schedule_ping()

    async def exchange(self, payload: bytes | None, timeout_s: float | None) -> bytes:
        """Send a message, unless it is None, and wait for the next one.

        Raises:
            RequestTimeout: It did not come in time; the connection is dropped.
            SessionLost: The connection broke.
            Unasked: A message was there already.
        """
        if self._messages:
            return self._early(payload)
        if self._transport is None or self._lost is not None:
            raise SessionLost(self.lost_reason)
        if payload is not None:
            self._transport.write(masked_text_frame(payload, self._keys.next()))
        if timeout_s is not None:
            self._set_deadline(self._loop.time() + timeout_s)
        try:
            while not self._messages:
                if self._lost is not None:
                    raise SessionLost(self._lost)
                await self._change()
        except TimeoutError:
            self._give_up("a request timed out")
            raise RequestTimeout(f"No reply within {timeout_s} s; the episode is lost") from None
        except asyncio.CancelledError:  # the next reply would belong to this request
            self._give_up("a request was cancelled")
            raise
        finally:
            self._deadline = None
        return self._messages.popleft()

    def _early(self, payload: bytes | None) -> bytes:
        """Return a message that was there already, where it is more of what was asked for."""
        message = self._messages.popleft()
        if payload is not None:
            raise Unasked(message)
        return message

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

    def abandon(self, reason: str) -> None:
        """Hang up without a word, from the loop's own thread."""
        self._drop(reason)

    def _drop(self, reason: str) -> None:
        self._lost = self._lost or reason
        for timer in (self._timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._wake()

    def _give_up(self, reason: str) -> None:
        """Drop the connection, unless there is still something to say on it; `close` does that."""
        if self._will is None:
            self._drop(reason)

    def let_go(self, reason: str, farewell: bytes | None = None) -> None:
        """Say goodbye and hang up, from the loop's own thread; never raises."""
        transport, self._transport = self._transport, None
        if transport is not None and not transport.is_closing() and not self._loop.is_closed():
            will, self._will = self._will, None
            for text in (farewell, will):
                if text is not None:
                    transport.write(masked_text_frame(text, self._keys.next()))
            transport.write(masked_control_frame(Opcode.CLOSE, close_payload(1000), self._keys.next()))
            transport.close()
        self._drop(reason)

    async def close(self, farewell: bytes | None = None) -> None:
        """Say goodbye and hang up; never raises."""
        self.let_go("closed by the client", farewell)

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
        except (AccessDenied, ConnectFailed) as exc:
            self._wake(exc)
        except FrameError as exc:
            self._drop(f"connection lost: {exc}")

    def _handle(self, message: WebSocketMessage) -> None:
        if message.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._messages.append(message.payload)
            self._wake()
        elif message.opcode == Opcode.PING and self._transport is not None:
            self._transport.write(masked_control_frame(Opcode.PONG, message.payload, self._keys.next()))
        elif message.opcode == Opcode.CLOSE:
            self._drop(closed_reason(message.payload))
        elif message.opcode == Opcode.OVERSIZE:
            self.is_hopeless = True  # it would be as long the next time
            raise FrameError(1009, oversize_reason(message.size, self._options))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits."""
        if self._handshake is not None:
            self._wake(ConnectFailed("the server closed the connection during the handshake", is_transient=True))
        self._drop("the server closed the connection" if exc is None else f"connection lost: {exc}")
