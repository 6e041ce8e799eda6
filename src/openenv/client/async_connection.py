"""A WebSocket connection on an event loop.

The protocol itself is `websocket.WebSocket`. Knows transports; must not know what messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from weakref import WeakKeyDictionary

from ..errors import AccessDenied, ConnectFailed, RequestTimeout, SessionLost
from .flows import UnexpectedMessage
from .options import ConnectionOptions
from .tcp import READ_BYTES, connect_failure, open_plain_socket, proxy_for
from .url import Address
from .websocket import WebSocket

_READ_BUFFERS: WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview] = WeakKeyDictionary()


def _read_buffer(loop: asyncio.AbstractEventLoop) -> memoryview:
    """Return a buffer to read into. Loops that read and deliver in one go share one among their connections."""
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
        self.websocket = WebSocket(options, self._loop.time())
        self._is_opening = True
        self._waiter: asyncio.Future[None] | None = None
        self._ping_timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._buffer = _read_buffer(self._loop)

    @property
    def is_open(self) -> bool:
        """Whether the connection can still be used, as far as is known."""
        return self._transport is not None and self.websocket.lost is None

    @property
    def lost_reason(self) -> str:
        """Why it is closed."""
        return self.websocket.lost or "connection closed"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that this connection lives on."""
        return self._loop

    async def open(self, limit_s: float | None = None) -> None:
        """Connect and shake hands, within the options' limit or this one.

        Raises:
            ConnectFailed: The server cannot be reached or refuses.
            AccessDenied: The server requires another token.
        """
        timeout_s = self._options.connect_timeout_s
        if limit_s is not None:
            timeout_s = min(timeout_s, limit_s)
        try:
            await asyncio.wait_for(self._open(timeout_s), timeout_s)
        except BaseException as exc:
            self.drop("not connected")
            if isinstance(exc, ConnectFailed):
                raise connect_failure(self._address, exc, timeout_s) from None
            if isinstance(exc, (OSError, UnicodeError, asyncio.TimeoutError)) and not isinstance(exc, AccessDenied):
                raise connect_failure(self._address, exc, timeout_s) from exc
            raise

    async def _open(self, timeout_s: float) -> None:
        address = self._address
        request = self.websocket.start(address, self._options.subprotocols)
        context = ssl.create_default_context() if address.secure else None
        hostname = address.host if address.secure else None
        if proxy_for(address) is None:
            await self._loop.create_connection(
                lambda: self, address.host, address.port, ssl=context, server_hostname=hostname
            )
        else:
            # The tunnel is opened in a thread: it is rare, and short.
            sock = await self._loop.run_in_executor(None, open_plain_socket, address, timeout_s)
            sock.setblocking(False)
            await self._loop.create_connection(lambda: self, sock=sock, ssl=context, server_hostname=hostname)
        assert self._transport is not None
        self._transport.write(request)
        while self.websocket.is_connecting:
            await self._change()
        self._is_opening = False
        self._schedule_ping()

    # -- one request and its reply --------------------------------------------------------------------------------

    async def exchange(self, payload: bytes | None, timeout_s: float | None) -> bytes:
        """Send a message, unless it is None, and wait for the next one.

        Raises:
            RequestTimeout: No message came in time; the connection is dropped.
            SessionLost: The connection broke.
            UnexpectedMessage: A message was there before this request; nothing was sent.
        """
        websocket = self.websocket
        messages = websocket.messages
        if messages:
            if payload is not None:
                raise UnexpectedMessage(messages.popleft().payload)
            return messages.popleft().payload
        if self._transport is None or websocket.lost is not None:
            raise SessionLost(self.lost_reason)
        if payload is not None:
            self._transport.write(websocket.text(payload))
        if timeout_s is not None:
            self._set_deadline(self._loop.time() + timeout_s)
        try:
            while not messages:
                if websocket.lost is not None:
                    raise SessionLost(websocket.lost)
                await self._change()
        except TimeoutError:
            self._give_up("a request timed out")
            raise RequestTimeout(f"No reply within {timeout_s} s; the episode is lost") from None
        except asyncio.CancelledError:  # the next reply would belong to this request
            self._give_up("a request was cancelled")
            raise
        finally:
            self._deadline = None
        return messages.popleft().payload

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

    # -- between requests -----------------------------------------------------------------------------------------

    def _schedule_ping(self) -> None:
        interval = self._options.ping_interval_s
        if interval is not None and self.is_open:
            self._ping_timer = self._loop.call_later(interval, self._check, interval)

    def _check(self, interval: float) -> None:
        # Half of the interval: a server that was silent since shortly after the last check is not left for another one.
        ping = self.websocket.check(self._loop.time(), interval / 2)
        if self.websocket.lost is not None:
            self.drop(self.websocket.lost)
            return
        if ping and self._transport is not None:
            self._transport.write(ping)
        self._schedule_ping()

    # -- hanging up -----------------------------------------------------------------------------------------------

    async def close(self, last_message: bytes | None = None) -> None:
        """Send a last message, the close message and a close frame; never raises."""
        self.release("closed by the client", last_message)

    def release(self, reason: str, last_message: bytes | None = None) -> None:
        """Hang up, from the loop's own thread; never raises."""
        transport, self._transport = self._transport, None
        if transport is not None and not transport.is_closing() and not self._loop.is_closed():
            transport.write(self.websocket.goodbye(last_message))
            transport.close()
        self.drop(reason)

    def _give_up(self, reason: str) -> None:
        """Drop the connection, unless there is a close message to send, which `close` does."""
        if self.websocket.close_message is None:
            self.drop(reason)

    def drop(self, reason: str) -> None:
        """Close the connection without a message, from the loop's own thread."""
        self.websocket.lose(reason)
        for timer in (self._ping_timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._wake()

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
        """Return where to read to."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take in what was read."""
        websocket = self.websocket
        try:
            replies = websocket.feed(bytes(self._buffer[:nbytes]), self._loop.time())
        except (AccessDenied, ConnectFailed) as exc:
            self._wake(exc)
            return
        if replies and self._transport is not None:
            self._transport.write(replies)
        if websocket.lost is not None:
            self.drop(websocket.lost)
        elif websocket.messages or self._is_opening:  # not for each piece of a long message
            self._wake()

    def eof_received(self) -> bool:
        """Close the transport: a server that has shut its side is gone."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake the request or the handshake that waits."""
        if self.websocket.is_connecting:
            self._wake(ConnectFailed("the server closed the connection during the handshake", is_transient=True))
        self.drop("the server closed the connection" if exc is None else f"connection lost: {exc}")
