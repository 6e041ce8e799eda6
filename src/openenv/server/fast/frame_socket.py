"""`FrameSocket`: a WebSocket on uvicorn's bare transport, with the pings and writes of all sockets of a loop.

After the handshake the endpoint takes over the transport. A frame then costs one read and one write, and no ASGI
message. Knows RFC 6455 and transports; must not know the meaning of messages.

    bytes --> FrameReader --> handler.on_message            send(payload) --> WriteBatch --> transport
                 |                                                               (one flush per pass of the loop)
                 +-- ping: pong      OPEN -- close() --> CLOSING -- peer's close frame, 2 s, or end --> lost
                 +-- close frame:    OPEN -- answered ---------------------------------------------> lost
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import Any, cast

from openenv.protocol.frames import FrameError, FrameReader, Opcode, close_payload, control_frame, text_head

from ..asgi import Receive, Send
from ..runners import current_dispatcher, loop_local
from ..slow_clients import PartialRequests, UnreadReplies
from ..sockets import AsgiSocket, Socket, SocketHandler

logger = logging.getLogger(__name__)

INTERVAL_S = 20.0
TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 2.0
_CHECK_S = 5.0
_BIG = 8192  # write messages of this size separately: the reader can start with them
_MOST_UNWRITTEN = 1024 * 1024
_WHOLE_TEXT = 0x81  # first byte of a text message in a single frame (RFC 6455, 5.2)


class KeepAlive:
    """Pings the idle connections of one loop, with one timer for all, and drops unresponsive ones."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, interval_s: float = INTERVAL_S, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._check_s = min(_CHECK_S, interval_s / 4)
        self._timer: asyncio.TimerHandle | None = None
        self.pinged: dict[FrameSocket, float | None] = {}  # when each was pinged, while its answer is due

    def add(self, connection: FrameSocket) -> None:
        """Watch a connection."""
        self.pinged[connection] = None
        if self._timer is None:
            self._timer = self._loop.call_later(self._check_s, self._check_all)

    def discard(self, connection: FrameSocket) -> None:
        """Stop watching a connection."""
        self.pinged.pop(connection, None)
        if not self.pinged and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_all(self) -> None:
        now = self._loop.time()
        for connection, pinged_at in list(self.pinged.items()):
            try:
                self.pinged[connection] = self._check(connection, pinged_at, now)
            except Exception:  # one broken connection must not end the watch over the others
                logger.exception("a connection could not be checked and is dropped")
                self.pinged.pop(connection, None)
                connection.abort()
        self._timer = self._loop.call_later(self._check_s, self._check_all) if self.pinged else None

    def _check(self, connection: FrameSocket, pinged_at: float | None, now: float) -> float | None:
        """Ping or drop a connection when it is time; return when it was pinged, if its answer is still due."""
        if not connection.can_be_heard:
            return None
        if pinged_at is not None and connection.last_heard < pinged_at:
            if now - pinged_at >= self._timeout_s:
                connection.abort()
            return pinged_at
        if now - connection.last_heard >= self._interval_s:
            connection.ping()
            return now
        return None


