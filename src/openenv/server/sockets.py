"""WebSocket connections after their handshake: the interface, and an implementation on ASGI messages for any server.

The fast implementation, on uvicorn's bare transport, is `fast.frame_socket`. Must not know the meaning of messages.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from .asgi import Receive, Send, transport_of
from .runners import loop_local
from .slow_clients import UnreadReplies

logger = logging.getLogger(__name__)

_MOST_QUEUED = 16
_MOST_QUEUED_BYTES = 256 * 1024


class SocketHandler(Protocol):
    """Handles the events of a socket, always on its loop."""

    def on_message(self, payload: bytes) -> None:
        """Handle a whole text message."""

    def on_binary(self, payload: bytes) -> None:
        """Handle a whole binary message."""

    def on_oversize(self, size: int) -> None:
        """Handle a message over the limit, which was dropped."""

    def on_writable(self) -> None:
        """Continue: the peer has caught up, and `is_full` is False again."""

    def on_shutdown(self) -> None:
        """Finish the running requests, then close the socket: the server shuts down."""

    def on_lost(self) -> None:
        """Clean up: the connection is gone. Called once."""


class Socket(Protocol):
    """A WebSocket connection."""

    close_code: int | None
    """The peer's close code; None until the peer closes."""

    is_full: bool
    """Whether to stop sending for now, because the peer reads too slowly."""

    @property
    def peer(self) -> str:
        """The address of the peer, if it is known."""
        ...

    def start(self, handler: SocketHandler) -> None:
        """Begin to deliver messages."""

    def send(self, payload: bytes) -> None:
        """Send a text message."""

    def send_binary(self, payload: bytes) -> None:
        """Send a binary message."""

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close after the messages sent so far."""

    def pause(self) -> None:
        """Stop reading for now."""

    def resume(self) -> None:
        """Read again."""

    async def wait_closed(self) -> None:
        """Wait for the end of the connection."""


class SocketUser:
    """The side of a handler that the operator's view of sessions asks."""

    _socket: Socket
    address: str | None = None
    """The client's address, as a proxy may have named it; None if only the socket knows it."""

    @property
    def peer(self) -> str:
        """The address of the client."""
        return self._socket.peer if self.address is None else self.address


class AsgiSocket:
    """A connection through ASGI messages: one task reads, one writes."""

    peer = ""

    def __init__(self, receive: Receive, send: Send, *, max_size: int) -> None:
        self._receive = receive
        self._send = send
        self._max_size = max_size
        self._handler: SocketHandler | None = None
        self._queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()  # "text", "bytes" or "close", and its content
        self._queued_bytes = 0
        self._unread = loop_local(asyncio.get_running_loop(), UnreadReplies)
        self.is_full = False  # whether the peer reads too slowly
        self._readable = asyncio.Event()
        self._readable.set()
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self.close_code: int | None = None

    def start(self, handler: SocketHandler) -> None:
        """Begin to deliver messages."""
        self._handler = handler
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read(handler)), loop.create_task(self._write())]
        for task in self._tasks:
            task.add_done_callback(_log_failure)

    def send(self, payload: bytes) -> None:
        """Send a text message."""
        if not self._closing:
            self._put("text", payload)

    def send_binary(self, payload: bytes) -> None:
        """Send a binary message."""
        if not self._closing:
            self._put("bytes", payload)

    def _put(self, kind: str, payload: bytes) -> None:
        self._queue.put_nowait((kind, payload))
        self._queued_bytes += len(payload)
        if self._queue.qsize() >= _MOST_QUEUED or self._queued_bytes >= _MOST_QUEUED_BYTES:
            self.is_full = True
            self._unread.add(self, self._stop)

    def get_write_buffer_size(self) -> int:
        """Return the number of unsent bytes known here."""
        transport = transport_of(self._receive)
        return self._queued_bytes + (0 if transport is None else transport.get_write_buffer_size())

    def _stop(self, reason: str, is_urgent: bool) -> None:
        """Abort the connection of a peer that does not read: a close frame would wait behind its unread replies."""
        self._closing = True
        transport = transport_of(self._receive)
        if transport is not None:
            transport.abort()
        for task in self._tasks:
            task.cancel()

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close after the messages sent so far."""
        if not self._closing:
            self._closing = True
            self._queue.put_nowait(("close", {"type": "websocket.close", "code": code, "reason": reason}))

    def pause(self) -> None:
        """Stop reading for now."""
        self._readable.clear()

    def resume(self) -> None:
        """Read again."""
        self._readable.set()

    async def wait_closed(self) -> None:
        """Wait for the end of the connection."""
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Do not await them: a cancelled caller must see its cancellation and not theirs.
            for task in self._tasks:
                task.cancel()

    async def _read(self, handler: SocketHandler) -> None:
        try:
            while True:
                await self._readable.wait()
                message = await self._receive()
                if message["type"] != "websocket.receive":
                    code = message.get("code")
                    self.close_code = None if code == 1005 else code  # servers report a cut connection as 1005, too
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
            self._unread.discard(self)
            handler.on_lost()

    async def _write(self) -> None:
        while True:
            kind, content = await self._queue.get()
            try:
                if kind == "close":
                    await self._send(content)
                    return
                await self._send({"type": "websocket.send", kind: content if kind == "bytes" else content.decode()})
            except Exception:  # each server raises something else if the client is gone
                logger.debug("a message could not be sent", exc_info=True)
                return
            self._queued_bytes -= len(content)
            content = b""  # or an idle connection would keep its last reply
            is_low = self._queue.qsize() <= _MOST_QUEUED // 2 and self._queued_bytes <= _MOST_QUEUED_BYTES // 2
            if self.is_full and is_low and self._handler is not None:
                self.is_full = False
                self._unread.discard(self)
                self._handler.on_writable()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.warning("a WebSocket connection failed", exc_info=task.exception())
