"""The page's routes: playing, the list of sessions, login, and the live updates of `WS /ws/ui`.

Knows HTTP and sockets. `visitor_actions` has the actions of visitors, `visitors` their sessions.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from openenv import settings
from openenv.errors import (
    EnvironmentFactoryError,
    OpenEnvError,
    RequestCancelled,
    RequestValidationError,
    SessionCapacityError,
    SessionLost,
    SessionNotFoundError,
    message_of,
)
from openenv.protocol.json_values import decode, encode
from openenv.protocol.server_v1 import error_list
from openenv.types import WSErrorCode

from ..access import AccessPolicy, Role, page_key, role_of, token_cookie
from ..asgi import (
    BODY_TOO_LARGE,
    BodyTooLarge,
    ClientGone,
    HeaderList,
    Receive,
    Scope,
    Send,
    cookie,
    header,
    read_body,
    respond,
    set_cookie,
)
from ..fast.frame_socket import open_socket
from ..mcp.tool_calls import NoTools
from ..service import EnvService
from ..sessions.session import Session, SessionState
from ..sockets import Socket
from .episode_recorder import opener_of
from .page_description import PageDescription
from .quickstart import DEFAULT_URL
from .visitor_actions import NoState, UnfitAction, VisitorActions
from .visitors import COOKIE, Visitor, Visitors

logger = logging.getLogger(__name__)

ENDED_BY_OPERATOR = "ended by an operator"
NO_TOOLS = "NO_TOOLS"
NO_STATE = "NO_STATE"
UI_PROTOCOL = "openenv.ui.v1"
SESSIONS = "sessions"
_INVALID = WSErrorCode.VALIDATION_ERROR.value
_FAILED = WSErrorCode.EXECUTION_ERROR.value
_MAX_LOGIN_BODY = 16 * 1024
_MAX_UI_MESSAGE = 64 * 1024
_HOST = re.compile(r"[\w.:\[\]-]+", re.ASCII)
_NO_STORE: HeaderList = ((b"cache-control", b"no-store"),)


class InvalidBody(Exception):
    """A body does not have the shape that the route expects."""


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """The response of a route."""

    body: bytes
    status: int = 200
    headers: HeaderList = _NO_STORE

    @classmethod
    def of(cls, value: Any, status: int = 200, headers: HeaderList = _NO_STORE) -> PageAnswer:
        """Encode a response."""
        return cls(encode(value), status, headers)


def _handler(
    work: Callable[[PageRoutes, Scope, Receive], Awaitable[PageAnswer]],
) -> Callable[[PageRoutes, Scope, Receive, Send], Coroutine[Any, Any, None]]:
    """Make an ASGI handler of a method that returns a response; exceptions become responses, too."""

    @functools.wraps(work)
    async def handle(self: PageRoutes, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await work(self, scope, receive)
        except ClientGone:
            return
        except Exception as exc:
            answer = self.refusal(exc)
        await respond(send, answer.status, answer.body, answer.headers)

    return handle


@dataclass(frozen=True, slots=True)
class PageRoutes:
    """The ASGI handlers of the page's HTTP routes.

    Args:
        service: The served environment.
        visitors: The visitors.
        actions: Acts for them.
        description: Describes the page.
        access: Returns the server's tokens and roles.
        is_embedded: Whether the page usually appears in a frame of another site.
    """

    service: EnvService
    visitors: Visitors
    actions: VisitorActions
    description: PageDescription
    access: Callable[[], AccessPolicy]
    is_embedded: bool = False

    # -- playing --------------------------------------------------------------------------------------------------

    @_handler
    async def page(self, scope: Scope, receive: Receive) -> PageAnswer:
        """Handle `GET /web/page`."""
        asks_for_token = not self.access().is_open
        url = address_of(scope)
        return PageAnswer.of(await self.description.describe(role_of(scope), url=url, asks_for_token=asks_for_token))

    @_handler
    async def metadata(self, scope: Scope, receive: Receive) -> PageAnswer:
        """Handle `GET /web/metadata`."""
        return PageAnswer.of((await self.description.metadata()).model_dump())

    @_handler
    async def state(self, scope: Scope, receive: Receive) -> PageAnswer:
        """Handle `GET /web/state`."""
        return PageAnswer(await self.actions.state(self._visitor(scope)))

    @_handler
    async def reset(self, scope: Scope, receive: Receive) -> PageAnswer:
        """Handle `POST /web/reset`."""
        kwargs = await self._object(receive)
        key = cookie(scope, COOKIE) or None
        visitor = self.visitors.of(key)
        _note_theme(scope, visitor)
        outcome = await self.actions.reset(visitor, kwargs)
        new_key = None if key is None else self.visitors.rename(key)
        if new_key is None:
            return PageAnswer(outcome.payload)
        renamed = visitor_cookie(scope, new_key, is_embedded=self.is_embedded)
        return PageAnswer(outcome.payload, headers=[*_NO_STORE, renamed])

    @_handler
    async def step(self, scope: Scope, receive: Receive) -> PageAnswer:
        """Handle `POST /web/step`."""
        body = await self._object(receive)
        visitor = self._visitor(scope)
        if "message" in body and "action" not in body:
            return PageAnswer((await self.actions.say(visitor, str(body["message"]))).payload)
        action = body.get("action", {})
        if not isinstance(action, dict):
            raise InvalidBody("'action' has to be an object")
        return PageAnswer((await self.actions.step(visitor, action)).payload)

    @_handler
    async def call(self, scope: Scope, receive: Receive) -> PageAnswer:
        """Handle `POST /web/call`."""
        body = await self._object(receive)
        name, arguments = body.get("name"), body.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise InvalidBody("expected the 'name' of a tool, and its 'arguments' as an object")
        return PageAnswer.of(await self.actions.call(self._visitor(scope), name, arguments))

    @_handler
    async def cancel(self, scope: Scope, receive: Receive) -> PageAnswer:
        """Handle `POST /web/cancel`."""
        return PageAnswer.of({"cancelled": self._visitor(scope).cancel()})

    @_handler
    async def close(self, scope: Scope, receive: Receive) -> PageAnswer:
        """Handle `POST /web/close`."""
        return PageAnswer.of({"closed": self._visitor(scope).end()})

    # -- operators ------------------------------------------------------------------------------------------------

    @_handler
    async def sessions(self, scope: Scope, receive: Receive) -> PageAnswer:
        """Handle `GET /web/sessions`: all sessions of the server, without their tokens."""
        manager = self.service.manager
        own = self._visitor(scope).session
        capacity = {
            "max": manager.max_sessions,
            "active": manager.active,
            "queued": manager.queue.total,
            "draining": manager.is_draining,
        }
        entries = self._session_entries(own)
        for answer in await manager.peers.ask(SESSIONS):
            entries += decode(answer) if answer else []
        return PageAnswer.of({"capacity": capacity, "sessions": entries})

    def encoded_sessions(self) -> bytes:
        """Return the sessions of this process, for the list of another one."""
        return encode(self._session_entries(None))

    def _session_entries(self, own: Session | None) -> list[dict[str, Any]]:
        entries = [self._session_entry(session, is_mine=session is own) for session in self.service.manager.sessions()]
        return [entry for entry in entries if entry is not None]

    @_handler
    async def end_session(self, scope: Scope, receive: Receive) -> PageAnswer:
        """Handle `DELETE /web/sessions/{session_id}`."""
        session_id = scope["path_params"]["session_id"]
        session = next((session for session in self.service.manager.sessions() if session.id == session_id), None)
        if session is None or session.is_ending:
            missing = SessionNotFoundError(session_id)
            self.service.manager.report_error(missing.code)
            return PageAnswer.of({"detail": str(missing), "code": missing.code}, 404, ())
        session.close(ENDED_BY_OPERATOR)
        visitor = self.visitors.by_session.get(session_id)
        if visitor is not None:  # tell the page at once: the session may take long to close
            visitor.lose(ENDED_BY_OPERATOR)
        return PageAnswer.of({"session_id": session_id, "closed": True}, headers=())

    def _session_entry(self, session: Session, *, is_mine: bool) -> dict[str, Any] | None:
        info = self.service.manager.info(session.id)
        if info is None:  # it has just ended
            return None
        visitor = self.visitors.by_session.get(session.id)
        idle_s = session.unused_s if visitor is None else visitor.unused_s
        return {
            "session_id": session.id,
            "state": session.state.value,
            "kind": "page" if visitor is not None else session.kind.value,
            "opened_by": "page" if visitor is not None else opener_of(session),
            "episode_id": None if visitor is None else visitor.episode.episode_id,
            "step_count": session.step_count,
            "created_at": info.created_at,
            "last_activity_at": info.last_activity_at,
            "age_s": max(0.0, info.last_activity_at - info.created_at + session.unused_s),
            "idle_s": 0.0 if session.state is SessionState.BUSY else idle_s,
            "is_mine": is_mine,
        }

    # -- inside ---------------------------------------------------------------------------------------------------

    def _visitor(self, scope: Scope) -> Visitor:
        visitor = self.visitors.find(cookie(scope, COOKIE) or None)
        _note_theme(scope, visitor)
        return visitor

    async def _object(self, receive: Receive) -> dict[str, Any]:
        raw = await read_body(receive, self.service.options.max_message_bytes)
        try:
            self.service.value_limit.check(raw)
            body = decode(raw) if raw.strip() else {}
        except ValueError as exc:
            raise InvalidBody(f"The body is not JSON: {exc}") from exc
        if body is not None and not isinstance(body, dict):
            raise InvalidBody("The body has to be an object")
        return body or {}

    def refusal(self, exc: Exception) -> PageAnswer:
        """Turn an exception into a response."""
        match exc:
            case BodyTooLarge():
                self.service.manager.report_error(BODY_TOO_LARGE)
                return PageAnswer.of({"detail": str(exc), "code": BODY_TOO_LARGE, "limit_bytes": exc.limit}, 413)
            case InvalidBody():
                return self._invalid(str(exc), [{"type": "value_error", "loc": [], "msg": str(exc)}])
            case UnfitAction():
                cause = exc.__cause__
                assert isinstance(cause, Exception)
                return self._invalid("The action does not fit.", error_list(cause))
            case NoTools():
                return PageAnswer.of({"detail": "This environment has no tools.", "code": NO_TOOLS}, 404)
            case NoState():
                return PageAnswer.of({"detail": str(exc), "code": NO_STATE}, 409)
            case RequestValidationError():  # the environment refuses the action
                return self._invalid(str(exc), exc.details.get("errors") or [])
            case OpenEnvError():
                return self._session_refusal(exc)
        logger.error("a request of the web page failed", exc_info=exc)
        return PageAnswer.of({"detail": message_of(exc), "code": _FAILED}, 500)

    def _invalid(self, text: str, errors: list[dict[str, Any]]) -> PageAnswer:
        self.service.manager.report_error(_INVALID)
        return PageAnswer.of({"detail": text, "code": _INVALID, "errors": errors}, 422)

    def _session_refusal(self, exc: OpenEnvError) -> PageAnswer:
        reason = exc.details.get("reason") if isinstance(exc, EnvironmentFactoryError) else None
        text = str(exc) if reason is None else f"{exc} {reason}"
        body = encode({"detail": text, "code": exc.code, **exc.details})
        if isinstance(exc, SessionLost):
            return PageAnswer(body, 410)
        if isinstance(exc, RequestCancelled):
            return PageAnswer(body, 409)
        if isinstance(exc, SessionCapacityError):
            retry_after = str(max(1, int(self.service.manager.retry_after_s))).encode()
            return PageAnswer(body, 503, [*_NO_STORE, (b"retry-after", retry_after)])
        if not isinstance(exc, EnvironmentFactoryError):
            logger.error("a request of the web page failed", exc_info=exc)
        return PageAnswer(body, 500)


def _note_theme(scope: Scope, visitor: Visitor) -> None:
    """Store the colours of the visitor's page, which each action reports."""
    theme = header(scope, b"x-openenv-theme")
    if theme is not None:
        visitor.theme = "dark" if theme == "dark" else "light"


