"""Helpers for bare ASGI handlers: read a body, find a header, answer with JSON, notice a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any, Final, TypeVar

from ..protocol.json_values import encode
from ..sessions.events import RequestOrigin

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
HeaderList = Sequence[tuple[bytes, bytes]]
_T = TypeVar("_T")
_LISTEN_AFTER_S = 0.02


BODY_TOO_LARGE: Final = "BODY_TOO_LARGE"


class BodyTooLarge(Exception):
    """The request's body is over the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The body is larger than {limit} bytes")
        self.limit = limit


class ClientGone(Exception):
    """The client went away before its request was whole, or before it was answered."""


def header(scope: Scope, name: bytes) -> str | None:
    """Return a request header; `name` is in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None


def origin_of(scope: Scope, request_id: str | int | None = None) -> RequestOrigin:
    """Return where a request comes from, for logs and traces."""
    return RequestOrigin(request_id, header(scope, b"traceparent"))


def cookie(scope: Scope, name: str) -> str | None:
    """Return a request cookie."""
    # Read by hand: the standard parser gives up at the first cookie that it does not like, of whatever page.
    for pair in (header(scope, b"cookie") or "").split(";"):
        key, _, value = pair.partition("=")
        if key.strip() == name:
            return value.strip().strip('"')
    return None


async def read_body(receive: Receive, limit: int) -> bytes:
    """Read a request's body.

    Raises:
        BodyTooLarge: It is over the limit; the rest is not read.
        ClientGone: The client disconnected.
    """
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        if len(body) > limit:
            raise BodyTooLarge(limit)
        return body
    chunks, size = [body], len(body)
    while message.get("more_body"):
        if size > limit:
            raise BodyTooLarge(limit)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
    if size > limit:
        raise BodyTooLarge(limit)
    return b"".join(chunks)


class BodyLimit:
    """A handler for requests whose body is not too large; larger ones are refused with 413."""

    def __init__(self, handler: Handler, limit: Callable[[], int]) -> None:
        self._handler = handler
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, and pass it on or refuse it."""
        try:
            body = await read_body(receive, self._limit())
        except BodyTooLarge as exc:
            await respond_json(send, 413, {"detail": str(exc), "code": "BODY_TOO_LARGE", "limit_bytes": exc.limit})
        except ClientGone:
            return
        else:
            await self._handler(scope, _BufferedReceive(body, receive), send)


class _BufferedReceive:
    """A `receive` that returns a body that was read already, then what follows."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        body, self._body = self._body, None
        return await self._receive() if body is None else {"type": "http.request", "body": body, "more_body": False}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work of a request whose body was read; it is cancelled if the client leaves meanwhile.

    Raises:
        ClientGone: The client disconnected before the work was done.
    """
    watch = _DisconnectWatch(receive)
    try:
        return await work
    except asyncio.CancelledError:
        if watch.is_gone:
            raise ClientGone from None
        raise
    finally:
        watch.end()


class _DisconnectWatch:
    """Cancels the task it is made in when its client goes. Most requests are done before it starts to listen."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watching: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(_LISTEN_AFTER_S, self._begin)
        self.is_gone = False

    def _begin(self) -> None:
        self._watching = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        await _disconnected(self._receive)
        self.is_gone = True
        self._task.cancel()

    def end(self) -> None:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(send: Send, status: int, body: bytes, headers: HeaderList = ()) -> None:
    """Answer with JSON text."""
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})


async def respond_json(send: Send, status: int, value: Mapping[str, Any] | list[Any], headers: HeaderList = ()) -> None:
    """Answer with a value."""
    await respond(send, status, encode(value), headers)
