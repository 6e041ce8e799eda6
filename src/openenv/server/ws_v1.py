"""`/ws` in protocol v1 (docs/reference/protocol.md): one connection, one session, one reply per request, in order.

The server reads frames while a step runs, up to a limit, so it notices at once when a client leaves. Must not know
transports or encodings.

    OPENING -- session ready --> IDLE -- frame --> ANSWERING -- reply --> IDLE (or the next queued frame)
       |                          |                    |
       +-- refused: error, close  +-- close frame,     +-- lost: the session ends after its running step
                                      lost, shutdown: the session ends; an attached session of another client stays
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from openenv.errors import (
    Forbidden,
    OpenEnvError,
    SessionClosedError,
    SessionElsewhere,
    SessionLost,
    SessionNotFoundError,
)
from openenv.protocol.json_values import TooManyValues
from openenv.protocol.server_v1 import Malformed, error_frame, exception_frame, frame_type, rpc_frame
from openenv.types import WSErrorCode

from .access import Role, may
from .author_frames import author_exc_info
from .backpressure import Backpressure, Oversize, ReadAhead
from .mcp.openenv_rpc import OpenEnvRpc
from .runners import Dispatcher
from .service import EnvService
from .sessions.events import RequestOrigin
from .sessions.lifetime import DISCONNECTED, WORKER_CRASHED
from .sessions.operations import Operation
from .sessions.session import Session, SessionKind, SessionState, with_hint
from .sockets import Socket, SocketUser

logger = logging.getLogger(__name__)

# Read at most this far ahead; then the transport makes the client wait (see `Backpressure`).
_AHEAD = 128
_AHEAD_BYTES = 8 * 1024 * 1024
_CHECKED_BYTES = 65_536


class V1Connection(SocketUser):
    """One client's connection."""

    role = Role.ORCHESTRATOR

    def __init__(self, service: EnvService, socket: Socket, dispatcher: Dispatcher, rpc: OpenEnvRpc) -> None:
        self._service = service
        self._rpc = rpc
        self._parse_step = service.protocol.parse_step
        self._step = service.frame_operations.step
        self._socket = socket
        self._dispatcher = dispatcher
        self._session: Session | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._owns_session = True
        self._answering = True  # frames wait until the session is ready
        self._kind = ""
        self._leaving = False
        self._lost = False
        self._backpressure = Backpressure(socket, self._take, self._is_busy, ahead=ReadAhead(_AHEAD, _AHEAD_BYTES))
        self.origin: RequestOrigin | None = None

    def begin(self, session_id: str | None) -> None:
        """Open a session, or attach to the named one. Report a failure and end the connection."""
        if session_id is not None:
            self._attach(session_id)
            return
        manager = self._service.manager
        session = manager.reserve_at_once(SessionKind.SOCKET, by_agent=self.role is Role.AGENT)
        if session is None:
            self._waiting = self._dispatcher.loop.create_task(self._open_later())
        else:
            self._session = session
            manager.build(session, self._opened)

    async def _open_later(self) -> None:
        """Wait for a slot that is about to be free, then open a session."""
        try:
            await self._service.manager.open(
                SessionKind.SOCKET, by_agent=self.role is Role.AGENT, on_reserved=self._reserved
            )
        except OpenEnvError as exc:
            self._opened(exc)
        except Exception:
            logger.exception("a session could not be opened")
            self._socket.close(1011)
        else:
            self._opened(None)

    def _opened(self, problem: OpenEnvError | None) -> None:
        if problem is None:
            self._answering = False
            self._next()
        elif isinstance(problem, SessionClosedError):
            self._fail(WSErrorCode.SESSION_ERROR, "The session was closed while it was created")
        else:
            self._fail(problem.code, str(problem), problem.details)

    def _reserved(self, session: Session) -> None:
        self._session = session
        if self._lost:
            session.close(DISCONNECTED)

    def _attach(self, session_id: str) -> None:
        try:
            session = self._service.manager.find(session_id)
        except SessionElsewhere as exc:
            self._fail(exc.code, str(exc), exc.details)
            return
        except (SessionNotFoundError, SessionLost):
            self._fail(WSErrorCode.SESSION_ERROR, f"Unknown session_id: {session_id}")
            return
        if session.state is SessionState.CREATING or session.is_attached:
            self._service.manager.report_error(WSErrorCode.SESSION_ERROR.value, session)
        if session.state is SessionState.CREATING:
            self._fail(WSErrorCode.SESSION_ERROR, f"Session {session_id} is still initializing")
        elif session.is_attached:
            self._fail(WSErrorCode.SESSION_ERROR, f"Session {session_id} already has an attached WebSocket")
        else:
            session.attach(self)
            self._session, self._owns_session = session, False
            self._opened(None)

    def _fail(self, code: WSErrorCode | str, message: str, details: dict[str, Any] | None = None) -> None:
        self._socket.send(error_frame(code, message, details))
        self._socket.close()

    # -- SocketHandler --------------------------------------------------------------------------------------------

    def on_message(self, payload: bytes) -> None:
        """Handle a frame, or queue it until the frames before it are answered."""
        if self._answering or not self._backpressure.is_open or self._socket.is_full:
            self._backpressure.hold(payload, False)
        else:
            self._handle(payload)

    on_binary = on_message  # both kinds of frames carry JSON

    def on_oversize(self, size: int) -> None:
        """Refuse a message over the limit, in its turn; the session continues."""
        self._backpressure.hold(Oversize(size), False)
        if not self._answering:
            self._next()

    def on_writable(self) -> None:
        """Continue after the client has read its replies."""
        if not self._answering:
            self._next()

    def on_shutdown(self) -> None:
        """Answer the running request, then close."""
        self._leaving = True
        self._backpressure.drop()
        if not self._answering:
            self._socket.close(1012, "the server is shutting down")

    def on_lost(self) -> None:
        """End the session if this connection opened it; detach from an attached one."""
        if self._lost:
            return
        self._lost = True
        self._backpressure.drop()
        if self._waiting is not None:
            self._waiting.cancel()
        session = self._session
        if session is None:
            return
        if self._owns_session:
            session.close(DISCONNECTED)
        else:
            # An agent may have attached to another client's session. That client may still be there.
            session.detach(self, client_left=self.role is not Role.AGENT or session.by_agent)

    def holds_back(self, session: Session) -> bool:
        """Never hold a call back: v1 runs one request at a time."""
        return False

    def let_go(self, session: Session, reason: str) -> None:
        """Keep the socket when the session ends: the next request gets the reason."""

    # -- requests -------------------------------------------------------------------------------------------------

    def _handle(self, payload: bytes) -> None:
        if len(payload) > _CHECKED_BYTES and not self._is_within_limits(payload):
            return
        if self.role is not Role.ORCHESTRATOR and (kind := frame_type(payload)) and not may(self.role, kind):
            self._service.manager.report_error(Forbidden.code, self._session)
            self._socket.send(exception_frame(Forbidden(self.role.value)))
            return
        action = self._parse_step(payload)
        if action is not None:
            self._submit(self._step, action)
            return
        request = self._service.protocol.parse(payload)
        if isinstance(request, Malformed):
            self._service.manager.report_error(request.code.value, self._session)
            self._socket.send(request.reply)
        elif request.type == "close":
            self._socket.close()
            self.on_lost()
        elif request.type == "mcp":
            self._submit_rpc(request.data)
        else:  # reset, step or state
            self._submit(getattr(self._service.frame_operations, request.type), request.data)

    def _is_within_limits(self, payload: bytes) -> bool:
        """Return whether a large message may be parsed; refuse one with too many values."""
        try:
            self._service.value_limit.check(payload)
        except TooManyValues as exc:
            self._service.manager.report_error(WSErrorCode.INVALID_JSON.value, self._session)
            self._socket.send(self._invalid(str(exc)))
            return False
        return True

    def _invalid(self, text: str) -> bytes:
        return error_frame(WSErrorCode.INVALID_JSON, f"Invalid JSON: {text}")

    def _submit(self, operation: Operation, argument: Any) -> None:
        session = self._session
        assert session is not None
        self._answering = True
        self._kind = operation.kind
        session.submit(operation, argument, self._answer, self._dispatcher, self.origin)

    def _submit_rpc(self, data: Any) -> None:
        self._answering = True
        self._waiting = self._dispatcher.loop.create_task(self._answer_rpc(data))

    async def _answer_rpc(self, data: Any) -> None:
        answer = await self._rpc.answer(data, own=self._session, notify=self._notify, role=self.role)
        self._answer(self._rpc_frame(answer), None)

    def _notify(self, note: Mapping[str, Any]) -> None:
        if not (self._lost or self._socket.is_full):  # a client that does not read misses progress, but no reply
            self._socket.send(self._rpc_frame(note))

    def _rpc_frame(self, message: Mapping[str, Any]) -> bytes:
        return rpc_frame(message)

    def _answer(self, reply: Any, error: BaseException | None) -> None:
        if self._lost:
            return
        self._answering = False
        if error is None:
            self._socket.send(reply)
        elif isinstance(error, SessionClosedError) and error.reason == WORKER_CRASHED:
            lost = SessionLost(WORKER_CRASHED)
            self._fail(lost.code, str(lost), lost.details)
            return
        elif isinstance(error, SessionClosedError):
            self._fail(WSErrorCode.SESSION_ERROR, str(error), error.details)
            return
        else:
            session = self._session
            assert session is not None
            logger.error("session %s: %s failed", session.id, self._kind, exc_info=author_exc_info(error))
            shown = with_hint(self._service.errors.shown(error), session, self._kind, has_place=False)
            self._socket.send(exception_frame(shown))
        if self._leaving or not self._backpressure.is_open:
            self._next()

    def _next(self) -> None:
        """Handle queued frames while the client reads the replies."""
        if self._leaving:
            self._socket.close(1012, "the server is shutting down")
        else:
            self._backpressure.resume()

    def _is_busy(self) -> bool:
        return self._answering or self._lost or self._leaving

    def _take(self, message: bytes | Oversize, binary: bool) -> None:
        if isinstance(message, bytes):
            self._handle(message)
        else:
            self._service.manager.report_error(WSErrorCode.VALIDATION_ERROR.value, self._session)
            self._socket.send(self._too_large(message.size, self._service.options.max_message_bytes))

    def _too_large(self, size: int, limit: int) -> bytes:
        text = f"A message of {size} bytes is over the limit of {limit} bytes"
        return error_frame(WSErrorCode.VALIDATION_ERROR, text, {"errors": [], "limit_bytes": limit})
