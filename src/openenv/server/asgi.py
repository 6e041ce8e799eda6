"""Helpers for bare ASGI handlers: read a body, find a header, answer with JSON, notice a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any, Final, TypeVar

from openenv.protocol.json_values import encode

from .runners import loop_local
from .sessions.events import RequestOrigin
from .slow_clients import PartialRequests

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
HeaderList = Sequence[tuple[bytes, bytes]]
_T = TypeVar("_T")
_LISTEN_AFTER_S = 0.02


BODY_TOO_LARGE: Final = "BODY_TOO_LARGE"
HEAD_TOO_LARGE: Final = "HEAD_TOO_LARGE"
MOST_HEAD_BYTES: Final = 65_536
MOST_FIELDS: Final = 256


class BodyTooLarge(Exception):
    """The request's body is over the limit."""

    def __init__(self, limit: int, text: str | None = None) -> None:
        super().__init__(text or f"The body is larger than {limit} bytes")
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


def head_bytes(target: bytes, headers: HeaderList) -> int:
    """Return the length of a request head, without its fixed parts."""
    return len(target) + sum(len(name) + len(value) + 4 for name, value in headers)


def transport_of(receive: Receive) -> asyncio.Transport | None:
    """Return the transport of a request, if the server exposes it. Uvicorn does, unless a layer is in between."""
    transport = getattr(getattr(receive, "__self__", None), "transport", None)
    return transport if hasattr(transport, "get_write_buffer_size") else None


def origin_of(scope: Scope, request_id: str | int | None = None) -> RequestOrigin:
    """Return the origin of a request, for logs and traces."""
    return RequestOrigin(request_id, header(scope, b"traceparent"))


def cookie(scope: Scope, name: str) -> str | None:
    """Return a request cookie."""
    return cookie_in(header(scope, b"cookie") or "", name)


def cookie_in(line: str, name: str) -> str | None:
    """Return a cookie from the value of a `Cookie` field (RFC 6265, 4.2)."""
    # The standard parser gives up at the first malformed cookie, even if another page of the host has set it.
    for pair in line.split(";"):
        key, _, value = pair.partition("=")
        if key.strip() == name:
            return value.strip().strip('"')
    return None


def set_cookie(
    name: str, value: str | None, *, same_site: str = "Lax", is_secure: bool = False, is_partitioned: bool = False
) -> tuple[bytes, bytes]:
    """Return the header that sets a cookie for all paths; scripts cannot read it. The only place that writes cookies.

    Args:
        name: The cookie.
        value: The value; None removes the cookie.
        same_site: `Strict`, `Lax`, or `None` for a page in a frame of another site.
        is_secure: Whether browsers send it over HTTPS only.
        is_partitioned: Whether each embedding site has its own copy.
    """
    attributes = ["Path=/", "HttpOnly", f"SameSite={same_site}"]
    attributes += ["Secure"] * is_secure + ["Partitioned"] * is_partitioned + ["Max-Age=0"] * (value is None)
    return b"set-cookie", "; ".join([f"{name}={value or ''}", *attributes]).encode()


async def read_body(receive: Receive, limit: int) -> bytes:
    """Read a request's body.

    Raises:
        BodyTooLarge: It is over the limit; the rest is not read.
        ClientGone: The client disconnected.
    """
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    chunk: bytes = message.get("body", b"")
    if len(chunk) > limit:
        raise BodyTooLarge(limit)
    return await _PartialBody(receive, chunk).read(limit) if message.get("more_body") else chunk


class _PartialBody:
    """A body that arrives in parts: it counts toward the memory for incomplete requests of all clients."""

    can_be_heard = True  # nothing but the client delays it

    def __init__(self, receive: Receive, begin: bytes) -> None:
        self._receive = receive
        self._data: bytearray | None = bytearray(begin)

    async def read(self, limit: int) -> bytes:
        """Read the rest, and return all of it."""
        partial = loop_local(asyncio.get_running_loop(), PartialRequests)
        try:
            while self._data is not None:
                partial.hold(self, len(self._data))
                message = await self._receive()
                if message["type"] == "http.disconnect" or self._data is None:
                    break
                self._data += message.get("body", b"")
                if len(self._data) > limit:
                    raise BodyTooLarge(limit)
                if not message.get("more_body"):
                    return bytes(self._data)
        finally:
            partial.discard(self)
        raise ClientGone

    def drop_request(self, reason: str) -> None:
        """Drop the buffered part, and end the connection if the server exposes it."""
        self._data = None
        transport = transport_of(self._receive)
        if transport is not None:
            transport.abort()


class BodyLimit:
    """Passes on requests with a body up to the limit, and refuses larger ones with 413."""

    def __init__(self, handler: Handler, limit: Callable[[], int]) -> None:
        self._handler = handler
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, and pass it on or refuse it."""
        try:
            body = await read_body(receive, self._limit())
        except BodyTooLarge as exc:
            await respond_too_large(send, exc)
        except ClientGone:
            return
        else:
            unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive_again() -> Message:
                return unread.pop() if unread else await receive()

            await self._handler(scope, receive_again, send)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Run the work of a request after its body was read; cancel it if the client leaves meanwhile.

    Raises:
        ClientGone: The client disconnected before the work was done.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    is_gone = False
    watch: asyncio.Task[None] | None = None

    async def cancel_when_gone() -> None:
        nonlocal is_gone
        await disconnected(receive)
        is_gone = True
        task.cancel()

    def begin() -> None:
        nonlocal watch
        watch = loop.create_task(cancel_when_gone())

    timer = loop.call_later(_LISTEN_AFTER_S, begin)  # most requests finish earlier and need no task
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone:
            raise ClientGone from None
        raise
    finally:
        timer.cancel()
        if watch is not None:
            watch.cancel()


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects; the request's body must have been read."""
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


async def respond_too_large(send: Send, exc: BodyTooLarge) -> None:
    """Refuse a body."""
    await respond_json(send, 413, {"detail": str(exc), "code": BODY_TOO_LARGE, "limit_bytes": exc.limit})
