"""`SessionHost`: the sessions of a worker process, and the loop that answers the server's requests.

    request ──> OPEN: a session and its thread ──> READY or an error
                ASK: an operation of a session ──> its result; a coroutine is finished on this loop first
                FORK, REAP: `copies`             CLOSE, CANCEL: the session's own methods
                EXIT, or the server has ended ──> close all sessions

Knows sessions and messages; must not know what the operations do.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final

from openenv.env.binding import Encoder

from ....sessions.lifetime import ClosedEnvironments
from ....sessions.operations import FORK
from ....sessions.session import Session, SessionCall, SessionCallbacks, SessionKind, SessionState
from ...base import Lane, LaneCall
from ...dispatcher import CallProfile, Delivery, Dispatcher, WorkerThread
from ...thread import ThreadRunner
from .. import fork_checks
from ..messages import READ_BYTES, MessageKind, MessageReader, PackedState, describe, unpack
from .copies import CopiedSession, ProcessCopies, environment_of
from .operations import WorkerRequest, completed, operation_of, tools_of, unencoded
from .server_link import ForwardedEvents, ForwardedLog, ReplySender, ServerHandle

_CLOSE_S: Final = 5.0
_LOOK_S: Final = 2.0


class _ImmediateDispatcher(Dispatcher):
    """Delivers in the thread of the call: replies need no loop."""

    __slots__ = ()

    def hand_over(self, delivery: Delivery) -> bool:
        delivery.deliver()
        return True

    def post(self, delivery: Delivery) -> None:
        delivery.deliver()

    def hand_out(self, worker: WorkerThread, call: LaneCall) -> bool:
        worker.put((call,))
        return True


class _ThreadPerSession(CallProfile):
    """Gives each session a thread from the start, because any of them may hang."""

    __slots__ = ()

    is_slow = True
    is_fast = False

    def record(self, kind: str, seconds: float, calls: int = 1) -> None:
        return


class SessionHost:
    """The sessions of this process, by the number of their lane in the server.

    Args:
        sock: The connection to the server.
        factory: Makes an environment.
        server: The server's process.
        copied: In a copied process, the inherited session.
    """

    def __init__(
        self,
        sock: socket.socket,
        factory: Callable[[], Any],
        *,
        server: ServerHandle,
        copied: CopiedSession | None = None,
    ) -> None:
        self._socket = sock
        self.replies = ReplySender(sock)
        self._factory = factory
        self._server = server
        self._copied = copied
        self._copies = ProcessCopies(self, is_copy=copied is not None)
        self._reader = MessageReader()
        self._runner = ThreadRunner(max_threads=1 << 20)
        self._runner.profile = _ThreadPerSession()
        self._is_pinned = False
        self._sessions: dict[int, Session] = {}
        self._closing: dict[str, int] = {}
        self._running: dict[int, tuple[int, SessionCall]] = {}
        self._encoders: dict[int, Encoder] = {}
        self._closed_environments = ClosedEnvironments(lambda: len(self._sessions))
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Serve until EXIT, or until the server ends."""
        loop = self._loop = asyncio.get_running_loop()
        self._dispatcher = _ImmediateDispatcher(loop)
        self._exit = asyncio.Event()
        self._task = asyncio.current_task()
        if self._copied is not None:
            self._adopt(self._copied)
        loop.add_reader(self._socket, self._readable)
        self.replies.send(MessageKind.READY)
        self._look()
        await self._exit.wait()
        loop.remove_reader(self._socket)
        await self._close_all()

    def _look(self) -> None:
        """Check regularly whether the server has ended: another process may keep a copy of the socket open."""
        self._copies.reap_orphans()
        if self._server.has_ended:
            self._exit.set()
        else:
            self._loop.call_later(_LOOK_S, self._look)

    async def _close_all(self) -> None:
        for session in list(self._sessions.values()):
            session.close("the server has ended")
        deadline = self._loop.time() + _CLOSE_S
        while self._sessions and self._loop.time() < deadline:  # noqa: ASYNC110 - sessions end in threads
            await asyncio.sleep(0.02)

    # -- requests of the server -----------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._exit.set()
            return
        for kind, number, payload in self._reader.feed(data):
            try:
                self._handle(kind, number, payload)
            except Exception as exc:
                self.replies.send_error(number, exc)

    def _handle(self, kind: int, number: int, payload: bytes) -> None:
        match kind:
            case MessageKind.ASK:
                self._ask(number, *unpack(payload))
            case MessageKind.OPEN:
                self._open(number, *unpack(payload))
            case MessageKind.CLOSE:
                self._close(number, unpack(payload))
            case MessageKind.CANCEL:
                self._cancel(number, unpack(payload))
            case MessageKind.ENCODER:
                self._encoders[number] = unpack(payload)
            case MessageKind.FORK:
                self._fork(number, *unpack(payload))
            case MessageKind.REAP:
                self._copies.reap(number)
            case MessageKind.EXIT:
                self._exit.set()

    def _open(self, number: int, lane_number: int, single_thread: bool, state: PackedState | None) -> None:
        lane = self._runner.lane()
        factory = self._factory if state is None else partial(environment_of, self._factory, state)

        def pin() -> None:
            if not self._is_pinned:
                self._is_pinned = True
                self._runner.pin(lane)

        if single_thread:
            pin()
        session = self._add_session(lane_number, lane)

        def built(_: Any, error: BaseException | None) -> None:
            if error is not None:
                self.replies.send_error(number, error)
                return
            if getattr(type(session.env), "REQUIRES_SINGLE_THREAD_EXECUTOR", False):
                pin()
            try:
                description = describe(session.env)
            except Exception as exc:
                self.replies.send_error(number, exc)
                session.close()
            else:
                self.replies.send_result(number, description)

        session.construct(factory, built, self._dispatcher)

    def _add_session(self, lane_number: int, lane: Lane) -> Session:
        session = self._sessions[lane_number] = Session(
            str(lane_number),
            SessionKind.ONCE,
            lane=lane,
            clock=time.time,
            listener=SessionCallbacks(lambda *_: None, self._closed),
        )
        session.on_dropped = self._closed_environments.add
        return session

    def _ask(self, number: int, lane_number: int, name: str, encoder: int, argument: Any, wants_events: bool) -> None:
        session = self._sessions[lane_number]
        if name == "describe":  # do not wait for the running call, which may take long
            self._start(number, tools_of(session.env).describe())
            return
        events = ForwardedEvents(self.replies, number, self._loop) if wants_events else None
        request = WorkerRequest(argument, events)
        operation = operation_of(name, self._encoders[encoder] if encoder else unencoded)
        call = session.submit(operation, request, partial(self._reply, number), self._dispatcher)
        self._running[lane_number] = number, call

    def _reply(self, number: int, result: Any, error: BaseException | None) -> None:
        if error is not None:
            self.replies.send_error(number, error)
        elif inspect.isawaitable(result) or inspect.isasyncgen(result):
            self._loop.call_soon_threadsafe(self._start, number, completed(result))
        else:
            self.replies.send_result(number, result)

    def _start(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(self._finish(number, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            result = await work
        except Exception as exc:
            self.replies.send_error(number, exc)
        else:
            self.replies.send_result(number, result)

    def _cancel(self, number: int, lane_number: int) -> None:
        session = self._sessions.get(lane_number)
        running, call = self._running.get(lane_number, (None, None))
        if session is not None and call is not None and running == number:
            session.cancel(call)

    def _close(self, number: int, lane_number: int) -> None:
        session = self._sessions.get(lane_number)
        if session is None or session.state is SessionState.CLOSED:
            self.replies.send_result(number, None)
            return
        self._closing[session.id] = number
        session.close()

    def _closed(self, session: Session) -> None:
        lane_number = int(session.id)
        self._sessions.pop(lane_number, None)
        self._running.pop(lane_number, None)
        number = self._closing.pop(session.id, None)
        if number is not None:
            self.replies.send_result(number, None)

    # -- copies ---------------------------------------------------------------------------------------------------

    def _fork(self, number: int, lane_number: int, numbers: list[int], by_process: bool) -> None:
        session = self._sessions[lane_number]
        work = partial(self._copies.copy, session, number, numbers, by_process)
        call = session.submit(FORK, work, partial(self._reply, number), self._dispatcher)
        self._running[lane_number] = number, call

    @property
    def session_count(self) -> int:
        """The number of sessions in this process."""
        return len(self._sessions)

    def own_tasks(self) -> set[asyncio.Task[Any] | None]:
        """Return the host's tasks, which do not prevent a fork."""
        return {self._task, asyncio.current_task(), *self._tasks}

    def own_descriptors(self) -> set[int]:
        """Return the host's descriptors, which do not prevent a fork."""
        loops = [self._loop, *fork_checks.tool_loops()]
        descriptors = {fd for loop in loops for fd in fork_checks.loop_descriptors(loop)}
        return descriptors | {self._socket.fileno(), -1 if self._server.descriptor is None else self._server.descriptor}

    def copied_host(self, sock: socket.socket, copied: CopiedSession) -> SessionHost:
        """Return the host of a copy of this process; call it in the copy."""
        self._socket.close()
        for loop in (self._loop, *fork_checks.tool_loops()):
            fork_checks.close_copied_loop(loop)
        server = replace(self._server, is_parent=False)
        host = SessionHost(sock, self._factory, server=server, copied=copied)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, ForwardedLog):
                handler.replies = host.replies
        return host

    def _adopt(self, copied: CopiedSession) -> None:
        session = self._add_session(copied.lane_number, self._runner.adopt(copied.thread))
        session.construct(lambda: copied.env, lambda *_: None, self._dispatcher)
