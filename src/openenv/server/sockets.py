"""WebSocket carriers: the frames of one connection, either on the bare transport or through ASGI messages.

Under uvicorn the endpoint takes the transport over once the handshake is done: a frame then costs a read and a write
and no ASGI message. Wherever that is not possible the same endpoint runs on plain ASGI. Knows bytes and connections;
must not know what the messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import Any, Protocol, cast

from ..protocol.frames import FrameError, FrameReader, Opcode, close_payload, control_frame, text_head
from .asgi import Receive, Send
from .fast.frame_socket import INTERVAL_S, TIMEOUT_S, KeepAlive, WriteBatch

logger = logging.getLogger(__name__)

_BIG = 8192  # from here on a message is worth a write of its own, and its reader a start on it
_WHOLE_TEXT = 0x81  # first byte of a text message in a single frame
_OUTBOX = 16
CLOSE_TIMEOUT_S = 2.0


class SocketHandler(Protocol):
    """What a carrier tells its owner; all calls come on the loop."""

    def on_message(self, payload: bytes) -> None:
        """A whole text message came."""
        ...

    def on_binary(self, payload: bytes) -> None:
        """A whole binary message came."""
        ...

    def on_oversize(self, size: int) -> None:
        """A message over the limit came and was dropped."""
        ...

    def on_writable(self) -> None:
        """The peer has caught up; `is_full` is False again."""
        ...

    def on_shutdown(self) -> None:
        """The server is going down: finish what is under way, then close the socket."""
        ...

    def on_lost(self) -> None:
        """The connection is gone; called once."""
        ...


class Socket(Protocol):
    """A WebSocket connection after its handshake."""

    @property
    def is_full(self) -> bool:
        """Whether the peer reads too slowly for more to be sent now."""
        ...

    def send(self, payload: bytes) -> None:
        """Send a text message."""
        ...

    def send_binary(self, payload: bytes) -> None:
        """Send a binary message."""
        ...

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close after what was sent."""
        ...

    def pause(self) -> None:
        """Take in no more for now."""
        ...

    def resume(self) -> None:
        """Go on taking in."""
        ...

    async def wait_closed(self) -> None:
        """Wait for the end of the connection."""
        ...


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
        self._full: asyncio.Future[None] | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self.last_heard = self._loop.time()
        self.close_code: int | None = None  # what the peer said when it closed

    def start(self, handler: SocketHandler) -> None:
        """Begin to deliver messages."""
        self._handler = handler
        self._transport.set_protocol(self)
        self._keepalive.add(self)

    # -- Socket ---------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the peer reads too slowly for more to be sent now."""
        return self._full is not None

    def send(self, payload: bytes) -> None:
        """Send a text message."""
        if self._closing:
            return
        head = text_head(len(payload))
        if len(payload) < _BIG:
            self._writes.add(self._transport, head + payload, is_alone=self._keepalive.watched == 1)
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
        while self._full is not None:
            await asyncio.shield(self._full)

    def can_be_heard(self, now: float) -> bool:
        """Say whether we read from the peer. One that takes nothing in for too long is dropped instead."""
        if self._full is not None:
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
        wanted = self._closing or not (self._handler_paused or self._full is not None)
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
        if self._full is None:
            self._full = self._loop.create_future()
            self._stalled_since = 0.0
        self._update_reading()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._relieve()
        self._update_reading()
        if self._handler is not None and not self._closing:
            self._handler.on_writable()

    def _relieve(self) -> None:
        full, self._full = self._full, None
        if full is not None and not full.done():
            full.set_result(None)

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


class AsgiSocket:
    """A connection through ASGI messages, for any server."""

    def __init__(self, receive: Receive, send: Send, *, max_size: int) -> None:
        self._receive = receive
        self._send = send
        self._max_size = max_size
        self._handler: SocketHandler | None = None
        self._outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._readable = asyncio.Event()
        self._readable.set()
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, handler: SocketHandler) -> None:
        """Begin to deliver messages."""
        self._handler = handler
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read(handler)), loop.create_task(self._write())]
        for task in self._tasks:
            task.add_done_callback(_log_failure)

    @property
    def is_full(self) -> bool:
        """Whether the peer reads too slowly for more to be sent now."""
        return self._outbox.qsize() >= _OUTBOX

    def send(self, payload: bytes) -> None:
        """Send a text message."""
        if not self._closing:
            self._outbox.put_nowait({"type": "websocket.send", "text": payload.decode()})

    def send_binary(self, payload: bytes) -> None:
        """Send a binary message."""
        if not self._closing:
            self._outbox.put_nowait({"type": "websocket.send", "bytes": payload})

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close after what was sent."""
        if not self._closing:
            self._closing = True
            self._outbox.put_nowait({"type": "websocket.close", "code": code, "reason": reason})

    def pause(self) -> None:
        """Take in no more for now."""
        self._readable.clear()

    def resume(self) -> None:
        """Go on taking in."""
        self._readable.set()

    async def wait_closed(self) -> None:
        """Wait for the end of the connection."""
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Not awaited: a caller that is being cancelled must see its own cancellation and not that of these.
            for task in self._tasks:
                task.cancel()

    async def _read(self, handler: SocketHandler) -> None:
        try:
            while True:
                await self._readable.wait()
                message = await self._receive()
                if message["type"] != "websocket.receive":
                    return
                text = message.get("text")
                payload = text.encode() if text is not None else message.get("bytes") or b""
                if len(payload) > self._max_size:
                    handler.on_oversize(len(payload))
                elif text is None:
                    handler.on_binary(payload)
                else:
                    handler.on_message(payload)
        finally:
            self._closing = True
            handler.on_lost()

    async def _write(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._send(message)
            except Exception:  # servers differ in what they raise for a client that is gone
                logger.debug("a message could not be sent", exc_info=True)
                return
            if message["type"] == "websocket.close":
                return
            if self._outbox.qsize() == _OUTBOX // 2 and self._handler is not None:
                self._handler.on_writable()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.warning("a WebSocket connection failed", exc_info=task.exception())


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


def open_socket(receive: Receive, send: Send, *, max_size: int) -> FrameSocket | AsgiSocket:
    """Return the fastest carrier that this connection allows."""
    with contextlib.suppress(AttributeError):
        socket = take_over(receive, max_size=max_size)
        if socket is not None:
            return socket
    return AsgiSocket(receive, send, max_size=max_size)
