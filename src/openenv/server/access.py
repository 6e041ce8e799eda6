"""Who may do what: tokens, the roles they stand for, and what each role may reach.

An orchestrator may do everything. An agent may call tools and nothing else: it cannot reset, look at the state, or see
rewards. An observer may look and change nothing. Knows roles, requests' headers and the paths of routes; how a refusal
is sent is in `gate`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final
from urllib.parse import unquote

from .. import settings
from ..sessions.limits import Account
from .asgi import Scope, cookie, header

ROLE: Final = "openenv.role"
ADDRESS_TOKEN: Final = "openenv.address_token"
_TOKEN_COOKIE: Final = "openenv_token"
_FOUND: Final = "openenv.access"
_TOKEN = re.compile(r"[!-+\--~]+")  # what is visible in ASCII, but for the comma, which separates several


class Role(str, Enum):
    """What a token stands for."""

    ORCHESTRATOR = "orchestrator"
    AGENT = "agent"
    OBSERVER = "observer"


class Area(Enum):
    """A part of a server that the same roles may enter."""

    OPEN = "open"
    ANY_ROLE = "any role"
    LOOK = "look"
    TOOLS = "tools"
    CONTROL = "control"

    @property
    def roles(self) -> frozenset[Role]:
        """Who may enter."""
        return _ENTRY[self]


_ENTRY: Mapping[Area, frozenset[Role]] = {
    Area.OPEN: frozenset(Role),
    Area.ANY_ROLE: frozenset(Role),
    Area.LOOK: frozenset({Role.ORCHESTRATOR, Role.OBSERVER}),
    Area.TOOLS: frozenset({Role.ORCHESTRATOR, Role.AGENT}),
    Area.CONTROL: frozenset({Role.ORCHESTRATOR}),
}
_PROBED = frozenset({"/health", "/ready"})  # by load balancers, which have no tokens
_LOOKED_AT = frozenset({"/metadata", "/schema", "/metrics", "/state", "/sessions", "/sessions/{session_id}"})
# The page itself holds no secrets, and somebody without a token has to find where to give one.
_PAGE = frozenset({"/", "/web", "/web/", "/web/static/{file}", "/web/login", "/web/logout"})
_LOOKED_AT_ON_PAGE = frozenset({"/web/page", "/web/metadata", "/web/state", "/web/sessions"})
_REQUESTS: Mapping[Role, frozenset[str]] = {
    Role.AGENT: frozenset({"open", "mcp", "close", "batch", "cancel", "ping"}),
    Role.OBSERVER: frozenset({"state", "ping"}),
}


def area_of(path: str, methods: Iterable[str] | None) -> Area:
    """Say which area a route belongs to. Whatever is not listed is the orchestrator's.

    Args:
        path: The route's path, with its parameters.
        methods: Its HTTP methods; None for a WebSocket.
    """
    if path == "/mcp" or (path == "/ws" and methods is None):  # frames on a socket are judged one by one: see `may`
        return Area.TOOLS
    if path in _PAGE:
        return Area.OPEN
    if path == "/ws/ui" and methods is None:
        return Area.LOOK
    if methods is None or not {"GET", "HEAD"}.issuperset(methods):
        return Area.CONTROL
    if path in _PROBED:
        return Area.OPEN
    return Area.LOOK if path in _LOOKED_AT or path in _LOOKED_AT_ON_PAGE else Area.CONTROL


def is_of_page(path: str) -> bool:
    """Say whether a route is the web page's, whose cookie counts there and nowhere else."""
    return path in ("/", "/web", "/ws/ui") or path.startswith("/web/")


def token_cookie(scope: Scope) -> str:
    """Name the cookie that holds the page's token; browsers have one set of cookies for all ports of a host."""
    _, _, port = (header(scope, b"host") or "").rpartition(":")
    return f"{_TOKEN_COOKIE}_{port}" if port.isdecimal() and port.isascii() else _TOKEN_COOKIE


def page_key(token: str) -> str:
    """Return what the page's cookie holds for a token: servers on other ports see it, and must not learn the token."""
    return hmac.new(token.encode(), b"openenv web page", "sha256").hexdigest()


def may(role: Role, request: str) -> bool:
    """Say whether a role may send a request of this type over `/ws`: `reset`, `step`, `mcp`, `open` and so on.

    The requests in a `batch` have to be asked about one by one.
    """
    return role is Role.ORCHESTRATOR or request in _REQUESTS[role]


def role_of(scope: Scope) -> Role:
    """Return the role of a connection or request that was admitted; without tokens everybody is an orchestrator."""
    role = scope.get(ROLE, Role.ORCHESTRATOR)
    assert isinstance(role, Role)
    return role


