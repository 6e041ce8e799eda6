"""`/ws` in protocol v2 (docs/protocol.md): many sessions on one connection, each request answered exactly once.

A session outlives its connection by the grace period, and its replies go to the connection that holds it by then. Knows
messages and sessions; must not know transports or encodings.

    FrameSocket --> V2Connection.on_message --> Backpressure
                         |
                         +-- step -----> PendingReply --> Session.submit --> lane --> PendingReply.done --> send
                         +-- batch ----> StepGroup per thread (plain, new steps)  --> BatchReplies ------> send_batch
                         |               or each request by itself
                         +-- open -----> SessionOpener
                         +-- reset, state, mcp, close, cancel, ping
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ..errors import (
    Forbidden,
    OpenEnvError,
    RequestCancelled,
    SessionCapacityError,
    SessionClosedError,
    SessionLost,
    SessionNotFoundError,
    StaleRequest,
)
from ..protocol.codec import Codec
from ..protocol.server_v2 import (
    Batch,
    Parsed,
    RefusedRequest,
    Request,
    ServerProtocolV2,
    Writer,
    request_of,
    writer_of,
)
from ..runners import Dispatcher, LaneExecutor
from ..sessions.events import RequestOrigin
from ..sessions.group import StepGroup
from ..sessions.ledger import LedgerEntry
from ..sessions.lifetime import CLOSED_BY_CLIENT, DISCONNECTED, SHUTTING_DOWN, client_reason
from ..sessions.operations import Operation, Operations, StepInput, build_operations
from ..sessions.session import Session, SessionKind, with_hint
from ..types import ServerMode, WSErrorCode
from .access import Role, account_of, may
from .backpressure import Backpressure, LoopTurns, Oversize
from .mcp.openenv_rpc import OpenEnvRpc
from .replies import BatchReplies, PendingReply, RecentMessages, ReplySlot, SentMessage
from .service import EnvService
from .sockets import Socket

logger = logging.getLogger(__name__)

# A client may send two requests ahead for each session, and some more; then it has to read replies first.
_MOST_UNDER_WAY = 8192
_AHEAD = 128
_GYM = frozenset({"reset", "step", "state"})
_NORMAL_CLOSURES = frozenset({1000, 1001, 1005})  # RFC 6455, 7.4.1: the client ended the connection itself
_LARGE_BATCH = 4096  # bytes
_MOST_OPENED = 1024  # ids of `open` requests that are remembered


class V2Service:
    """What all v2 connections to one environment share."""

    def __init__(self, service: EnvService, rpc: OpenEnvRpc) -> None:
        self.service = service
        self.manager = service.manager
        self.rpc = rpc
        self.protocol = ServerProtocolV2(service.action_cls)
        self._operations: dict[Writer, Operations] = {}

    def operations(self, writer: Writer) -> Operations:
        """Return the operations whose results are encoded for a writer."""
        operations = self._operations.get(writer)
        if operations is None:
            operations = self._operations[writer] = build_operations(writer.observation, writer.state)
        return operations


class V2Connection:
    """One client's connection; the handler of its socket, and the holder of its sessions."""

    def __init__(
        self, shared: V2Service, socket: Socket, dispatcher: Dispatcher, codec: Codec, role: Role = Role.ORCHESTRATOR
    ) -> None:
        self.service = shared.service
        self.manager = shared.manager
        self.dispatcher = dispatcher
        self.role = role
        self.writer = writer_of(codec)
        self.sessions: dict[str, Session] = {}
        self.traceparent: str | None = None  # of the handshake, for requests without one
        self.is_lost = False
        self._socket = socket
        self._codec = codec
        self._is_json = not codec.is_binary
        self._compress: int | None = None
        self._rpc = shared.rpc
        self._protocol = shared.protocol
        self._operations = shared.operations(self.writer)
        self._limit = self.service.options.max_message_bytes
        self._takes_steps = self.service.mode is ServerMode.SIMULATION
        self._takes_any_step = self._takes_steps and role is Role.ORCHESTRATOR
        self._recent = RecentMessages(self.writer)
        self._opener = SessionOpener(self)
        self._pending: set[PendingReply] = set()
        self._groups: set[StepGroup] = set()
        self._grouped = 0  # steps in them
        self._ready: list[bytes] = []
        turns = LoopTurns.of(dispatcher.loop)
        self._backpressure = Backpressure(socket, self._read, self._is_loaded, is_long=_is_large_batch, turns=turns)

    # -- SocketHandler --------------------------------------------------------------------------------------------

    def on_message(self, payload: bytes) -> None:
        """Handle a text message."""
        # Nearly always nothing waits and nothing has to: the common way costs no call.
        if self._backpressure.is_open and len(payload) < _LARGE_BATCH and not self._socket.is_full:
            self._read(payload, False)
        else:
            self._backpressure.receive(payload, False)

    def on_binary(self, payload: bytes) -> None:
        """Handle a binary message."""
        self._backpressure.receive(payload, True)

    def on_oversize(self, size: int) -> None:
        """Refuse a message over the limit."""
        text = f"A message of {size} bytes is over the limit of {self._limit} bytes"
        code = WSErrorCode.VALIDATION_ERROR.value
        self._refuse(None, None, {"message": text, "code": code, "errors": [], "limit_bytes": self._limit})

    def on_writable(self) -> None:
        """Continue after the client has read its replies."""
        self._backpressure.resume()

    def on_shutdown(self) -> None:
        """Announce which sessions end now, and close; running calls end in the drain, and their replies stay."""
        for session in self.sessions.values():
            if session.is_idle:
                self._send_detached(session, SHUTTING_DOWN)
        self._socket.close(1012, "the server is shutting down")

    def on_lost(self) -> None:
        """Leave the sessions to the clients that have their tokens (docs/protocol.md, 4)."""
        if self.is_lost:
            return
        self.is_lost = True
        self._backpressure.drop()
        self._opener.cancel_all()
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            self.manager.attachments.release(session, self)

    # -- SessionHolder --------------------------------------------------------------------------------------------

    def let_go(self, session: Session, reason: str) -> None:
        """Give a session up: another connection has it now, or it has ended. Called from any thread."""
        if self.dispatcher.is_at_hand:
            self._let_go(session, reason)
        else:
            try:
                self.dispatcher.loop.call_soon_threadsafe(self._let_go, session, reason)
            except RuntimeError:  # the loop has ended, and the connection with it
                return

    def _let_go(self, session: Session, reason: str) -> None:
        if self.sessions.pop(session.id, None) is not None and not self.is_lost:
            self._send_detached(session, reason)

    def _send_detached(self, session: Session, reason: str) -> None:
        self.send_message({"type": "event", "event": "detached", "session": session.id, "reason": reason})

    # -- requests -------------------------------------------------------------------------------------------------

    def _read(self, payload: bytes | Oversize, binary: bool) -> None:
        assert isinstance(payload, bytes)
        message = self._recent.add(payload, binary)
        if self._is_json and not binary:
            step = self._protocol.parse_step(payload)
            if step is not None:
                self._handle_step(step, message)
                return
            batch = self._protocol.parse_batch(payload)
            if batch is not None:
                self._handle_batch(batch, message)
                return
        try:
            decoded = self._codec.decode(payload, binary=binary, max_bytes=self._limit)
        except ValueError as exc:
            self._refuse(None, None, {"message": f"Invalid JSON: {exc}", "code": WSErrorCode.INVALID_JSON.value})
        else:
            self._handle_parsed(self._protocol.parse_map(decoded), message)

    def _handle_parsed(self, parsed: Parsed, message: SentMessage) -> None:
        if isinstance(parsed, Request):
            self._handle(parsed, message)
        elif isinstance(parsed, Batch):
            self._handle_batch(parsed, message)
        else:
            self._refuse(parsed.id, parsed.session, parsed.error)

    def _handle_step(self, step: dict[str, Any], message: SentMessage) -> None:
        """Run a plain, new step: nearly every request, so it skips what the others need."""
        name, request_id = step.get("session"), step["id"]
        session = self.sessions.get(name) if name is not None else self._only_session
        # A plain step has the keys type, id and data, and perhaps session.
        is_plain = len(step) == (3 if name is None else 4) and self._takes_any_step
        if session is None or not is_plain or request_id <= session.ledger.last_id:
            self._handle(request_of(step), message)
            return
        entry = PendingReply(self, session, request_id, ("step", message), name=name, slot=None)
        session.ledger.add(entry)
        origin = RequestOrigin(request_id, self.traceparent) if self.manager.wants_origins else None
        self._start(entry, self._operations.step, step["data"], origin)

    @property
    def _only_session(self) -> Session | None:
        return next(iter(self.sessions.values())) if len(self.sessions) == 1 else None

    def _start(self, entry: PendingReply, operation: Operation, argument: Any, origin: RequestOrigin | None) -> None:
        self._pending.add(entry)
        call = entry.session.submit(operation, argument, entry.done, self.dispatcher, origin)
        if not entry.is_done:
            entry.call = call
            self._pause_if_loaded()

    def _handle_batch(self, batch: Batch, message: SentMessage) -> None:
        """Run the requests of a batch side by side (docs/protocol.md, 2.3)."""
        count = len(batch.requests) if batch.steps is None else len(batch.steps)
        replies = BatchReplies(self, batch.id, count, each=batch.each)
        if batch.steps is not None and self._takes_any_step and not batch.each:
            self._run_groups(batch.steps, replies, message)
        else:
            for place, request in enumerate(batch.in_full()):
                self._handle_one(request, message, ReplySlot(replies, place))
        if not count and not batch.each:
            replies.send()

    def _handle_one(self, request: Request | RefusedRequest, message: SentMessage, slot: ReplySlot) -> None:
        if isinstance(request, RefusedRequest):
            self._reply_error(request.id, request.session, request.error, slot)
        else:
            self._handle(request, message, slot)

    def _run_groups(self, steps: list[dict[str, Any]], replies: BatchReplies, message: SentMessage) -> None:
        """Run steps in groups, one per thread that sessions share; what is no plain, new step runs by itself.

        One hand-over to each thread instead of one per step is most of what a batch gains.
        """
        operation, sessions, asked = self._operations.step, self.sessions, ("step", message)
        groups: dict[LaneExecutor, StepGroup] = {}
        alone: list[int] = []
        apart: set[str] = set()  # sessions whose later steps must not overtake one that runs by itself
        for place, step in enumerate(steps):
            name: Any = step.get("session")
            session = sessions.get(name) if len(step) == 4 else None  # type, id, session, data
            if session is not None and name not in apart:
                executor = session.lane.host
                group = groups.get(executor)
                if group is None:
                    observe = self.manager.observe_step
                    group = groups[executor] = StepGroup(
                        operation, self.writer.observed, asked, self.dispatcher, replies.put_group, observe
                    )
                request_id, action, ledger = step["id"], step["data"], session.ledger
                if request_id > ledger.last_id and session.begin_step(group, operation, action):
                    ledger.begin_step(request_id, asked)
                    group.sessions.append(session)
                    group.actions.append(action)
                    group.ids.append(request_id)
                    group.places.append(place)
                    continue
            alone.append(place)
            apart.update(sessions if name is None else (name,))  # without a name the only session is meant
        for executor, group in groups.items():
            if not group.sessions:
                continue
            self._groups.add(group)
            self._grouped += len(group.sessions)
            executor.submit(group)
        self._pause_if_loaded()
        for place in alone:
            self._handle_one(request_of(steps[place]), message, ReplySlot(replies, place))

    def _handle(self, request: Request, message: SentMessage, slot: ReplySlot | None = None) -> None:
        try:
            if self.role is not Role.ORCHESTRATOR and not may(self.role, request.type):
                raise Forbidden(self.role.value)
            if request.type in ("step", "reset", "state", "mcp", "close"):
                self._submit(request, message, slot)
            elif request.type == "open":
                compress = (request.extra or {}).get("compress")
                if isinstance(compress, int):
                    self._compress = compress
                self._opener.open(request)
            elif request.type == "cancel":
                self._cancel(request)
            else:
                self.send(self.writer.message("pong", request.id, None, None))
        except OpenEnvError as exc:
            self.manager.report_error(exc.code)
            self._reply(self.writer.reply(self.writer.error(exc), request.id, request.session), slot)

    def _submit(self, request: Request, message: SentMessage, slot: ReplySlot | None) -> None:
        """Run a request of a session, unless it has run before."""
        session = self._session(request)
        entry = session.ledger.find(request.id)
        if entry is not None:
            self._answer_again(entry, session, request, message, slot)
            return
        if request.type in _GYM and not self._takes_steps:
            text = f"Unknown message type: {request.type} frames are off in production mode"
            error = {"message": text, "code": WSErrorCode.UNKNOWN_TYPE.value}
            self._reply_error(request.id, request.session, error, slot, session)
            return
        pending = session.ledger.add(
            PendingReply(self, session, request.id, (request.type, message), name=request.session, slot=slot)
        )
        if request.type == "mcp":
            self._run_rpc(request, pending)
        elif request.type == "close":
            self.sessions.pop(session.id, None)
            session.detach(self)
            session.close(CLOSED_BY_CLIENT)  # before the reply, so that nothing of it runs once the client has that
            pending.answer("closed", self.writer.data({}))
        else:
            operation, argument = self._operation(request)
            self._start(pending, operation, argument, self._origin(request) if self.manager.wants_origins else None)

    def _answer_again(
        self, entry: LedgerEntry, session: Session, request: Request, message: SentMessage, slot: ReplySlot | None
    ) -> None:
        """Answer a repeated request with the reply to the first one, now or when that is there."""
        kind, first = entry.asked
        if kind != request.type or first.differs(message, request.id, session.id):
            text = f"Invalid message: {request.id} is the id of another request: {kind!r}"
            error = {"message": text, "code": WSErrorCode.VALIDATION_ERROR.value}
            self._reply_error(request.id, request.session, error, slot, session)
            return

        def answer(kept: bytes) -> None:
            reply = first.writer.opened(kept, request.id, session.id)
            self._reply(self.writer.reply(reply, request.id, request.session), slot)

        entry.tell(answer)

    def _origin(self, request: Request) -> RequestOrigin:
        traceparent = (request.extra or {}).get("traceparent")
        return RequestOrigin(request.id, traceparent if isinstance(traceparent, str) else self.traceparent)

    def _operation(self, request: Request) -> tuple[Operation, Any]:
        if request.type == "step":
            if request.kwargs is None and request.timeout_s is None:
                return self._operations.step, request.data
            kwargs = dict(request.kwargs or {})
            if request.timeout_s is not None:
                kwargs["timeout_s"] = request.timeout_s
            return self._operations.step_with, StepInput(request.data, kwargs)
        if request.type == "reset":
            return self._operations.reset, request.data
        return self._operations.state, None

    def _session(self, request: Request) -> Session:
        name = request.session
        if name is None:
            session = self._only_session
            if session is None:
                count = len(self.sessions) or "no"
                raise SessionNotFoundError("", f"The connection has {count} sessions, so the request must name one.")
            return session
        session = self.sessions.get(name)
        if session is None:
            raise SessionNotFoundError(name, f"This connection has no session '{name}'.")
        return session

    def _run_rpc(self, request: Request, entry: PendingReply) -> None:
        def end(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # before it began; later it answers that itself
                entry.answer("error", self.writer.error(RequestCancelled()).data)

        self._pending.add(entry)
        entry.call = task = self.dispatcher.loop.create_task(self._answer_rpc(request, entry))
        task.add_done_callback(end)
        self._pause_if_loaded()

    async def _answer_rpc(self, request: Request, entry: PendingReply) -> None:
        def notify(note: Mapping[str, Any]) -> None:
            progress = {key: value for key, value in note.get("params", {}).items() if key != "progressToken"}
            event = {"type": "event", "id": request.id, "event": "progress", **progress}
            if request.session is not None:
                event["session"] = request.session
            self.send_message(event)

        try:
            result = await self._rpc.answer(request.data, own=entry.session, notify=notify, role=self.role)
            kind, data = "mcp", self.writer.data(result)
        except asyncio.CancelledError:
            kind, data = "error", self.writer.error(RequestCancelled()).data
        except Exception as exc:
            kind, data = "error", self.writer.error(self.service.errors.shown(exc)).data
        entry.answer(kind, data)

    def _cancel(self, request: Request) -> None:
        """Cancel a request under way; the reply says whether there was one (docs/protocol.md, 2.4)."""
        target = (request.extra or {}).get("request")
        is_cancelled = False
        if isinstance(target, int):
            if request.session is None and self._opener.is_opening(target):
                is_cancelled = self._opener.cancel(target)
            else:
                is_cancelled = self._cancel_call(self._session(request), target)
        self.send_message({"type": "cancelled", "id": request.id, "found": is_cancelled})

    def _cancel_call(self, session: Session, request_id: int) -> bool:
        for entry in self._pending:
            if entry.session is session and entry.key == request_id:
                call = entry.call
                if isinstance(call, asyncio.Task):
                    return call.cancel()
                return call is not None and session.cancel(call)
        step = (session, request_id)
        for group in self._groups:
            if step in zip(group.sessions, group.ids, strict=True):
                return session.cancel(group)
        return False

    # -- load -----------------------------------------------------------------------------------------------------

    def finished(self, entry: PendingReply) -> None:
        """Forget a request that is answered."""
        entry.call = None  # the call refers to the entry; a cycle would wait for the garbage collector
        self._pending.discard(entry)
        if self._backpressure.is_paused:
            self._resume_if_few()

    def finished_group(self, group: StepGroup) -> None:
        """Forget a group that is answered."""
        self._groups.discard(group)
        self._grouped -= len(group.sessions)
        if self._backpressure.is_paused:
            self._resume_if_few()

    def _is_loaded(self) -> bool:
        """Whether as much is under way as one client may request before it reads replies."""
        return len(self._pending) + self._grouped >= min(_MOST_UNDER_WAY, _AHEAD + 2 * len(self.sessions))

    def _pause_if_loaded(self) -> None:
        if len(self._pending) + self._grouped >= _AHEAD and self._is_loaded():
            self._backpressure.pause()

    def _resume_if_few(self) -> None:
        if len(self._pending) + self._grouped < min(_MOST_UNDER_WAY, _AHEAD + 2 * len(self.sessions)) // 2:
            self._backpressure.resume()

    # -- replies --------------------------------------------------------------------------------------------------

    def _refuse(self, request_id: int | None, session: str | None, error: Mapping[str, Any]) -> None:
        self._reply_error(request_id, session, error, None)

    def _reply_error(
        self,
        request_id: int | None,
        name: str | None,
        error: Mapping[str, Any],
        slot: ReplySlot | None,
        session: Session | None = None,
    ) -> None:
        self.manager.report_error(error["code"], session)
        self._reply(self.writer.message("error", request_id, name, self.writer.data(error)), slot)

    def _reply(self, reply: bytes, slot: ReplySlot | None) -> None:
        if slot is None:
            self.send(reply)
        else:
            slot.put(reply)

    def failure(self, error: BaseException, session: Session, request_id: int, kind: str) -> bytes:
        """Return the data of the error reply to a request of that type that failed."""
        if isinstance(error, SessionClosedError):
            error = SessionLost(client_reason(error.reason))
        else:
            logger.info("session %s: %s failed (request %d)", session.id, kind, request_id, exc_info=error)
        return self.writer.error(with_hint(self.service.errors.shown(error), session, kind)).data

    def send_error(self, request: Request, exc: BaseException) -> None:
        """Answer a request with an error."""
        self.send(self.writer.reply(self.writer.error(exc), request.id, request.session))

    def send_batch(self, replies: list[bytes], batch_id: int | None) -> None:
        """Send replies together."""
        self.send(self._codec.batch(replies, batch_id))

    def send_soon(self, reply: bytes) -> None:
        """Send a reply together with others that are ready in the same pass of the loop."""
        if not self._ready:
            self.dispatcher.loop.call_soon(self._send_ready)
        self._ready.append(reply)

    def _send_ready(self) -> None:
        ready, self._ready = self._ready, []
        self.send_batch(ready, None)

    def send_message(self, message: Mapping[str, Any]) -> None:
        """Send an event, or a reply outside of a session."""
        self.send(self._codec.encode(message))

    def send(self, payload: bytes) -> None:
        """Send an encoded message."""
        if self.is_lost:
            return
        if self._compress is not None and len(payload) >= self._compress:
            payload, binary = self._codec.compressed(payload, self._compress)
        else:
            binary = not self._is_json
        if binary:
            self._socket.send_binary(payload)
        else:
            self._socket.send(payload)

    @property
    def is_closed_by_client(self) -> bool:
        """Whether the client ended the connection itself, so that it will not come back for what it waits for."""
        return self._socket.close_code in _NORMAL_CLOSURES


class SessionOpener:
    """Answers `open` on one connection: a new session, perhaps after waiting for a slot, or one resumed by its token.

    A repeated `open` gets the session that the first one opened: on the same connection by its id, on another one by
    its nonce (docs/protocol.md, 4.1).
    """

    def __init__(self, connection: V2Connection) -> None:
        self._connection = connection
        self._manager = connection.manager
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._opened_as: dict[int, str] = {}

    def is_opening(self, request_id: int) -> bool:
        """Whether a session is being opened for a request."""
        return request_id in self._opening

    def cancel(self, request_id: int) -> bool:
        """Cancel the opening of a session."""
        return self._opening[request_id].cancel()

    def cancel_all(self) -> None:
        """Cancel every opening: the connection is gone."""
        for task in self._opening.values():
            task.cancel()

    def open(self, request: Request) -> None:
        """Resume a session, or open one; the reply is sent when it is ready.

        Raises:
            OpenEnvError: It cannot be resumed.
        """
        options = request.extra or {}
        token = options.get("resume")
        if isinstance(token, str):
            session = self._manager.attachments.claimed(token)
            if self._connection.role is Role.AGENT and not session.account.is_agent:
                raise Forbidden(self._connection.role.value)  # the replies that are kept for its owner show rewards
            self._manager.attachments.reattach(session, self._connection)
            self._connection.sessions[session.id] = session
            self._reply(request, session, resumed=True)
            return
        if request.id in self._opening:  # sent twice: one reply is for both
            return
        if request.id in self._opened_as:
            self._reply_again(request)
            return
        known = self._manager.openings.find(self._nonce(options))
        if known is not None:
            self._hold(request, known)
            return
        task = self._connection.dispatcher.loop.create_task(self._open_new(request, options))
        self._opening[request.id] = task
        task.add_done_callback(lambda task: self._end(request, task))

    def _end(self, request: Request, task: asyncio.Task[None]) -> None:
        self._opening.pop(request.id, None)
        if task.cancelled() and not self._connection.is_lost:  # before it began; later it answers that itself
            self._connection.send_error(request, RequestCancelled())

    def _nonce(self, options: Mapping[str, Any]) -> str | None:
        """Return the client's own name for its session; an agent cannot mean an orchestrator's."""
        nonce = options.get("nonce")
        return f"{self._connection.role.value} {nonce}" if isinstance(nonce, str) else None

    async def _open_new(self, request: Request, options: Mapping[str, Any]) -> None:
        wait_s, key = options.get("wait_s"), options.get("key")
        connection = self._connection
        last_position = -1

        def on_position(position: int) -> None:
            nonlocal last_position
            if position != last_position:
                last_position = position
                connection.send_message({"type": "event", "id": request.id, "event": "queued", "position": position})

        opening = self._manager.openings.begin(
            self._nonce(options),
            lambda opening: self._manager.open(
                SessionKind.RESUMABLE,
                wait_s=float(wait_s) if isinstance(wait_s, (int, float)) else 0.0,
                account=account_of(connection.role, key if isinstance(key, str) else None),
                on_position=opening.tell_position,
                on_reserved=opening.reserved,
            ),
        )
        try:
            session = await opening.wait(on_position)
        except asyncio.CancelledError:
            opening.leave(is_final=not connection.is_lost or connection.is_closed_by_client)
            if not connection.is_lost:
                connection.send_error(request, RequestCancelled())
                return
            raise
        except SessionCapacityError as exc:
            retry_s = self._manager.retry_after_s
            refusal = SessionCapacityError(exc.active_sessions, exc.max_sessions, str(exc), retry_after_s=retry_s)
            connection.send_error(request, refusal)
            return
        except OpenEnvError as exc:
            connection.send_error(request, exc)
            return
        except Exception as exc:  # the client waits for a reply whatever happens
            logger.exception("a session could not be opened")
            connection.send_error(request, connection.service.errors.shown(exc))
            return
        if connection.is_lost:
            if not opening.is_kept:  # no client has its token
                session.close(DISCONNECTED)
            return
        self._hold(request, session)

    def _hold(self, request: Request, session: Session) -> None:
        """Answer with the session that this request opened, here or on a connection that is gone."""
        if session.holder is None and not session.ledger.last_id:
            session.attach(self._connection)
        else:
            self._manager.attachments.reattach(session, self._connection)
        self._connection.sessions[session.id] = session
        self._opened_as[request.id] = session.id
        if len(self._opened_as) > _MOST_OPENED:
            del self._opened_as[next(iter(self._opened_as))]
        self._reply(request, session, resumed=False)

    def _reply_again(self, request: Request) -> None:
        session = self._connection.sessions.get(self._opened_as[request.id])
        if session is None:
            raise StaleRequest(request.id, max(self._opened_as))
        self._reply(request, session, resumed=False)

    def _reply(self, request: Request, session: Session, *, resumed: bool) -> None:
        message = {
            "type": "opened",
            "id": request.id,
            "session": session.id,
            "token": self._manager.attachments.token(session),
            "resumed": resumed,
            "last_id": session.ledger.last_id,
            "grace_s": self._manager.limits.grace_s,
        }
        self._connection.send_message(message)


def _is_large_batch(payload: bytes) -> bool:
    """Guess whether a message requests much work, without reading it."""
    return len(payload) >= _LARGE_BATCH and b"batch" in payload[:40]
