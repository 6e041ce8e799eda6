"""One worker process in the server: its socket, its open requests, and the thread that reads.

Knows messages and processes; must not know environments, or which session gets which worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from openenv.env.tools.source import ToolEvents
from openenv.errors import RequestCancelled

from ..dispatcher import Dispatcher
from .messages import (
    READ_BYTES,
    MessageKind,
    MessageReader,
    WorkerMessage,
    WorkerSetup,
    encode_message,
    pack,
    unpack,
    unpack_error,
)

logger = logging.getLogger(__name__)

# With `-c`, `sys.path[0]` is the working folder. A file there may have the name of one of our modules.
_BOOT: Final = (
    "import sys; sys.path[0] = sys.argv[1]; from openenv.server.runners.process.child.main import main; main()"
)
_SOURCES: Final = str(Path(__file__).resolve().parents[4])
_STDERR: Final = 2  # for the output of environments: standard output may carry a protocol (`openenv mcp`)
_REAP_S: Final = 1.0  # between the end of a socket and the end of its process
_LOOK_S: Final = 0.5
_MOST_DESCRIPTORS: Final = 253  # with one message, by the kernel's own limit


_Socket = socket.socket  # `WorkerProcess.socket` hides the module from annotations


class WorkerGone(Exception):
    """The process has ended; the text says how."""


class WorkerReply:
    """An open request to a worker. `resolve` is called once, from any thread."""

    __slots__ = ("error", "events", "result")

    def __init__(self, events: ToolEvents | None = None) -> None:
        self.events = events
        self.result: Any = None
        self.error: BaseException | None = None

    def resolve(self, result: Any, error: BaseException | None) -> None:
        """Set the outcome and wake the waiter."""
        self.result = result
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Wake the waiter."""
        raise NotImplementedError

    def outcome(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result


class BlockingReply(WorkerReply):
    """A reply that a thread waits for."""

    __slots__ = ("_done",)

    def __init__(self) -> None:
        super().__init__()
        self._done = threading.Event()

    def wake(self) -> None:
        self._done.set()

    def wait(self) -> Any:
        """Block until the reply arrives."""
        self._done.wait()
        return self.outcome()


class AwaitedReply(WorkerReply):
    """A reply that a coroutine waits for."""

    __slots__ = ("_dispatcher", "_future", "_is_resolved")

    def __init__(self, dispatcher: Dispatcher, events: ToolEvents | None = None) -> None:
        super().__init__(events)
        self._dispatcher = dispatcher
        self._is_resolved = False
        self._future: asyncio.Future[None] = dispatcher.loop.create_future()

    def wake(self) -> None:
        self._dispatcher.post(self)

    def deliver(self) -> None:
        """Wake the coroutine; called on the loop."""
        self._is_resolved = True
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, cancel: Callable[[], None]) -> Any:
        """Wait for the reply; a cancelled wait cancels the request, once.

        The wait goes on until the worker has answered the cancelled request: a session runs one call at a time, so its
        next one must not begin before.
        """
        is_cancelled = False
        while not self._is_resolved:
            try:
                await self._future
            except asyncio.CancelledError:
                if not is_cancelled:
                    is_cancelled = True
                    cancel()
                self._future = self._dispatcher.loop.create_future()  # a cancelled future cannot be awaited again
        if is_cancelled and isinstance(self.error, RequestCancelled):
            raise asyncio.CancelledError
        return self.outcome()


class ForkReply(AwaitedReply):
    """The reply to a request for copies: their process ids, and the sockets to them."""

    __slots__ = ("copies",)

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self.copies: list[tuple[int, socket.socket]] = []

    def close(self) -> None:
        """Close the sockets of unused copies, which ends them."""
        while self.copies:
            self.copies.pop()[1].close()


