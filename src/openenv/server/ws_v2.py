"""`/ws` in protocol v2: many sessions on one connection, each request answered once, whatever happens to connections.

A session that loses its connection is kept for the grace period and can be attached to again; replies go to whoever
asked, on whichever connection he is now. Knows messages and sessions; must not know transports or encodings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

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
    EncodedReply,
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
from ..sessions.session import Cancellable, Session, SessionCall, SessionHolder, SessionKind, with_hint
from ..types import ServerMode, WSErrorCode
from .access import Role, account_of, may
from .backpressure import Backpressure, LoopTurns
from .mcp.openenv_rpc import OwnMethods
from .replies import Asked, Collected, Each, Message, Outcome, Place, Recent, Single, Target, answer_again
from .service import EnvService
from .sockets import Socket

# entrance: How sessions come to a v2 connection: opened anew, perhaps after waiting, or resumed with their token.
#
# A request that is repeated, on this connection or on another one, gets the session that it has opened. Knows the
# manager and requests; must not know sockets or encodings.


logger = logging.getLogger(__name__)

_MOST_OPENED = 1024  # whose ids are kept


class Entering(SessionHolder, Protocol):
    """A connection, as far as its sessions are concerned."""

    sessions: dict[str, Session]

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        ...

    @property
    def has_said_goodbye(self) -> bool:
        """Whether the client has ended it itself."""
        ...

    def send_message(self, message: Mapping[str, Any]) -> None:
        """Send something that is no answer to a call."""
        ...

    def send_error(self, request: Request, exc: BaseException) -> None:
        """Say that a request failed."""
        ...


class Entrance:
    """Answers `open` on one connection."""

    def __init__(self, connection: Entering, service: EnvService, hub: Dispatcher, role: Role) -> None:
        self._connection = connection
        self._service = service
        self._manager = service.manager
        self._hub = hub
        self._role = role
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._opened_as: dict[int, str] = {}

    def is_opening(self, request_id: int) -> bool:
        """Whether a session is being opened for a request."""
        return request_id in self._opening

    def cancel(self, request_id: int) -> bool:
        """Give up a session that is being opened."""
        return self._opening[request_id].cancel()

    def leave(self) -> None:
        """Give up all that are being opened: the connection is gone."""
        for task in self._opening.values():
            task.cancel()

    def open(self, request: Request) -> None:
        """Resume a session, or open one; the answer comes when it is there.

        Raises:
            OpenEnvError: That cannot be.
        """
        given = request.extra or {}
        resume = given.get("resume")
        if isinstance(resume, str):
            session = self._manager.attachments.claimed(resume)
            if self._role is Role.AGENT and not session.account.is_agent:
                raise Forbidden(self._role.value)  # the replies that are kept for its owner show rewards
            self._manager.attachments.reattach(session, self._connection)
            self._connection.sessions[session.id] = session
            self._opened(request, session, resumed=True)
            return
        if request.id in self._opening:  # sent twice: one answer is for both
            return
        if request.id in self._opened_as:
            self._open_again(request)
            return
        known = self._manager.openings.find(self._nonce(given))
        if known is not None:
            self._hold(request, known)
            return
        task = self._hub.loop.create_task(self._open_new(request, given))
        self._opening[request.id] = task
        task.add_done_callback(lambda task: self._ended(request, task))

    def _ended(self, request: Request, task: asyncio.Task[None]) -> None:
        self._opening.pop(request.id, None)
        if task.cancelled() and not self._connection.is_lost:  # before it had begun, or it would have said so itself
            self._connection.send_error(request, RequestCancelled())

    def _nonce(self, given: Mapping[str, Any]) -> str | None:
        """What a client calls its session before it knows the token; an agent cannot mean an orchestrator's."""
        nonce = given.get("nonce")
        return f"{self._role.value} {nonce}" if isinstance(nonce, str) else None

    async def _open_new(self, request: Request, given: Mapping[str, Any]) -> None:
        wait_s, key = given.get("wait_s"), given.get("key")
        connection = self._connection
        told: list[int] = []

        def on_position(position: int) -> None:
            if not told or told[-1] != position:
                told.append(position)
                connection.send_message({"type": "event", "id": request.id, "event": "queued", "position": position})

        opening = self._manager.openings.begin(
            self._nonce(given),
            lambda opening: self._manager.open_in_turn(
                SessionKind.RESUMABLE,
                wait_s=float(wait_s) if isinstance(wait_s, (int, float)) else 0.0,
                account=account_of(self._role, key if isinstance(key, str) else None),
                on_position=opening.tell_position,
                on_reserved=opening.reserved,
            ),
        )
        try:
            session = await opening.wait(on_position)
        except asyncio.CancelledError:
            opening.leave(is_final=not connection.is_lost or connection.has_said_goodbye)
            if not connection.is_lost:
                connection.send_error(request, RequestCancelled())
                return
            raise
        except SessionCapacityError as exc:
            later = self._manager.retry_after_s
            told_when = SessionCapacityError(exc.active_sessions, exc.max_sessions, str(exc), retry_after_s=later)
            connection.send_error(request, told_when)
            return
        except OpenEnvError as exc:
            connection.send_error(request, exc)
            return
        except Exception as exc:  # whatever it is, whoever waits must be told
            logger.exception("a session could not be opened")
            connection.send_error(request, self._service.errors.shown(exc))
            return
        if connection.is_lost:
            if not opening.is_kept:  # nobody has learnt its token
                session.close(DISCONNECTED)
            return
        self._hold(request, session)

    def _hold(self, request: Request, session: Session) -> None:
        """Answer with a session that was opened by this request, here or on a connection that is gone."""
        if session.holder is None and not session.ledger.last_id:
            self._manager.attachments.hold(session, self._connection)
        else:
            self._manager.attachments.reattach(session, self._connection)
        self._connection.sessions[session.id] = session
        self._opened_as[request.id] = session.id
        if len(self._opened_as) > _MOST_OPENED:
            del self._opened_as[next(iter(self._opened_as))]
        self._opened(request, session, resumed=False)

    def _open_again(self, request: Request) -> None:
        """Answer a repeated request with the session that it has opened."""
        session = self._connection.sessions.get(self._opened_as[request.id])
        if session is None:
            raise StaleRequest(request.id, max(self._opened_as))
        self._opened(request, session, resumed=False)

    def _opened(self, request: Request, session: Session, *, resumed: bool) -> None:
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


