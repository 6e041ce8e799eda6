"""`/web/login` and `/web/logout`: a token for a cookie that scripts cannot read.

The cookie counts for the page's own routes only. Knows tokens and cookies; who may do what is in `server.access`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import settings
from ..errors import (
    EnvironmentFactoryError,
    OpenEnvError,
    SessionCapacityError,
    SessionLost,
    SessionNotFoundError,
    message_of,
)
from ..protocol.json_values import decode, encode
from ..protocol.server_v1 import error_list
from ..server.access import AccessPolicy, Role, page_key, role_of, token_cookie
from ..server.asgi import (
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
    respond_json,
)
from ..server.fast.frame_socket import open_socket
from ..server.mcp.tool_calls import NoTools
from ..server.service import EnvService
from ..server.sockets import Socket
from ..sessions.manager import SessionManager
from ..sessions.session import Session, SessionState
from ..types import WSErrorCode
from .page_description import PageDescription
from .quickstart import DEFAULT_URL
from .visitor_actions import NoState, UnfitAction, VisitorActions
from .visitors import COOKIE, Visitor, Visitors

_MAX_BODY = 16 * 1024


class Login:
    """The ASGI handlers of `/web/login` and `/web/logout`.

    Args:
        access: Tells which tokens count.
        report: Told the code of each refusal.
    """

    def __init__(self, access: Callable[[], AccessPolicy], report: Callable[[str], None]) -> None:
        self._access = access
        self._report = report

    async def login(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/login`."""
        try:
            body = decode(await read_body(receive, _MAX_BODY))
        except ClientGone:
            return
        except (ValueError, BodyTooLarge):
            body = None
        access = self._access()
        if access.is_open:
            await respond_json(send, 200, {"role": Role.ORCHESTRATOR.value})
            return
        token = body.get("token") if isinstance(body, dict) else None
        role = access.role(token.strip()) if isinstance(token, str) else None
        if role is None:
            await self._refuse(send, 401, "UNAUTHORIZED", "This server does not know that token.")
        elif role is Role.AGENT:
            await self._refuse(send, 403, "FORBIDDEN", "The token is an agent's, who may call tools and nothing else.")
        else:
            assert isinstance(token, str)
            kept = _set_cookie(scope, page_key(token.strip()))
            await respond_json(send, 200, {"role": role.value}, [kept])

    async def logout(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/logout`."""
        forgotten = _set_cookie(scope, "", life="; Max-Age=0")
        await respond_json(send, 200, {"role": None}, [forgotten])

    async def _refuse(self, send: Send, status: int, code: str, text: str) -> None:
        self._report(code)
        await respond_json(send, status, {"detail": text, "code": code})


def _set_cookie(scope: Scope, value: str, *, life: str = "") -> tuple[bytes, bytes]:
    secure = "; Secure" if is_https(scope) else ""
    return b"set-cookie", f"{token_cookie(scope)}={value}; Path=/; HttpOnly; SameSite=Strict{secure}{life}".encode()


def is_https(scope: Scope) -> bool:
    """Say whether the browser speaks TLS, with this server or with a proxy in front of it."""
    forwarded = (header(scope, b"x-forwarded-proto") or "").split(",")[0].strip().lower()
    return scope.get("scheme") in ("https", "wss") or forwarded == "https"


# routes: The page's routes that are about playing: `/web/page`, `/web/reset`, `/web/step` and their kin.
#
# Knows HTTP; what is done is in `play`, for whom in `visitors`.


logger = logging.getLogger(__name__)

NO_TOOLS = "NO_TOOLS"
NO_STATE = "NO_STATE"
_UNFIT = WSErrorCode.VALIDATION_ERROR.value
_FAILED = WSErrorCode.EXECUTION_ERROR.value
_HOST = re.compile(r"[\w.:\[\]-]+", re.ASCII)
_NO_STORE: HeaderList = ((b"cache-control", b"no-store"),)


class Unfit(Exception):
    """A body is not what the route takes."""

    def __init__(self, text: str, errors: list[dict[str, Any]] | None = None) -> None:
        super().__init__(text)
        self.errors = errors or [{"type": "value_error", "loc": [], "msg": text}]


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """What a route answers."""

    body: bytes
    status: int = 200
    headers: HeaderList = _NO_STORE


class PlayRoutes:
    """The ASGI handlers.

    Args:
        service: The served environment.
        visitors: Who plays.
        play: Does it.
        page: Says what the page shows.
        access: Tells which tokens count.
    """

    def __init__(
        self,
        service: EnvService,
        visitors: Visitors,
        play: VisitorActions,
        page: PageDescription,
        access: Callable[[], AccessPolicy],
    ) -> None:
        self._service = service
        self._visitors = visitors
        self._play = play
        self._page = page
        self._access = access

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/page`."""

        async def answer() -> PageAnswer:
            asks = not self._access().is_open
            return PageAnswer(
                encode(await self._page.describe(role_of(scope), url=address_of(scope), asks_for_token=asks))
            )

        await self._answer(send, answer)

    async def metadata(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/metadata`."""

        async def answer() -> PageAnswer:
            return PageAnswer(encode((await self._page.metadata()).model_dump()))

        await self._answer(send, answer)

    async def state(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/state`."""

        async def answer() -> PageAnswer:
            try:
                return PageAnswer(await self._play.state(self._visitor(scope)))
            except NoState as exc:
                return PageAnswer(encode({"detail": str(exc), "code": NO_STATE}), 409)

        await self._answer(send, answer)

    async def reset(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/reset`."""

        async def answer() -> PageAnswer:
            kwargs = await self._object(receive)
            return PageAnswer(
                (await self._play.reset(self._visitors.of(cookie(scope, COOKIE) or None), kwargs)).payload
            )

        await self._answer(send, answer)

    async def step(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/step`."""

        async def answer() -> PageAnswer:
            body = await self._object(receive)
            visitor = self._visitor(scope)
            if "message" in body and "action" not in body:
                return PageAnswer((await self._play.say(visitor, str(body["message"]))).payload)
            action = body.get("action", {})
            if not isinstance(action, dict):
                raise Unfit("'action' has to be an object")
            return PageAnswer((await self._play.step(visitor, action)).payload)

        await self._answer(send, answer)

    async def close(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/close`."""
        await respond_json(send, 200, {"closed": self._visitor(scope).end()}, _NO_STORE)

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/call`."""

        async def answer() -> PageAnswer:
            body = await self._object(receive)
            name, arguments = body.get("name"), body.get("arguments") or {}
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise Unfit("expected the 'name' of a tool, and its 'arguments' as an object")
            called = await self._play.call(self._visitor(scope), name, arguments)
            return PageAnswer(encode({"result": called.result, "error": called.error}))

        await self._answer(send, answer)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _visitor(self, scope: Scope) -> Visitor:
        return self._visitors.find(cookie(scope, COOKIE) or None)

    async def _object(self, receive: Receive) -> dict[str, Any]:
        raw = await read_body(receive, self._service.options.max_message_bytes)
        try:
            body = decode(raw) if raw.strip() else {}
        except ValueError as exc:
            raise Unfit(f"The body is not JSON: {exc}") from exc
        if body is not None and not isinstance(body, dict):
            raise Unfit("The body has to be an object")
        return body or {}

    async def _answer(self, send: Send, work: Callable[[], Any]) -> None:
        """PageAnswer with what the work returns, or with what went wrong."""
        try:
            answer: PageAnswer = await work()
        except ClientGone:
            return
        except BodyTooLarge as exc:
            self._service.manager.report_error(BODY_TOO_LARGE)
            body = {"detail": str(exc), "code": BODY_TOO_LARGE, "limit_bytes": exc.limit}
            answer = PageAnswer(encode(body), 413)
        except (Unfit, UnfitAction) as exc:
            self._service.manager.report_error(_UNFIT)
            answer = _unfit(exc)
        except NoTools:
            answer = PageAnswer(encode({"detail": "This environment has no tools.", "code": NO_TOOLS}), 404)
        except OpenEnvError as exc:
            answer = self._refusal(exc)
        except Exception as exc:
            logger.exception("a request of the web page failed")
            answer = PageAnswer(encode({"detail": message_of(exc), "code": _FAILED}), 500)
        await respond(send, answer.status, answer.body, answer.headers)

    def _refusal(self, exc: OpenEnvError) -> PageAnswer:
        reason = exc.details.get("reason") if isinstance(exc, EnvironmentFactoryError) else None
        text = str(exc) if reason is None else f"{exc} {reason}"
        body = encode({"detail": text, "code": exc.code, **exc.details})
        if isinstance(exc, SessionLost):
            return PageAnswer(body, 410)
        if isinstance(exc, SessionCapacityError):
            later = str(max(1, int(self._service.manager.retry_after_s))).encode()
            return PageAnswer(body, 503, [*_NO_STORE, (b"retry-after", later)])
        if not isinstance(exc, EnvironmentFactoryError):
            logger.error("a request of the web page failed", exc_info=exc)
        return PageAnswer(body, 500)


def _unfit(exc: Unfit | UnfitAction) -> PageAnswer:
    if isinstance(exc, Unfit):
        text, errors = str(exc), exc.errors
    else:
        cause = exc.__cause__
        assert isinstance(cause, Exception)
        text, errors = "The action does not fit.", error_list(cause)
    return PageAnswer(encode({"detail": text, "code": _UNFIT, "errors": errors}), 422)


def address_of(scope: Scope) -> str:
    """Return the address that clients connect to, as the browser knows it."""
    space = settings.space_host()
    if space:
        return f"https://{space}"
    host = header(scope, b"host")
    if not host or not _HOST.fullmatch(host):  # the program that is shown has it in quotes
        return DEFAULT_URL
    root = str(scope.get("root_path", "")).rstrip("/")
    return f"{'https' if is_https(scope) else 'http'}://{host}{root}"


# operators: `/web/sessions`: all sessions of a server, for whoever looks after it.
#
# Knows the session manager and visitors; shows no tokens.


ENDED_BY_OPERATOR = "ended by an operator"


class OperatorRoutes:
    """The ASGI handlers."""

    def __init__(self, manager: SessionManager, visitors: Visitors) -> None:
        self._manager = manager
        self._visitors = visitors

    async def list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/sessions`."""
        manager = self._manager
        mine = self._visitors.find(cookie(scope, COOKIE) or None).session
        capacity = {
            "max": manager.max_sessions,
            "active": manager.active,
            "queued": len(manager.queue),
            "draining": manager.is_draining,
        }
        shown = [self._shown(session, is_mine=session is mine) for session in manager.sessions()]
        known = [session for session in shown if session is not None]
        await respond_json(send, 200, {"capacity": capacity, "sessions": known}, _NO_STORE)

    async def end(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `DELETE /web/sessions/{session_id}`."""
        session_id = scope["path_params"]["session_id"]
        found = next((session for session in self._manager.sessions() if session.id == session_id), None)
        if found is None or found.is_ending:
            missing = SessionNotFoundError(session_id)
            self._manager.report_error(missing.code)
            await respond_json(send, 404, {"detail": str(missing), "code": missing.code})
            return
        found.close(ENDED_BY_OPERATOR)
        player = self._visitors.player(session_id)
        if player is not None:  # he need not wait until it has ended
            player.lose(ENDED_BY_OPERATOR)
        await respond_json(send, 200, {"session_id": session_id, "closed": True})

    def _shown(self, session: Session, *, is_mine: bool) -> dict[str, Any] | None:
        info = self._manager.info(session.id)
        if info is None:  # it has just ended
            return None
        player = self._visitors.player(session.id)
        idle_s = session.unused_s if player is None else player.unused_s
        return {
            "session_id": session.id,
            "state": session.state.value,
            "kind": "page" if player is not None else session.kind.value,
            "episode_id": None if player is None else player.episode.episode_id,
            "step_count": session.step_count,
            "created_at": info.created_at,
            "last_activity_at": info.last_activity_at,
            "age_s": max(0.0, info.last_activity_at - info.created_at + session.unused_s),
            "idle_s": 0.0 if session.state is SessionState.BUSY else idle_s,
            "is_mine": is_mine,
        }


# updates: `WS /ws/ui`: what happens to a visitor's episode, as it happens.
#
# The page asks for the subprotocol `openenv.ui.v1` and gets increments; others get the contract's whole state after each
# change. Whoever reads too slowly misses increments and then gets the whole again: nobody waits for a socket. Knows
# sockets and frames; what they say is the visitor's business.


PROTOCOL = "openenv.ui.v1"
_MAX_MESSAGE = 64 * 1024


class UiConnection:
    """One socket that looks on.

    Args:
        visitor: Whose episode it sees.
        socket: Where the frames go.
        is_whole: Whether it gets the contract's frames.
    """

    def __init__(self, visitor: Visitor, socket: Socket, *, is_whole: bool) -> None:
        self._visitor = visitor
        self._socket = socket
        self._is_whole = is_whole
        self._is_behind = False

    def begin(self) -> None:
        """Show what there is, and whatever comes after it."""
        self._visitor.watchers.add(self)
        self._show_all()

    def _show_all(self) -> None:
        self._is_behind = False
        self._socket.send(self._visitor.state_update() if self._is_whole else self._visitor.hello())

    # -- Watcher --------------------------------------------------------------------------------------------------

    def changed(self, visitor: Visitor, frame: bytes, *, is_state: bool) -> None:
        """Send a frame, unless the peer does not read."""
        if self._is_whole and not is_state:
            return
        if self._is_behind or self._socket.is_full:
            self._is_behind = True
        elif self._is_whole:
            self._socket.send(visitor.state_update())
        else:
            self._socket.send(frame)

    def leave(self, reason: str) -> None:
        """Hang up, since the server stops."""
        self._socket.close(1012, reason)

    # -- SocketHandler --------------------------------------------------------------------------------------------

    def on_message(self, payload: bytes) -> None:
        """What comes in is of no interest."""

    def on_binary(self, payload: bytes) -> None:
        """Neither is this."""

    def on_oversize(self, size: int) -> None:
        """Nobody who looks on has so much to say."""
        self._socket.close(1009, "too large")

    def on_writable(self) -> None:
        """Show the whole to a peer that has missed something."""
        if self._is_behind:
            self._show_all()

    def on_shutdown(self) -> None:
        """The server is going down."""
        self.leave("the server is shutting down")

    def on_lost(self) -> None:
        """Nobody looks on any more."""
        self._visitor.watchers.discard(self)


class UiEndpoint:
    """The ASGI endpoint of `/ws/ui`."""

    def __init__(self, visitors: Visitors) -> None:
        self._visitors = visitors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept, and tell what happens until the connection ends."""
        await receive()  # websocket.connect
        offered = [name.strip() for name in (header(scope, b"sec-websocket-protocol") or "").split(",")]
        is_page = PROTOCOL in offered
        await send({"type": "websocket.accept", "subprotocol": PROTOCOL if is_page else None})
        socket = open_socket(receive, send, max_size=_MAX_MESSAGE)
        connection = UiConnection(self._visitors.of(cookie(scope, COOKIE)), socket, is_whole=not is_page)
        socket.start(connection)
        connection.begin()
        try:
            await socket.wait_closed()
        finally:
            connection.on_lost()
