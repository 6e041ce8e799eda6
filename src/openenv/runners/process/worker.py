"""One worker process, as the server sees it: its socket, and who waits for its answers.

Knows frames and processes; must not know environments or who gets which worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ...env.tools.source import ToolEvents
from ...errors import RequestCancelled
from ..dispatch import Dispatcher
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

# One thread that reads from all workers and notices when one has ended. Knows sockets and process ids only.


logger = logging.getLogger(__name__)

_LOOK_S = 0.5


class Subscriber(Protocol):
    """A worker, as far as the switchboard is concerned. All of it is called in the switchboard's thread."""

    socket: socket.socket

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    def read(self) -> bool | None:
        """Take what has come; None where there is nothing now, False where nothing will come any more."""
        ...

    def write(self) -> bool:
        """Send what waits; say whether some still does."""
        ...

    def is_running(self) -> bool:
        """Say whether the process is there."""
        ...

    def gone(self) -> None:
        """The process has ended, or does not speak any more."""
        ...


class SocketThread:
    """Reads for its subscribers.

    Args:
        look: Called now and then, in the thread.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._todo: deque[Callable[[], None]] = deque()
        self._pidfds: dict[Subscriber, int] = {}
        self._known: set[Subscriber] = set()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="openenv-workers", daemon=True)
        self._thread.start()

    def add(self, worker: Subscriber) -> None:
        """Read for a worker until it is gone."""
        self._do(lambda: self._add(worker))

    def watch_writes(self, worker: Subscriber) -> None:
        """Have a worker write when its socket takes more."""
        self._do(lambda: self._watch_writes(worker))

    def stop(self) -> None:
        """End the thread, once all workers are gone."""
        self._is_stopping = True
        self._do(lambda: None)
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _do(self, action: Callable[[], None]) -> None:
        self._todo.append(action)
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is about to wake; closed: it has ended
            self._wake_in.send(b"\0")

    # -- in the thread --------------------------------------------------------------------------------------------

    def _add(self, worker: Subscriber) -> None:
        self._known.add(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, (worker, "socket"))
        opened = _pidfd(worker.pid)
        if opened is not None:
            self._pidfds[worker] = opened
            self._selector.register(opened, selectors.EVENT_READ, (worker, "process"))

    def _watch_writes(self, worker: Subscriber) -> None:
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

    def _serve(self, worker: Subscriber, what: str, mask: int) -> None:
        if worker not in self._known:
            return  # it has gone in this very pass
        try:
            if what == "socket" and mask & selectors.EVENT_WRITE and not worker.write():
                self._selector.modify(worker.socket, selectors.EVENT_READ, (worker, "socket"))
            is_there = what == "socket" and (not mask & selectors.EVENT_READ or worker.read() is not False)
        except Exception:
            logger.exception("the messages of a worker process cannot be read")
            is_there = False
        if not is_there:
            self._drop(worker)

    def _look_around(self) -> None:
        for worker in [worker for worker in self._known if worker not in self._pidfds]:
            if not worker.is_running():
                self._drop(worker)
        self._look()

    def _drop(self, worker: Subscriber) -> None:
        self._known.discard(worker)
        with contextlib.suppress(Exception):
            while worker.read():  # what it has said before its end
                pass
        self._selector.unregister(worker.socket)
        opened = self._pidfds.pop(worker, None)
        if opened is not None:
            self._selector.unregister(opened)
            os.close(opened)
        self._guarded(worker.gone)

    @staticmethod
    def _guarded(action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception:
            logger.exception("the end or the beginning of a worker process could not be handled")


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # only newer Linux has it; elsewhere it is looked at now and then
        return None


# waiters: Whoever waits for a worker's answer: a coroutine, or a thread. Knows hubs and futures; must not know workers.


class PendingReply:
    """Waits for one answer. `resolve` is called once, from any thread."""

    __slots__ = ("error", "events", "result")

    def __init__(self, events: ToolEvents | None = None) -> None:
        self.events = events
        self.result: Any = None
        self.error: BaseException | None = None

    def resolve(self, result: Any, error: BaseException | None) -> None:
        """Take the answer."""
        self.result = result
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Tell whoever waits."""
        raise NotImplementedError

    def take(self) -> Any:
        """Return the result, or raise what came instead."""
        if self.error is not None:
            raise self.error
        return self.result


class BlockingReply(PendingReply):
    """Waits in a thread."""

    __slots__ = ("_done",)

    def __init__(self) -> None:
        super().__init__()
        self._done = threading.Event()

    def wake(self) -> None:
        self._done.set()

    def wait(self) -> Any:
        """Block until the answer is there."""
        self._done.wait()
        return self.take()


class AwaitedReply(PendingReply):
    """Waits on an event loop."""

    __slots__ = ("_future", "_hub", "_is_resolved")

    def __init__(self, hub: Dispatcher, events: ToolEvents | None = None) -> None:
        super().__init__(events)
        self._hub = hub
        self._is_resolved = False
        self._future: asyncio.Future[None] = hub.loop.create_future()

    def wake(self) -> None:
        self._hub.post(self)

    def deliver(self) -> None:
        """Go on, on the loop."""
        self._is_resolved = True
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, cancel: Callable[[], None]) -> Any:
        """Wait for the answer.

        The other side is told when the wait is cancelled, and waited for all the same: a session has one call at a
        time, so its next one must not begin before this one has ended.
        """
        is_cancelled = False
        while not self._is_resolved:
            try:
                await self._future
            except asyncio.CancelledError:
                if not is_cancelled:
                    is_cancelled = True
                    cancel()
                self._future = self._hub.loop.create_future()
        if is_cancelled and isinstance(self.error, RequestCancelled):
            raise asyncio.CancelledError
        return self.take()


