"""WebSocket connections after their handshake: the interface, and the one that runs on ASGI messages under any server.

The fast one, on uvicorn's bare transport, is `fast.frame_socket`. Must not know what the messages mean.
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
    """What a socket calls, always on its loop."""

    def on_message(self, payload: bytes) -> None:
        """Take a whole text message."""

    def on_binary(self, payload: bytes) -> None:
        """Take a whole binary message."""

    def on_oversize(self, size: int) -> None:
        """A message over the limit came and was dropped."""

    def on_writable(self) -> None:
        """The peer has caught up; `is_full` is False again."""

    def on_shutdown(self) -> None:
        """The server shuts down: finish what is under way, then close the socket."""

    def on_lost(self) -> None:
        """The connection is gone; called once."""


class Socket(Protocol):
    """A WebSocket connection."""

    close_code: int | None
    """The code that the peer closed the connection with; None while it has not."""

    is_full: bool
    """Whether the peer reads too slowly for more to be sent now."""

    def start(self, handler: SocketHandler) -> None:
        """Begin to deliver messages."""

    def send(self, payload: bytes) -> None:
        """Send a text message."""

    def send_binary(self, payload: bytes) -> None:
        """Send a binary message."""

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close after what was sent."""

    def pause(self) -> None:
        """Read no more for now."""

    def resume(self) -> None:
        """Read again."""

    async def wait_closed(self) -> None:
        """Wait for the end of the connection."""


class AsgiSocket:
    """A connection through ASGI messages: one task reads, one writes."""

    def __init__(self, receive: Receive, send: Send, *, max_size: int) -> None:
        self._receive = receive
        self._send = send
        self._max_size = max_size
        self._handler: SocketHandler | None = None
        self._queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()  # "text", "bytes" or "close", and its content
        self._queued_bytes = 0
        self._unread = loop_local(asyncio.get_running_loop(), UnreadReplies)
        self.is_full = False  # the peer reads too slowly for more to be sent now
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
        """Return the bytes that the peer has not read, as far as they are known here."""
        transport = transport_of(self._receive)
        return self._queued_bytes + (0 if transport is None else transport.get_write_buffer_size())

    def _stop(self, reason: str) -> None:
        """End the connection of a peer that does not read: a close frame would wait behind what it does not read."""
        self._closing = True
        transport = transport_of(self._receive)
        if transport is not None:
            transport.abort()
        for task in self._tasks:
            task.cancel()

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close after what was sent."""
        if not self._closing:
            self._closing = True
            self._queue.put_nowait(("close", {"type": "websocket.close", "code": code, "reason": reason}))

    def pause(self) -> None:
        """Read no more for now."""
        self._readable.clear()

    def resume(self) -> None:
        """Read again."""
        self._readable.set()

    async def wait_closed(self) -> None:
        """Wait for the end of the connection."""
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Not awaited: a caller that is cancelled must see its own cancellation and not that of these.
            for task in self._tasks:
                task.cancel()

    async def _read(self, handler: SocketHandler) -> None:
        try:
            while True:
                await self._readable.wait()
                message = await self._receive()
                if message["type"] != "websocket.receive":
                    code = message.get("code")
                    self.close_code = None if code == 1005 else code  # servers report a cut connection as that, too
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
            except Exception:  # servers differ in what they raise for a client that is gone
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
