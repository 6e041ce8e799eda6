"""`/ws` in protocol v2 (docs/protocol.md): many sessions on one connection, each request answered exactly once.

A session outlives its connection by the grace period, and its replies go to the connection that holds it by then. Knows
messages and sessions; must not know transports or encodings.

    FrameSocket --> V2Connection.on_message --> Backpressure
                         |
                         +-- step -----> PendingReply --> Session.submit --> lane --> PendingReply.done --> send
                         +-- batch ----> StepGroup per thread (plain, new steps)  --> BatchReplies ------> send_batch
                         |               or each request by itself
                         +-- columns --> ConnectionColumns (ws_v2_columns.py)
                         +-- open -----> SessionOpener (ws_v2_open.py)
                         +-- reset, state, mcp, fork, restore, render, close, cancel, ping

Ids make requests idempotent (2.1 and 4 of the specification). The session's ledger keeps the last replies as they were
sent, with their envelope:

    request ----> id above last_id? --yes--> PendingReply in the ledger --> runs --> ledger keeps the reply --> sent
                      | no
                      +--> same request, still running ----> waits for the same reply
                      +--> same request, reply kept -------> the kept reply, in this connection's encoding
                      +--> another request with that id ---> VALIDATION_ERROR
                      +--> reply no longer kept -----------> STALE_REQUEST
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from openenv.errors import (
    Forbidden,
    NotForkable,
    OpenEnvError,
    ReplyTooLarge,
    RequestCancelled,
    SessionClosedError,
    SessionLost,
    SessionNotFoundError,
    UnknownTypeError,
)
from openenv.protocol.codec import QUICK_CONTENT, Codec, ContentTooLarge
from openenv.protocol.server_v1 import ECHO_LIMIT
from openenv.protocol.server_v2 import WRITERS, Batch, ColumnBatch, RefusedRequest, Request, Writer, request_of
from openenv.types import WSErrorCode

from .access import Role, may
from .author_frames import author_exc_info, is_without_author
from .backpressure import Backpressure, LoopTurns, LoopUnpacker, Oversize, UnpackingJob
from .mcp.openenv_rpc import OpenEnvRpc
from .runners import Dispatcher, LaneExecutor, loop_local
from .service import EnvService
from .sessions.events import RequestOrigin
from .sessions.group import StepGroup
from .sessions.ledger import LedgerEntry
from .sessions.lifetime import CLOSED_BY_CLIENT, SHUTTING_DOWN, client_reason
from .sessions.operations import FORK, RESTORE, Operation, StepInput
from .sessions.session import Cancellable, Session, SessionKind, with_hint
from .sockets import Socket, SocketUser
from .ws_v2_columns import ColumnReplies, ColumnRequests, ConnectionColumns, KeptRow
from .ws_v2_open import SessionOpener

logger = logging.getLogger(__name__)

# A client may send two requests ahead for each session, and some more; then it has to read replies first.
_MOST_UNDER_WAY = 8192
_AHEAD = 128
_AHEAD_BYTES = 16 * 1024 * 1024  # for large messages
_MOST_READY_BYTES = 1024 * 1024
_OF_SESSION = frozenset({"reset", "step", "state", "fork", "restore", "render", "mcp", "close"})
_NORMAL_CLOSURES = frozenset({1000, 1001, 1005})  # RFC 6455, 7.4.1: the client ended the connection itself
_REPLY_OF: Final = {"state": "state", "fork": "forked", "restore": "restored", "render": "rendered"}
_LARGE: Final = 4096  # bytes; messages below are usual steps
_LONG: Final = 65_536  # bytes; reading longer messages takes a noticeable time
KEPT: Final = 4  # stored messages per connection, to compare requests with repeated ids
KEPT_BYTES: Final = 64 * 1024  # the most bytes of a stored message
_TWO_REQUESTS: Final = math.nan  # not even equal to itself
_NOT_COMPARED: Final = frozenset({"session", "traceparent"})  # a repetition may omit the name and has its trace

Send = Callable[[bytes], None]
"""Takes an encoded reply: sends it, or puts it into its place in a batch."""


class V2Connection(SocketUser):
    """One client's connection; the handler of its socket, and the holder of its sessions."""

    def __init__(
        self, service: EnvService, socket: Socket, dispatcher: Dispatcher, rpc: OpenEnvRpc, codec: Codec, role: Role
    ) -> None:
        self.service = service
        self.manager = service.manager
        self.dispatcher = dispatcher
        self.role = role
        self.writer = WRITERS[codec]
        self.sessions: dict[str, Session] = {}
        self.traceparent: str | None = None  # of the handshake, for requests without one
        self.is_lost = False
        self._socket = socket
        self.codec = codec
        self._is_json = not codec.is_binary
        self._compress: int | None = None
        self._rpc = rpc
        self._protocol = service.protocol_v2
        self._operations = service.operations_v2[self.writer]
        self.columns = ConnectionColumns(self)
        self.max_bytes = service.options.max_message_bytes
        self.takes_any_step = role is Role.ORCHESTRATOR
        self._recent = RecentMessages(self.writer)
        self._opener = SessionOpener(self)
        self._pending: set[PendingReply] = set()
        self._groups: set[StepGroup] = set()
        self._grouped = 0  # steps in them
        self._repeats = 0  # repeated requests that wait for a first reply
        self._ahead_bytes = 0  # of large messages with running requests
        self._held: list[Session] = []  # sessions that wait with their next call until the client reads
        self._ready: list[bytes] = []
        self._ready_bytes = 0
        self._unpacking: UnpackingJob | None = None  # a large message in another thread; later ones wait for it
        self._unpacker = loop_local(dispatcher.loop, LoopUnpacker)
        turns = loop_local(dispatcher.loop, LoopTurns)
        self._backpressure = Backpressure(socket, self._read, self._is_loaded, is_long=self._is_long, turns=turns)

    # -- SocketHandler --------------------------------------------------------------------------------------------

    def on_message(self, payload: bytes) -> None:
        """Handle a text message."""
        # The common case: nothing is queued and nothing has to be. It costs no further call.
        if self._backpressure.is_open and len(payload) < _LARGE and not self._socket.is_full:
            self._read(payload, False)
        else:
            self._backpressure.receive(payload, False)

    def on_binary(self, payload: bytes) -> None:
        """Handle a binary message."""
        self._backpressure.receive(payload, True)

    def on_oversize(self, size: int) -> None:
        """Refuse a message over the limit."""
        text = f"A message of {size} bytes is over the limit of {self.max_bytes} bytes"
        code = WSErrorCode.VALIDATION_ERROR.value
        self.refuse({"message": text, "code": code, "errors": [], "limit_bytes": self.max_bytes})

    def on_writable(self) -> None:
        """Continue after the client has read its replies."""
        if self._held:
            self._continue_held()
        self._backpressure.resume()

    def on_shutdown(self) -> None:
        """Announce the ending sessions and close. Running calls end in the drain, and their replies are stored."""
        for session in self.sessions.values():
            if session.is_idle:
                self._send_detached(session, SHUTTING_DOWN)
        self._socket.close(1012, "the server is shutting down")

    def on_lost(self) -> None:
        """Detach from the sessions; clients can resume them with their tokens (docs/protocol.md, 4)."""
        if self.is_lost:
            return
        self.is_lost = True
        self._backpressure.drop()
        if self._unpacking is not None:
            self._unpacker.drop(self._unpacking)
        self._opener.cancel_all()
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            self.manager.attachments.release(session, self)

    # -- SessionHolder --------------------------------------------------------------------------------------------

    def holds_back(self, session: Session) -> bool:
        """Keep a session from starting its next call while the client does not read. Called from any thread."""
        if not self._socket.is_full:
            return False
        self._held.append(session)
        if not self._socket.is_full:  # it has read meanwhile, and `on_writable` may have been called before this
            self.dispatcher.loop.call_soon_threadsafe(self._continue_held)
        return True

    def _continue_held(self) -> None:
        held, self._held = self._held, []
        for session in held:
            session.continue_calls()

    def let_go(self, session: Session, reason: str) -> None:
        """Forget a session: another connection has it now, or it has ended. Called from any thread."""
        if self.dispatcher.is_at_hand:
            self._let_go(session, reason)
        else:
            try:
                self.dispatcher.loop.call_soon_threadsafe(self._let_go, session, reason)
            except RuntimeError:  # the loop and the connection have ended
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
        if len(payload) >= _LARGE or (binary and self.codec.is_compressed(payload, binary=True)):
            self._read_large(payload, binary, message)
        else:
            self._parse(payload, binary, message, echo_input=True)

    def _read_large(self, payload: bytes, binary: bool, message: SentMessage) -> None:
        if not self.codec.is_compressed(payload, binary=binary):
            self._read_content(payload, binary, message)
            return
        try:
            content = self.codec.unpacked(payload, min(self.max_bytes, QUICK_CONTENT))
        except ContentTooLarge:
            unpack = partial(self.codec.unpacked, payload, self.max_bytes)
            self._unpacking = UnpackingJob(unpack, partial(self._read_unpacked, message))
            self._backpressure.pause()
            self._unpacker.start(self._unpacking)
        except ValueError as exc:
            self._refuse_payload(exc)
        else:
            self._read_content(content, self.codec.is_binary, message)

    def _read_unpacked(self, message: SentMessage, unpacked: asyncio.Future[bytes]) -> None:
        """Read a message that was unpacked in a thread, and then those behind it."""
        self._unpacking = None
        # Raised here, the error would form a cycle with the future in this frame. Its traceback holds what was unpacked
        # so far, and hundreds of megabytes would wait for the garbage collector.
        error = unpacked.exception()
        if isinstance(error, ValueError):
            self._refuse_payload(error)
        else:
            self._read_content(unpacked.result(), self.codec.is_binary, message)
        self._resume_if_few()

    def _read_content(self, payload: bytes, binary: bool, message: SentMessage) -> None:
        """Read a large message; count its bytes until all of its requests are answered."""
        before = self._under_way
        try:
            if self._is_json:
                self._protocol.limit.check(payload)  # before parsing allocates memory for its values
        except ValueError as exc:
            self._refuse_payload(exc)
            return
        self._parse(payload, binary, message, echo_input=len(payload) <= ECHO_LIMIT)
        message.unanswered = self._under_way - before
        if message.unanswered > 0:
            message.size = len(payload)
            self._ahead_bytes += message.size
            if self._ahead_bytes >= _AHEAD_BYTES:
                self._backpressure.pause()

    def _parse(self, payload: bytes, binary: bool, message: SentMessage, *, echo_input: bool) -> None:
        if self._is_json and not binary:
            # Fast parsers validate the two common messages directly from their bytes. Any other message is decoded and
            # read key by key, which also finds the errors to report.
            step = self._protocol.parse_step(payload)
            if step is not None:
                self._handle_step(step, message)
                return
            batch = self._protocol.parse_batch(payload)
            if batch is not None:
                self._handle_batch(batch, message)
                return
        try:
            decoded = self.codec.decode(payload, binary=binary, max_bytes=self.max_bytes, limit=self._protocol.limit)
        except ValueError as exc:
            self._refuse_payload(exc)
            return
        parsed = self._protocol.parse_map(decoded, echo_input=echo_input)
        if isinstance(parsed, Batch):
            self._handle_batch(parsed, message)
        elif isinstance(parsed, ColumnBatch):
            self.columns.run(parsed, message)
        else:
            self._handle(parsed, message, self.send)

    def _refuse_payload(self, problem: ValueError) -> None:
        self.refuse({"message": f"Invalid JSON: {problem}", "code": WSErrorCode.INVALID_JSON.value})

    def _is_long(self, payload: bytes) -> bool:
        """Guess from its length whether a message is much work."""
        if len(payload) < _LARGE:
            return False
        is_packed = self.codec.is_compressed(payload, binary=payload[:1] != b"{")
        return len(payload) >= _LONG or is_packed or b"batch" in payload[:40]

    def _handle_step(self, step: dict[str, Any], message: SentMessage) -> None:
        """Run a plain, new step. Nearly all requests are, so this takes a shorter path than `_handle`."""
        name, request_id = step.get("session"), step["id"]
        session = self.sessions.get(name) if name is not None else self._only_session
        # A plain step has the keys type, id, data and optionally session.
        is_plain = len(step) == (3 if name is None else 4) and self.takes_any_step
        if session is None or not is_plain or request_id <= session.ledger.last_id:
            self._handle(request_of(step), message, self.send)
            return
        entry = PendingReply(self, session, request_id, ("step", message), name, self.send)
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
            if len(self._pending) + self._grouped >= _AHEAD and self._is_loaded():
                self._backpressure.pause()

    def _handle_batch(self, batch: Batch, message: SentMessage) -> None:
        """Run the requests of a batch concurrently (docs/protocol.md, 2.3)."""
        count = len(batch.requests) if batch.steps is None else len(batch.steps)
        replies = BatchReplies(self, batch, count)
        if batch.steps is not None and self.takes_any_step and not batch.each:
            self._run_groups(batch.steps, replies, message)
        else:
            for place, request in enumerate(batch.in_full()):
                self._handle(request, message, BatchPlace(replies, place))
        if not count and not batch.each:
            replies.send()

    def _run_groups(self, steps: list[dict[str, Any]], replies: BatchReplies, message: SentMessage) -> None:
        """Run plain, new steps in groups, one per shared thread, and other requests such as resets separately.

        Batches are fast mostly because they need one hand-over per thread instead of one per step.
        """
        operation, sessions, sent = self._operations.step, self.sessions, ("step", message)
        groups: dict[LaneExecutor, StepGroup] = {}
        alone: list[int] = []
        apart: set[str] = set()  # later steps of these sessions must not overtake a separate request
        for place, step in enumerate(steps):
            name: Any = step.get("session")
            # A plain step has the keys type, id, session and data.
            session = sessions.get(name) if len(step) == 4 and step["type"] == "step" else None
            if session is not None and name not in apart:
                executor = session.lane.host
                group = groups.get(executor)
                if group is None:
                    group = groups[executor] = StepGroup(
                        operation,
                        self.writer.observed,
                        sent,
                        self.dispatcher,
                        replies.put_group,
                        self.manager.observers,
                    )
                request_id, action, ledger = step["id"], step["data"], session.ledger
                if request_id > ledger.last_id and session.begin_step(group, operation, action):
                    ledger.begin_step(request_id, sent)
                    group.sessions.append(session)
                    group.actions.append(action)
                    group.ids.append(request_id)
                    group.places.append(place)
                    continue
            alone.append(place)
            apart.update(sessions if name is None else (name,))  # without a name the only session is meant
        self.start_groups({executor: group for executor, group in groups.items() if group.sessions})
        for place in alone:
            self._handle(request_of(steps[place]), message, BatchPlace(replies, place))

    def start_groups(self, groups: Mapping[LaneExecutor, StepGroup]) -> None:
        """Hand groups of steps to their threads."""
        for executor, group in groups.items():
            self._groups.add(group)
            self._grouped += len(group.sessions)
            executor.submit(group, self.dispatcher)  # with the inline runner, all replies exist when this returns
        if self._is_loaded():
            self._backpressure.pause()

    def run_alone(self, request: dict[str, Any], message: SentMessage, replies: Replies, place: int) -> None:
        """Run one request of a batch by itself."""
        parsed = self._protocol.read(request)
        assert isinstance(parsed, (Request, RefusedRequest))
        self._handle(parsed, message, BatchPlace(replies, place))

    @property
    def step_operation(self) -> Operation:
        """The operation of a plain step."""
        return self._operations.step

    def _handle(self, request: Request | RefusedRequest, message: SentMessage, send: Send) -> None:
        if isinstance(request, RefusedRequest):
            self.refuse(request.error, request.id, request.session, send)
            return
        try:
            if self.role is not Role.ORCHESTRATOR and not may(self.role, request.type):
                raise Forbidden(self.role.value)
            if request.type in _OF_SESSION:
                self._submit(request, message, send)
            elif request.type == "open":
                compress = (request.extra or {}).get("compress")  # holds for the connection (docs/protocol.md, 1.2)
                if isinstance(compress, int):
                    self._compress = compress
                self._opener.open(request)
            elif request.type == "cancel":
                self._cancel(request)
            else:
                self.send(self.writer.message("pong", request.id, None, None))
        except OpenEnvError as exc:
            self.manager.report_error(exc.code)
            send(self.writer.message("error", request.id, request.session, self.writer.error(exc)))

    def _submit(self, request: Request, message: SentMessage, send: Send) -> None:
        """Run a request of a session, unless it has run before."""
        session = self._session(request)
        entry = session.ledger.find(request.id)  # raises STALE_REQUEST if the reply is no longer stored (2.1)
        if entry is not None:
            self._answer_again(entry, session, request, message, send)
            return
        if request.type == "render":
            from .web.page_operations import draws  # the page's modules are loaded by those who use it

            if not draws(session.env):
                raise UnknownTypeError(f"{self.service.env_name} has no render_web")
        pending = PendingReply(self, session, request.id, (request.type, message), request.session, send)
        session.ledger.add(pending)
        if request.type == "mcp":
            self._run_rpc(request, pending)
        elif request.type == "close":
            self.sessions.pop(session.id, None)
            session.detach(self)
            session.close(CLOSED_BY_CLIENT)  # before the reply: after it, none of the session's code may run
            pending.answer("closed", self.writer.data({}))
        else:
            operation, argument = self._operation(session, request)
            self._start(pending, operation, argument, self._origin(request) if self.manager.wants_origins else None)

    def _answer_again(
        self, entry: LedgerEntry, session: Session, request: Request, message: SentMessage, send: Send
    ) -> None:
        """Answer a repeated request with the first reply, now or when it is ready."""
        kind, first = entry.request
        if kind != request.type or first.differs(message, request.id, session.id):
            text = f"Invalid message: {request.id} is the id of another request: {kind!r}"
            error = {"message": text, "code": WSErrorCode.VALIDATION_ERROR.value}
            self.refuse(error, request.id, request.session, send, session)
            return

        def answer(kept: bytes | KeptRow) -> None:
            kept = bytes(kept)
            if isinstance(send, BatchPlace) and not send.has_room(len(kept)):
                send.refuse()  # do not write it: a batch may repeat one request ten thousand times
                return
            send(self.writer.repeat(kept, first.writer, request.id, session.id, request.session))

        def answer_late(kept: bytes | KeptRow) -> None:
            self._repeats -= 1
            if message.size:
                self._answered(message, 1)
            answer(kept)
            if self._backpressure.is_paused:
                self._resume_if_few()

        if entry.is_done:
            entry.on_reply(answer)
            return
        # Each may get a large reply, all of them at once, before the socket can report that it is full.
        self._repeats += 1
        entry.on_reply(answer_late)
        if self._is_loaded():
            self._backpressure.pause()

    def _origin(self, request: Request) -> RequestOrigin:
        traceparent = (request.extra or {}).get("traceparent")
        return RequestOrigin(request.id, traceparent if isinstance(traceparent, str) else self.traceparent)

    def _operation(self, session: Session, request: Request) -> tuple[Operation, Any]:
        if request.type == "step":
            if request.kwargs is None and request.timeout_s is None:
                return self._operations.step, request.data
            kwargs = dict(request.kwargs or {})
            if request.timeout_s is not None:
                kwargs["timeout_s"] = request.timeout_s
            return self._operations.step_with, StepInput(request.data, kwargs)
        if request.type == "reset":
            return self._operations.reset, request.data
        if request.type == "fork":
            return FORK, self.manager.forking(
                session,
                request.data["n"],
                kind=SessionKind.RESUMABLE,
                by_agent=session.by_agent,
                wait_s=request.data["wait_s"],
            )
        if request.type == "restore":
            return RESTORE, self.manager.restoring(session, request.data["from"])
        if request.type == "render":
            from .web.page_operations import DRAW  # see `_submit`

            return DRAW, request.data
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
            if task.cancelled():  # it had not begun; a running task answers by itself
                entry.answer("error", self.writer.error(RequestCancelled()))

        self._pending.add(entry)
        entry.call = task = self.dispatcher.loop.create_task(self._answer_rpc(request, entry))
        task.add_done_callback(end)
        if self._is_loaded():
            self._backpressure.pause()

    async def _answer_rpc(self, request: Request, entry: PendingReply) -> None:
        def notify(note: Mapping[str, Any]) -> None:
            if self._socket.is_full:  # a client that does not read misses progress, but no reply
                return
            progress = {key: value for key, value in note.get("params", {}).items() if key != "progressToken"}
            event = {"type": "event", "id": request.id, "event": "progress", **progress}
            if request.session is not None:
                event["session"] = request.session
            self.send_message(event)

        try:
            result = await self._rpc.answer(request.data, own=entry.session, notify=notify, role=self.role)
            kind, data = "mcp", self.writer.data(result)
        except asyncio.CancelledError:
            kind, data = "error", self.writer.error(RequestCancelled())
        except Exception as exc:
            kind, data = "error", self.writer.error(self.service.errors.shown(exc))
        entry.answer(kind, data)

    def _cancel(self, request: Request) -> None:
        """Cancel a running request; the reply says whether it was running (docs/protocol.md, 2.4)."""
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
        """Forget an answered request."""
        entry.call = None  # the call refers to the entry; a cycle would wait for the garbage collector
        self._pending.discard(entry)
        if entry.request[1].size:
            self._answered(entry.request[1], 1)
        if self._backpressure.is_paused:
            self._resume_if_few()

    def finished_group(self, group: StepGroup) -> None:
        """Forget an answered group."""
        self._groups.discard(group)
        self._grouped -= len(group.sessions)
        if group.request[1].size:
            self._answered(group.request[1], len(group.sessions))
        if self._backpressure.is_paused:
            self._resume_if_few()

    def _answered(self, message: SentMessage, count: int) -> None:
        """Stop counting the bytes of a large message when all of its requests are answered."""
        message.unanswered -= count
        if message.unanswered <= 0:
            self._ahead_bytes -= message.size
            message.size = 0

    @property
    def _under_way(self) -> int:
        return len(self._pending) + self._grouped + self._repeats

    def _is_loaded(self) -> bool:
        """Return whether the client has as many running requests as allowed before it reads replies."""
        is_full = self._under_way >= self._most_ahead or self._ahead_bytes >= _AHEAD_BYTES
        return is_full or self._unpacking is not None

    def _resume_if_few(self) -> None:
        is_few = self._under_way < self._most_ahead // 2
        if is_few and self._ahead_bytes <= _AHEAD_BYTES // 2 and self._unpacking is None:
            self._backpressure.resume()

    @property
    def _most_ahead(self) -> int:
        return min(_MOST_UNDER_WAY, _AHEAD + 2 * len(self.sessions))

    # -- replies --------------------------------------------------------------------------------------------------

    def refuse(
        self,
        error: Mapping[str, Any],
        request_id: int | None = None,
        name: str | None = None,
        send: Send | None = None,
        session: Session | None = None,
    ) -> None:
        """Answer a request that did not run; an unreadable one has neither id nor session."""
        self.manager.report_error(error["code"], session)
        (send or self.send)(self.writer.message("error", request_id, name, self.writer.data(error)))

    def failure(self, error: BaseException, session: Session, request_id: int, kind: str) -> bytes:
        """Return the data of the error reply to a failed request."""
        if isinstance(error, SessionClosedError):  # not the environment's failure; translate the reason for clients
            error = SessionLost(client_reason(error.reason))
        elif not isinstance(error, RequestCancelled):  # the client requested the cancellation
            text = "session %s: %s failed (request %d)"
            if isinstance(error, NotForkable) and is_without_author(error):
                logger.warning(f"{text}: %s", session.id, kind, request_id, error)
            else:
                logger.error(text, session.id, kind, request_id, exc_info=author_exc_info(error))
        return self.writer.error(with_hint(self.service.errors.shown(error), session, kind))

    def copies_data(self, copies: list[Session]) -> bytes:
        """Return the data of the reply to a `fork`: the copies' ids and resume tokens."""
        token = self.manager.attachments.token
        sessions = [{"session": session.id, "token": token(session)} for session in copies]
        return self.writer.data({"sessions": sessions})

    def send_error(self, request: Request, exc: BaseException) -> None:
        """Answer a request with an error."""
        self.send(self.writer.message("error", request.id, request.session, self.writer.error(exc)))

    def send_batch(self, replies: list[bytes], batch_id: int | None) -> None:
        """Send replies together."""
        self.send(self.codec.batch(replies, batch_id))

    def send_soon(self, reply: bytes) -> None:
        """Send a reply together with all others of the same pass of the loop."""
        if not self._ready:
            self.dispatcher.loop.call_soon(self._send_ready)
        self._ready.append(reply)
        self._ready_bytes += len(reply)
        if self._ready_bytes > _MOST_READY_BYTES:  # the socket can only report that it is full once it has them
            self._send_ready()

    def _send_ready(self) -> None:
        ready, self._ready = self._ready, []
        self._ready_bytes = 0
        if ready:
            self.send_batch(ready, None)

    @property
    def is_behind(self) -> bool:
        """Whether the client has to read before the server sends more."""
        return self._socket.is_full

    def send_message(self, message: Mapping[str, Any]) -> None:
        """Send an event, or a reply outside of a session."""
        self.send(self.codec.encode(message))

    def send(self, payload: bytes) -> None:
        """Send an encoded message."""
        if self.is_lost:
            return
        if self._compress is not None and len(payload) >= self._compress:
            payload, binary = self.codec.compressed(payload, self._compress)
        else:
            binary = not self._is_json
        if binary:
            self._socket.send_binary(payload)
        else:
            self._socket.send(payload)

    @property
    def is_closed_by_client(self) -> bool:
        """Whether the client closed the connection itself, so it will not come back for pending replies."""
        return self._socket.close_code in _NORMAL_CLOSURES