class ForkedProcess:
    """A process forked by a worker, with the needed part of the `Popen` interface. Its exit code is unknown here."""

    returncode: int | None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor: int | None = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return a number once the process has ended."""
        try:
            self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None
        return 0

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        descriptor = self._descriptor
        if descriptor is not None and not select.select([descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a copy of a worker", timeout or 0.0)

    def kill(self) -> None:
        """Kill it."""
        with self._lock:
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Free the handle of a process that has ended."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
            with contextlib.suppress(
                ChildProcessError
            ):  # it is our child only if we are PID 1 and its parents are dead
                os.waitpid(self.pid, os.WNOHANG)


class WorkerProcess:
    """One process.

    Args:
        sockets: The thread that reads from it.
        on_gone: Called with it once it has ended, in that thread.
        on_answer: Called at its first successful reply.
        original: The worker that it is a copy of, if it is a copy.
    """

    socket: socket.socket

    def __init__(
        self,
        sockets: SocketThread,
        *,
        on_gone: Callable[[WorkerProcess], None],
        on_answer: Callable[[], None],
        original: WorkerProcess | None = None,
    ) -> None:
        self._sockets = sockets
        self._on_gone = on_gone
        self._on_answer = on_answer
        self.original = original
        # The worker started by this server. Orphans among its direct and indirect copies become its children.
        self.ancestor: WorkerProcess = self if original is None else original.ancestor
        self.copies: set[WorkerProcess] = set()  # live copies; only an ancestor has these
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._forks = 0  # open requests for copies: their replies carry descriptors
        self._descriptors: deque[int] = deque()
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # the bytes of two messages must not mix
        self._sending_encoder = threading.Lock()  # no request may name an encoder that is not sent yet
        self.starting = threading.Lock()  # sessions of one worker are opened in several threads
        self._unsent = bytearray()
        self._reader = MessageReader()
        self._numbers = itertools.count(1)
        self._pending: dict[int, WorkerReply] = {}
        self._encoders: set[int] = set()  # that the worker has
        self.is_gone = False
        self.is_leaving = False
        self.is_ready = False
        self.has_answered = False
        self.how = ""
        self.failure: BaseException | None = None

    # -- starting -------------------------------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether the process was started."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Its process id; 0 before the start."""
        return 0 if self._process is None else self._process.pid

    def start(self, setup: WorkerSetup, descriptors: Sequence[int] = ()) -> None:
        """Start the process. Do not fork: it must not inherit the server's threads and locks.

        Args:
            setup: The first message.
            descriptors: Further descriptors for the process, under the same numbers.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            command = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
            command += ["-c", _BOOT, _SOURCES, str(theirs.fileno())]
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=_STDERR, pass_fds=[theirs.fileno(), *descriptors]
                )
            except BaseException:
                ours.close()
                raise
        self.socket = ours
        self._process = process
        self.send(encode_message(MessageKind.SETUP, payload=pack(setup)))
        self._sockets.add(self)

    def adopt(self, pid: int, sock: _Socket) -> None:
        """Take over a copy of another worker, which serves already.

        Raises:
            OSError: There is no such process any more.
        """
        sock.setblocking(False)
        self._process = ForkedProcess(pid)
        self.socket = sock
        self._sockets.add(self)

    # -- requests -------------------------------------------------------------------------------------------------

    def fork(self, payload: bytes, reply: ForkReply) -> int:
        """Request copies; return the number of the request, which cancels it.

        Raises:
            WorkerGone: The process has ended.
        """
        with self._lock:
            self._forks += 1
        return self.request(MessageKind.FORK, payload, reply)

    def reap(self, pid: int) -> None:
        """Let the process collect the status of an ended copy, which would stay a zombie."""
        self.send(encode_message(MessageKind.REAP, pid))

    def request(self, kind: MessageKind, payload: bytes, reply: WorkerReply) -> int:
        """Send a request; return its number, which cancels it.

        Raises:
            WorkerGone: The process has ended.
        """
        with self._lock:  # `take_pending` either finds the reply or makes this raise
            if self.is_gone:
                raise WorkerGone(self.how)
            number = next(self._numbers)
            self._pending[number] = reply
        self.send(encode_message(kind, number, payload))
        return number

    def send_encoder(self, number: int, payload: bytes) -> None:
        """Send an encoder, unless the worker has it."""
        if number in self._encoders:
            return
        with self._sending_encoder:
            if number not in self._encoders:
                self.send(encode_message(MessageKind.ENCODER, number, payload))
                self._encoders.add(number)

    def cancel(self, number: int, lane: int) -> None:
        """Interrupt a request if possible; it is answered in any case."""
        self.send(encode_message(MessageKind.CANCEL, number, pack(lane)))

    def leave(self) -> None:
        """Ask the process to end; kill it if it is not ready yet, because it has no environments to close."""
        self.is_leaving = True
        if self.is_ready:
            self.send(encode_message(MessageKind.EXIT))
        else:
            self.kill()

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return False when the time is up."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def send(self, data: bytes) -> None:
        """Send from any thread; the socket thread sends the rest later if the socket is full."""
        if self._process is None:
            return
        with self._sending:
            if self._unsent:  # the socket thread sends it, in order
                self._unsent += data
                return
            try:
                sent = self.socket.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                return  # the socket thread notices the end
            if sent == len(data):
                return
            self._unsent += memoryview(data)[sent:]
        self._sockets.watch_writes(self)

    # -- in the socket thread -------------------------------------------------------------------------------------

    def write(self) -> bool:
        """Send queued bytes; return whether some remain."""
        with self._sending:
            try:
                sent = self.socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                self._unsent.clear()
                return False
            del self._unsent[:sent]
            return bool(self._unsent)

    def read(self) -> bool | None:
        """Read once; return None if no data is available, False at the end of the stream."""
        try:
            if self._forks:
                data, descriptors, _, _ = socket.recv_fds(self.socket, READ_BYTES, _MOST_DESCRIPTORS)
                self._descriptors.extend(descriptors)
            else:
                data = self.socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return False
        if not data:
            return False
        for message in self._reader.feed(data):
            self._receive(message)
        return True

    def _receive(self, message: WorkerMessage) -> None:
        kind, number, payload = message
        match kind:
            case MessageKind.BYTES:
                self._resolve(number, payload, None)
            case MessageKind.VALUE:
                try:
                    value = unpack(payload)
                except Exception as exc:
                    self._resolve(number, None, exc)
                else:
                    self._resolve(number, value, None)
            case MessageKind.ERROR:
                self._resolve(number, None, unpack_error(payload))
            case MessageKind.EVENT:
                self._forward_event(number, *unpack(payload))
            case MessageKind.COPIES:
                self._receive_copies(number, unpack(payload))
            case MessageKind.LOG:
                _log(unpack(payload))
            case MessageKind.READY:
                self.is_ready = True
            case MessageKind.FAILED:
                self.failure = unpack_error(payload)

    def _resolve(self, number: int, result: Any, error: BaseException | None) -> None:
        with self._lock:
            reply = self._pending.pop(number, None)
            if isinstance(reply, ForkReply):
                self._forks -= 1
        if reply is None:
            return
        if error is None and not self.has_answered:  # workers that die before this are not replaced at once
            self.has_answered = True
            self._on_answer()
        reply.resolve(result, error)

    def _receive_copies(self, number: int, pids: list[int]) -> None:
        reply = self._pending.get(number)
        for pid in pids:
            copied = socket.socket(fileno=self._descriptors.popleft())
            if isinstance(reply, ForkReply):
                reply.copies.append((pid, copied))
            else:
                copied.close()

    def _forward_event(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        reply = self._pending.get(number)
        if reply is None or reply.events is None:
            return
        if name == "progress":
            reply.events.progress(*arguments)
        else:
            reply.events.log(*arguments)

    def is_running(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def gone(self) -> None:
        """Clean up after the process has ended or closed its socket."""
        assert self._process is not None
        if not self.wait(_REAP_S):  # without its socket it is useless
            self.kill()
            self._process.wait()
        self.how = _exit_text(self._process.returncode)
        self.socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        if isinstance(self._process, ForkedProcess):
            self._process.close()
        self._on_gone(self)

    def take_pending(self) -> list[WorkerReply]:
        """Refuse further requests, and return the unanswered ones."""
        with self._lock:
            self.is_gone = True
            pending, self._pending = list(self._pending.values()), {}
        return pending


class SocketThread:
    """One thread that reads from all workers, writes queued bytes to their sockets, and notices their end.

    The end of a worker closes its socket, unless a child of the worker keeps it open. So the thread also watches the
    worker's pidfd, or polls the process on systems without pidfds.

    Args:
        look: Called periodically in the thread.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._todo: deque[Callable[[], None]] = deque()
        self._pidfds: dict[WorkerProcess, int] = {}
        self._known: set[WorkerProcess] = set()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="openenv-workers", daemon=True)
        self._thread.start()

    def add(self, worker: WorkerProcess) -> None:
        """Serve a worker until it has ended."""
        self._do(lambda: self._add(worker))

    def watch_writes(self, worker: WorkerProcess) -> None:
        """Write to a worker when its socket has room."""
        self._do(lambda: self._watch_writes(worker))

    def stop(self) -> None:
        """End the thread after all workers have ended."""
        self._is_stopping = True
        self._do(lambda: None)
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _do(self, action: Callable[[], None]) -> None:
        self._todo.append(action)
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is about to wake; closed: it has ended
            self._wake_in.send(b"\0")

    # -- in the thread --------------------------------------------------------------------------------------------

    def _add(self, worker: WorkerProcess) -> None:
        self._known.add(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, (worker, "socket"))
        pidfd = _pidfd(worker.pid)
        if pidfd is not None:
            self._pidfds[worker] = pidfd
            self._selector.register(pidfd, selectors.EVENT_READ, (worker, "process"))

    def _watch_writes(self, worker: WorkerProcess) -> None:
        if worker in self._known:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(worker.socket, events, (worker, "socket"))

    def _run(self) -> None:
        looked_at = time.monotonic()
        while not self._is_stopping or self._todo or self._known:
            for key, mask in self._selector.select(_LOOK_S if self._known else None):
                if key.data is None:
                    self._drain_wakes()
                else:
                    worker, what = key.data
                    self._serve(worker, what, mask)
            while self._todo:
                self._guarded(self._todo.popleft())
            if time.monotonic() - looked_at >= _LOOK_S:
                looked_at = time.monotonic()
                self._guarded(self._look_around)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def _serve(self, worker: WorkerProcess, what: str, mask: int) -> None:
        if worker not in self._known:
            return  # it has ended in this pass
        try:
            if what == "socket" and mask & selectors.EVENT_WRITE and not worker.write():
                self._selector.modify(worker.socket, selectors.EVENT_READ, (worker, "socket"))
            # A pidfd becomes readable with the end of its process.
            is_alive = what == "socket" and (not mask & selectors.EVENT_READ or worker.read() is not False)
        except Exception:
            logger.exception("the messages of a worker process cannot be read")
            is_alive = False
        if not is_alive:
            self._drop(worker)

    def _look_around(self) -> None:
        for worker in [worker for worker in self._known if worker not in self._pidfds]:
            if not worker.is_running():
                self._drop(worker)
        self._look()

    def _drop(self, worker: WorkerProcess) -> None:
        self._known.discard(worker)
        with contextlib.suppress(Exception):
            while worker.read():  # read the messages sent before its end
                pass
        self._selector.unregister(worker.socket)
        pidfd = self._pidfds.pop(worker, None)
        if pidfd is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
        self._guarded(worker.gone)

    @staticmethod
    def _guarded(action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception:
            logger.exception("the start or the end of a worker process could not be handled")


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # only newer Linux has it
        return None


def _exit_text(code: int | None) -> str:
    if code is None:
        return "a copy, whose exit code is not known"
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _log(fields: dict[str, Any]) -> None:
    record = logging.makeLogRecord(fields)
    target = logging.getLogger(record.name)
    if target.isEnabledFor(record.levelno):
        target.handle(record)
