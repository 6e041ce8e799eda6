"""`/mcp`: Streamable HTTP of both eras of MCP, and OpenEnv's JSON-RPC on POST and WebSocket.

Knows HTTP; the meaning of requests is in `methods` and `openenv_rpc`, the sessions behind them in `mcp_sessions`.

    POST --era_of--> none (no MCP headers or _meta)   OpenEnv's JSON-RPC, `openenv_rpc`
                     handshake (up to 2025-11-25)     `initialize` opens a session, `Mcp-Session-Id` names it; GET keeps
                                                      a stream of events open, DELETE ends the session
                     modern (since 2026-07-28)        no handshake: a handle or a cookie names the session, and the
                                                      first call without either opens one
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

from openenv.errors import OpenEnvError, SessionElsewhere, SessionLost, SessionNotFoundError, StaleRequest
from openenv.protocol.json_values import decode, encode
from openenv.protocol.jsonrpc import (
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
    internal_error,
    invalid_params,
    invalid_request,
    method_not_found,
    negotiated_version,
    read_message,
    result_message,
    status_of,
)
from openenv.types import WSErrorCode

from ..access import Role, role_of
from ..asgi import (
    BODY_TOO_LARGE,
    BodyTooLarge,
    ClientGone,
    HeaderList,
    Receive,
    Scope,
    Send,
    cookie,
    disconnected,
    header,
    read_body,
    respond,
    respond_json,
    set_cookie,
    while_connected,
)
from ..http_routes import (
    BODY,
    KEY_HEADER,
    SESSION_HEADER,
    KeyReused,
    RequestKey,
    echoing,
    kept_entry,
    kept_reply,
    request_key,
)
from ..service import EnvService
from ..sessions.ledger import LedgerEntry
from ..sessions.lifetime import EXPIRED
from ..sessions.manager import SessionManager
from ..sessions.session import Session, SessionKind
from ..ws import WsEndpoint
from ..ws_v1 import V1Connection
from .mcp_sessions import McpSession, McpSessions
from .methods import McpExchange, McpMethods, failure, mcp_error
from .openenv_rpc import OpenEnvRpc
from .tool_calls import NoTools

logger = logging.getLogger(__name__)

COOKIE = "openenv_mcp"
PING_S = 15.0
_MOST_QUEUED_BYTES = 1024 * 1024
MAX_RUNNING = 256  # requests of one client at once
_LOOK_S = 0.5
_SESSION = b"mcp-session-id"
_HANDLE = SESSION_HEADER.lower().encode()
_ALLOW: HeaderList = [(b"allow", b"GET, POST, DELETE")]
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
_PING = {"type": "http.response.body", "body": b": ping\r\n\r\n", "more_body": True}
_END = {"type": "http.response.body", "body": b""}
_CANCELLED = McpError(REQUEST_CANCELLED, "Request cancelled")
_LOST = "The session has ended ({reason}) and its episode with it. The next call begins a new one."


class McpEndpoint:
    """The ASGI handler of POST, GET and DELETE on `/mcp`."""

    def __init__(self, service: EnvService) -> None:
        self._service = service
        self.sessions = McpSessions(service)
        self._methods = McpMethods(service)
        self._rpc = OpenEnvRpc(service)

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
                await respond_json(send, 405, {"detail": "Method Not Allowed"}, _ALLOW)

    def _count(self, problem: McpError) -> None:
        """Report a refusal, unless its cause was reported already."""
        if problem.__cause__ is None:
            self._service.manager.report_error(code_name(problem.code))

    async def _refuse(
        self, send: Send, status: int, problem: McpError | str, *, id: str | int | None = None, headers: HeaderList = ()
    ) -> None:
        if isinstance(problem, str):
            problem = invalid_request(problem)
        self._count(problem)
        await respond_json(send, status, error_message(id, problem), headers)

    def _opening_failure(self, exc: Exception) -> McpError:
        if not isinstance(exc, (McpError, NoTools, OpenEnvError)):
            logger.exception("the first reset of an MCP session failed")
        return mcp_error(exc, self._service.errors, prefix="reset failed: ")

    def _settled(
        self, message: McpMessage, work: asyncio.Future[dict[str, Any]], call: IdempotentCall | None
    ) -> dict[str, Any]:
        """Return the response to a request, and store it for repetitions; cancel the request if it still runs."""
        status = 200
        if not work.done() or work.cancelled():
            work.cancel()
            response = error_message(message.id, _CANCELLED)
        elif (problem := work.exception()) is None:
            response = result_message(message.id, work.result())
        else:
            status = _status(work)
            if not isinstance(problem, McpError):
                logger.error("MCP %s failed", message.method, exc_info=problem)
                problem = internal_error(self._service.errors.text(problem))
            else:
                self._count(problem)
            response = error_message(message.id, problem)
        if call is not None:
            call.finish(status, response)
        return response

    # -- POST -----------------------------------------------------------------------------------------------------

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        send = echoing(scope, send)
        try:
            scope[BODY] = await read_body(receive, self._service.options.max_message_bytes)
            self._service.value_limit.check(scope[BODY])
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
            await self._answer_rpc(scope, data, receive, send)
        elif era == "modern":
            await self._answer_modern(scope, headers, data, receive, send)
        else:
            await self._answer_handshake(scope, headers, data, receive, send)

    async def _answer_rpc(self, scope: Scope, data: Any, receive: Receive, send: Send) -> None:
        call = self._keyed_rpc(scope, data)
        if call is None:
            try:
                response = await while_connected(receive, self._rpc.answer(data, role=role_of(scope)))
            except ClientGone:
                return
        elif call.is_repeated:
            await call.repeat(send, ())
            return
        else:
            response = error_message(data.get("id"), _CANCELLED)
            try:
                response = await self._rpc.answer(data, role=role_of(scope))
            finally:
                call.finish(200, response)
        await respond_json(send, 200, response)

    def _keyed_rpc(self, scope: Scope, data: Any) -> IdempotentCall | None:
        """Return the call of a request with a key on a live session; any other request fails or runs without one."""
        manager = self._service.manager
        if header(scope, KEY_HEADER) is None:
            return None
        try:
            message = read_message(data)
            session_id = message.params.get("session_id")
            if not isinstance(session_id, str) or manager.info(session_id) is None:
                return None
            return IdempotentCall.of(manager, scope, message, manager.find(session_id))
        except (McpError, OpenEnvError):
            return None

    # -- the handshake era ----------------------------------------------------------------------------------------

    async def _answer_handshake(
        self, scope: Scope, headers: Mapping[str, str], data: Any, receive: Receive, send: Send
    ) -> None:
        try:
            message = read_message(data)
        except McpError as exc:
            await self._refuse(send, 400, exc)
            return
        if message.method == "initialize" and message.is_request and "mcp-session-id" not in headers:
            await self._initialize(scope, message, receive, send)
            return
        client = await self._client(headers, send, request_id=message.id)
        if client is None:
            return
        session_header: HeaderList = [(_SESSION, client.id.encode())]
        if not message.is_request:
            self._handle_notification(message, client)
            await respond(send, 202, b"", session_header)
            return
        reply = McpReply(send, session_header)
        if message.method == "initialize":  # repeated: the session stays as it is
            await reply.finish(result_message(message.id, self._methods.initialized(client)))
            return
        client.session.touch()
        call = IdempotentCall.of(self._service.manager, scope, message, client.session)
        if call is not None and call.is_repeated:
            await call.repeat(send, session_header)
            return
        if len(client.running) >= MAX_RUNNING:
            await self._refuse(send, 429, f"{MAX_RUNNING} requests of this client are under way", id=message.id)
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
            if client.running.get(message.id) is work:  # a client may use an id twice
                del client.running[message.id]
            response = self._settled(message, work, call)
        await reply.finish(response)

    async def _end_abandoned(self, client: McpSession, receive: Receive, work: asyncio.Future[Any]) -> None:
        """End a call if its client hung up and did not come back within the lease.

        Hanging up alone cancels nothing: "Disconnection SHOULD NOT be interpreted as the client cancelling its
        request" (MCP 2025-06-18, Transports, Sending Messages).
        """
        await disconnected(receive)
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

    async def _initialize(self, scope: Scope, message: McpMessage, receive: Receive, send: Send) -> None:
        """Open a session, if its client is still there to learn its id.

        A refusal has status 200 too: older clients ignore the body of any other status.
        """
        try:
            version, by_agent = negotiated_version(message.params), role_of(scope) is Role.AGENT
            beginning = self.sessions.begin(version, _handle(scope, message), by_agent=by_agent)
            client = await while_connected(receive, beginning)
        except ClientGone:
            return
        except Exception as exc:
            await respond_json(send, 200, error_message(message.id, self._opening_failure(exc)))
            return
        result = result_message(message.id, self._methods.initialized(client))
        await respond_json(send, 200, result, [(_SESSION, client.id.encode())])

    async def _client(
        self, headers: Mapping[str, str], send: Send, *, request_id: str | int | None = None
    ) -> McpSession | None:
        """Find the session of a request; answer the request if its session is unknown."""
        session_id = headers.get("mcp-session-id")
        if session_id is None:
            await self._refuse(send, 400, "Missing Mcp-Session-Id: begin with initialize", id=request_id)
            return None
        try:
            return self.sessions.find(session_id)
        except SessionElsewhere as exc:  # not 404, which makes clients begin again silently
            await respond_json(send, 421, error_message(request_id, invalid_params(str(exc), {"code": exc.code})))
            return None
        except (SessionNotFoundError, SessionLost) as exc:
            await respond_json(send, 404, error_message(request_id, invalid_request(f"Session not found: {exc}")))
            return None

    @staticmethod
    def _handle_notification(message: McpMessage, client: McpSession) -> None:
        client.session.touch()
        if message.method == "notifications/cancelled":
            request_id = message.params.get("requestId")
            work = client.running.get(request_id) if isinstance(request_id, (str, int)) else None
            if work is not None:
                work.cancel()

    # -- the modern era, since 2026-07-28 -------------------------------------------------------------------------

    async def _answer_modern(
        self, scope: Scope, headers: Mapping[str, str], data: Any, receive: Receive, send: Send
    ) -> None:
        message: McpMessage | None = None
        try:
            message = read_message(data)
            if not message.is_request:
                await respond(send, 202, b"")  # the modern era has no notification that changes anything
                return
            check_modern(headers, message)
            if not self._methods.knows(message.method, "modern"):
                raise method_not_found(message.method or "")
            session, extra = await self._modern_session(scope, message)
        except McpError as exc:
            await self._refuse(send, status_of(exc), exc, id=message.id if message else None)
            return
        except (SessionNotFoundError, SessionLost) as exc:
            assert message is not None
            await self._refuse_lost(scope, message, exc, send)
            return
        call = IdempotentCall.of(self._service.manager, scope, message, session)
        if call is not None and call.is_repeated:
            await call.repeat(send, extra)
            return
        reply = McpReply(send, extra)
        work = asyncio.ensure_future(self._methods.answer(message, McpExchange("modern", session, reply.notify)))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await reply.follow(work, gone)
            if call is not None:  # a client that gave its request a key may come back for the response
                await asyncio.wait({work}, timeout=self._service.manager.limits.idle_s)
        finally:
            is_gone = gone.done()
            gone.cancel()
            response = self._settled(message, work, call)  # in this era, hanging up cancels the request
        if not is_gone:
            await reply.finish(response, _status(work))

    async def _modern_session(self, scope: Scope, message: McpMessage) -> tuple[Session | None, HeaderList]:
        """Find the session of a request by its handle or the cookie of an earlier response, or open one.

        Returns:
            The session, None for a method that needs none, and the headers that name a new one.

        Raises:
            SessionLost: The session that the request names has ended.
            SessionNotFoundError: There was none.
        """
        handle = _handle(scope, message)
        session_cookie = cookie(scope, COOKIE)
        needs_session = self._methods.needs_session(message.method)
        try:
            if handle is not None:
                return self._service.manager.find(handle), ()
            if session_cookie is not None:
                session = self._service.manager.find(session_cookie)
                self._service.manager.slots.promote(session)
                return session, ()
        except (SessionNotFoundError, SessionLost):
            if needs_session:
                raise
        if not needs_session:
            return None, ()
        try:
            session = await self.sessions.open(SessionKind.SOFT, by_agent=role_of(scope) is Role.AGENT)
        except Exception as exc:
            raise self._opening_failure(exc) from exc
        return session, [set_cookie(COOKIE, session.id)]

    async def _refuse_lost(
        self, scope: Scope, message: McpMessage, lost: SessionNotFoundError | SessionLost, send: Send
    ) -> None:
        """Report that an episode is gone; the call never runs in a fresh environment instead."""
        reason = lost.reason if isinstance(lost, SessionLost) else "unknown"
        by_cookie = _handle(scope, message) is None
        text = _LOST.format(reason=reason) if by_cookie else f"No such session: {reason}"
        if isinstance(lost, SessionElsewhere):
            text, by_cookie = str(lost), False
        extra: HeaderList = [set_cookie(COOKIE, None)] if by_cookie else ()
        if message.method == "tools/call":
            result = {"resultType": "complete", **failure(text)}
            await respond_json(send, 200, result_message(message.id, result), extra)
        else:
            await respond_json(send, 400, error_message(message.id, invalid_params(text)), extra)

    # -- GET and DELETE -------------------------------------------------------------------------------------------

    async def _get(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        if "text/event-stream" not in headers.get("accept", "") or "mcp-session-id" not in headers:
            await respond_json(send, 405, {"detail": "Method Not Allowed"}, _ALLOW)
            return
        client = await self._client(headers, send)
        if client is None:
            return
        session_header: HeaderList = [(_SESSION, client.id.encode())]
        if client.stream_ended is not None:
            await self._refuse(send, 409, "The session has an open stream already", headers=session_header)
            return
        ended = client.stream_ended = asyncio.Event()
        period = min(PING_S, self._service.manager.limits.idle_s / 3)
        try:
            await start_stream(send, session_header)
            await stream_until(ended, receive, send, period_s=period, on_ping=client.session.touch)
        finally:
            client.stream_ended = None

    async def _delete(self, scope: Scope, send: Send) -> None:
        client = await self._client(_headers(scope), send)
        if client is None:
            return
        if client.is_owner and role_of(scope) is Role.AGENT and not client.session.by_agent:
            await self._refuse(send, 403, "An agent can only close sessions that agents have opened")
            return
        self.sessions.end(client)
        await respond(send, 200, b"", [(_SESSION, client.id.encode())])


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _handle(scope: Scope, message: McpMessage) -> str | None:
    """Return the id of an existing session: from a header, the query, or the request's `_meta`."""
    handle = header(scope, _HANDLE)
    if handle is not None:
        return handle.strip()
    query = scope.get("query_string", b"")
    if query and (values := parse_qs(query.decode("latin-1")).get("session_id")):
        return str(values[0])
    inside = message.meta.get(META_SESSION)
    return inside if isinstance(inside, str) else None