class PendingReply(LedgerEntry):
    """An accepted request of a session: its ledger entry, and the destination of its reply.

    One object on purpose. A step is answered in some 30 microseconds, and every object more costs about one of them.

    Args:
        connection: The connection that the request came on.
        session: Its session.
        request_id: Its id.
        request: Its type and its message, to distinguish a repetition from another request.
        name: The session as the request names it; None for the only one.
        send: Receives the reply: `V2Connection.send`, or its place in a batch.
    """

    __slots__ = ("_connection", "_name", "_send", "call", "session")

    def __init__(
        self,
        connection: V2Connection,
        session: Session,
        request_id: int,
        request: SentRequest,
        name: str | None,
        send: Send,
    ) -> None:
        super().__init__(request_id, request)
        self._connection = connection
        self._name = name
        self._send = send
        self.session = session
        self.call: Cancellable | asyncio.Task[None] | None = None  # for `cancel`

    def done(self, result: Any, error: BaseException | None) -> None:
        """Answer with the outcome of a call."""
        kind: str = self.request[0]
        if error is None:
            if kind == "fork":
                result = self._connection.copies_data(result)
            elif kind == "restore":
                result = self._connection.writer.data({})
            elif kind == "render":
                result = self._connection.writer.data({"html": result.html})
            self.answer(_REPLY_OF.get(kind, "observation"), result)
        else:
            self.answer("error", self._connection.failure(error, self.session, int(self.key), kind))

    def answer(self, kind: str, data: bytes) -> None:
        """Store the reply in the ledger, which sends it through `finish`."""
        connection = self._connection
        message = connection.writer.message(kind, int(self.key), self._name, data)
        self.session.ledger.finish(self, message, len(message))
        connection.finished(self)

    def finish(self, reply: bytes) -> None:
        """Send the reply here and to connections that have repeated the request since."""
        self._send(reply)
        super().finish(reply)


