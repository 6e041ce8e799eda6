"""The sessions of one worker process: builds environments, does what the server asks of them, answers.

A session here is the same `Session` as in a server with the thread runner, each with a thread of its own, so that one
that hangs is in nobody's way. Knows sessions and frames; must not know how the process was started.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..env.tools.source import ToolEvents
from ..runners.base import NotSendable
from ..runners.dispatch import Delivery, Dispatcher
from ..runners.process.messages import (
    READ_BYTES,
    MessageKind,
    MessageReader,
    describe,
    encode_message,
    pack,
    pack_error,
    unpack,
)
from ..runners.thread import Profile, ThreadRunner
from ..sessions.session import Call, Session, SessionKind, SessionState
from .operations import Asked, completed, describe_tools, operation, same

logger = logging.getLogger(__name__)

_CLOSING_S = 5.0
_LOOK_S = 2.0


class Line:
    """The way back to the server; may be used from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, kind: MessageKind, number: int = 0, payload: bytes = b"") -> None:
        """Send a message. A server that is gone gets no answers; the loop sees it go."""
        data = encode_message(kind, number, payload)
        with self._lock:
            try:
                self._socket.sendall(data)
            except OSError:
                return

    def send_result(self, number: int, result: Any) -> None:
        """Send a result, or why it cannot be sent."""
        if type(result) is bytes:
            self.send(MessageKind.BYTES, number, result)
            return
        try:
            payload = pack(result)
        except Exception as exc:
            self.send_error(number, NotSendable(f"a {type(result).__name__} cannot be sent by a worker process: {exc}"))
        else:
            self.send(MessageKind.VALUE, number, payload)

    def send_error(self, number: int, error: BaseException) -> None:
        """Send what was raised."""
        self.send(MessageKind.ERROR, number, pack_error(error))


class SentEvents(ToolEvents):
    """Sends what a tool tells to the server at once, so that it comes before the tool's result."""

    def __init__(self, line: Line, number: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(lambda *_: None, loop=loop)
        self._line = line
        self._number = number

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Tell progress."""
        self._line.send(MessageKind.EVENT, self._number, pack(("progress", (progress, total, message))))

    def log(self, level: str, logger: str | None, data: Any) -> None:
        """Tell a log message; what cannot be pickled is shown as text."""
        try:
            payload = pack(("log", (level, logger, data)))
        except Exception:
            payload = pack(("log", (level, logger, repr(data))))
        self._line.send(MessageKind.EVENT, self._number, payload)


class _AtOnce(Dispatcher):
    """Delivers wherever the result is: answers need no loop."""

    __slots__ = ()

    def post(self, delivery: Delivery) -> None:
        delivery.deliver()


class _OwnThreads(Profile):
    """Gives each session a thread of its own from the beginning: any of them may hang."""

    __slots__ = ()

    is_slow = True
    is_fast = False

    def record(self, kind: str, seconds: float) -> None:
        return


class SessionHost:
    """The sessions of this process.

    Args:
        sock: The way to the server.
        factory: Makes an environment.
        parent: The server's process id.
    """

    def __init__(self, sock: socket.socket, factory: Callable[[], Any], *, parent: int) -> None:
        self._socket = sock
        self._line = Line(sock)
        self._factory = factory
        self._parent = parent
        self._reader = MessageReader()
        self._runner = ThreadRunner(max_threads=1 << 20)
        self._runner.profile = _OwnThreads()
        self._is_pinned = False
        self._sessions: dict[int, Session] = {}
        self._closing: dict[str, int] = {}
        self._running: dict[int, tuple[int, Call]] = {}
        self._encoders: dict[int, Callable[[Any], Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Serve until the server says so, or is gone."""
        loop = self._loop = asyncio.get_running_loop()
        self._hub = _AtOnce(loop)
        self._left = asyncio.Event()
        loop.add_reader(self._socket, self._readable)
        self._line.send(MessageKind.READY)
        while not self._left.is_set():
            try:
                await asyncio.wait_for(self._left.wait(), _LOOK_S)
            except asyncio.TimeoutError:
                if os.getppid() != self._parent:  # a copy of the socket may live on in another process
                    self._left.set()
        loop.remove_reader(self._socket)
        await self._close_all()

    async def _close_all(self) -> None:
        for session in list(self._sessions.values()):
            session.close("the server has ended")
        deadline = self._loop.time() + _CLOSING_S
        while self._sessions and self._loop.time() < deadline:  # noqa: ASYNC110 - sessions end in threads
            await asyncio.sleep(0.02)

    # -- what the server says -------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._left.set()
            return
        for kind, number, payload in self._reader.feed(data):
            try:
                self._take(kind, number, payload)
            except Exception as exc:
                self._line.send_error(number, exc)

    def _take(self, kind: int, number: int, payload: bytes) -> None:
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
            case MessageKind.EXIT:
                self._left.set()

    def _open(self, number: int, place: int, single_thread: bool) -> None:
        lane = self._runner.lane()
        if single_thread and not self._is_pinned:
            self._is_pinned = True
            self._runner.pin(lane)
        session = self._sessions[place] = Session(
            str(place),
            SessionKind.ONCE,
            lane=lane,
            clock=time.time,
            on_ready=lambda *_: None,
            on_closed=self._closed,
        )

        def built(_: Any, error: BaseException | None) -> None:
            if error is not None:
                self._line.send_error(number, error)
                return
            if getattr(type(session.env), "REQUIRES_SINGLE_THREAD_EXECUTOR", False) and not self._is_pinned:
                self._is_pinned = True
                self._runner.pin(lane)
            try:
                description = describe(session.env)
            except Exception as exc:
                self._line.send_error(number, exc)
                session.close()
            else:
                self._line.send_result(number, description)

        session.construct(self._factory, built, self._hub)

    def _ask(self, number: int, place: int, name: str, encoder: int, argument: Any, wants_events: bool) -> None:
        session = self._sessions[place]
        if name == "describe":
            self._start(number, describe_tools(session.env))
            return
        encode = self._encoders[encoder] if encoder else None
        events = SentEvents(self._line, number, self._loop) if wants_events else None
        asked = Asked(argument, encode or same, events)
        call = session.submit(operation(name, encode), asked, partial(self._answer, number), self._hub)
        self._running[place] = number, call

    def _answer(self, number: int, result: Any, error: BaseException | None) -> None:
        if error is not None:
            self._line.send_error(number, error)
        elif inspect.isawaitable(result) or inspect.isasyncgen(result):
            self._loop.call_soon_threadsafe(self._start, number, completed(result))
        else:
            self._line.send_result(number, result)

    def _start(self, number: int, work: Any) -> None:
        task = self._loop.create_task(self._finish(number, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, number: int, work: Any) -> None:
        try:
            result = await work
        except Exception as exc:
            self._line.send_error(number, exc)
        else:
            self._line.send_result(number, result)

    def _cancel(self, number: int, place: int) -> None:
        session = self._sessions.get(place)
        running, call = self._running.get(place, (None, None))
        if session is not None and call is not None and running == number:
            session.cancel(call)

    def _close(self, number: int, place: int) -> None:
        session = self._sessions.get(place)
        if session is None or session.state is SessionState.CLOSED:
            self._line.send_result(number, None)
            return
        self._closing[session.id] = number
        session.close()

    def _closed(self, session: Session) -> None:
        place = int(session.id)
        self._sessions.pop(place, None)
        self._running.pop(place, None)
        number = self._closing.pop(session.id, None)
        if number is not None:
            self._line.send_result(number, None)
