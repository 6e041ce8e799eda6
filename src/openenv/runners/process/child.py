"""The beginning and the end of a worker process.

Started by the process runner with one end of a socket pair; ends when the server says so, or is gone. Knows processes,
signals and logging; what happens in between is the host's.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import importlib.machinery
import importlib.util
import inspect
import io
import logging
import logging.handlers
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from ...env.binding import Encoder
from ...env.tools.source import EVENTS, ToolEvents, ToolSource
from ...sessions.operations import Operation, StepInput, build_operations, interrupt_tools
from ...sessions.session import Session, SessionCall, SessionKind, SessionState
from ..base import NotSendable
from ..dispatch import Delivery, Dispatcher
from ..thread import CallProfile, ThreadRunner
from .messages import (
    HEADER,
    MAIN_MODULE,
    READ_BYTES,
    MessageKind,
    MessageReader,
    WorkerSetup,
    describe,
    encode_message,
    pack,
    pack_error,
    unpack,
)

# modules: Importing in a worker what its server has imported in ways of its own.
#
# A server may have loaded a file under a name that nobody finds (`openenv serve my_env.py`), and the program itself is
# `__main__` there. Knows the import system only.


class ModuleFileFinder:
    """Finds modules by a table of names and files, after all other finders; packages above them are made up."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files
        self._packages = {name.rsplit(".", depth)[0] for name in files for depth in range(1, name.count(".") + 1)}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module that is in the table."""
        file = self._files.get(name)
        if file is not None:
            return importlib.util.spec_from_file_location(name, file)
        if name in self._packages:
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
        return None


def install(files: Mapping[str, str], main: str | None) -> None:
    """Make modules importable, and load the program's file under the names by which pickles know it."""
    if files:
        sys.meta_path.append(ModuleFileFinder(files))
    if main is not None:
        # The same names as in a process that multiprocessing has spawned: the program's `if __name__` guard holds.
        spec = importlib.util.spec_from_file_location(MAIN_MODULE, main)
        if spec is None or spec.loader is None:
            raise ImportError(f"{main} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules["__main__"] = sys.modules[MAIN_MODULE] = module
        spec.loader.exec_module(module)


# operations: What a server can ask of an environment in a worker.
#
# Each is an `Operation` on the worker's own session, so it runs there as it would in a server: blocking code in the
# session's thread, coroutines on the loop. Knows environments and tools; must not know sockets.


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """What was asked for.

    Args:
        argument: The operation's own.
        encode: Applied to the result, where the environment's code runs.
        events: Where a running tool tells its progress.
    """

    argument: Any
    encode: Encoder
    events: ToolEvents | None = None


def same(value: Any) -> Any:
    """Leave a result as it is."""
    return value


def operation(name: str, encode: Encoder | None) -> Operation:
    """Return an operation by its name."""
    return _gym(name, encode or same) if name in ("reset", "step", "step_with", "state") else _OTHERS[name]


@functools.lru_cache(maxsize=64)
def _gym(name: str, encode: Encoder) -> Operation:
    plain: Operation = getattr(build_operations(encode, encode), name)
    in_loop, prefers_lane = plain.in_loop, plain.prefers_lane

    def run(env: Any, asked: WorkerRequest) -> Any:
        with_events = EVENTS.set(asked.events)
        try:
            return plain.in_lane(env, _argument(name, asked))
        finally:
            EVENTS.reset(with_events)

    async def run_async(env: Any, asked: WorkerRequest) -> Any:
        assert in_loop is not None
        EVENTS.set(asked.events)  # a task of its own: nobody else sees it
        return await in_loop(env, _argument(name, asked))

    def prefers(env: Any, asked: WorkerRequest) -> bool:
        return prefers_lane is not None and prefers_lane(env, _argument(name, asked))

    return Operation(plain.kind, run, None if in_loop is None else run_async, prefers, plain.interrupt)


def _argument(name: str, asked: WorkerRequest) -> Any:
    return StepInput(*asked.argument) if name == "step_with" else asked.argument


# -- anything else that an environment has ------------------------------------------------------------------------


def _method(env: Any, asked: WorkerRequest) -> Any:
    """Call a method; what is made while it is read is read here."""
    name, arguments, keywords = asked.argument
    found = getattr(env, name)(*arguments, **keywords)
    return list(found) if isinstance(found, Iterator) else found


def _set_mode(env: Any, asked: WorkerRequest) -> None:
    env._mode = asked.argument


# -- tools --------------------------------------------------------------------------------------------------------

_OF_SERVERS: WeakKeyDictionary[Any, ToolSource] = WeakKeyDictionary()


def tools_of(env: Any) -> ToolSource | None:
    """Return the tools of an environment, its own or those of the FastMCP server that it brings."""
    own = getattr(env, "tools", None)
    if isinstance(own, ToolSource):
        return own
    server = getattr(env, "mcp_server", None)
    if server is None or not hasattr(server, "local_provider"):
        return None
    registry = _OF_SERVERS.get(server)
    if registry is None:
        from ...env.tools.tool_registry import ToolRegistry  # loads FastMCP, which this environment has loaded already

        registry = _OF_SERVERS[server] = ToolRegistry(server)
    return registry


def _tools(env: Any) -> ToolSource:
    tools = tools_of(env)
    if tools is None:
        raise RuntimeError("the environment has no tools any more")
    return tools


def _call_tool(env: Any, asked: WorkerRequest) -> Any:
    name, arguments, timeout_s = asked.argument
    return _tools(env).call_blocking(name, arguments, timeout_s=timeout_s, events=asked.events)


async def _call_tool_async(env: Any, asked: WorkerRequest) -> Any:
    name, arguments, timeout_s = asked.argument
    return await _tools(env).call(name, arguments, timeout_s=timeout_s, events=asked.events)


def _call_only_blocks(env: Any, asked: WorkerRequest) -> bool:
    return _tools(env).is_blocking(asked.argument[0])


async def describe_tools(env: Any) -> Any:
    """List the tools; needs no turn: a long call must not keep a client from looking."""
    return await _tools(env).describe()


async def _ask_client(env: Any, asked: WorkerRequest) -> Any:
    """Call a method of FastMCP's client of the server behind the tools."""
    name, arguments, keywords = asked.argument

    def ask(client: Any) -> Awaitable[Any]:
        method: Callable[..., Awaitable[Any]] = getattr(client, name)
        return method(*arguments, **keywords)

    return await _tools(env).ask_server(ask)


def _never(env: Any, asked: WorkerRequest) -> Any:
    raise AssertionError("this runs on the event loop")


_OTHERS = {
    "method": Operation("call", _method),
    "mode": Operation("call", _set_mode),
    "tool": Operation("tool", _call_tool, _call_tool_async, _call_only_blocks, interrupt_tools),
    "client": Operation("tool", _never, _ask_client),
}


async def completed(found: Any) -> Any:
    """Wait for what a method has begun: a coroutine, or all that an asynchronous generator has to give."""
    if inspect.isasyncgen(found):
        return [item async for item in found]
    return await found if inspect.isawaitable(found) else found


# host: The sessions of one worker process: builds environments, does what the server asks of them, answers.
#
# A session here is the same `Session` as in a server with the thread runner, each with a thread of its own, so that one
# that hangs is in nobody's way. Knows sessions and frames; must not know how the process was started.


logger = logging.getLogger(__name__)

_CLOSING_S = 5.0
_LOOK_S = 2.0


class ReplySender:
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


class ForwardedEvents(ToolEvents):
    """Sends what a tool tells to the server at once, so that it comes before the tool's result."""

    def __init__(self, line: ReplySender, number: int, loop: asyncio.AbstractEventLoop) -> None:
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


class _ImmediateDispatcher(Dispatcher):
    """Delivers wherever the result is: answers need no loop."""

    __slots__ = ()

    def post(self, delivery: Delivery) -> None:
        delivery.deliver()


class _ThreadPerSession(CallProfile):
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
        self._line = ReplySender(sock)
        self._factory = factory
        self._parent = parent
        self._reader = MessageReader()
        self._runner = ThreadRunner(max_threads=1 << 20)
        self._runner.profile = _ThreadPerSession()
        self._is_pinned = False
        self._sessions: dict[int, Session] = {}
        self._closing: dict[str, int] = {}
        self._running: dict[int, tuple[int, SessionCall]] = {}
        self._encoders: dict[int, Callable[[Any], Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Serve until the server says so, or is gone."""
        loop = self._loop = asyncio.get_running_loop()
        self._hub = _ImmediateDispatcher(loop)
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
        events = ForwardedEvents(self._line, number, self._loop) if wants_events else None
        asked = WorkerRequest(argument, encode or same, events)
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


_ENDING_S = 3.0


class ForwardedLog(logging.handlers.QueueHandler):
    """Hands log records to the server, whose handlers decide how they look and where they go."""

    def __init__(self, line: ReplySender) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._line = line

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record."""
        self._line.send(MessageKind.LOG, payload=pack(vars(record)))


def main() -> None:
    """Run a worker; the number of its socket is the last argument."""
    sock = socket.socket(fileno=int(sys.argv[-1]))
    sock.set_inheritable(False)
    # The server ends its workers itself. Handlers, not SIG_IGN: that would be passed on to an environment's programs.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _left_to_the_server)
    faulthandler.enable()  # a crash says where it happened
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # or a crash would take with it what was printed
    setup = _read_setup(sock)
    if setup is None:
        return
    line = ReplySender(sock)
    _send_logs(line, setup)
    try:
        sys.path[:] = setup.path
        sys.argv[:] = ["openenv-worker"]
        install(setup.files, setup.main)
        factory = unpack(setup.factory)
    except BaseException as exc:
        line.send(MessageKind.FAILED, payload=pack_error(exc))
        sys.exit(1)
    asyncio.run(SessionHost(sock, factory, parent=setup.parent).run())
    # A thread that an environment has left behind must not keep the process.
    threading.Thread(target=_end_anyway, daemon=True).start()


def _left_to_the_server(*_: Any) -> None:
    """Do nothing."""


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


def _send_logs(line: ReplySender, setup: WorkerSetup) -> None:
    logging.getLogger().addHandler(ForwardedLog(line))
    for name, level in setup.levels.items():
        logging.getLogger(name or None).setLevel(level)


def _end_anyway() -> None:
    time.sleep(_ENDING_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