class BatchReplies:
    """The replies to one batch: sent together after the last one, or with `each` as they are ready.

    Together they have at most the size of the largest message, which clients read, too. What would be over that has run
    and is kept in its session's ledger; the client gets `REPLY_TOO_LARGE` for it, and repeats the request.
    """

    __slots__ = ("_batch", "_connection", "_missing", "_replies", "_size")

    def __init__(self, connection: V2Connection, batch: Batch, count: int) -> None:
        self._connection = connection
        self._batch = batch
        self._replies: list[bytes] = [] if batch.each else [b""] * count
        self._missing = count
        self._size = 0  # bytes of single replies; with `each`, of unread replies

    def put(self, place: int, reply: bytes) -> None:
        """Store the reply to one request."""
        if not self.has_room(len(reply)):
            reply = self._refusal(place)
        self._size += len(reply)
        if self._batch.each:
            self._connection.send_soon(reply)
            return
        self._replies[place] = reply
        self._missing -= 1
        if not self._missing:
            self.send()

    def has_room(self, size: int) -> bool:
        """Return whether a reply of that size fits beside the others; the first one always does."""
        if self._batch.each and not self._connection.is_behind:
            self._size = 0
        return not self._size or self._size + size <= self._connection.max_bytes

    def refuse(self, place: int) -> None:
        """Store an error in the place of a reply that does not fit."""
        self.put(place, self._refusal(place))

    def put_group(self, group: StepGroup) -> None:
        """Store the replies to a group of steps, here and in the ledgers of their sessions."""
        connection, replies, request = self._connection, self._replies, group.request
        steps = zip(group.sessions, group.ids, group.places, group.outcomes, strict=True)
        for session, request_id, place, outcome in steps:
            if not isinstance(outcome, bytes):  # the exception of a failed step
                session.report_error(outcome)
                data = connection.failure(outcome, session, request_id, "step")
                outcome = connection.writer.message("error", request_id, session.id, data)
            session.ledger.finish_step(request_id, request, outcome, len(outcome))
            replies[place] = outcome
        connection.finished_group(group)
        self._missing -= len(group.sessions)
        if not self._missing:
            self.send()

    def send(self) -> None:
        """Send the replies."""
        replies, most = self._replies, self._connection.max_bytes
        if sum(map(len, replies)) > most:
            size = 0
            for place, reply in enumerate(replies):
                if size and size + len(reply) > most:
                    replies[place] = self._refusal(place)
                size += len(replies[place])
        self._connection.send_batch(replies, self._batch.id)

    def _refusal(self, place: int) -> bytes:
        steps, writer = self._batch.steps, self._connection.writer
        if steps is not None:
            request_id, name = steps[place]["id"], steps[place].get("session")
        else:
            request = self._batch.requests[place]
            request_id, name = request.id, request.session
        text = f"The replies to one batch have at most {self._connection.max_bytes} bytes; repeat the request"
        return writer.message("error", request_id, name, writer.error(ReplyTooLarge(text)))


