"""The answer to a POST: JSON, or a stream of events once there is something to tell before the result.

Clients keep their connection after JSON and drop it after a stream, and some limit the size of an event; so a stream
begins only when a notification, or a long silence, needs one. Knows ASGI and server-sent events only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from ...protocol.json_values import encode
from ..asgi import HeaderList, Receive, Send, respond

PING_S = 15.0
_LOOK_S = 0.5
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class Reply:
    """Writes one answer. `notify` may be called at any time before the result is there."""

    def __init__(self, send: Send, headers: HeaderList = ()) -> None:
        self._send = send
        self._headers = headers
        self._notes: deque[Mapping[str, Any]] = deque()
        self._wake: asyncio.Future[None] | None = None
        self.is_stream = False

    def notify(self, note: Mapping[str, Any]) -> None:
        """Send a notification before the result."""
        self._notes.append(note)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def follow(self, work: asyncio.Future[Any], gone: asyncio.Future[Any] | None = None) -> None:
        """Send notifications until the work is done, or until `gone` says that nobody listens any more."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake = loop.create_future()
            if self._notes:
                self._wake.set_result(None)
            waited: set[asyncio.Future[Any]] = {work, self._wake} if gone is None else {work, self._wake, gone}
            done, _ = await asyncio.wait(waited, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
            while self._notes:
                await self._event(self._notes.popleft())
            if work.done() or gone in done:
                return
            if not done:
                await self._comment()

    async def finish(self, message: Mapping[str, Any], status: int = 200) -> None:
        """Send the result."""
        if not self.is_stream:
            await respond(self._send, status, encode(message), self._headers)
            return
        await self._event(message)
        await self._send({"type": "http.response.body", "body": b""})

    async def _event(self, message: Mapping[str, Any]) -> None:
        await self._begin()
        body = b"event: message\r\ndata: " + encode(message) + b"\r\n\r\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _comment(self) -> None:
        await self._begin()
        await self._send({"type": "http.response.body", "body": b": ping\r\n\r\n", "more_body": True})

    async def _begin(self) -> None:
        if not self.is_stream:
            self.is_stream = True
            await start_stream(self._send, self._headers)


async def start_stream(send: Send, headers: HeaderList) -> None:
    """Begin a stream of events."""
    await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS, *headers]})


async def stream_until(ended: asyncio.Event, receive: Receive, send: Send, *, period_s: float, on_beat: Any) -> None:
    """Keep a stream open until it shall end, its client goes or the server stops, with a sign of life each period."""
    gone = asyncio.ensure_future(_disconnected(receive))
    over = asyncio.ensure_future(ended.wait())
    loop = asyncio.get_running_loop()
    can_stop = _keeps_connection(receive)
    next_beat = loop.time()
    try:
        while not (gone.done() or over.done()):
            if loop.time() >= next_beat:
                await send({"type": "http.response.body", "body": b": ping\r\n\r\n", "more_body": True})
                on_beat()
                next_beat = loop.time() + period_s
            left_s = max(0.0, next_beat - loop.time())
            wait_s = min(left_s, _LOOK_S) if can_stop else left_s
            await asyncio.wait({gone, over}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if can_stop and not _keeps_connection(receive):
                break
        if not gone.done():
            await send({"type": "http.response.body", "body": b""})
    finally:
        gone.cancel()
        over.cancel()


def _keeps_connection(receive: Receive) -> bool:
    """Say whether the server wants to keep the connection of a request after its answer.

    uvicorn waits for running answers before it tells an application to shut down. But it tells their connections, and
    that can be seen; of other servers, and through middleware that has a `receive` of its own, nothing is known.
    """
    return getattr(getattr(receive, "__self__", None), "keep_alive", None) is True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
