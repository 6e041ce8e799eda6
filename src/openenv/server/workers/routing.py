"""Routing: chooses the place for a request, which is the place of its session or the least loaded one.

Places are the workers of a server, or the servers behind a gateway. IDs of sessions, MCP sessions and visitors contain
their place, so routing needs no table. Knows the routes of an environment's server; must not know connections.

    names a session of a place              that place
    opens a session                         the least loaded place; with a known key, the same place as before
    the web page, with a visitor's cookie   the visitor's place
    the web page's files and lists          here
    the web page, programs without cookies  the place that they share
    anything else, an unknown name          here: any place can answer
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import parse_qs

from openenv.protocol.codec import Codec
from openenv.protocol.json_values import ValueLimit, decode
from openenv.protocol.jsonrpc import META_SESSION

from ..access import VISITOR_COOKIE
from ..asgi import cookie_in
from ..http_routes import KEY_HEADER, SESSION_COOKIE, SESSION_HEADER
from ..mcp.endpoint import COOKIE as MCP_COOKIE
from ..request_head import COOKIE, OFFERS_V2, RequestHead, field_pattern, value_of

GONE: Final = -1
"""The place of a session that no longer exists."""
_GRADIO: Final = "/web/gradio"  # Gradio keeps its visitors in the process
# Parts of the web page that are the same in every place.
_ANYWHERE: Final = frozenset({"/web", "/web/page", "/web/metadata", "/web/login", "/web/logout"})
_ANYWHERE_BELOW: Final = ("/web/static/", "/web/rollouts")
MOST_BODY_BYTES: Final = 256 * 1024  # read to find the session of a JSON-RPC request

_SESSION: Final = field_pattern(rb"(?:x-openenv-session|mcp-session-id)")
_KEY: Final = field_pattern(KEY_HEADER)
_RPC_SESSION: Final = re.compile(rb'"(?:session_id|' + re.escape(META_SESSION).encode() + rb')"\s*:\s*"([^"\\]*)"')
_RPC_OPENS: Final = re.compile(rb'"method"\s*:\s*"(?:initialize|openenv/session/create)"')
_MODERN: Final = field_pattern(b"mcp-protocol-version", rb"20(?:2[6-9]|[3-9]\d)-")

_GYM: Final = frozenset({"/reset", "/step", "/state"})

assert SESSION_HEADER.lower() == "x-openenv-session"


class Destination(NamedTuple):
    """The place that a request goes to.

    Args:
        place: Its number.
        sessions: How many sessions the request opens there; they count as load until they are opened.
    """

    place: int
    sessions: int = 0


class Places(Protocol):
    """The places that a router chooses from."""

    def find(self, name: str) -> int | None:
        """Return the place that created a name, or `GONE`; None if the name contains no place."""

    def place(self, here: int, key: bytes | None = None, sessions: int = 1) -> Destination:
        """Choose the place of new sessions: the least loaded one.

        A repeated request goes to the same place as the first and opens nothing.

        Args:
            here: The place that has the connection.
            key: The client's idempotency key, to recognize a repeated request.
            sessions: How many sessions will be opened.
        """

    def shared(self, here: int) -> int:
        """Return the place for state that all requests without a name share."""

    def of_visitor(self, name: str, here: int) -> int:
        """Return the place of a visitor of the web page: for an unknown or lost one, the same place each time."""


class Router:
    """Chooses places.

    Args:
        places: All places and their loads.
        here: The place that has the connection.
    """

    def __init__(self, places: Places, here: int) -> None:
        self._places = places
        self.move(here)

    def move(self, here: int) -> None:
        """Record that another place has the connection now."""
        self._here = here
        self._stay = Destination(here)

    def _of_name(self, name: str) -> Destination | None:
        """Return the place of a named session; None if any place can answer."""
        index = self._places.find(name)
        if index is None:
            return None
        return self._stay if index == GONE else Destination(index)

    def _shared(self) -> Destination:
        return Destination(self._places.shared(self._here))

    # -- requests -------------------------------------------------------------------------------------------------

    def needs_body(self, head: RequestHead) -> bool:
        """Return whether the body has to be read: a JSON-RPC request may name its session there."""
        return head.path == "/mcp" and head.method == b"POST" and self._by_head(head) is None

    def of_request(self, head: RequestHead, body: bytes, *, is_first: bool) -> Destination:
        """Choose the place of an HTTP request.

        Args:
            head: Its head.
            body: Its body, if `needs_body` asks for it.
            is_first: Whether it is the first of its connection. Then a stateless call may go to the least loaded place.
        """
        choice = self._by_head(head)
        if choice is not None:
            return choice
        if head.path == "/mcp" and head.method == b"POST":
            return self._of_rpc(head, body, is_first=is_first)
        if is_first and head.path in _GYM:
            return self._places.place(self._here)
        return self._stay

    def _by_head(self, head: RequestHead) -> Destination | None:
        """Choose by the head alone; None if that does not decide."""
        path, raw = head.path, head.raw
        session = _SESSION.search(raw)
        if session is not None:
            name = session[1].decode("latin-1").strip()
            if name.lower() != "new" or path != "/reset":
                return self._of_name(name) or self._stay
            return self._of_opening(raw)
        if path == "/sessions":
            return self._of_opening(raw) if head.method == b"POST" else self._stay
        if path.startswith(("/sessions/", "/web/sessions/")):
            name = path.removeprefix("/web").split("/")[2]  # the rest is the operation
            return self._of_name(name) or self._stay
        if path.startswith("/web"):
            return self._of_page(head)
        if head.query and (choice := self._by_query(head.query)) is not None:
            return choice
        if path in _GYM or path == "/mcp":
            cookie = self._cookie(raw, MCP_COOKIE if path == "/mcp" else SESSION_COOKIE)
            return None if cookie is None else self._of_name(cookie)
        return None

    def _of_opening(self, raw: bytes) -> Destination:
        """Place a request that opens a session; the same key leads to the same place."""
        key = _KEY.search(raw)
        return self._places.place(self._here, None if key is None else b"http " + key[1].strip())

    def _by_query(self, query: bytes) -> Destination | None:
        names = parse_qs(query.decode("latin-1")).get("session_id") if b"session_id" in query else None
        return self._of_name(names[0]) or self._stay if names else None

    def _cookie(self, raw: bytes, name: str) -> str | None:
        return cookie_in(value_of(COOKIE, raw) or "", name)

    def _of_page(self, head: RequestHead) -> Destination:
        if head.path in _ANYWHERE or head.path.startswith(_ANYWHERE_BELOW):
            return self._stay
        if head.path.startswith(_GRADIO):
            return self._shared()
        visitor = self._cookie(head.raw, VISITOR_COOKIE)
        if visitor:
            return self._of_visitor(visitor)
        if head.path == "/web/" and head.method == b"GET":
            return self._places.place(self._here)  # the visitor's place: the response names it in a cookie
        return self._shared()

    def _of_visitor(self, visitor: str) -> Destination:
        return Destination(self._places.of_visitor(visitor, self._here))

    def _of_rpc(self, head: RequestHead, body: bytes, *, is_first: bool) -> Destination:
        choices = {self._of_name(name.decode("utf-8", "replace")) for name in _RPC_SESSION.findall(body)} - {None}
        if choices:
            # A tool may have an argument with that name. If that could matter, parse the whole message.
            session = None if choices == {self._stay} else _rpc_session(body)
            return (None if session is None else self._of_name(session)) or self._stay
        if _RPC_OPENS.search(body) or _MODERN.search(head.raw) or is_first:
            return self._places.place(self._here)
        return self._stay

    # -- WebSockets -----------------------------------------------------------------------------------------------

    def of_upgrade(self, head: RequestHead) -> Destination:
        """Choose the place of a WebSocket by its handshake; in protocol v2 the first message decides."""
        if head.path == "/ws/ui":
            visitor = self._cookie(head.raw, VISITOR_COOKIE)
            return self._of_visitor(visitor) if visitor else self._shared()
        if head.path.startswith(_GRADIO):
            return self._shared()
        if head.path not in ("/ws", "/mcp", "/harness"):
            return self._stay
        choice = self._by_query(head.query) if head.query else None
        if choice is not None:
            return choice
        if head.path == "/ws" and OFFERS_V2.search(head.raw):
            return self._stay
        return self._places.place(self._here)

    def of_first_message(
        self, payload: bytes, codec: Codec, *, binary: bool, role: str, limit: int, sessions: int
    ) -> Destination:
        """Choose the place of a v2 connection by its first message: `open` names a session or requests a new one."""
        request = read_open(payload, codec, binary=binary, limit=limit)
        if request is None:
            return self._stay
        key = request.key(role)
        if request.session is not None:
            index = self._places.find(request.session)
            if index is not None and index != GONE:
                return Destination(index)
            key = None  # any place can report the lost session; a new one will follow on this connection
        return self._places.place(self._here, key, sessions)


class OpenRequestHead(NamedTuple):
    """The parts of an `open` that routing needs.

    Args:
        session: The session id in its resume token, if it has a token.
        nonce: Its nonce.
    """

    session: str | None
    nonce: str | None

    def key(self, role: str) -> bytes | None:
        """Return the key that identifies a repeated request; `role` separates clients with different rights."""
        return None if self.nonce is None else f"ws {role} {self.nonce}".encode("utf-8", "surrogatepass")


def read_open(payload: bytes, codec: Codec, *, binary: bool, limit: int) -> OpenRequestHead | None:
    """Read the first message of a v2 connection; None if it is not an `open`, or an invalid one."""
    if len(payload) > MOST_BODY_BYTES or codec.is_compressed(payload, binary=binary):
        return None
    try:
        message = codec.decode(payload, binary=binary, max_bytes=limit, limit=ValueLimit.within(MOST_BODY_BYTES))
    except ValueError:
        return None
    if not isinstance(message, Mapping) or message.get("type") != "open":
        return None
    token, nonce = message.get("resume"), message.get("nonce")
    session = token.partition(".")[2].partition(".")[0] if isinstance(token, str) else None
    return OpenRequestHead(session, nonce if isinstance(nonce, str) else None)


def _rpc_session(body: bytes) -> str | None:
    """Return the session that a JSON-RPC message names."""
    try:
        message: Any = decode(body)
    except ValueError:
        return None
    params = message.get("params") if isinstance(message, dict) else None
    if not isinstance(params, dict):
        return None
    meta = params.get("_meta")
    names = (params.get("session_id"), meta.get(META_SESSION) if isinstance(meta, dict) else None)
    return next((name for name in names if isinstance(name, str)), None)