Replies = BatchReplies | ColumnReplies


class BatchPlace:
    """Receives the reply to one request of a batch."""

    __slots__ = ("_place", "_replies")

    def __init__(self, replies: Replies, place: int) -> None:
        self._replies = replies
        self._place = place

    def __call__(self, reply: bytes) -> None:
        self._replies.put(self._place, reply)

    def has_room(self, size: int) -> bool:
        """Return whether a reply of that size fits into the answer."""
        return self._replies.has_room(size)

    def refuse(self) -> None:
        """Store an error in the reply's place."""
        self._replies.refuse(self._place)


class SentMessage:
    """A message from a client with one or more requests, in its original bytes.

    It is decoded again only when an id is seen a second time: a client that uses an id twice must not take the reply to
    one request for the reply to the other.
    """

    __slots__ = ("_binary", "_contents", "_payload", "size", "source", "unanswered", "writer")

    def __init__(self, writer: Writer, payload: bytes | None, binary: bool) -> None:
        self.size = 0  # bytes of a large message with unanswered requests; their number follows
        self.unanswered = 0
        self.writer = writer
        self._payload = payload
        self._binary = binary
        self._contents: dict[tuple[int, str | None], Any] | None = None
        self.source: ColumnRequests | None = None  # the requests of a message with columns

    def forget(self) -> None:
        """Drop the contents."""
        self._payload = self._contents = self.source = None

    def differs(self, other: SentMessage, request_id: int, session: str) -> bool:
        """Return whether the request with that id certainly differs from the one in another message."""
        if self.writer is not other.writer:
            return False  # equal values may differ in another encoding
        here, there = self._content(request_id, session), other._content(request_id, session)
        return here is not None and there is not None and _certainly_differ(here, there)

    def _content(self, request_id: int, session: str) -> Any:
        contents = self._contents
        if contents is None:  # decode once, even if many of its requests are repeated
            contents = self._contents = {}
            for key, content in self._requests():
                known = contents.setdefault(key, content)
                if known is not content and _certainly_differ(known, content):
                    contents[key] = _TWO_REQUESTS
        return contents.get((request_id, session), contents.get((request_id, None)))

    def _requests(self) -> Iterator[tuple[tuple[int, str | None], Any]]:
        requests: Iterable[Any]
        if self.source is not None:
            requests = self.source
        elif self._payload is None:
            return
        else:
            try:
                message = self.writer.codec.decode(self._payload, binary=self._binary, max_bytes=64 * KEPT_BYTES)
            except ValueError:
                return
            requests = message["requests"] if message.get("type") == "batch" else (message,)
        for request in requests:
            request_id, session = (request.get("id"), request.get("session")) if isinstance(request, dict) else (0, 0)
            if isinstance(request_id, int) and (session is None or isinstance(session, str)):  # else it was refused
                yield (request_id, session), {key: request[key] for key in request if key not in _NOT_COMPARED}


SentRequest = tuple[str, SentMessage]
"""A request in a ledger: its type and its message. A plain tuple; all steps of a batch share one."""


def _certainly_differ(here: Any, there: Any) -> bool:
    try:
        return bool(here != there)
    except Exception:  # comparing arrays gives an array
        return False


class RecentMessages:
    """The last messages of one connection; without contents for messages over 64 KiB."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._messages: deque[SentMessage] = deque()

    def add(self, payload: bytes, binary: bool) -> SentMessage:
        """Store a message and drop the contents of the oldest one: ledgers may refer to it for much longer."""
        message = SentMessage(self._writer, payload if len(payload) <= KEPT_BYTES else None, binary)
        self._messages.append(message)
        if len(self._messages) > KEPT:
            self._messages.popleft().forget()
        return message
