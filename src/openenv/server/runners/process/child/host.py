"""What runs in a worker process: it loads the factory, hosts sessions, and answers the server's requests.

    main ──> reads WorkerSetup ──> loads the factory ──> SessionHost.run ──> ends with the server, or when that says so

A session here is the same `Session` as in a server with the thread runner, each with a thread of its own, so that one
that hangs does not delay the others. The server's half of this is `worker.py`.

A worker with a single session can be copied by fork(2), with its environment in whatever state (`ProcessFork`):

    main thread: event loop             ......... fork .........>   does not exist in the copy
    the session's thread ── os.fork ──> goes on, in the original    goes on, in the copy: now its main thread
                                                                    a new thread runs a new `SessionHost` and its loop

So the environment stays on its thread, with everything that C libraries tie to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import importlib.util
import inspect
import io
import logging
import logging.handlers
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from openenv.env.binding import Encoder
from openenv.env.copies import own_snapshot, require_copyable, require_inner_state, restore_into, writes_snapshots
from openenv.env.tools.source import EVENTS, ToolEvents, ToolRequest, ToolSource, find_tools
from openenv.errors import NotForkable, message_of

from ...module_finder import ModuleTableFinder
from ...sessions.lifetime import ClosedEnvironments
from ...sessions.operations import FORK, Operation, StepInput, build_operations, interrupt_tools
from ...sessions.session import Session, SessionCall, SessionCallbacks, SessionKind, SessionState
from ..base import Lane, NotSendable
from ..thread import CallProfile, Delivery, Dispatcher, ThreadLane, ThreadRunner, WorkerThread
from . import fork_checks
from .messages import (
    HEADER,
    MAIN_MODULE,
    READ_BYTES,
    MessageKind,
    MessageReader,
    PackedState,
    WorkerSetup,
    describe,
    encode_message,
    pack,
    pack_error,
    unpack,
)

_EXIT_S: Final = 3.0
_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
_COPIES_AT_ONCE: Final = 250  # the kernel sends at most 253 descriptors with one message
_CLOSE_S: Final = 5.0
_LOOK_S: Final = 2.0


# -- the process --------------------------------------------------------------------------------------------------


def main() -> None:
    """Run a worker; the number of its socket is the last argument."""
    sock = socket.socket(fileno=int(sys.argv[-1]))
    sock.set_inheritable(False)
    # The server ends its workers itself. Handlers, not SIG_IGN: programs that an environment starts would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    faulthandler.enable()  # a crash shows where it happened
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # or a crash would lose what was printed
    setup = _read_setup(sock)
    if setup is None:
        return
    replies = ReplySender(sock)
    logging.getLogger().addHandler(ForwardedLog(replies))
    for name, level in setup.levels.items():
        logging.getLogger(name or None).setLevel(level)
    try:
        sys.path[:] = setup.path
        sys.argv[:] = ["openenv-worker"]
        install(setup.files, setup.main)
        factory = unpack(setup.factory)
    except BaseException as exc:
        replies.send(MessageKind.FAILED, payload=pack_error(exc))
        sys.exit(1)
    asyncio.run(SessionHost(sock, factory, server=ServerHandle.open(setup.parent)).run())
    # A thread that an environment has left behind must not keep the process.
    threading.Thread(target=_exit_anyway, daemon=True).start()


def _exit_anyway() -> None:
    time.sleep(_EXIT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@dataclass(frozen=True, slots=True)
class ServerHandle:
    """The server's process, for a worker that must not outlive it. Copies of a worker are not its children."""

    pid: int
    descriptor: int | None  # a pidfd, where there are such
    is_parent: bool = True

    @classmethod
    def open(cls, pid: int) -> ServerHandle:
        """Return the handle of this process's parent."""
        try:
            return cls(pid, os.pidfd_open(pid))
        except (AttributeError, OSError):
            return cls(pid, None)

    @property
    def has_ended(self) -> bool:
        """Whether the server is gone."""
        if self.is_parent:
            return os.getppid() != self.pid
        if self.descriptor is not None:
            return bool(select.select([self.descriptor], [], [], 0)[0])
        try:
            os.kill(self.pid, 0)
        except OSError:
            return True
        return False


def _read_setup(sock: socket.socket) -> WorkerSetup | None:
    header = _read(sock, HEADER.size)
    if header is None:
        return None
    size, kind, _ = HEADER.unpack(header)
    payload = _read(sock, size)
    if payload is None or kind != MessageKind.SETUP:
        return None
    setup: WorkerSetup = unpack(payload)
    return setup


