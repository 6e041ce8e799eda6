"""One worker process, as the server sees it: its socket, and who waits for its answers.

Knows frames and processes; must not know environments or who gets which worker.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from .switchboard import Switchboard
from .waiters import Waiter

logger = logging.getLogger(__name__)

_BOOT = "import sys; sys.path[0] = sys.argv[1]; from openenv.workers.main import main; main()"
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
        switchboard: Switchboard,
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
        self._pending: dict[int, Waiter] = {}
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

    def request(self, kind: MessageKind, payload: bytes, waiter: Waiter) -> int:
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

    def take_pending(self) -> list[Waiter]:
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