class WriteBatch:
    """Collects the writes of one loop during a pass, and makes them at its end.

    Sending wakes the peer. If a client with a hundred sessions wakes once for a hundred replies, that costs both sides
    far less than waking a hundred times.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._dispatcher = current_dispatcher()
        self._dispatcher.after_delivery = self.flush
        self._connections = loop_local(loop, KeepAlive).pinged
        self._due: list[tuple[asyncio.WriteTransport, bytes]] = []
        self._size = 0

    def add(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write soon, in order; at once if the loop has only one connection."""
        if not self._due:
            if len(self._connections) == 1:
                transport.write(data)
                return
            if not self._dispatcher.is_delivering:
                self._loop.call_soon(self.flush)
        self._due.append((transport, data))
        self._size += len(data)
        if self._size > _MOST_UNWRITTEN:  # a transport reports that it is full only once it has the data
            self.flush()

    def flush(self) -> None:
        """Write all collected replies."""
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
    """A connection on the bare transport, taken over from the server's own protocol (`origin`)."""

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
        self._keepalive = loop_local(self._loop, KeepAlive)
        self._writes = loop_local(self._loop, WriteBatch)
        self._unread = loop_local(self._loop, UnreadReplies)
        self._is_partial = False  # a message has begun and is not whole
        self.is_full = False  # whether the peer reads too slowly
        self._drained: asyncio.Future[None] | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self.last_heard = self._loop.time()
        self.close_code: int | None = None  # the peer's close code

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
        size = len(payload)
        if size < _BIG:
            self._writes.add(self._transport, text_head(size) + payload)
        else:
            self._writes.flush()
            self._transport.writelines((text_head(size), payload))
            if self.is_full:
                self._unread.check()

    def send_binary(self, payload: bytes) -> None:
        """Send a binary message."""
        if not self._closing:
            self._writes.flush()
            head = text_head(len(payload))
            self._transport.writelines((b"\x82" + head[1:], payload))
            if self.is_full:
                self._unread.check()

    async def drained(self) -> None:
        """Wait until the peer has read enough of the sent messages."""
        while self.is_full:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    @property
    def peer(self) -> str:
        """The address of the peer. Looking it up is a thirtieth of an opening, so this is done when it is needed."""
        address = self._transport.get_extra_info("peername")
        return str(address[0]) if isinstance(address, tuple) else ""

    @property
    def can_be_heard(self) -> bool:
        """Whether an answer to a ping could be read now."""
        return self._is_reading and not self._closing

    def ping(self) -> None:
        """Send a ping (RFC 6455, 5.5.2)."""
        if not self._closing:
            self._transport.write(control_frame(Opcode.PING))

    def shutdown(self) -> None:
        """Let the handler finish: the server shuts down."""
        if self._handler is not None:
            self._handler.on_shutdown()

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Send a close frame; the connection ends when the peer has answered it, or after 2 s (RFC 6455, 7.1.1)."""
        if not self._closing:
            self._start_closing(close_payload(code, reason))
            with contextlib.suppress(OSError, RuntimeError):  # the peer may be gone already
                if self._transport.can_write_eof():
                    self._transport.write_eof()  # the peer sees the end now, and its later bytes cause no reset
            self._update_reading()

    def _answer_close(self, payload: bytes) -> None:
        """Answer the close frame of a peer that closes first, and end the connection."""
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
        # A peer that neither answers nor reads must not hold the connection.
        self._close_timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def _await_close(self, data: bytes) -> None:
        """Read only for the peer's close frame; everything else it sends after ours is dropped."""
        try:
            messages = self._reader.feed(data)
        except FrameError:
            self._transport.close()
            return
        self._note_partial()
        if any(message.opcode == Opcode.CLOSE for message in messages):
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._closing = True
        self._transport.abort()

    def pause(self) -> None:
        """Stop reading for now."""
        self._handler_paused = True
        self._update_reading()

    def resume(self) -> None:
        """Read again."""
        self._handler_paused = False
        self._update_reading()

    def _update_reading(self) -> None:
        """Read unless the handler has enough or the peer reads no replies; a closing socket always reads."""
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
        """A future that is done once the connection has ended; cancelling it does not close the socket."""
        return self._closed

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Cut the bytes into messages and pass them to the handler."""
        handler = self._handler
        if handler is None:
            return
        if self._closing:
            self._await_close(data)
            return
        self.last_heard = self._loop.time()
        payload = self._reader.whole(data)
        if payload is None:
            self._read_frames(data, handler)
        elif data[0] == _WHOLE_TEXT:
            handler.on_message(payload)
        else:
            handler.on_binary(payload)

    def _read_frames(self, data: bytes, handler: SocketHandler) -> None:
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
        self._note_partial()

    def _note_partial(self) -> None:
        """Count the buffered bytes of an incomplete message, together with all other clients."""
        held = self._reader.held
        if held:
            self._is_partial = True
            loop_local(self._loop, PartialRequests).hold(self, held)
        elif self._is_partial:
            self._forget_partial()

    def _forget_partial(self) -> None:
        self._is_partial = False
        loop_local(self._loop, PartialRequests).discard(self)

    def drop_request(self, reason: str) -> None:
        """Drop the buffered part of a message, and end the connection."""
        self._reader.drop_all()
        self.close(1008, reason)

    def eof_received(self) -> bool:
        """Treat a client that has shut its side as gone."""
        return False

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read its replies: they would pile up here."""
        self.is_full = True
        self._update_reading()
        self._unread.add(self._transport, self._stop)

    def resume_writing(self) -> None:
        """Continue: the client has caught up."""
        self._relieve()
        self._update_reading()
        if self._handler is not None and not self._closing:
            self._handler.on_writable()

    def _stop(self, reason: str, is_urgent: bool) -> None:
        """End the connection of a client that does not read; unless urgent, it can still read the reason."""
        if is_urgent:
            self.abort()
        else:
            self.close(1008, reason)

    def _relieve(self) -> None:
        self.is_full = False
        self._unread.discard(self._transport)
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the handler, and the server's own protocol, which keeps the list of connections."""
        self._closing = True
        self._relieve()
        if self._is_partial:
            self._forget_partial()
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

    That protocol is `UpgradeProtocol` or uvicorn's. Returns None, and changes nothing, unless it is one of them, no
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
    """Return the socket of an accepted connection, on its bare transport if possible."""
    socket = take_over(receive, max_size=max_size) if fast else None
    return socket or AsgiSocket(receive, send, max_size=max_size)