def _status(work: asyncio.Future[Any]) -> int:
    problem = None if work.cancelled() else work.exception()
    return status_of(problem) if isinstance(problem, McpError) else 200


# -- replies ----------------------------------------------------------------------------------------------------------


class McpReply:
    """Writes the response to one POST: JSON, or a stream of events if something precedes the result.

    Clients reuse their connection after JSON and drop it after a stream, and some limit the size of an event. So a
    stream begins only with the first notification, or the first ping of a long call.
    """

    def __init__(self, send: Send, headers: HeaderList = ()) -> None:
        self._send = send
        self._headers = headers
        self._notifications: deque[bytes] = deque()
        self._queued_bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self.is_stream = False

    def notify(self, notification: Mapping[str, Any]) -> None:
        """Send a notification before the result; a client that does not read misses some, but not the result."""
        if self._queued_bytes > _MOST_QUEUED_BYTES:
            return
        encoded = encode(notification)
        self._queued_bytes += len(encoded)
        self._notifications.append(encoded)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def follow(self, work: asyncio.Future[Any], gone: asyncio.Future[Any] | None = None) -> None:
        """Send notifications until the work is done or the client is gone."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake = loop.create_future()
            if self._notifications:
                self._wake.set_result(None)
            awaited: set[asyncio.Future[Any]] = {work, self._wake} if gone is None else {work, self._wake, gone}
            done, _ = await asyncio.wait(awaited, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
            while self._notifications and not (gone is not None and gone.done()):
                encoded = self._notifications.popleft()
                await self._event(encoded)
                self._queued_bytes -= len(encoded)
            if work.done() or (gone is not None and gone.done()):
                return
            if not done:
                await self._begin()
                await self._send(_PING)

    async def finish(self, message: Mapping[str, Any], status: int = 200) -> None:
        """Send the result."""
        if not self.is_stream:
            await respond(self._send, status, encode(message), self._headers)
            return
        await self._event(encode(message))
        await self._send(_END)

    async def _event(self, encoded: bytes) -> None:
        await self._begin()
        body = b"event: message\r\ndata: " + encoded + b"\r\n\r\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _begin(self) -> None:
        if not self.is_stream:
            self.is_stream = True
            await start_stream(self._send, self._headers)


async def start_stream(send: Send, headers: HeaderList) -> None:
    """Begin a stream of events."""
    await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS, *headers]})


async def stream_until(
    ended: asyncio.Event, receive: Receive, send: Send, *, period_s: float, on_ping: Callable[[], None]
) -> None:
    """Keep a stream open until `ended`, until its client is gone or the server stops; sends a ping each period."""
    gone = asyncio.ensure_future(disconnected(receive))
    over = asyncio.ensure_future(ended.wait())
    loop = asyncio.get_running_loop()
    can_stop = _keeps_connection(receive)
    next_ping = loop.time()
    try:
        while not (gone.done() or over.done()):
            if loop.time() >= next_ping:
                await send(_PING)
                on_ping()
                next_ping = loop.time() + period_s
            left_s = max(0.0, next_ping - loop.time())
            wait_s = min(left_s, _LOOK_S) if can_stop else left_s
            await asyncio.wait({gone, over}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if can_stop and not _keeps_connection(receive):
                break
        if not gone.done():
            await send(_END)
    finally:
        gone.cancel()
        over.cancel()


def _keeps_connection(receive: Receive) -> bool:
    """Return whether the server will keep a request's connection after the response.

    uvicorn waits for running responses before it shuts the application down, so a stream has to notice the shutdown
    by itself: uvicorn clears `keep_alive` of its connections first. Other servers, and middleware with a `receive` of
    its own, show nothing.
    """
    return getattr(getattr(receive, "__self__", None), "keep_alive", None) is True


# -- idempotency ------------------------------------------------------------------------------------------------------


class IdempotentCall:
    """One tool call with an `Idempotency-Key`: the first, which runs, or a repetition, which gets the same response."""

    def __init__(self, manager: SessionManager, session: Session, key: RequestKey, message: McpMessage) -> None:
        self._session = session
        self._refusal: tuple[int, bytes] | None = None
        self._entry: LedgerEntry | None = None
        try:
            self._entry = kept_entry(manager, session, key)
            self.is_repeated = self._entry is not None
        except (KeyReused, StaleRequest) as exc:
            self.is_repeated = True
            problem = McpError(JsonRpcErrorCode.INVALID_REQUEST.value, str(exc), {"code": exc.code})
            status = 409 if isinstance(exc, StaleRequest) else 422
            self._refusal = status, encode(error_message(message.id, problem))
        if not self.is_repeated:
            self._entry = session.ledger.begin(key.name, key.digest)

    @classmethod
    def of(
        cls, manager: SessionManager, scope: Scope, message: McpMessage, session: Session | None
    ) -> IdempotentCall | None:
        """Return the keyed call of a request; None for one without a key, session or tool."""
        if session is None or message.method != "tools/call":
            return None
        key = request_key(scope)
        if key is not None and role_of(scope) is Role.AGENT:
            # Each role has separate keys. A stored reply for the orchestrator contains rewards, and an agent that
            # guesses a key must not take the reply away.
            key = RequestKey(f"agent {key.name}", key.digest)
        return None if key is None else cls(manager, session, key, message)

    def finish(self, status: int, response: Mapping[str, Any]) -> None:
        """Store the response to the first call, for waiting and later repetitions."""
        assert self._entry is not None
        body = encode(response)
        self._session.ledger.finish(self._entry, (status, body), len(body))

    async def repeat(self, send: Send, headers: HeaderList) -> None:
        """Answer a repetition; waits while the first call runs."""
        if self._refusal is None:
            assert self._entry is not None
            status, body = await kept_reply(self._entry)
        else:
            status, body = self._refusal
        await respond(send, status, body, headers)


# -- WebSocket --------------------------------------------------------------------------------------------------------


class RpcConnection(V1Connection):
    """A connection of `WS /mcp`: OpenEnv's JSON-RPC, one request per text frame, with one session per connection."""

    def _handle(self, payload: bytes) -> None:
        try:
            self._service.value_limit.check(payload)
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

    connection = RpcConnection  # every role that may connect may call tools


def _error(code: JsonRpcErrorCode, message: str, data: Any = None) -> bytes:
    return encode(JsonRpcResponse.error_response(code, message, data).model_dump())
