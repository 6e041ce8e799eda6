"""`/mcp` over HTTP: Streamable HTTP of both eras of MCP, and OpenEnv's own JSON-RPC for everybody else.

Knows HTTP; what requests mean is in `methods` and `own`, whose session they are for in `episodes`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from ...errors import OpenEnvError, SessionLost, SessionNotFoundError, StaleRequest
from ...protocol.json_values import decode, encode
from ...protocol.jsonrpc import (
    META_SESSION,
    REQUEST_CANCELLED,
    JsonRpcErrorCode,
    JsonRpcResponse,
    McpError,
    McpMessage,
    check_modern,
    code_name,
    era_of,
    error_message,
    invalid_params,
    method_not_found,
    read_message,
    result_message,
    status_of,
)
from ...sessions.ledger import LedgerEntry
from ...sessions.lifetime import EXPIRED
from ...sessions.manager import SessionManager
from ...sessions.session import Session, SessionKind
from ...types import WSErrorCode
from ..access import Role, account_of, role_of
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
    respond_json,
    while_connected,
)
from ..http_routes import (
    BODY,
    KEY_HEADER,
    KEY_REUSED,
    KEY_REUSED_TEXT,
    SESSION_HEADER,
    RequestKey,
    echoing,
    kept_reply,
    request_key,
)
from ..service import EnvService
from ..ws import WsEndpoint
from ..ws_v1 import V1Connection
from .mcp_sessions import Episodes, McpSession
from .methods import McpExchange, McpMethods, failure, negotiated, session_error
from .openenv_rpc import OwnMethods
from .tool_calls import NoTools

# reply: The answer to a POST: JSON, or a stream of events once there is something to tell before the result.
#
# Clients keep their connection after JSON and drop it after a stream, and some limit the size of an event; so a stream
# begins only when a notification, or a long silence, needs one. Knows ASGI and server-sent events only.


PING_S = 15.0
_LOOK_S = 0.5
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class McpReply:
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


# once: Tool calls under an `Idempotency-Key`: one that is repeated is answered as it was before, and not run again.
#
# Knows a session's ledger and how answers are worded; must not know what tools do.


class Once:
    """One call under its key: the first of its kind, or a repetition."""

    def __init__(self, manager: SessionManager, session: Session, key: RequestKey, message: McpMessage) -> None:
        self._session = session
        self._refusal: tuple[int, bytes] | None = None
        self._entry: LedgerEntry | None = None
        try:
            self._entry = session.ledger.find(key.name)
            self.is_repeated = self._entry is not None
            if self._entry is not None and self._entry.asked != key.asked:  # or it would get another's reply
                self._refuse(manager, message, 422, KEY_REUSED, KEY_REUSED_TEXT)
        except StaleRequest as exc:
            self.is_repeated = True
            self._refuse(manager, message, 409, exc.code, str(exc))
        if not self.is_repeated:
            self._entry = session.ledger.begin(key.name, key.asked)

    @classmethod
    def of(cls, manager: SessionManager, scope: Scope, message: McpMessage, session: Session | None) -> Once | None:
        """Return the call that a request is; None where it has no key, or calls no tool of a session."""
        if session is None or message.method != "tools/call":
            return None
        key = request_key(scope)
        return None if key is None else cls(manager, session, key, message)

    def _refuse(self, manager: SessionManager, message: McpMessage, status: int, code: str, text: str) -> None:
        manager.report_error(code, self._session)
        problem = McpError(JsonRpcErrorCode.INVALID_REQUEST.value, text, {"code": code})
        self._refusal = status, encode(error_message(message.id, problem))

    def finish(self, status: int, told: Mapping[str, Any]) -> None:
        """Keep the answer to the first call, and tell those who have asked again meanwhile."""
        assert self._entry is not None
        body = encode(told)
        self._session.ledger.finish(self._entry, (status, body), len(body))

    async def answer_again(self, send: Send, headers: HeaderList) -> None:
        """Answer a repetition; waits where the call still runs."""
        if self._refusal is None:
            assert self._entry is not None
            status, body = await kept_reply(self._entry)
        else:
            status, body = self._refusal
        await respond(send, status, body, headers)


logger = logging.getLogger(__name__)

COOKIE = "openenv_mcp"
_SESSION = b"mcp-session-id"
_HANDLE = SESSION_HEADER.lower().encode()
_CANCELLED = McpError(REQUEST_CANCELLED, "Request cancelled")
_LOST = "The session has ended ({reason}) and its episode with it. The next call begins a new one."


class McpEndpoint:
    """The ASGI handler of POST, GET and DELETE on `/mcp`."""

    def __init__(self, service: EnvService) -> None:
        self._service = service
        self.episodes = Episodes(service)
        self._methods = McpMethods(service)
        self._own = OwnMethods(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        match scope["method"]:
            case "POST":
                await self._post(scope, receive, send)
            case "GET":
                await self._get(scope, receive, send)
            case "DELETE":
                await self._delete(scope, send)
            case _:
                await respond_json(send, 405, {"detail": "Method Not Allowed"}, [(b"allow", b"GET, POST, DELETE")])

    def _count(self, problem: BaseException | None) -> None:
        """Report a refusal, unless it follows from what was reported where it happened."""
        if isinstance(problem, McpError) and problem.__cause__ is None:
            self._service.manager.report_error(code_name(problem.code))

    def _outcome(self, message: McpMessage, work: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        """Word what came of a request."""
        if work.cancelled():
            return error_message(message.id, _CANCELLED)
        problem = work.exception()
        if problem is None:
            return result_message(message.id, work.result())
        self._count(problem)
        if not isinstance(problem, McpError):
            logger.error("MCP %s failed", message.method, exc_info=problem)
            problem = McpError(JsonRpcErrorCode.INTERNAL_ERROR.value, self._service.errors.text(problem))
        return error_message(message.id, problem)

    def _settled(self, message: McpMessage, work: asyncio.Future[dict[str, Any]], once: Once | None) -> dict[str, Any]:
        """Word what came of a request, cancel it if nothing has, and keep the answer for those who ask again."""
        if work.done():
            told = self._outcome(message, work)
        else:
            work.cancel()
            told = error_message(message.id, _CANCELLED)
        if once is not None:
            once.finish(_status(work) if work.done() else 200, told)
        return told

    # -- POST -----------------------------------------------------------------------------------------------------

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        send = echoing(scope, send)
        try:
            scope[BODY] = await read_body(receive, self._service.options.max_message_bytes)
            data = decode(scope[BODY])
        except ClientGone:
            return
        except (ValueError, BodyTooLarge) as exc:
            code = BODY_TOO_LARGE if isinstance(exc, BodyTooLarge) else JsonRpcErrorCode.PARSE_ERROR.name
            self._service.manager.report_error(code)
            problem = JsonRpcResponse.error_response(JsonRpcErrorCode.PARSE_ERROR, f"Parse error: {exc}").model_dump()
            is_mcp = era_of(headers, None) is not None
            await respond_json(send, 400 if is_mcp else 200, problem)
            return
        era = era_of(headers, data)
        if era is None:
            await self._answer_own(scope, data, receive, send)
        elif era == "modern":
            await self._answer_modern(scope, headers, data, receive, send)
        else:
            await self._answer_handshake(scope, headers, data, receive, send)

    async def _answer_own(self, scope: Scope, data: Any, receive: Receive, send: Send) -> None:
        role = role_of(scope)
        once = self._once_own(scope, data)
        if once is not None:
            await self._answer_own_once(once, data, role, send)
            return
        try:
            answer = await while_connected(receive, self._own.answer(data, role=role))
        except ClientGone:
            return
        await respond_json(send, 200, answer)

    def _once_own(self, scope: Scope, data: Any) -> Once | None:
        """Return a call that has a key and names a session that is there; of anything else it is told when it runs."""
        manager = self._service.manager
        if header(scope, KEY_HEADER) is None:
            return None
        try:
            message = read_message(data)
            named = message.params.get("session_id")
            if not isinstance(named, str) or manager.info(named) is None:
                return None
            return Once.of(manager, scope, message, manager.find(named))
        except (McpError, OpenEnvError):
            return None

    async def _answer_own_once(self, once: Once, data: Any, role: Role, send: Send) -> None:
        if once.is_repeated:
            await once.answer_again(send, ())
            return
        answer = error_message(data.get("id"), _CANCELLED)
        try:
            answer = await self._own.answer(data, role=role)
        finally:
            once.finish(200, answer)
        await respond_json(send, 200, answer)

    # -- the handshake era ----------------------------------------------------------------------------------------

    async def _answer_handshake(
        self, scope: Scope, headers: Mapping[str, str], data: Any, receive: Receive, send: Send
    ) -> None:
        try:
            message = read_message(data)
        except McpError as exc:
            self._count(exc)
            await respond_json(send, 400, error_message(None, exc))
            return
        if message.method == "initialize" and message.is_request and "mcp-session-id" not in headers:
            await self._initialize(scope, message, send)
            return
        client = await self._client(headers, message, send)
        if client is None:
            return
        named: HeaderList = [(_SESSION, client.id.encode())]
        if not message.is_request:
            self._take_note(message, client)
            await respond(send, 202, b"", named)
            return
        reply = McpReply(send, named)
        if message.method == "initialize":  # once more: the session stays as it is
            await reply.finish(result_message(message.id, self._methods.initialized(message.params, client)))
            return
        client.session.touch()
        once = Once.of(self._service.manager, scope, message, client.session)
        if once is not None and once.is_repeated:
            await once.answer_again(send, named)
            return
        exchange = McpExchange("handshake", client.session, reply.notify, client)
        work = asyncio.ensure_future(self._methods.answer(message, exchange))
        assert message.id is not None
        client.running[message.id] = work
        watch = asyncio.ensure_future(self._end_abandoned(client, receive, work))
        try:
            await reply.follow(work)
        finally:
            watch.cancel()
            client.running.pop(message.id, None)
            told = self._settled(message, work, once)
        await reply.finish(told)

    async def _end_abandoned(self, client: McpSession, receive: Receive, work: asyncio.Future[Any]) -> None:
        """End a call whose client has hung up, which cancels nothing, and has not come back within the lease."""
        await _disconnected(receive)
        lease_s = self._service.manager.limits.idle_s
        while not work.done():
            left_s = lease_s - client.session.unused_s
            if left_s <= 0:
                break
            await asyncio.sleep(left_s)
        if client.is_owner:
            client.session.close(EXPIRED)
        else:
            work.cancel()

    async def _initialize(self, scope: Scope, message: McpMessage, send: Send) -> None:
        """Open a session. A refusal is sent with 200: older clients lose what comes with another status."""
        try:
            account = account_of(role_of(scope))
            client = await self.episodes.begin(negotiated(message.params), _handle(scope, message), account=account)
        except McpError as exc:
            problem = exc
        except NoTools as exc:
            problem = McpError(JsonRpcErrorCode.INTERNAL_ERROR.value, str(exc))
        except OpenEnvError as exc:
            problem = session_error(self._service.errors.shown(exc))
        except Exception as exc:
            logger.exception("the first reset of an MCP session failed")
            problem = McpError(JsonRpcErrorCode.INTERNAL_ERROR.value, f"reset failed: {self._service.errors.text(exc)}")
        else:
            result = result_message(message.id, self._methods.initialized(message.params, client))
            await respond_json(send, 200, result, [(_SESSION, client.id.encode())])
            return
        await respond_json(send, 200, error_message(message.id, problem))

    async def _client(self, headers: Mapping[str, str], message: McpMessage | None, send: Send) -> McpSession | None:
        """Find whose request this is; answers itself if that is nobody's."""
        request_id = message.id if message is not None else None
        name = headers.get("mcp-session-id")
        if name is None:
            problem = McpError(JsonRpcErrorCode.INVALID_REQUEST.value, "Missing Mcp-Session-Id: begin with initialize")
            self._count(problem)
            await respond_json(send, 400, error_message(request_id, problem))
            return None
        try:
            return self.episodes.find(name)
        except (SessionNotFoundError, SessionLost) as exc:
            problem = McpError(JsonRpcErrorCode.INVALID_REQUEST.value, f"Session not found: {exc}")
            await respond_json(send, 404, error_message(request_id, problem))
            return None

    @staticmethod
    def _take_note(message: McpMessage, client: McpSession) -> None:
        client.session.touch()
        if message.method == "notifications/cancelled":
            wanted = message.params.get("requestId")
            work = client.running.get(wanted) if isinstance(wanted, (str, int)) else None
            if work is not None:
                work.cancel()

    # -- since 2026-07-28 -----------------------------------------------------------------------------------------

    async def _answer_modern(
        self, scope: Scope, headers: Mapping[str, str], data: Any, receive: Receive, send: Send
    ) -> None:
        message: McpMessage | None = None
        try:
            message = read_message(data)
            if not message.is_request:
                await respond(send, 202, b"")  # there is nothing that a notification could still change
                return
            check_modern(headers, message)
            if not self._methods.knows(message.method, "modern"):
                raise method_not_found(message.method or "")
            session, extra = await self._modern_session(scope, message)
        except McpError as exc:
            self._count(exc)
            await respond_json(send, status_of(exc), error_message(message.id if message else None, exc))
            return
        except _Gone as exc:
            await self._refuse_lost(message, exc, send)
            return
        once = Once.of(self._service.manager, scope, message, session)
        if once is not None and once.is_repeated:
            await once.answer_again(send, extra)
            return
        reply = McpReply(send, extra)
        work = asyncio.ensure_future(self._methods.answer(message, McpExchange("modern", session, reply.notify)))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await reply.follow(work, gone)
            if once is not None:  # a client that has given its request a key may come back for the answer
                await asyncio.wait({work}, timeout=self._service.manager.limits.idle_s)
        finally:
            is_gone = gone.done()
            gone.cancel()
            told = self._settled(message, work, once)  # a client that hangs up cancels its request
        if not is_gone:
            await reply.finish(told, _status(work))

    async def _modern_session(self, scope: Scope, message: McpMessage) -> tuple[Session | None, HeaderList]:
        """Find the session that a request names, by a handle or by the cookie of an earlier answer, or open one."""
        handle = _handle(scope, message)
        kept = cookie(scope, COOKIE)
        try:
            if handle is not None:
                return self._service.manager.find(handle), ()
            if kept is not None:
                session = self._service.manager.find(kept)
                self._service.manager.slots.promote(session)
                return session, ()
        except (SessionNotFoundError, SessionLost) as exc:
            if not self._methods.needs_session(message.method):
                return None, ()
            raise _Gone(exc, by_cookie=handle is None) from exc
        if not self._methods.needs_session(message.method):
            return None, ()
        try:
            session = await self.episodes.open(SessionKind.SOFT, account_of(role_of(scope)))
        except OpenEnvError as exc:
            raise session_error(self._service.errors.shown(exc)) from exc
        except NoTools as exc:
            raise McpError(JsonRpcErrorCode.INTERNAL_ERROR.value, str(exc)) from exc
        except Exception as exc:
            text = f"reset failed: {self._service.errors.text(exc)}"
            raise McpError(JsonRpcErrorCode.INTERNAL_ERROR.value, text) from exc
        return session, [_cookie(session.id)]

    async def _refuse_lost(self, message: McpMessage | None, lost: _Gone, send: Send) -> None:
        """Say that an episode is gone; never go on with a fresh environment in its place."""
        assert message is not None
        extra: HeaderList = [_cookie("", expired=True)] if lost.by_cookie else ()
        text = _LOST.format(reason=lost.reason) if lost.by_cookie else f"No such session: {lost.reason}"
        if message.method == "tools/call":
            result = {"resultType": "complete", **failure(text)}
            await respond_json(send, 200, result_message(message.id, result), extra)
        else:
            await respond_json(send, 400, error_message(message.id, invalid_params(text)), extra)

    # -- GET and DELETE -------------------------------------------------------------------------------------------

    async def _get(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        if "text/event-stream" not in headers.get("accept", "") or "mcp-session-id" not in headers:
            await respond_json(send, 405, {"detail": "Method Not Allowed"}, [(b"allow", b"GET, POST, DELETE")])
            return
        client = await self._client(headers, None, send)
        if client is None:
            return
        named: HeaderList = [(_SESSION, client.id.encode())]
        if client.stream_ended is not None:
            problem = McpError(JsonRpcErrorCode.INVALID_REQUEST.value, "The session has an open stream already")
            self._count(problem)
            await respond_json(send, 409, error_message(None, problem), named)
            return
        ended = client.stream_ended = asyncio.Event()
        period = min(PING_S, self._service.manager.limits.idle_s / 3)
        try:
            await start_stream(send, named)
            await stream_until(ended, receive, send, period_s=period, on_beat=client.session.touch)
        finally:
            client.stream_ended = None

    async def _delete(self, scope: Scope, send: Send) -> None:
        headers = _headers(scope)
        client = await self._client(headers, None, send)
        if client is None:
            return
        if client.is_owner and role_of(scope) is Role.AGENT and not client.session.account.is_agent:
            text = "An agent can only close sessions that agents have opened"
            problem = McpError(JsonRpcErrorCode.INVALID_REQUEST.value, text)
            self._count(problem)
            await respond_json(send, 403, error_message(None, problem))
            return
        self.episodes.end(client)
        await respond(send, 200, b"", [(_SESSION, client.id.encode())])


class _Gone(Exception):
    """The session that a request names is not there."""

    def __init__(self, cause: SessionNotFoundError | SessionLost, *, by_cookie: bool) -> None:
        self.reason = cause.reason if isinstance(cause, SessionLost) else "unknown"
        self.by_cookie = by_cookie
        super().__init__(self.reason)


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _handle(scope: Scope, message: McpMessage) -> str | None:
    """The name of an existing session: in a header, in the address, or in the request itself."""
    named = header(scope, _HANDLE)
    if named is not None:
        return named.strip()
    query = scope.get("query_string", b"")
    if query and (found := parse_qs(query.decode("latin-1")).get("session_id")):
        return str(found[0])
    inside = message.meta.get(META_SESSION)
    return inside if isinstance(inside, str) else None


def _cookie(value: str, *, expired: bool = False) -> tuple[bytes, bytes]:
    life = "; Max-Age=0" if expired else ""
    return b"set-cookie", f"{COOKIE}={value}; Path=/; HttpOnly; SameSite=Lax{life}".encode()


def _status(work: asyncio.Future[Any]) -> int:
    problem = None if work.cancelled() else work.exception()
    return status_of(problem) if isinstance(problem, McpError) else 200


# socket: `WS /mcp`: OpenEnv's own JSON-RPC, one request per text frame, on the connection's own session.
#
# Knows frames; what requests mean is in `own`, how a connection lives in `server.ws`.


class RpcConnection(V1Connection):
    """A connection whose frames are JSON-RPC."""

    def _handle(self, payload: bytes) -> None:
        try:
            data = decode(payload)
        except ValueError as exc:
            self._service.manager.report_error(JsonRpcErrorCode.PARSE_ERROR.name, self._session)
            self._socket.send(_error(JsonRpcErrorCode.PARSE_ERROR, f"Parse error: {exc}"))
        else:
            self._submit_rpc(data)

    def _rpc_frame(self, message: Mapping[str, Any]) -> bytes:
        return encode(message)

    def _fail(self, code: WSErrorCode | str, message: str, details: dict[str, Any] | None = None) -> None:
        self._socket.send(_error(JsonRpcErrorCode.SERVER_ERROR, message, details or None))
        self._socket.close()

    def _too_large(self, size: int, limit: int) -> bytes:
        return _error(JsonRpcErrorCode.INVALID_REQUEST, f"A message of {size} bytes is over the limit of {limit} bytes")


class RpcEndpoint(WsEndpoint):
    """The ASGI endpoint of `WS /mcp`."""

    connection = RpcConnection
    restricted = RpcConnection  # whoever may come here may call tools


def _error(code: JsonRpcErrorCode, message: str, data: Any = None) -> bytes:
    return encode(JsonRpcResponse.error_response(code, message, data).model_dump())