_BOOT = "import sys; sys.path[0] = sys.argv[1]; from openenv.runners.process.child import main; main()"
_HOME = str(Path(__file__).resolve().parents[3])
_STDERR = 2
_REAP_S = 1.0


class WorkerGone(Exception):
    """The process has ended; the text says how."""


class WorkerProcess:
    """One process.

    Args:
        switchboard: Reads for it.
        on_gone: Called with it once it has ended, in the switchboard's thread; it takes the open requests with it.
        on_answer: Called for each request that was answered with a result.
    """

    socket: socket.socket

    def __init__(
        self,
        switchboard: SocketThread,
        *,
        on_gone: Callable[[WorkerProcess], None],
        on_answer: Callable[[], None],
    ) -> None:
        self._switchboard = switchboard
        self._on_gone = on_gone
        self._on_answer = on_answer
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._telling = threading.Lock()
        self.starting = threading.Lock()
        self._outbox = bytearray()
        self._reader = MessageReader()
        self._numbers = itertools.count(1)
        self._pending: dict[int, PendingReply] = {}
        self._told: set[int] = set()
        self.is_gone = False
        self.is_leaving = False
        self.is_ready = False
        self.has_answered = False
        self.how = ""
        self.failure: BaseException | None = None

    # -- beginning ------------------------------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether there is a process, or was one."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Its process id; 0 before there is one."""
        return 0 if self._process is None else self._process.pid

    def start(self, setup: WorkerSetup) -> None:
        """Start the process. It is no fork of this one: the server's threads and locks are not in it."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            command = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
            command += ["-c", _BOOT, _HOME, str(theirs.fileno())]
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=_STDERR, pass_fds=[theirs.fileno()]
                )
            except BaseException:
                ours.close()
                raise
        self.socket = ours
        self._process = process
        self.send(encode_message(MessageKind.SETUP, payload=pack(setup)))
        self._switchboard.add(self)

    # -- asking ---------------------------------------------------------------------------------------------------

    def request(self, kind: MessageKind, payload: bytes, waiter: PendingReply) -> int:
        """Send a request; its number cancels it.

        Raises:
            WorkerGone: There is nobody to ask.
        """
        with self._lock:
            if self.is_gone:
                raise WorkerGone(self.how)
            number = next(self._numbers)
            self._pending[number] = waiter
        self.send(encode_message(kind, number, payload))
        return number

    def tell_encoder(self, number: int, payload: bytes) -> None:
        """Make an encoder known, once."""
        if number in self._told:
            return
        with self._telling:
            if number not in self._told:
                self.send(encode_message(MessageKind.ENCODER, number, payload))
                self._told.add(number)

    def cancel(self, number: int, place: int) -> None:
        """Interrupt a request as far as that is possible; it is answered all the same."""
        self.send(encode_message(MessageKind.CANCEL, number, pack(place)))

    def leave(self) -> None:
        """Have it end; one that is not ready holds nothing that had to be closed."""
        self.is_leaving = True
        if self.is_ready:
            self.send(encode_message(MessageKind.EXIT))
        else:
            self.kill()

    def kill(self) -> None:
        """End it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def send(self, data: bytes) -> None:
        """Send, from any thread; what the socket does not take now is sent later."""
        if self._process is None:
            return
        with self._sending:
            if self._outbox:
                self._outbox += data
                return
            try:
                sent = self.socket.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                return  # the switchboard sees the end of it
            if sent == len(data):
                return
            self._outbox += memoryview(data)[sent:]
        self._switchboard.watch_writes(self)

    # -- in the switchboard's thread ------------------------------------------------------------------------------

    def write(self) -> bool:
        """Send what waits; say whether some still does."""
        with self._sending:
            try:
                sent = self.socket.send(self._outbox)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                self._outbox.clear()
                return False
            del self._outbox[:sent]
            return bool(self._outbox)

    def read(self) -> bool | None:
        """Take what has come; None where there is nothing now, False where nothing will come any more."""
        try:
            data = self.socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return False
        if not data:
            return False
        for message in self._reader.feed(data):
            self._take(message)
        return True

    def _take(self, message: WorkerMessage) -> None:
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
                self._tell(number, unpack(payload))
            case MessageKind.LOG:
                _log(unpack(payload))
            case MessageKind.READY:
                self.is_ready = True
            case MessageKind.FAILED:
                self.failure = unpack_error(payload)

    def _resolve(self, number: int, result: Any, error: BaseException | None) -> None:
        with self._lock:
            waiter = self._pending.pop(number, None)
        if waiter is None:
            return
        if error is None and not self.has_answered:
            self.has_answered = True
            self._on_answer()
        waiter.resolve(result, error)

    def _tell(self, number: int, event: tuple[str, tuple[Any, ...]]) -> None:
        waiter = self._pending.get(number)
        if waiter is None or waiter.events is None:
            return
        name, arguments = event
        if name == "progress":
            waiter.events.progress(*arguments)
        else:
            waiter.events.log(*arguments)

    def is_running(self) -> bool:
        """Say whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def gone(self) -> None:
        """Take leave of a process that has ended, or that does not speak any more."""
        assert self._process is not None
        if not self.wait(_REAP_S):
            self.kill()
            self._process.wait()
        self.how = _ending(self._process.returncode)
        self.socket.close()
        self._on_gone(self)

    def take_pending(self) -> list[PendingReply]:
        """Let no more requests in, and return those that will not be answered."""
        with self._lock:
            self.is_gone = True
            pending, self._pending = list(self._pending.values()), {}
        return pending


def _ending(code: int) -> str:
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
