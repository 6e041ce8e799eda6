"""The two applications: one passes requests on to an endpoint and records, the other plays recordings back. Plain ASGI.

Knows HTTP. Must not know how it is served, nor any dialect.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

import httpx2
from pydantic_core import from_json, to_json

from .cassette import Cassette, CassetteMiss, Piece, Recording

logger = logging.getLogger("openenv.llm.cassettes")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_SECRET_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
_SECRET_PARAMETERS = ("key", "api_key", "apikey", "token", "access_token")
_NOT_FORWARDED = frozenset(
    {"host", "content-length", "connection", "accept-encoding", "transfer-encoding", "keep-alive", *_SECRET_HEADERS}
)
_KEPT_HEADERS = ("retry-after", "x-policy-version", "x-openenv-model")
_MASK = "***"


class RecorderApp:
    """Passes every request on, streams the reply as it comes, and writes both down when it has ended.

    Args:
        cassette: Where to write.
        origin: The endpoint's scheme, host and port.
        api_key: The endpoint's key; None sends the one that a request brings.
        timeout_s: How long the endpoint may be silent.
    """

    def __init__(self, cassette: Cassette, origin: str, *, api_key: str | None, timeout_s: float) -> None:
        self._cassette, self._origin, self._api_key = cassette, origin, api_key
        self._timeout_s = timeout_s
        self._client: httpx2.AsyncClient | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            if self._client is not None:
                await self._client.aclose()
            return
        if self._client is None:
            timeout = httpx2.Timeout(self._timeout_s, connect=20)
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
            self._client = httpx2.AsyncClient(timeout=timeout, limits=limits)
        content = await _content(receive)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        secrets = [headers[name].removeprefix("Bearer ").strip() for name in _SECRET_HEADERS if name in headers]
        secrets += [value for name, value in _query(scope) if name.lower() in _SECRET_PARAMETERS]
        if self._api_key is not None:
            secrets.append(self._api_key)
        recording = Recording(
            method=scope["method"], path=_path(scope), request=_scrubbed(_json(content), secrets), status=502
        )
        target = self._origin + scope["path"] + (f"?{scope['query_string'].decode()}" if scope["query_string"] else "")
        request = self._client.build_request(
            scope["method"], target, content=content or None, headers=self._forwarded(headers)
        )
        try:
            await self._pass_on(request, recording, secrets, send)
        except httpx2.HTTPError as exc:
            logger.warning("the endpoint at %s failed: %s", self._origin, exc)
            recording.complete = False
            if not recording.first_byte_s:
                body = to_json({"error": {"message": f"the endpoint failed: {exc}", "type": "upstream_error"}})
                await _reply(send, 502, body)
                return  # there is no reply that could be played back
        finally:
            if recording.first_byte_s:
                _mask_pieces(recording, secrets)
                self._cassette.append(recording, upstream=self._origin)

    async def _pass_on(self, request: httpx2.Request, recording: Recording, secrets: list[str], send: Send) -> None:
        assert self._client is not None
        began = time.monotonic()
        response = await self._client.send(request, stream=True)
        try:
            last = time.monotonic()
            recording.first_byte_s = max(round(last - began, 6), 1e-6)
            recording.status = response.status_code
            recording.content_type = response.headers.get("content-type", "application/json")
            recording.headers = {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers}
            recording.complete = False
            await send(_head(recording.status, recording.content_type, recording.headers))
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            async for chunk in response.aiter_bytes():
                now = time.monotonic()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if text := decoder.decode(chunk):
                    recording.pieces.append(Piece(after_s=round(now - last, 6), data=text))
                    last = now
            recording.complete = True
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()

    def _forwarded(self, headers: dict[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in headers.items() if name not in _NOT_FORWARDED}
        kept["accept-encoding"] = "identity"
        for name in _SECRET_HEADERS:
            if name in headers:
                bearer = "Bearer " if name == "authorization" else ""
                kept[name] = headers[name] if self._api_key is None else f"{bearer}{self._api_key}"
        if self._api_key is not None and not any(name in kept for name in _SECRET_HEADERS):
            kept["authorization"] = f"Bearer {self._api_key}"
        return kept


class PlayerApp:
    """Answers from a cassette; a request that is not in it is refused and remembered.

    Args:
        cassette: What to play.
        speed: 1.0 keeps the recorded times, 2.0 halves them, 0 does not wait at all.
    """

    def __init__(self, cassette: Cassette, *, speed: float) -> None:
        self._cassette, self._speed = cassette, speed
        self.misses: list[CassetteMiss] = []
        self.played = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        body = _json(await _content(receive))
        try:
            recording = self._cassette.find(scope["method"], _path(scope), body)
        except CassetteMiss as exc:
            self.misses.append(exc)
            logger.warning("%s", exc)
            error = {"message": str(exc), "type": "cassette_miss", "code": exc.code, **exc.details}
            await _reply(send, 404, to_json({"error": error}))
            return
        self.played += 1
        await self._wait(recording.first_byte_s)
        await send(_head(recording.status, recording.content_type, recording.headers))
        async for piece in self._pieces(recording):
            await send({"type": "http.response.body", "body": piece.data.encode(), "more_body": True})
        if recording.complete:  # otherwise the server breaks the connection off, as the endpoint did
            await send({"type": "http.response.body", "body": b""})

    async def _pieces(self, recording: Recording) -> AsyncIterator[Piece]:
        for piece in recording.pieces:
            await self._wait(piece.after_s)
            yield piece

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._speed if self._speed else 0)


def _head(status: int, content_type: str, headers: dict[str, str]) -> dict[str, Any]:
    pairs = [(b"content-type", content_type.encode("latin-1"))]
    pairs += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


async def _reply(send: Send, status: int, body: bytes) -> None:
    await send(_head(status, "application/json", {"content-length": str(len(body))}))
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Receive, send: Send) -> None:
    """Return when the server is to end."""
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})


async def _content(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _json(content: bytes) -> Any:
    if not content:
        return None
    try:
        return from_json(content)
    except ValueError:
        return content.decode("utf-8", "replace")


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def _path(scope: Scope) -> str:
    """Return the path and query without keys."""
    kept = [(name, value) for name, value in _query(scope) if name.lower() not in _SECRET_PARAMETERS]
    return str(scope["path"]) + (f"?{urlencode(kept)}" if kept else "")


def _masked(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        if len(secret) >= 8:  # shorter ones are no secrets, and would be found everywhere
            text = text.replace(secret, _MASK)
    return text


def _mask_pieces(recording: Recording, secrets: list[str]) -> None:
    whole = _masked(recording.text, secrets)
    if whole != recording.text:  # a key may lie across two pieces, so they become one
        recording.pieces = [Piece(after_s=sum(piece.after_s for piece in recording.pieces), data=whole)]


def _scrubbed(value: Any, secrets: list[str]) -> Any:
    return from_json(_masked(to_json(value).decode(), secrets))
