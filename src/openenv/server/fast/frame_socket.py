"""Pings for idle connections, one timer for all: a peer that vanished without a word is found and dropped.

Knows when a connection was last heard of; must not know what it carries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import Any, cast

from ...protocol.frames import FrameError, FrameReader, Opcode, close_payload, control_frame, text_head
from ...runners import current_dispatcher, loop_local
from ..asgi import Receive, Send
from ..sockets import AsgiSocket, Socket, SocketHandler

logger = logging.getLogger(__name__)

INTERVAL_S = 20.0
TIMEOUT_S = 20.0
_LOOK_S = 5.0
_BIG = 8192  # from here on a message is worth a write of its own, and its reader a start on it
_WHOLE_TEXT = 0x81  # first byte of a text message in a single frame
CLOSE_TIMEOUT_S = 2.0


class KeepAlive:
    """Watches the connections of one loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, interval_s: float = INTERVAL_S, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._look_s = min(_LOOK_S, interval_s / 4)
        self.pinged: dict[FrameSocket, float | None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> KeepAlive:
        """Return the loop's own watcher."""
        return loop_local(loop, cls, lambda: cls(loop))

    def add(self, connection: FrameSocket) -> None:
        """Watch a connection."""
        self.pinged[connection] = None
        if self._timer is None:
            self._timer = self._loop.call_later(self._look_s, self._look)

    def discard(self, connection: FrameSocket) -> None:
        """Watch it no more."""
        self.pinged.pop(connection, None)
        if not self.pinged and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        now = self._loop.time()
        for connection, pinged_at in list(self.pinged.items()):
            try:
                self.pinged[connection] = self._judge(connection, pinged_at, now)
            except Exception:  # one broken connection must not end the watch over the others
                logger.exception("a connection could not be checked and is dropped")
                self.pinged.pop(connection, None)
                connection.abort()
        self._timer = self._loop.call_later(self._look_s, self._look) if self.pinged else None

    def _judge(self, connection: FrameSocket, pinged_at: float | None, now: float) -> float | None:
        """Ask or drop where it is time; return when the connection was asked, if its answer is still due."""
        if not connection.can_be_heard(now):
            return None
        if pinged_at is not None and connection.last_heard < pinged_at:
            if now - pinged_at >= self._timeout_s:
                connection.abort()
            return pinged_at
        if now - connection.last_heard >= self._interval_s:
            connection.ping()
            return now
        return None


# writes: Writes collected over one pass of the event loop and made together at its end.
#
# Sending wakes the peer; a peer that wakes to many replies at once costs both sides far less than one that wakes for
# each. Knows transports and bytes.


_MOST_UNWRITTEN = 1024 * 1024


class WriteBatch:
    """The writes of one loop that are due at the end of this pass."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._hub = current_dispatcher()
        self._hub.after_delivery = self.flush
        self._due: list[tuple[asyncio.WriteTransport, bytes]] = []
        self._size = 0

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> WriteBatch:
        """Return the loop's own batch."""
        return loop_local(loop, cls, lambda: cls(loop))

    def add(self, transport: asyncio.WriteTransport, data: bytes, *, is_alone: bool = False) -> None:
        """Write soon, in order; at once for a connection that has none beside it to wait for."""
        if is_alone and not self._due:
            transport.write(data)
            return
        if not self._due and not self._hub.is_delivering:
            self._loop.call_soon(self.flush)
        self._due.append((transport, data))
        self._size += len(data)
        if self._size > _MOST_UNWRITTEN:  # a transport that has too much says so only once it has got it
            self.flush()

    def flush(self) -> None:
        """Write what is due."""
        due, self._due = self._due, []
        self._size = 0
        for transport, data in due:
            if transport.is_closing():
                continue
            try:
                transport.write(data)
            except Exception:  # one connection that has just died must not cost the others their replies
                logger.debug("a reply could not be written", exc_info=True)


class FrameSocket(asyncio.Protocol):
    """A connection on the bare transport, taken over from the server's own protocol."""

    def __init__(self, transport: asyncio.Transport, origin: asyncio.Protocol, *, max_size: int) -> None:
        self._transport = transport
        self._origin = origin
        self._reader = FrameReader(max_size)
        self._handler: SocketHandler | None = None
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        self._is_reading = True
        self._handler_paused = False
        self._stalled_since = 0.0
        self._unsent = 0
        self._keepalive = KeepAlive.of(self._loop)
        self._writes = WriteBatch.of(self._loop)
        self.is_full = False  # the peer reads too slowly for more to be sent now
        self._drained: asyncio.Future[None] | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self.last_heard = self._loop.time()
        self.close_code: int | None = None  # what the peer said when it closed

    def start(self, handler: SocketHandler) -> None:
        """Begin to deliver messages."""
        self._handler = handler
        self._transport.set_protocol(self)
        self._keepalive.add(self)

    # -- Socket ---------------------------------------------------------------------------------------------------

    def send(self, payload: bytes) -> None:
        """Send a text message."""
        if self._closing:
            return
        head = text_head(len(payload))
        if len(payload) < _BIG:
            self._writes.add(self._transport, head + payload, is_alone=len(self._keepalive.pinged) == 1)
        else:
            self._writes.flush()
            self._transport.writelines((head, payload))

    def send_binary(self, payload: bytes) -> None:
        """Send a binary message."""
        if not self._closing:
            self._writes.flush()
            head = text_head(len(payload))
            self._transport.writelines((b"\x82" + head[1:], payload))

    async def drained(self) -> None:
        """Wait until the peer has read enough of what was sent."""
        while self.is_full:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def can_be_heard(self, now: float) -> bool:
        """Say whether we read from the peer. One that takes nothing in for too long is dropped instead."""
        if self.is_full:
            unsent = self._transport.get_write_buffer_size()
            if unsent < self._unsent or self._stalled_since == 0.0:
                self._unsent, self._stalled_since = unsent, now
            elif now - self._stalled_since > INTERVAL_S + TIMEOUT_S:
                self.abort()
        return self._is_reading and not self._closing

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        if not self._closing:
            self._transport.write(control_frame(Opcode.PING))

    def shutdown(self) -> None:
        """The server is going down."""
        if self._handler is not None:
            self._handler.on_shutdown()

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Send a close frame, and hang up when the peer has answered it or its time is over (RFC 6455, 7.1.1)."""
        if not self._closing:
            self._start_closing(close_payload(code, reason))
            with contextlib.suppress(OSError, RuntimeError):  # the peer may be gone without our knowing yet
                if self._transport.can_write_eof():
                    self._transport.write_eof()  # the peer sees the end now; what it still sends causes no reset
            self._update_reading()

    def _answer_close(self, payload: bytes) -> None:
        """The peer says goodbye first: say it too, and hang up."""
        whole = len(payload) >= 2
        self.close_code = int.from_bytes(payload[:2], "big") if whole else 1005
        self._start_closing(payload[:2] if whole else b"")
        self._transport.close()

    def _start_closing(self, payload: bytes) -> None:
        self._closing = True
        self._keepalive.discard(self)
        self._writes.flush()
        with contextlib.suppress(OSError, RuntimeError):
            self._transport.write(control_frame(Opcode.CLOSE, payload))
        # A peer that neither answers nor reads is not waited for.
        self._close_timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def _await_close(self, data: bytes) -> None:
        """After our goodbye only the peer's counts; whatever else it sends is dropped."""
        try:
            messages = self._reader.feed(data)
        except FrameError:
            self._transport.close()
            return
        if any(message.opcode == Opcode.CLOSE for message in messages):
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._closing = True
        self._transport.abort()

    def pause(self) -> None:
        """Take in no more for now."""
        self._handler_paused = True
        self._update_reading()

    def resume(self) -> None:
        """Go on taking in."""
        self._handler_paused = False
        self._update_reading()

    def _update_reading(self) -> None:
        """Read unless the handler has enough or the peer does not take our replies; a closing socket always reads."""
        wanted = self._closing or not (self._handler_paused or self.is_full)
        if wanted is self._is_reading or self._transport.is_closing():
            return
        self._is_reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    async def wait_closed(self) -> None:
        """Wait for the end of the connection."""
        await asyncio.shield(self._closed)

    @property
    def ending(self) -> asyncio.Future[None]:
        """Done once the connection has ended. Whoever lets others cancel it closes the socket then."""
        return self._closed

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Cut the bytes into messages and hand them on."""
        handler = self._handler
        if handler is None:
            return
        if self._closing:
            self._await_close(data)
            return
        self.last_heard = self._loop.time()
        payload = self._reader.whole(data)
        if payload is None:
            self._read_slowly(data, handler)
        elif data[0] == _WHOLE_TEXT:
            handler.on_message(payload)
        else:
            handler.on_binary(payload)

    def _read_slowly(self, data: bytes, handler: SocketHandler) -> None:
        try:
            messages = self._reader.feed(data)
        except FrameError as exc:
            self.close(exc.close_code, exc.reason)
            return
        for message in messages:
            if message.opcode == Opcode.TEXT:
                handler.on_message(message.payload)
            elif message.opcode == Opcode.BINARY:
                handler.on_binary(message.payload)
            elif message.opcode == Opcode.PING:
                self._transport.write(control_frame(Opcode.PONG, message.payload))
            elif message.opcode == Opcode.CLOSE:
                self._answer_close(message.payload)
            elif message.opcode == Opcode.OVERSIZE:
                handler.on_oversize(message.size)
            if self._closing:
                return

    def eof_received(self) -> bool:
        """A client that has shut its side is gone."""
        return False

    def pause_writing(self) -> None:
        """A client that does not read gets no further replies to buffer."""
        if not self.is_full:
            self.is_full = True
            self._stalled_since = 0.0
        self._update_reading()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._relieve()
        self._update_reading()
        if self._handler is not None and not self._closing:
            self._handler.on_writable()

    def _relieve(self) -> None:
        self.is_full = False
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everybody, the server's own protocol included: it keeps the list of connections."""
        self._closing = True
        self._relieve()
        if self._close_timer is not None:
            self._close_timer.cancel()
        self._keepalive.discard(self)
        if not self._closed.done():
            self._closed.set_result(None)
        if self._handler is not None:
            self._handler.on_lost()
        self._origin.connection_lost(exc)


def take_over(receive: Receive, *, max_size: int) -> FrameSocket | None:
    """Take the transport from the server's WebSocket protocol, right after `websocket.accept` was sent.

    That protocol is our own (`upgrade`) or uvicorn's. Returns None, and changes nothing, unless it is one of them, no
    extension such as compression was negotiated, nothing has been read ahead, and no middleware is in between.
    """
    origin: Any = getattr(receive, "__self__", None)
    take = getattr(origin, "take_frames", None)
    if take is not None:
        socket: FrameSocket | None = take(max_size)
        return socket
    module = sys.modules.get("uvicorn.protocols.websockets.websockets_sansio_impl")
    if module is None or type(origin) is not module.WebSocketsSansIOProtocol:
        return None
    try:
        untouched = not origin.conn.extensions and not origin.conn.reader.buffer and origin.queue.empty()
        transport = cast(asyncio.Transport, origin.transport)
        if not untouched or transport.is_closing() or not origin.handshake_complete:
            return None
        origin.stop_keepalive()
    except AttributeError:
        logger.debug("this version of uvicorn is not known; staying on ASGI", exc_info=True)
        return None
    return FrameSocket(transport, origin, max_size=max_size)


def open_socket(receive: Receive, send: Send, *, max_size: int, fast: bool = True) -> Socket:
    """Return the socket of a connection that was just accepted: on its bare transport if that is allowed and possible."""
    if fast:
        with contextlib.suppress(AttributeError):  # of a server or middleware that is not known here
            socket = take_over(receive, max_size=max_size)
            if socket is not None:
                return socket
    return AsgiSocket(receive, send, max_size=max_size)