def _read(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return None
        data += more
    return bytes(data)


def install(files: Mapping[str, str], main: str | None) -> None:
    """Make modules importable, and load the program's file under the names by which pickles know it."""
    if files:
        sys.meta_path.append(ModuleTableFinder(files))
    if main is not None:
        # The same names as in a process that multiprocessing has spawned: the program's `if __name__` guard holds.
        spec = importlib.util.spec_from_file_location(MAIN_MODULE, main)
        if spec is None or spec.loader is None:
            raise ImportError(f"{main} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules["__main__"] = sys.modules[MAIN_MODULE] = module
        spec.loader.exec_module(module)


# -- messages to the server ---------------------------------------------------------------------------------------


class ReplySender:
    """Sends messages to the server; may be used from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, kind: MessageKind, number: int = 0, payload: bytes = b"") -> None:
        """Send a message; without effect when the server is gone, which the host notices."""
        data = encode_message(kind, number, payload)
        with self._lock:
            try:
                self._socket.sendall(data)
            except OSError:
                return

    def send_copies(self, number: int, pids: list[int], sockets: list[socket.socket]) -> None:
        """Send copies of this process: their ids, and the server's ends of the sockets to them."""
        for start in range(0, len(pids), _COPIES_AT_ONCE):
            end = start + _COPIES_AT_ONCE
            data = encode_message(MessageKind.COPIES, number, pack(pids[start:end]))
            descriptors = [sock.fileno() for sock in sockets[start:end]]
            with self._lock:
                try:
                    sent = socket.send_fds(self._socket, [data], descriptors)
                    self._socket.sendall(data[sent:])
                except OSError:
                    return

    def send_result(self, number: int, result: Any) -> None:
        """Send a result, or the reason why it cannot be sent."""
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
        """Send an exception."""
        self.send(MessageKind.ERROR, number, pack_error(error))


class ForwardedLog(logging.handlers.QueueHandler):
    """Forwards log records to the server, whose handlers format and store them."""

    def __init__(self, replies: ReplySender) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.replies = replies

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record."""
        self.replies.send(MessageKind.LOG, payload=pack(vars(record)))


class ForwardedEvents(ToolEvents):
    """Forwards a tool's events to the server at once, so that they come before the tool's result."""

    def __init__(self, replies: ReplySender, number: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(lambda *_: None, loop=loop)
        self._replies = replies
        self._number = number

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Forward progress."""
        self._replies.send(MessageKind.EVENT, self._number, pack(("progress", (progress, total, message))))

    def log(self, level: str, logger: str | None, data: Any) -> None:
        """Forward a log message; data that cannot be pickled is sent as text."""
        try:
            payload = pack(("log", (level, logger, data)))
        except Exception:
            payload = pack(("log", (level, logger, repr(data))))
        self._replies.send(MessageKind.EVENT, self._number, payload)


# -- sessions -----------------------------------------------------------------------------------------------------


class _ImmediateDispatcher(Dispatcher):
    """Delivers in the thread that has the result: replies need no loop."""

    __slots__ = ()

    def post(self, delivery: Delivery) -> None:
        delivery.deliver()


class _ThreadPerSession(CallProfile):
    """Gives each session a thread of its own from the start: any of them may hang."""

    __slots__ = ()

    is_slow = True
    is_fast = False

    def record(self, kind: str, seconds: float) -> None:
        return


class SessionHost:
    """The sessions of this process, each under the number of its lane in the server.

    Args:
        sock: The connection to the server.
        factory: Makes an environment.
        server: The server's process.
        copied: In a copy of a process, the session that it has from its original.
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
        self._replies = ReplySender(sock)
        self._factory = factory
        self._server = server
        self._copied = copied
        self._copies: set[int] = set()  # process ids
        self._orphans: set[int] = set()  # process ids of copies that have ended, and whose status was not asked for
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
        """Serve until the server says so, or is gone."""
        loop = self._loop = asyncio.get_running_loop()
        self._dispatcher = _ImmediateDispatcher(loop)
        self._exit = asyncio.Event()
        self._task = asyncio.current_task()
        if self._copied is not None:
            self._adopt(self._copied)
        loop.add_reader(self._socket, self._readable)
        self._replies.send(MessageKind.READY)
        self._look()
        await self._exit.wait()
        loop.remove_reader(self._socket)
        await self._close_all()

    def _look(self) -> None:
        """End with the server now and then: a copy of the socket may live on in another process."""
        for pid in list(self._orphans):
            self._reap(pid)
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
                self._replies.send_error(number, exc)

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
                self._reap(number)
            case MessageKind.EXIT:
                self._exit.set()

    def _open(self, number: int, lane_number: int, single_thread: bool, state: PackedState | None) -> None:
        lane = self._runner.lane()
        factory = self._factory if state is None else partial(_environment_of, self._factory, state)

        def pin() -> None:
            if not self._is_pinned:
                self._is_pinned = True
                self._runner.pin(lane)

        if single_thread:
            pin()
        session = self._add_session(lane_number, lane)

        def built(_: Any, error: BaseException | None) -> None:
            if error is not None:
                self._replies.send_error(number, error)
                return
            if getattr(type(session.env), "REQUIRES_SINGLE_THREAD_EXECUTOR", False):
                pin()
            try:
                description = describe(session.env)
            except Exception as exc:
                self._replies.send_error(number, exc)
                session.close()
            else:
                self._replies.send_result(number, description)

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
        if name == "describe":  # without waiting for the running call, which may take long
            self._start(number, _tools(session.env).describe())
            return
        events = ForwardedEvents(self._replies, number, self._loop) if wants_events else None
        request = WorkerRequest(argument, events)
        operation = operation_of(name, self._encoders[encoder] if encoder else _same)
        call = session.submit(operation, request, partial(self._reply, number), self._dispatcher)
        self._running[lane_number] = number, call

    def _reply(self, number: int, result: Any, error: BaseException | None) -> None:
        if error is not None:
            self._replies.send_error(number, error)
        elif inspect.isawaitable(result) or inspect.isasyncgen(result):
            self._loop.call_soon_threadsafe(self._start, number, _completed(result))
        else:
            self._replies.send_result(number, result)

    def _start(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(self._finish(number, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            result = await work
        except Exception as exc:
            self._replies.send_error(number, exc)
        else:
            self._replies.send_result(number, result)

    def _cancel(self, number: int, lane_number: int) -> None:
        session = self._sessions.get(lane_number)
        running, call = self._running.get(lane_number, (None, None))
        if session is not None and call is not None and running == number:
            session.cancel(call)

    def _close(self, number: int, lane_number: int) -> None:
        session = self._sessions.get(lane_number)
        if session is None or session.state is SessionState.CLOSED:
            self._replies.send_result(number, None)
            return
        self._closing[session.id] = number
        session.close()

    def _closed(self, session: Session) -> None:
        lane_number = int(session.id)
        self._sessions.pop(lane_number, None)
        self._running.pop(lane_number, None)
        number = self._closing.pop(session.id, None)
        if number is not None:
            self._replies.send_result(number, None)

    # -- copies ---------------------------------------------------------------------------------------------------

    def _fork(self, number: int, lane_number: int, numbers: list[int], by_process: bool) -> None:
        session = self._sessions[lane_number]
        work = partial(self._copy, session, number, numbers, by_process)
        call = session.submit(FORK, work, partial(self._reply, number), self._dispatcher)
        self._running[lane_number] = number, call

    async def _copy(self, session: Session, number: int, numbers: list[int], by_process: bool) -> PackedState | None:
        """Copy this process for each lane of the server, or return the environment's state, for other workers.

        Raises:
            NotForkable: Neither can be.
        """
        env = session.env
        problem = fork_checks.obstacle(self._own_tasks(), self._own_descriptors(), self._copies)
        is_alone = len(self._sessions) == 1
        is_inner = not getattr(type(env), "HAS_EXTERNAL_STATE", False)
        if problem is None and is_inner and is_alone and by_process and fork_checks.is_possible():
            self._fork_process(session, number, numbers)
            return None
        if writes_snapshots(type(env)):
            snapshot = await session.run_in_lane(partial(own_snapshot, env), kind="fork")
            return _packed(env, snapshot, is_snapshot=True)
        require_inner_state(env)
        name = type(env).__name__
        if problem is not None:
            raise NotForkable(f"{name} cannot be copied: {problem}. Write snapshot() and restore() in it.")
        state: PackedState = await session.run_in_lane(partial(_packed, env, env, is_snapshot=False), kind="fork")
        return state

    def _own_tasks(self) -> set[asyncio.Task[Any] | None]:
        return {self._task, asyncio.current_task(), *self._tasks}

    def _own_descriptors(self) -> set[int]:
        loops = [self._loop, *fork_checks.tool_loops()]
        own = {fd for loop in loops for fd in fork_checks.loop_descriptors(loop)}
        return own | {self._socket.fileno(), -1 if self._server.descriptor is None else self._server.descriptor}

    def _fork_process(self, session: Session, number: int, numbers: list[int]) -> None:
        if not self._copies and self._copied is None:
            _adopt_orphans()
        fork = ProcessFork(self, session, numbers)
        session.lane.submit(fork)
        # The event loop stands still until then: so this thread holds no lock that a copy would wait for, for ever.
        fork.done.wait()
        self._copies.update(fork.pids)
        with contextlib.ExitStack() as stack:
            for sock in fork.sockets:
                stack.enter_context(sock)
            if fork.error is not None:
                raise NotForkable(f"The process cannot be copied: {message_of(fork.error)}") from fork.error
            self._replies.send_copies(number, fork.pids, fork.sockets)

    def _reap(self, pid: int) -> None:
        self._copies.discard(pid)
        try:
            os.waitpid(pid, os.WNOHANG)
            self._orphans.discard(pid)
        except ChildProcessError:
            # The child of another copy, which may be ending itself: then it becomes this process's child in a moment.
            if os.path.exists(f"/proc/{pid}"):
                self._orphans.add(pid)
            else:
                self._orphans.discard(pid)

    def copied_host(self, sock: socket.socket, copied: CopiedSession) -> SessionHost:
        """Return the host of a copy of this process; called there."""
        self._socket.close()
        for loop in (self._loop, *fork_checks.tool_loops()):
            fork_checks.close_copied_loop(loop)
        server = replace(self._server, is_parent=False)
        host = SessionHost(sock, self._factory, server=server, copied=copied)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, ForwardedLog):
                handler.replies = host._replies
        return host

    def _adopt(self, copied: CopiedSession) -> None:
        session = self._add_session(copied.lane_number, self._runner.adopt(copied.thread))
        session.construct(lambda: copied.env, lambda *_: None, self._dispatcher)


@dataclass(frozen=True, slots=True)
class CopiedSession:
    """What a copy of a process has of its original: an environment and its thread, for a new lane of the server."""

    lane_number: int
    env: Any
    thread: WorkerThread


class ProcessFork:
    """Copies the process, in the thread of its only session; a `LaneCall`.

    Random generators of the copies are in the same state, on purpose: `random` would seed its own one again in a copy.
    """

    kind = "fork"
    count = 1

    def __init__(self, host: SessionHost, session: Session, numbers: list[int]) -> None:
        self._host = host
        self._session = session
        self._numbers = numbers
        self.done = threading.Event()
        self.pids: list[int] = []
        self.sockets: list[socket.socket] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Fork; returns in the original and in every copy."""
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # or copies would print it again
            random_state, files = random.getstate(), fork_checks.open_files()
            for number in self._numbers:
                ours, theirs = socket.socketpair()
                self.sockets.append(theirs)
                with ours:
                    pid = _fork()
                    if pid == 0:
                        self._go_on_as_copy(ours, number, random_state, files)
                        return
                self.pids.append(pid)
        except BaseException as exc:
            self.error = exc
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.done.set()

    def _go_on_as_copy(
        self, sock: socket.socket, number: int, random_state: Any, files: list[fork_checks.OpenFile]
    ) -> None:
        try:
            with open("/proc/self/comm", "w") as file:
                file.write(fork_checks.COPY_NAME)
            random.setstate(random_state)
            for theirs in self.sockets:  # the server's ends: it would not notice that a sibling has ended
                theirs.close()
            for opened in files:
                fork_checks.reopen(opened)
            lane = self._session.lane
            assert isinstance(lane, ThreadLane)
            copied = CopiedSession(number, self._session.env, lane.host)
            host = self._host.copied_host(sock.dup(), copied)
            threading.Thread(target=_serve_copy, args=(host,), name="openenv-host", daemon=True).start()
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads; `fork_checks` has looked
        return os.fork()


def _serve_copy(host: SessionHost) -> None:
    code = 1
    try:
        asyncio.run(host.run())
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what the original has registered for its own exit is not the copy's to do


def _adopt_orphans() -> None:
    """Become the parent of copies whose own parent has ended: in a container, PID 1 may never ask for their status."""
    import ctypes  # not needed before

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _packed(env: Any, value: Any, *, is_snapshot: bool) -> PackedState:
    if not is_snapshot:
        require_copyable(env)
    try:
        return PackedState(is_snapshot, pack(value))
    except Exception as exc:
        kind = "snapshot" if is_snapshot else "state"
        raise NotForkable(
            f"{type(env).__name__} shares its process with others, so its {kind} has to be pickled, and cannot be: "
            f"{message_of(exc)}. Serve it with one session in each process (--sessions-per-process 1), which copies "
            "the whole process, or write snapshot() and restore() that can be pickled."
        ) from exc


def _environment_of(factory: Callable[[], Any], state: PackedState) -> Any:
    value = unpack(state.pickled)
    if not state.is_snapshot:
        return value
    env = factory()
    restore_into(env, value)
    return env


async def _completed(begun: Any) -> Any:
    """Wait for a coroutine that a method has returned, or for all items of an asynchronous generator."""
    if inspect.isasyncgen(begun):
        return [item async for item in begun]
    return await begun


# -- operations ---------------------------------------------------------------------------------------------------
# Each is an `Operation` on the worker's own session, so it runs here as it would in a server: blocking code in the
# session's thread, coroutines on the loop.


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """The argument of an operation.

    Args:
        argument: As the server has sent it.
        events: Takes the events of a running tool.
    """

    argument: Any
    events: ToolEvents | None = None


def operation_of(name: str, encode: Encoder) -> Operation:
    """Return an operation by its name."""
    return _gym(name, encode) if name in ("reset", "step", "step_with", "state") else _OTHERS[name]


def _same(value: Any) -> Any:
    return value


@functools.lru_cache(maxsize=64)
def _gym(name: str, encode: Encoder) -> Operation:
    plain: Operation = getattr(build_operations(encode, encode), name)
    in_loop, prefers_lane = plain.in_loop, plain.prefers_lane

    def argument(request: WorkerRequest) -> Any:
        return StepInput(*request.argument) if name == "step_with" else request.argument

    def run(env: Any, request: WorkerRequest) -> Any:
        with_events = EVENTS.set(request.events)
        try:
            return plain.in_lane(env, argument(request))
        finally:
            EVENTS.reset(with_events)

    async def run_async(env: Any, request: WorkerRequest) -> Any:
        assert in_loop is not None
        EVENTS.set(request.events)  # in a task of its own: no other call sees it
        return await in_loop(env, argument(request))

    def prefers(env: Any, request: WorkerRequest) -> bool:
        return prefers_lane is not None and prefers_lane(env, argument(request))

    return Operation(plain.kind, run, None if in_loop is None else run_async, prefers, plain.interrupt)


def _method(env: Any, request: WorkerRequest) -> Any:
    """Call a method; the items of an iterator are made here, since it cannot be sent."""
    name, arguments, keywords = request.argument
    result = getattr(env, name)(*arguments, **keywords)
    return list(result) if isinstance(result, Iterator) else result


def _set_mode(env: Any, request: WorkerRequest) -> None:
    env._mode = request.argument


def _tools(env: Any) -> ToolSource:
    tools = find_tools(env)
    if tools is None:
        raise RuntimeError("the environment has no tools any more")
    return tools


def _tool_request(request: WorkerRequest) -> ToolRequest:
    name, arguments, timeout_s = request.argument
    return ToolRequest(name, arguments, timeout_s, request.events)


def _call_tool(env: Any, request: WorkerRequest) -> Any:
    return _tools(env).call_blocking(_tool_request(request))


async def _call_tool_async(env: Any, request: WorkerRequest) -> Any:
    return await _tools(env).call(_tool_request(request))


def _call_only_blocks(env: Any, request: WorkerRequest) -> bool:
    return _tools(env).is_blocking(request.argument[0])


async def _ask_client(env: Any, request: WorkerRequest) -> Any:
    """Call a method of FastMCP's client of the server behind the tools."""
    name, arguments, keywords = request.argument

    def ask(client: Any) -> Awaitable[Any]:
        method: Callable[..., Awaitable[Any]] = getattr(client, name)
        return method(*arguments, **keywords)

    return await _tools(env).ask_server(ask)


def _never(env: Any, request: WorkerRequest) -> Any:
    raise AssertionError("this runs on the event loop")


def _restore(env: Any, request: WorkerRequest) -> None:
    restore_into(env, unpack(request.argument))


_OTHERS: Final = {
    "restore": Operation("call", _restore),
    "method": Operation("call", _method),
    "mode": Operation("call", _set_mode),
    "tool": Operation("tool", _call_tool, _call_tool_async, _call_only_blocks, interrupt_tools),
    "client": Operation("tool", _never, _ask_client),
}