@dataclass(frozen=True, slots=True)
class PageLogin:
    """The ASGI handlers of login and logout.

    Args:
        access: Returns the server's tokens and roles.
        report: Called with the code of each refusal.
    """

    access: Callable[[], AccessPolicy]
    report: Callable[[str], None]

    async def login(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/login`: exchange a token for a cookie that scripts cannot read.

        The cookie is valid for the page's routes only; `server.access` defines the rights of each role.
        """
        try:
            body = decode(await read_body(receive, _MAX_LOGIN_BODY))
        except ClientGone:
            return
        except (ValueError, BodyTooLarge):
            body = None
        answer = self._answer(scope, body.get("token") if isinstance(body, dict) else None)
        await respond(send, answer.status, answer.body, answer.headers)

    async def logout(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/logout`."""
        answer = PageAnswer.of({"role": None}, headers=[_token_cookie(scope, None)])
        await respond(send, answer.status, answer.body, answer.headers)

    def _answer(self, scope: Scope, token: Any) -> PageAnswer:
        access = self.access()
        if access.is_open:
            return PageAnswer.of({"role": Role.ORCHESTRATOR.value}, headers=())
        token = token.strip() if isinstance(token, str) else ""
        role = access.role(token)
        if role is None:
            return self._refuse(401, "UNAUTHORIZED", "This server does not know that token.")
        if role is Role.AGENT:
            return self._refuse(403, "FORBIDDEN", "The token is an agent's, which may call tools and nothing else.")
        return PageAnswer.of({"role": role.value}, headers=[_token_cookie(scope, page_key(token))])

    def _refuse(self, status: int, code: str, text: str) -> PageAnswer:
        self.report(code)
        return PageAnswer.of({"detail": text, "code": code}, status, ())


def _token_cookie(scope: Scope, value: str | None) -> tuple[bytes, bytes]:
    return set_cookie(token_cookie(scope), value, same_site="Strict", is_secure=is_https(scope))


def visitor_cookie(scope: Scope, key: str, *, is_embedded: bool) -> tuple[bytes, bytes]:
    """Return the header that gives a browser its visitor's key."""
    is_secure = is_https(scope)
    if is_embedded and is_secure:
        return set_cookie(COOKIE, key, same_site="None", is_secure=True, is_partitioned=True)
    return set_cookie(COOKIE, key, is_secure=is_secure)


def is_https(scope: Scope) -> bool:
    """Return whether the browser uses TLS, with this server or with a proxy in front of it."""
    forwarded = (header(scope, b"x-forwarded-proto") or "").split(",")[0].strip().lower()
    return scope.get("scheme") in ("https", "wss") or forwarded == "https"


def address_of(scope: Scope) -> str:
    """Return the server's address in the browser."""
    space = settings.space_host()
    if space:
        return f"https://{space}"
    host = header(scope, b"host")
    if not host or not _HOST.fullmatch(host):  # it goes between quotes into the program of the quick start
        return DEFAULT_URL
    root = str(scope.get("root_path", "")).rstrip("/")
    return f"{'https' if is_https(scope) else 'http'}://{host}{root}"


# -- live updates -----------------------------------------------------------------------------------------------------


class UiConnection:
    """One socket that shows a visitor's episode.

    The page asks for the subprotocol `openenv.ui.v1` and gets one frame for each change; other clients get the whole
    state after each change (`is_whole`), as in the contract. A peer that reads too slowly misses frames and gets the
    whole state once it reads again: backpressure of a socket never delays the episode.
    """

    def __init__(self, visitor: Visitor, socket: Socket, *, is_whole: bool) -> None:
        self._visitor = visitor
        self._socket = socket
        self._is_whole = is_whole
        self._is_behind = False

    def begin(self) -> None:
        """Send the current state, and subscribe to changes."""
        self._visitor.watchers.add(self)
        self._send_all()

    def _send_all(self) -> None:
        self._is_behind = False
        self._socket.send(self._visitor.state_update() if self._is_whole else self._visitor.snapshot())

    # -- Watcher --------------------------------------------------------------------------------------------------

    def changed(self, visitor: Visitor, frame: bytes, *, is_state: bool) -> None:
        """Send a frame, unless the peer is behind."""
        if self._is_whole and not is_state:
            return
        if self._is_behind or self._socket.is_full:
            self._is_behind = True
        elif self._is_whole:
            self._socket.send(visitor.state_update())
        else:
            self._socket.send(frame)

    def shut_down(self, reason: str) -> None:
        """Close the socket, since the server stops."""
        self._socket.close(1012, reason)

    # -- SocketHandler --------------------------------------------------------------------------------------------

    def on_message(self, payload: bytes) -> None:
        """Ignore what the peer sends."""

    def on_binary(self, payload: bytes) -> None:
        """Ignore what the peer sends."""

    def on_oversize(self, size: int) -> None:
        """Close the socket of a peer that sends too much."""
        self._socket.close(1009, "too large")

    def on_writable(self) -> None:
        """Send the whole state to a peer that has missed frames."""
        if self._is_behind:
            self._send_all()

    def on_shutdown(self) -> None:
        """Close the socket, since the server stops."""
        self.shut_down("the server is shutting down")

    def on_lost(self) -> None:
        """Unsubscribe."""
        self._visitor.watchers.discard(self)


class UiEndpoint:
    """The ASGI endpoint of `/ws/ui`."""

    def __init__(self, visitors: Visitors) -> None:
        self._visitors = visitors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept, and send updates until the connection ends."""
        await receive()  # websocket.connect
        offered = [name.strip() for name in (header(scope, b"sec-websocket-protocol") or "").split(",")]
        is_page = UI_PROTOCOL in offered
        await send({"type": "websocket.accept", "subprotocol": UI_PROTOCOL if is_page else None})
        socket = open_socket(receive, send, max_size=_MAX_UI_MESSAGE)
        connection = UiConnection(self._visitors.of(cookie(scope, COOKIE)), socket, is_whole=not is_page)
        socket.start(connection)
        connection.begin()
        try:
            await socket.wait_closed()
        finally:
            connection.on_lost()
