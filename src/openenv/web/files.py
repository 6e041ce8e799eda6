"""The page's own files: `index.html` and what it loads, with the headers that keep a page to itself.

They are read when the application is made, so that no request waits for a disk. Knows one folder and HTTP's validators;
must not know what is in the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..server.asgi import HeaderList, Receive, Scope, Send, cookie, header, respond_json
from .page_routes import is_https
from .visitors import COOKIE, new_key

FOLDER: Final = Path(__file__).parent / "static"
_INDEX = "index.html"
# Styles may be inline for the pictures that environments draw: a frame made from text inherits this policy. Nothing of
# theirs runs: scripts come from this server only, and their frame allows none.
_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; media-src 'self' data: blob:; frame-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'self'; object-src 'none'; frame-ancestors {}"
)
_REDIRECT = [(b"location", b"web/"), (b"content-length", b"0")]
_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    tag: str
    type: str


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, f'"{hashlib.sha256(body).hexdigest()[:24]}"', _TYPES[path.suffix])


class PageFiles:
    """The ASGI handlers of `/`, `/web`, `/web/` and `/web/static/{file}`.

    Args:
        greet: Told the key of each browser that loads the page.
        framed_by: Origins whose pages may show this one in a frame, beside its own.
        is_embedded: Whether the page is usually shown in a frame of another site, so that its cookie has to say so.
        folder: Where the files are.
    """

    def __init__(
        self,
        greet: Callable[[str], object],
        framed_by: Iterable[str] = (),
        *,
        is_embedded: bool = False,
        folder: Path = FOLDER,
    ) -> None:
        self._greet = greet
        self._is_embedded = is_embedded
        self._files = {path.name: _read(path) for path in folder.iterdir() if path.suffix in _TYPES}
        ancestors = " ".join(["'self'", *sorted(framed_by)])
        self._headers: HeaderList = [
            (b"content-security-policy", _POLICY.format(ancestors).encode("latin-1", "ignore")),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-cache"),
        ]

    async def redirect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /` and `GET /web`. The address is relative: a proxy may have put something in front of it."""
        await send({"type": "http.response.start", "status": 307, "headers": _REDIRECT})
        await send({"type": "http.response.body", "body": b""})

    async def index(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/`; a browser that is new here is given a cookie."""
        file = self._files.get(_INDEX)
        if file is None:
            await respond_json(send, 404, {"detail": "The page is not installed.", "code": "NOT_FOUND"})
            return
        known = cookie(scope, COOKIE)
        key = known or new_key()
        self._greet(key)
        headers: HeaderList = [] if known else [self._visitor_cookie(scope, key)]
        await self._send(scope, send, file, headers)

    async def static(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/static/{file}`."""
        file = self._files.get(scope["path_params"]["file"])
        if file is None:
            await respond_json(send, 404, {"detail": "There is no such file.", "code": "NOT_FOUND"})
        else:
            await self._send(scope, send, file, ())

    async def _send(self, scope: Scope, send: Send, file: _File, headers: HeaderList) -> None:
        fixed = [(b"etag", file.tag.encode()), *self._headers, *headers]
        if file.tag in (header(scope, b"if-none-match") or ""):
            await send({"type": "http.response.start", "status": 304, "headers": fixed})
            await send({"type": "http.response.body", "body": b""})
            return
        described = [(b"content-type", file.type.encode()), (b"content-length", str(len(file.body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": [*described, *fixed]})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else file.body})

    def _visitor_cookie(self, scope: Scope, key: str) -> tuple[bytes, bytes]:
        secure = is_https(scope)
        place = "SameSite=None; Secure; Partitioned" if self._is_embedded and secure else "SameSite=Lax"
        mark = "; Secure" if secure and "Secure" not in place else ""
        return b"set-cookie", f"{COOKIE}={key}; Path=/; HttpOnly; {place}{mark}".encode()