# A client may send two requests ahead for each session, and some more; then it has to read answers first.
_MOST_UNDER_WAY = 8192
_AHEAD = 128
_GYM = frozenset({"reset", "step", "state"})
_GOODBYES = frozenset({1000, 1001, 1005})
_LARGE_BATCH = 4096  # bytes


class V2Service:
    """What all v2 connections to one environment share."""

    def __init__(self, service: EnvService, rpc: OwnMethods) -> None:
        self.service = service
        self.manager = service.manager
        self.rpc = rpc
        self.protocol = ServerProtocolV2(service.action_cls)
        self._operations: dict[Writer, Operations] = {}

    def operations(self, writer: Writer) -> Operations:
        """Return the operations whose results are encoded for a writer."""
        found = self._operations.get(writer)
        if found is None:
            found = self._operations[writer] = build_operations(writer.observation, writer.state)
        return found


class V2Connection:
    """One client's connection."""

    def __init__(
        self, shared: V2Service, socket: Socket, hub: Dispatcher, codec: Codec, role: Role = Role.ORCHESTRATOR
    ) -> None:
        self._shared = shared
        self._manager = shared.manager
        self._socket = socket
        self._hub = hub
        self._codec = codec
        self._role = role
        self.writer = writer_of(codec)
        self._operations = shared.operations(self.writer)
        self._recent = Recent(self.writer)
        self._is_json = not codec.is_binary
        self._takes_steps = shared.service.mode is ServerMode.SIMULATION
        self._steps_go_together = self._takes_steps and role is Role.ORCHESTRATOR
        self._limit = shared.service.options.max_message_bytes
        self.sessions: dict[str, Session] = {}
        self._entrance = Entrance(self, shared.service, hub, role)
        self._calls: dict[tuple[str, int], SessionCall] = {}
        self._groups: set[StepGroup] = set()
        self._grouped = 0  # steps in them
        self._rpcs: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._ready: list[bytes] = []
        self._compress: int | None = None
        self._intake = Backpressure(socket, self._read, self._is_loaded, _is_large_batch, LoopTurns.of(hub.loop))
        self._lost = False
        self.traceparent: str | None = None  # of the handshake, for requests that bring none

    # -- SocketHandler --------------------------------------------------------------------------------------------

    def on_message(self, payload: bytes) -> None:
        """Take in a text message."""
        self._intake.receive(payload, False)

    def on_binary(self, payload: bytes) -> None:
        """Take in a binary message."""
        self._intake.receive(payload, True)

    def _read(self, payload: bytes, binary: bool) -> None:
        message = self._recent.add(payload, binary)
        if self._is_json and not binary:
            parsed = self._shared.protocol.parse_json(payload)
            if parsed is not None:
                self._take(parsed, message)
                return
        try:
            decoded = self._codec.decode(payload, binary=binary, max_bytes=self._limit)
        except ValueError as exc:
            self._refuse(None, None, {"message": f"Invalid JSON: {exc}", "code": WSErrorCode.INVALID_JSON.value})
        else:
            self._take(self._shared.protocol.parse_map(decoded), message)

    def on_oversize(self, size: int) -> None:
        """Refuse a message over the limit."""
        text = f"A message of {size} bytes is over the limit of {self._limit} bytes"
        code = WSErrorCode.VALIDATION_ERROR.value
        self._refuse(None, None, {"message": text, "code": code, "errors": [], "limit_bytes": self._limit})

    def on_writable(self) -> None:
        """Go on where a client that did not read had made us stop."""
        self._intake.go_on()

    def on_shutdown(self) -> None:
        """Say which sessions end now, and hang up; running calls end in the drain, and their replies can be fetched."""
        for session in self.sessions.values():
            if session.is_idle:
                self._tell_detached(session, SHUTTING_DOWN)
        self._socket.close(1012, "the server is shutting down")

    def on_lost(self) -> None:
        """Leave the sessions to whoever has their tokens."""
        if self._lost:
            return
        self._lost = True
        self._intake.drop()
        self._entrance.leave()
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            self._manager.attachments.release(session, self)

    # -- SessionHolder --------------------------------------------------------------------------------------------

    def let_go(self, session: Session, reason: str) -> None:
        """Another connection has a session now, or it has ended; told from any thread."""
        if self._hub.is_at_hand:
            self._let_go(session, reason)
        else:
            try:
                self._hub.loop.call_soon_threadsafe(self._let_go, session, reason)
            except RuntimeError:  # the loop has ended, and the connection with it
                return

    def _let_go(self, session: Session, reason: str) -> None:
        if self.sessions.pop(session.id, None) is not None and not self._lost:
            self._tell_detached(session, reason)

    def _tell_detached(self, session: Session, reason: str) -> None:
        self.send_message({"type": "event", "event": "detached", "session": session.id, "reason": reason})

    # -- requests -------------------------------------------------------------------------------------------------

    def _take(self, parsed: Parsed, message: Message) -> None:
        if isinstance(parsed, Request):
            self._handle(parsed, Single(self, parsed), message)
        elif isinstance(parsed, Batch):
            self._handle_batch(parsed, message)
        else:
            self._refuse(parsed.id, parsed.session, parsed.error)

    def _handle_batch(self, batch: Batch, message: Message) -> None:
        count = len(batch.requests) if batch.steps is None else len(batch.steps)
        collected = None if batch.each else Collected(self, batch.id, count)
        if collected is not None and batch.steps is not None and self._steps_go_together:
            self._take_together(batch.steps, collected, message)
            return
        for place, request in enumerate(batch.in_full()):
            target = Each(self, request) if collected is None else Place(collected, place, request)
            self._handle_one(request, target, message)
        if collected is not None and not count:
            collected.send()

    def _handle_one(self, request: Request | RefusedRequest, target: Target, message: Message) -> None:
        if isinstance(request, RefusedRequest):
            self._manager.report_error(request.error["code"])
            target.answer(EncodedReply("error", self.writer.data(request.error), self.writer))
        else:
            self._handle(request, target, message)

    def _take_together(self, steps: list[dict[str, Any]], collected: Collected, message: Message) -> None:
        """Run steps in groups, one for each thread that sessions share; what is no plain, new step runs by itself."""
        operation, sessions, asked = self._operations.step, self.sessions, Asked("step", message)
        groups: dict[LaneExecutor, StepGroup] = {}
        alone: list[int] = []
        apart: set[str] = set()  # whose later steps may not overtake one that runs by itself
        for place, given in enumerate(steps):
            name: Any = given.get("session")
            session = sessions.get(name) if len(given) == 4 else None  # type, id, session, data
            if session is not None and name not in apart:
                host = session.lane.host
                group = groups.get(host)
                if group is None:
                    group = groups[host] = self._new_group(asked, collected)
                request_id, action, ledger = given["id"], given["data"], session.ledger
                if request_id > ledger.last_id and session.begin_step(group, operation, action):
                    ledger.begin_step(request_id, asked)
                    group.sessions.append(session)
                    group.actions.append(action)
                    group.ids.append(request_id)
                    group.places.append(place)
                    continue
            alone.append(place)
            apart.update(sessions if name is None else (name,))  # without a name the only one is meant
        for host, group in groups.items():
            if not group.sessions:
                continue
            self._groups.add(group)
            self._grouped += len(group.sessions)
            host.submit(group)
        self._watch_load()
        for place in alone:
            request = request_of(steps[place])
            self._handle_one(request, Place(collected, place, request), message)
        if not steps:
            collected.send()

    def _new_group(self, asked: Asked, collected: Collected) -> StepGroup:
        step, observe = self._operations.step, self._manager.observe_step
        return StepGroup(step, self.writer.observed, asked, self._hub, collected.take, observe)

    def _handle(self, request: Request, target: Target, message: Message) -> None:
        try:
            if self._role is not Role.ORCHESTRATOR and not may(self._role, request.type):
                raise Forbidden(self._role.value)
            if request.type == "step" or request.type in ("reset", "state", "mcp", "close"):  # nearly all of them
                self._submit(request, target, message)
            elif request.type == "open":
                self._open(request)
            elif request.type == "cancel":
                self._cancel(request)
            else:
                self._send(self.writer.message("pong", request.id, None, None))
        except OpenEnvError as exc:
            self._manager.report_error(exc.code)
            target.answer(self.writer.error(exc))

    def _submit(self, request: Request, target: Target, message: Message) -> None:
        """Run a request of a session, unless it has run before."""
        session = self._session(request)
        entry = session.ledger.find(request.id)
        if entry is not None:
            kind, first = entry.asked
            if kind != request.type or first.differs(message, request.id, session.id):
                text = f"Invalid message: {request.id} is the id of another request: {kind!r}"
                self._answer_error(target, WSErrorCode.VALIDATION_ERROR, text, session)
            else:
                answer_again(entry, session, target)
            return
        if request.type in _GYM and not self._takes_steps:
            text = f"Unknown message type: {request.type} frames are off in production mode"
            self._answer_error(target, WSErrorCode.UNKNOWN_TYPE, text, session)
            return
        entry = session.ledger.begin(request.id, Asked(request.type, message))
        entry.tell(target.answer)
        if request.type == "mcp":
            self._run_rpc(request, session, entry)
            return
        if request.type == "close":
            self.sessions.pop(session.id, None)
            session.holder = None
            session.close(CLOSED_BY_CLIENT)  # first, so that nothing of it is run any more once its client is told
            session.ledger.finish(entry, EncodedReply("closed", self.writer.data({}), self.writer), 0)
            return
        operation, argument = self._operation(request)
        running = Outcome(self, session, request, entry)
        origin = self._origin(request) if self._manager.wants_origins else None
        call = session.submit(operation, argument, running.done, self._hub, origin)
        if not entry.is_done:
            self._calls[(session.id, request.id)] = call
            self._watch_load()

    def _answer_error(self, target: Target, code: WSErrorCode, text: str, session: Session) -> None:
        self._manager.report_error(code.value, session)
        target.answer(EncodedReply("error", self.writer.data({"message": text, "code": code.value}), self.writer))

    def _origin(self, request: Request) -> RequestOrigin:
        given = (request.extra or {}).get("traceparent")
        return RequestOrigin(request.id, given if isinstance(given, str) else self.traceparent)

    def _operation(self, request: Request) -> tuple[Operation, Any]:
        if request.type == "step":
            if request.kwargs is None and request.timeout_s is None:
                return self._operations.step, request.data
            given = dict(request.kwargs or {})
            if request.timeout_s is not None:
                given["timeout_s"] = request.timeout_s
            return self._operations.step_with, StepInput(request.data, given)
        if request.type == "reset":
            return self._operations.reset, request.data
        return self._operations.state, None

    def _session(self, request: Request) -> Session:
        name = request.session
        if name is None:
            if len(self.sessions) != 1:
                count = len(self.sessions) or "no"
                raise SessionNotFoundError("", f"The connection has {count} sessions, so the request must name one.")
            return next(iter(self.sessions.values()))
        session = self.sessions.get(name)
        if session is None:
            raise SessionNotFoundError(name, f"This connection has no session '{name}'.")
        return session

    def _run_rpc(self, request: Request, session: Session, entry: LedgerEntry) -> None:
        task = self._hub.loop.create_task(self._answer_rpc(request, session, entry))
        key = (session.id, request.id)
        self._rpcs[key] = task
        task.add_done_callback(lambda task: self._finished_rpc(key, task, session, entry))
        self._watch_load()

    def _finished_rpc(
        self, key: tuple[str, int], task: asyncio.Task[None], session: Session, entry: LedgerEntry
    ) -> None:
        self._rpcs.pop(key, None)
        if task.cancelled():  # before it had begun, or it would have said so itself
            reply = self.writer.error(RequestCancelled())
            session.ledger.finish(entry, reply, len(reply.data))
        self._resume_if_few()

    async def _answer_rpc(self, request: Request, session: Session, entry: LedgerEntry) -> None:
        def notify(note: Mapping[str, Any]) -> None:
            told = {key: value for key, value in note.get("params", {}).items() if key != "progressToken"}
            event = {"type": "event", "id": request.id, "event": "progress", **told}
            if request.session is not None:
                event["session"] = request.session
            self.send_message(event)

        try:
            answer = await self._shared.rpc.answer(request.data, own=session, notify=notify, role=self._role)
            reply = EncodedReply("mcp", self.writer.data(answer), self.writer)
        except asyncio.CancelledError:
            reply = self.writer.error(RequestCancelled())
        except Exception as exc:
            reply = self.writer.error(self._shared.service.errors.shown(exc))
        session.ledger.finish(entry, reply, len(reply.data))

    def finished(self, session: Session, request: Request) -> None:
        """Forget a call that is done."""
        self._calls.pop((session.id, request.id), None)
        self._resume_if_few()

    def finished_together(self, group: StepGroup) -> None:
        """Forget a group that is done."""
        self._groups.discard(group)
        self._grouped -= len(group.sessions)
        self._resume_if_few()

    @property
    def _under_way(self) -> int:
        return len(self._calls) + self._grouped + len(self._rpcs)

    @property
    def _most_under_way(self) -> int:
        return min(_MOST_UNDER_WAY, _AHEAD + 2 * len(self.sessions))

    def _is_loaded(self) -> bool:
        """Whether as much is under way as one client may ask for before it reads."""
        return self._under_way >= self._most_under_way

    def _resume_if_few(self) -> None:
        if self._intake.is_paused and self._under_way < self._most_under_way // 2:
            self._intake.go_on()

    def _watch_load(self) -> None:
        if self._is_loaded():
            self._intake.pause()

    # -- sessions -------------------------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return self._lost

    @property
    def has_said_goodbye(self) -> bool:
        """Whether the client has ended the connection itself, so that it will not come back for what it waits for."""
        return getattr(self._socket, "close_code", None) in _GOODBYES

    def _open(self, request: Request) -> None:
        compress = (request.extra or {}).get("compress")
        if isinstance(compress, int):
            self._compress = compress
        self._entrance.open(request)

    def _cancel(self, request: Request) -> None:
        wanted = (request.extra or {}).get("request")
        found = False
        if isinstance(wanted, int):
            if request.session is None and self._entrance.is_opening(wanted):
                found = self._entrance.cancel(wanted)
            else:
                session = self._session(request)
                call: Cancellable | None = self._calls.get((session.id, wanted)) or self._group_of(session, wanted)
                task = self._rpcs.get((session.id, wanted))
                found = session.cancel(call) if call is not None else task is not None and task.cancel()
        message = {"type": "cancelled", "id": request.id, "found": found}
        self.send_message(message)

    def _group_of(self, session: Session, request_id: int) -> StepGroup | None:
        wanted = (session, request_id)
        return next((group for group in self._groups if wanted in zip(group.sessions, group.ids, strict=True)), None)

    # -- answers --------------------------------------------------------------------------------------------------

    def _refuse(self, request_id: int | None, session: str | None, error: Mapping[str, Any]) -> None:
        self._manager.report_error(error["code"])
        self._send(self.writer.message("error", request_id, session, self.writer.data(error)))

    def send_error(self, request: Request, exc: BaseException) -> None:
        """Say that a request failed."""
        self.send_reply(self.writer.error(exc), request)

    def send_reply(self, reply: EncodedReply, request: Request | RefusedRequest) -> None:
        """Send an answer alone."""
        self._send(self.written(reply, request))

    def failure(self, error: BaseException, session: Session, request_id: int, kind: str) -> EncodedReply:
        """Say why a request failed."""
        if isinstance(error, SessionClosedError):
            error = SessionLost(client_reason(error.reason))
        else:
            logger.info("session %s: %s failed (request %d)", session.id, kind, request_id, exc_info=error)
        return self.writer.error(with_hint(self._shared.service.errors.shown(error), session, kind))

    def written(self, reply: EncodedReply, request: Request | RefusedRequest) -> bytes:
        """Write an answer."""
        return self.writer.reply(reply, request.id, request.session)

    def send_batch(self, replies: list[bytes], batch_id: int | None) -> None:
        """Send answers together."""
        self._send(self._codec.batch(replies, batch_id))

    def send_soon(self, reply: EncodedReply, request: Request | RefusedRequest) -> None:
        """Send an answer together with others that are ready in the same moment."""
        if not self._ready:
            self._hub.loop.call_soon(self._send_ready)
        self._ready.append(self.written(reply, request))

    def _send_ready(self) -> None:
        ready, self._ready = self._ready, []
        self.send_batch(ready, None)

    def send_message(self, message: Mapping[str, Any]) -> None:
        """Send something that is no answer to a call."""
        self._send(self._codec.encode(message))

    def _send(self, payload: bytes) -> None:
        if self._lost:
            return
        if self._compress is not None and len(payload) >= self._compress:
            payload, binary = self._codec.compressed(payload, self._compress)
        else:
            binary = not self._is_json
        if binary:
            self._socket.send_binary(payload)
        else:
            self._socket.send(payload)


def _is_large_batch(payload: bytes) -> bool:
    """Guess whether a message asks for much at once, without reading it."""
    return len(payload) >= _LARGE_BATCH and b"batch" in payload[:40]
