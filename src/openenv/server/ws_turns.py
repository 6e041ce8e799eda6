"""`WS /harness` (docs/reference/protocol.md): a turn-by-turn conversation with the agent of a `HarnessEnvironment`.

Production mode only. Sessions, capacity, drain and limits work as on `/ws`; this module adds the frames of turns.

    connect ─> session, reset ─> session_started ─> message ─> event ... turn_complete ─> message ─> ...
                   │                                   │         └─ a failed turn: error, close
                   └─ refused: error, close            └─ an invalid frame: protocol_error, the session stays
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from pydantic import ValidationError

from openenv.env.binding import RemoteEnvironment
from openenv.errors import HarnessError, OpenEnvError, SessionClosedError
from openenv.protocol.json_values import decode, encode
from openenv.protocol.turn_messages import HarnessClientMessage, HarnessEvent, HarnessEventType, HarnessProtocolError
from openenv.types import WSErrorCode

from .access import role_of
from .asgi import Receive, Scope, Send, origin_of
from .runners import current_dispatcher
from .sessions.operations import Operation
from .sockets import Socket
from .ws import WsEndpoint
from .ws_v1 import V1Connection

logger = logging.getLogger(__name__)


def may_serve_turns(env_cls: type[Any] | None) -> bool:
    """Return whether environments of a class take turns; True for an unknown class."""
    return env_cls is None or bool(getattr(env_cls, "SERVES_TURNS", False))


class HarnessConnection(V1Connection):
    """One client's conversation."""

    _readable: asyncio.Future[None] | None = None  # a turn waits for it while the client does not read

    def _opened(self, problem: OpenEnvError | None) -> None:
        session = self._session
        if problem is not None or session is None:
            super()._opened(problem)
        elif isinstance(session.env, RemoteEnvironment):
            self._refuse_session("turns need the runner 'thread' or 'inline', not 'process'")
        elif not may_serve_turns(type(session.env)):
            self._refuse_session("the environment is no HarnessEnvironment")
        else:
            session.submit(self._service.frame_operations.reset, {}, self._started, self._dispatcher, self.origin)

    def _refuse_session(self, text: str) -> None:
        self._service.manager.report_error(WSErrorCode.SESSION_ERROR.value, self._session)
        self._fail(WSErrorCode.SESSION_ERROR, f"harness session failed: {text}")

    def _started(self, _: Any, error: BaseException | None) -> None:
        session = self._session
        if self._lost or session is None:
            return
        if isinstance(error, SessionClosedError):
            super()._opened(error)
        elif error is not None:
            logger.warning("session %s: the agent did not start", session.id, exc_info=error)
            self._refuse_session(self._shown(error))
        else:
            data = {"session_id": session.id, "harness": session.env.adapter.config.name}
            self._socket.send(encode({"type": "session_started", "data": data}))
            super()._opened(None)

    def _shown(self, error: BaseException) -> str:
        return self._service.errors.text(error)

    # -- frames ---------------------------------------------------------------------------------------------------

    def _handle(self, payload: bytes) -> None:
        try:
            self._service.value_limit.check(payload)
            data = decode(payload)
        except ValueError as exc:
            self._protocol_error(WSErrorCode.INVALID_JSON, f"Invalid JSON: {exc}")
            return
        try:
            message = HarnessClientMessage.model_validate(data)
        except ValidationError as exc:
            problems = exc.errors(include_url=False, include_context=False, include_input=False)
            text = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'frame'}: {each['msg']}" for each in problems)
            self._protocol_error(WSErrorCode.VALIDATION_ERROR, f"Invalid message: {text}")
            return
        self._submit(Operation("step", _never, self._take_turn), message.content)

    def _protocol_error(self, code: WSErrorCode, text: str) -> None:
        self._service.manager.report_error(code.value, self._session)
        self._socket.send(_protocol_error(code, text))

    def _too_large(self, size: int, limit: int) -> bytes:
        text = f"A message of {size} bytes is over the limit of {limit} bytes"
        return _protocol_error(WSErrorCode.VALIDATION_ERROR, text)

    # -- turns ----------------------------------------------------------------------------------------------------

    async def _take_turn(self, env: Any, message: str) -> bytes:
        """Run a turn; return its last frame, to send after the turn is recorded."""
        turn = await env.run_turn(message, on_event=self._send_event)
        return _frame(turn.events[-1])

    async def _send_event(self, event: HarnessEvent) -> None:
        """Send an event; the agent waits while the client does not read."""
        if event.type is HarnessEventType.TURN_COMPLETE:
            return
        self._socket.send(_frame(event))
        while self._socket.is_full and not self._lost:
            self._readable = asyncio.get_running_loop().create_future()
            await self._readable

    def on_writable(self) -> None:
        """Continue with the turn, or with the next frame."""
        self._wake()
        super().on_writable()

    def on_lost(self) -> None:
        """End the session, and the turn with it."""
        super().on_lost()
        self._wake()

    def _wake(self) -> None:
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)

    def _answer(self, reply: Any, error: BaseException | None) -> None:
        if self._lost:
            return
        self._answering = False
        if isinstance(error, SessionClosedError):
            super()._answer(reply, error)
            return
        if error is not None:
            session = self._session
            assert session is not None
            logger.info("session %s: a turn failed", session.id, exc_info=error)
            text = self._shown(error)
            text = text if isinstance(error, HarnessError) else f"harness turn failed: {text}"
            event = HarnessEvent(type=HarnessEventType.ERROR, data={"message": text, "recoverable": False})
            self._socket.send(_frame(event))
            self._socket.close()
            return
        self._socket.send(reply)
        if self._leaving or not self._backpressure.is_open:
            self._next()


class HarnessEndpoint(WsEndpoint):
    """The ASGI endpoint of `WS /harness`."""

    connection = HarnessConnection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection, unless the first environment has shown that the class takes no turns."""
        if may_serve_turns(self._service.manager.env_cls):
            await super().__call__(scope, receive, send)
        else:
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": 1000, "reason": "no such route"})

    def begin(self, scope: Scope, socket: Socket, subprotocol: str | None = None) -> HarnessConnection:
        """Open a new session; this route cannot attach to an existing one."""
        connection = HarnessConnection(self._service, socket, current_dispatcher(), self._rpc)
        connection.role = role_of(scope)
        socket.start(connection)
        if self._service.manager.wants_origins:
            connection.origin = origin_of(scope)
        connection.begin(None)
        return connection


def _frame(event: HarnessEvent) -> bytes:
    return encode(event.model_dump(mode="json"))


def _protocol_error(code: WSErrorCode, text: str) -> bytes:
    return encode(HarnessProtocolError(data={"message": text, "code": code.value}).model_dump())


def _never(env: Any, _: Any) -> None:
    raise AssertionError("turns run on the event loop")