def account_of(role: Role, key: str | None = None) -> Account:
    """Say whom a session counts for that somebody of this role opens, under a key if he has named one."""
    return Account(key, is_agent=role is Role.AGENT)


def shows_token(scope: Scope) -> bool:
    """Say whether a request that somebody was asked to identify carried a token, known or not."""
    return bool(scope.get(_FOUND, (None, None, False))[2])


class AccessPolicy:
    """The tokens of a server and the roles that they stand for. Without any, the server is open.

    Args:
        orchestrator: Tokens that may do everything; one, or several.
        agent: Tokens that may call tools.
        observer: Tokens that may look.

    Raises:
        ValueError: A token is empty, cannot be sent in a header, or stands for two roles.
    """

    def __init__(
        self,
        *,
        orchestrator: str | Iterable[str] = (),
        agent: str | Iterable[str] = (),
        observer: str | Iterable[str] = (),
    ) -> None:
        given = {Role.ORCHESTRATOR: orchestrator, Role.AGENT: agent, Role.OBSERVER: observer}
        self._tokens: dict[bytes, Role] = {}
        self._page_keys: dict[bytes, Role] = {}
        for role, tokens in given.items():
            for token in [tokens] if isinstance(tokens, str) else tokens:
                self._add(token, role)

    def _add(self, token: str, role: Role) -> None:
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"the {role.value} token is empty, or has characters that a header cannot carry")
        known = self._tokens.setdefault(token.encode(), role)
        self._page_keys[page_key(token).encode()] = known
        if known is not role:
            raise ValueError(f"one token cannot be both the {known.value}'s and the {role.value}'s")

    @classmethod
    def from_settings(cls) -> AccessPolicy:
        """Return the policy that `OPENENV_TOKEN`, `OPENENV_AGENT_TOKEN` and `OPENENV_OBSERVER_TOKEN` ask for."""
        return cls(
            orchestrator=settings.orchestrator_tokens(),
            agent=settings.agent_tokens(),
            observer=settings.observer_tokens(),
        )

    def __repr__(self) -> str:
        roles = ", ".join(role.value for role in Role if self.has(role))
        return f"<AccessPolicy {f'with tokens for {roles}' if roles else 'open'}>"

    @property
    def is_open(self) -> bool:
        """Whether there are no tokens, so that everybody may do everything."""
        return not self._tokens

    def has(self, role: Role) -> bool:
        """Say whether some token stands for a role."""
        return role in self._tokens.values()

    def role(self, token: str) -> Role | None:
        """Return what a token stands for, or None. Takes as long for one as for the other."""
        return _match(self._tokens, token)

    def identify(self, scope: Scope, *, by_address: bool = False, by_cookie: bool = False) -> Role | None:
        """Return the role of the token that a request carries, or None where there is none, or an unknown one.

        Args:
            scope: The request.
            by_address: Whether `?token=` in the address counts, for clients that cannot set headers. It is taken out
                of the query, so that nobody behind logs it; the scope has it as `ADDRESS_TOKEN` if it is known.
            by_cookie: Whether the cookie counts that the web page has got for a token.
        """
        known = scope.get(_FOUND)
        if known is not None and known[0] is self:  # the short way may have looked already
            role: Role | None = known[1]
            return role
        token = _bearer(scope)
        if by_address:
            written = _take_from_address(scope)
            token = written if token is None else token
        kept = cookie(scope, token_cookie(scope)) if by_cookie and token is None else None
        role = None if token is None else self.role(token)
        if kept is not None:
            role = _match(self._page_keys, kept)
        scope[_FOUND] = (self, role, token is not None or kept is not None)
        if role is not None and by_address and written is not None:
            scope[ADDRESS_TOKEN] = written
        return role


def _match(known: Mapping[bytes, Role], given: str) -> Role | None:
    secret, found = given.encode("utf-8", "surrogatepass"), None
    for one, role in known.items():
        if hmac.compare_digest(one, secret):
            found = role
    return found


def _bearer(scope: Scope) -> str | None:
    scheme, _, token = (header(scope, b"authorization") or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _take_from_address(scope: Scope) -> str | None:
    query: bytes = scope.get("query_string") or b""
    if b"token=" not in query:
        return None
    parts = query.split(b"&")
    scope["query_string"] = b"&".join(part for part in parts if not part.startswith(b"token="))
    found = next((part for part in parts if part.startswith(b"token=")), None)
    return None if found is None else unquote(found[len(b"token=") :].decode("latin-1"))
