"""The supervisor of `openenv serve --workers N`: owns the port, starts workers, replaces dead and hung ones.

It takes no part in requests, so clients never wait for it. It has one thread and no event loop. It sleeps until a
worker reports or ends, a signal arrives, or it is time to read the heartbeats.

    start N --> all are ready --> go: they listen --> a worker dies: its row is cleared, its messages are forwarded,
                                                      a new process starts

    serving -- silent for `timeout_s` --> hung: no new sessions; waiting connections move to other workers
       ^                                   |
       +------------ beats again ----------+-- silent for `replace_s` --> its process group is killed: it dies
       +-- silent with the board's lock --> killed at once: all other workers wait for that lock
    SIGTERM, SIGINT --> the workers drain --> all have ended --> exit
                        second signal: they hurry, as a server with one process does
                        third signal, or time is up: they are killed
"""

from __future__ import annotations

import contextlib
import gc
import logging
import logging.config
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from openenv.protocol.backoff import Backoff

from ..loading import TargetError
from ..run import SAME_SIGNAL_S, UNCLOSED_EXIT, HeartbeatOptions, ServeOptions, bound_socket, log_config
from ..sessions.peers import new_boot
from ..telemetry.prometheus import Family, counters, merge, render
from .board import LEAVING, MOST_WORKERS, QUIET, SERVING, STARTING, Board, WorkerPlace
from .channel import PeerChannel, PeerMessage, PeerMessageKind, message_pair, receive
from .worker import BEATS_PER_TIMEOUT, ServerWorkerSetup, receive_control, send_control, sessions_opened_by

logger = logging.getLogger("uvicorn.error")

# With `-c`, `sys.path[0]` is the working folder. A file there may have the name of one of our modules.
_BOOT: Final = "import sys; sys.path[0] = sys.argv[1]; from openenv.server.workers.worker import main; main()"
_SOURCES: Final = str(Path(__file__).resolve().parents[3])
_PAUSES: Final = Backoff()
_LIVED_S: Final = 10.0  # a worker that lived this long is replaced at once
_PATIENCE_S: Final = 15.0  # extra time for a drain beyond its limit
_BACKLOG: Final = 2048  # as in uvicorn
_EXIT_S: Final = 0.2  # how long a worker may take to exit after its control socket has closed
_CONTROL_S: Final = 5.0  # how long a worker may take to send the rest of a message
_LOCK_PAUSE_S: Final = 0.002
_BEATING: Final = (SERVING, LEAVING, QUIET)  # states in which a worker writes heartbeats


class WorkerFailed(TargetError):
    """A worker reports that the target cannot be loaded."""


class WorkerHandle:
    """One worker process, as the supervisor sees it."""

    def __init__(self, place: WorkerPlace, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.place = place
        self.process = process
        self.control = control
        self.began_at = time.monotonic()
        self.is_ready = False
        self.is_started = False
        self.failure: WorkerFailed | None = None
        self.report = ""
        self.beats = 0
        self.heard_at = 0.0  # when a heartbeat was last seen
        self.end_reason = "died"

    @property
    def name(self) -> str:
        return f"worker {self.place.index} (process {self.process.pid})"

    def kill(self) -> None:
        """Kill the process and its children: a hung child must not outlive its worker."""
        pid = self.process.pid
        with contextlib.suppress(OSError):
            if self.process.poll() is None and os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class SupervisorBoard(Board):
    """The supervisor's view of the board. It waits for the lock for a limited time, then has its holder killed.

    Args:
        workers: How many workers there are.
        patience_s: How long a live worker may hold the lock; normally it holds it for microseconds.
        kill: Kills the worker with a process id.
    """

    def __init__(self, workers: int, patience_s: float, kill: Callable[[int], None]) -> None:
        super().__init__(workers)
        self._patience_s = patience_s
        self._kill = kill

    def __enter__(self) -> Board:
        deadline = time.monotonic() + self._patience_s
        while not self.try_lock():
            holder = self.lock_holder()
            if holder is not None and time.monotonic() > deadline:
                self._kill(holder)
            time.sleep(_LOCK_PAUSE_S)
        return self


class Supervisor:
    """Starts, watches and ends the workers of a server.

    Args:
        target: The environment or application to serve.
        options: The options of the whole server.
        on_started: Announces the server; it is pickled, and called in the first worker.
    """

    def __init__(self, target: str, options: ServeOptions, on_started: Callable[[Any, int], None]) -> None:
        self._target = target
        self._options = options
        self._on_started = on_started
        self._count = options.workers
        self._boot = new_boot()
        self._heartbeat: HeartbeatOptions = options.heartbeat
        self._tick_s = self._heartbeat.timeout_s / BEATS_PER_TIMEOUT
        self._checked_at = time.monotonic()
        self._replaced: Counter[str] = Counter(hung=0, died=0)
        self._ended_texts = b""
        self._board = SupervisorBoard(self._count, self._heartbeat.timeout_s, self._kill_holder)
        self._keep_ended_metrics()
        # Workers listen on it once all are ready. Until then clients are refused and try again.
        listener = bound_socket(options.host, options.port)
        listener.setblocking(False)
        self._listening = [listener]
        self._pairs = [message_pair() for _ in range(self._count)]
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, WorkerHandle] = {}
        self._deaths = [0] * self._count
        self._due: dict[int, float] = {}  # when to start the replacement of a dead worker
        self._signals: list[int] = []
        self._is_serving = False
        self._drain_until: float | None = None
        self._finish_s = 0.0  # how long sessions may go on after SIGTERM
        self._shutdowns = 0  # signals to shut down
        self._signalled_at = 0.0
        self._status = 0
        self.was_interrupted = False

    def run(self) -> int:
        """Serve until a signal comes; return the exit status.

        Raises:
            WorkerFailed: The target cannot be loaded.
        """
        with self._signal_handlers():
            try:
                for index in range(self._count):
                    self._start(index)
                while self._running or (self._drain_until is None and not self._status):
                    self._run_once()
            finally:
                self._kill()
                self._close()
        return self._status

    # -- starting -------------------------------------------------------------------------------------------------

    def _start(self, index: int) -> None:
        generation = self._board.begin(index)
        is_first = index == 0 and not self._is_serving
        setup = ServerWorkerSetup(
            target=self._target,
            options=self._options,
            place=WorkerPlace(index, generation),
            workers=self._count,
            boot=self._boot,
            path=sys.path,
            listening=[sock.fileno() for sock in self._listening],
            board=self._board.fd,
            reader=self._pairs[index][0].fileno(),
            writers=[writer.fileno() for _, writer in self._pairs],
            on_started=self._on_started if is_first else None,
        )
        ours, theirs = socket.socketpair()
        ours.settimeout(_CONTROL_S)
        with theirs:
            command = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
            command += ["-c", _BOOT, _SOURCES, str(theirs.fileno())]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), *setup.descriptors]
            )
        self._running[index] = worker = WorkerHandle(setup.place, process, ours)
        self._board.set_pid(index, process.pid)
        with contextlib.suppress(OSError):  # it may have died already
            send_control(ours, setup)
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def _run_once(self) -> None:
        """Wait for the next event and handle it."""
        for key, _ in self._selector.select(self._wait_s()):
            if isinstance(key.data, WorkerHandle):
                self._read_control(key.data)
            else:
                with contextlib.suppress(BlockingIOError):
                    key.fileobj.recv(4096)  # type: ignore[union-attr]
        while self._signals:
            self._signalled(self._signals.pop(0))
        for worker in list(self._running.values()):
            if worker.process.poll() is not None:
                self._ended(worker)
        now = time.monotonic()
        if now >= self._checked_at + self._tick_s:
            self._check_heartbeats(now)
        for index in [index for index, due in self._due.items() if due <= now]:
            del self._due[index]
            self._start(index)
        if self._drain_until is not None and now > self._drain_until:
            logger.error("Workers did not end in time, and are killed")
            self._status = self._status or UNCLOSED_EXIT
            self._kill()

    def _wait_s(self) -> float:
        times = [self._checked_at + self._tick_s, *self._due.values()]
        if self._drain_until is not None:
            times.append(self._drain_until)
        return max(0.0, min(times) - time.monotonic()) + 0.001

    def _read_control(self, worker: WorkerHandle) -> None:
        try:
            word, *more = receive_control(worker.control)
        except (EOFError, OSError):
            self._selector.unregister(worker.control)
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_EXIT_S)
            return
        if word == "failed":
            worker.failure, worker.report = WorkerFailed(more[0]), more[1]
        elif word == "ready":
            worker.is_ready = True
            self._finish_s = more[0]
            self._allow_listening()
        elif word == "started":
            worker.is_started = True

    def _allow_listening(self) -> None:
        """Let workers listen. At the start all begin together, or the first one would get all sessions."""
        if not self._is_serving and not all(worker.is_ready for worker in self._running.values()):
            return
        self._is_serving = True
        for worker in self._running.values():
            if worker.is_ready and not worker.is_started and self._board.state(worker.place.index) == STARTING:
                with contextlib.suppress(OSError):
                    send_control(worker.control, "go")

    # -- heartbeats -----------------------------------------------------------------------------------------------

    def _check_heartbeats(self, now: float) -> None:
        """Mark silent workers as hung, and kill them if they stay silent."""
        # If this process slept longer than planned, so did the workers, perhaps: the machine was suspended or starved.
        late_s = now - self._checked_at - self._tick_s
        self._checked_at = now
        silent: list[WorkerHandle] = []
        for worker in self._running.values():
            index, beats = worker.place.index, self._board.beats(worker.place.index)
            if late_s > self._tick_s:
                worker.heard_at += late_s
            if beats != worker.beats or self._board.state(index) not in _BEATING:
                worker.beats, worker.heard_at = beats, now
                if self._board.is_hung(index):
                    self._recovered(worker)
            elif now - worker.heard_at > self._heartbeat.timeout_s:
                silent.append(worker)
        if silent and not self._free_lock(now, silent):
            for worker in silent:
                self._handle_silence(worker, now - worker.heard_at)

    def _free_lock(self, now: float, silent: Sequence[WorkerHandle]) -> bool:
        """Kill a silent worker that holds the board's lock; return whether one did. The others wait for it."""
        holder = self._board.lock_holder()
        if holder not in [worker.process.pid for worker in silent]:
            return False
        assert holder is not None
        self._kill_holder(holder)
        for worker in self._running.values():
            worker.heard_at = now
        return True

    def _kill_holder(self, pid: int) -> None:
        """Kill the worker that holds the board's lock and does not release it."""
        for worker in self._running.values():
            if worker.process.pid == pid and worker.process.poll() is None:
                logger.error("%s has stopped while it decided for all workers, and is killed", worker.name)
                worker.end_reason = "hung"
                worker.kill()

    def _handle_silence(self, worker: WorkerHandle, silent_s: float) -> None:
        index, replace_s = worker.place.index, self._heartbeat.replace_s
        if not self._board.is_hung(index):
            self._board.mark_hung(index, is_hung=True)
            logger.error("%s has not responded for %.1f s and gets no new sessions", worker.name, silent_s)
            self._rescue(index)
            self._wake_others()  # the first client of the queue may be one of theirs now
        if replace_s and silent_s > replace_s and worker.end_reason != "hung":
            logger.error("%s has not responded for %.1f s and is killed", worker.name, silent_s)
            worker.end_reason = "hung"
            worker.kill()

    def _recovered(self, worker: WorkerHandle) -> None:
        logger.warning("%s responds again", worker.name)
        self._board.mark_hung(worker.place.index, is_hung=False)
        self._send(worker.place.index, PeerMessageKind.WAKE)  # `_rescue` may have dropped one

    def _rescue(self, index: int) -> None:
        """Move connections that are about to open sessions from a hung worker to the others.

        Connections of its sessions stay: the worker may recover. Questions and wake-up calls are dropped, because the
        workers that sent them do not wait any longer.
        """
        messages: list[PeerMessage] = []
        with contextlib.suppress(BlockingIOError, OSError):
            while True:
                message = receive(self._pairs[index][0])
                if message is not None:
                    messages.append(message)
        others, count = self._board.others(index), 0
        for message in messages:
            if message.kind is PeerMessageKind.CONNECTION:
                place, sessions = index, sessions_opened_by(message.payload)
                if sessions and others:
                    place, count = others[count % len(others)], count + 1
                    self._board.settle(index, sessions)
                self._send(place, PeerMessageKind.CONNECTION, message.payload, message.descriptors)
            for fd in message.descriptors:
                os.close(fd)

    # -- the end of a worker --------------------------------------------------------------------------------------

    def _ended(self, worker: WorkerHandle) -> None:
        """Remove an ended worker from the server, and replace it."""
        if worker.failure is None:
            with contextlib.suppress(EOFError, OSError, ValueError):
                worker.control.setblocking(False)
                while True:
                    word, *more = receive_control(worker.control)
                    if word == "failed":
                        worker.failure, worker.report = WorkerFailed(more[0]), more[1]
        index, status = worker.place.index, worker.process.returncode
        del self._running[index]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.control)
        worker.control.close()
        left = self._board.end(index)
        if self._drain_until is None and self._is_serving:
            self._replaced[worker.end_reason] += 1
        self._keep_metrics(index, left.live)
        if self._drain_until is not None:
            # The signals are fine: they ended the process before its handler was installed.
            if status not in (0, -signal.SIGTERM, -signal.SIGINT):
                self._status = self._status or (status if status > 0 else 1)
            return
        if not self._is_serving:
            self._failed(worker)
        how = f"was killed by signal {-status}" if status < 0 else f"has ended with exit code {status}"
        logger.error("%s %s; %d session(s) are lost with it, and another one starts", worker.name, how, left.live)
        self._forward(index)
        self._wake_others()
        lived_s = time.monotonic() - worker.began_at
        self._deaths[index] = 0 if lived_s > _LIVED_S else self._deaths[index] + 1
        pause_s = _PAUSES.pause_s(self._deaths[index] - 1) if self._deaths[index] > 1 else 0.0
        self._due[index] = time.monotonic() + pause_s

    def _failed(self, worker: WorkerHandle) -> None:
        """Abort the start: a worker cannot serve."""
        if worker.report:
            sys.stderr.write(f"{worker.report}\n")
        if worker.failure is not None:
            raise worker.failure
        status = worker.process.returncode
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        raise WorkerFailed(f"{worker.name} has ended with {how} before it could serve")

    def _forward(self, index: int) -> None:
        """Forward connections on their way to a dead worker: any worker can report the lost sessions."""
        others = self._board.others(index)
        reader, count = self._pairs[index][0], 0
        while others:
            try:
                message = receive(reader)
            except (BlockingIOError, OSError):
                return
            if message is None:
                continue
            if message.kind is PeerMessageKind.CONNECTION:
                count += 1
                self._send(
                    others[count % len(others)], PeerMessageKind.CONNECTION, message.payload, message.descriptors
                )
            for fd in message.descriptors:
                os.close(fd)

    def _send(self, index: int, kind: PeerMessageKind, payload: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Send a message to a worker; drop it if the worker does not read. The supervisor never waits."""
        channel = PeerChannel(self._count, self._pairs[index][0], [writer for _, writer in self._pairs], lambda _: b"")
        with contextlib.suppress(OSError):
            channel.send(index, kind, payload, descriptors)

    def _wake_others(self) -> None:
        """Wake clients that wait for a slot: the dead worker's slots are free."""
        for other in self._board.others(self._count):
            self._send(other, PeerMessageKind.WAKE)

    def _keep_metrics(self, index: int, lost: int) -> None:
        """Add a worker's counters to the sums of all ended workers: counters must never fall."""
        text = counters(self._board.kept_text(index))
        if lost:
            name = "openenv_sessions_closed_total"
            text += f"# HELP {name} Ended sessions, by reason.\n# TYPE {name} counter\n".encode()
            text += f'{name}{{reason="worker crashed"}} {lost}\n'.encode()
        self._ended_texts = merge([self._ended_texts, text])
        self._keep_ended_metrics()
        self._board.keep_text(index, b"")

    def _keep_ended_metrics(self) -> None:
        """Store the counters of ended workers, and how many were replaced."""
        replaced = Family("openenv_workers_replaced_total", "counter", "Workers replaced, by reason: died or hung.")
        replaced.add_all("reason", sorted(self._replaced.items()))
        self._board.keep_text(self._count, merge([self._ended_texts, render([replaced])]))

    # -- the end of the server ------------------------------------------------------------------------------------

    def _signalled(self, signum: int) -> None:
        self.was_interrupted = self.was_interrupted or signum == signal.SIGINT
        now = time.monotonic()
        if self._shutdowns and now - self._signalled_at < SAME_SIGNAL_S:
            return  # a signal to the whole process group arrives twice
        self._shutdowns, self._signalled_at = self._shutdowns + 1, now
        # With a drain timeout the first SIGTERM waits for sessions, and the second one starts the usual drain.
        waits = signum == signal.SIGTERM and self._finish_s > 0
        if self._shutdowns > (3 if waits else 2):
            self._kill()
            return
        if self._drain_until is None:
            logger.info("Shutting down: %d workers drain", len(self._running))
            self._board.drain()
            self._due.clear()
        # Calls, connections and environments each have their time (`EnvironmentServer.shutdown`).
        drain_until = now + 2 * self._options.drain_s + _PATIENCE_S
        if self._shutdowns == 1 and waits:
            drain_until += self._finish_s
        self._drain_until = drain_until if self._drain_until is None else min(self._drain_until, drain_until)
        for worker in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(signum)

    def _kill(self) -> None:
        for worker in self._running.values():
            worker.kill()
        for worker in self._running.values():
            worker.process.wait()

    def _close(self) -> None:
        for worker in self._running.values():
            worker.control.close()
        self._selector.close()
        for pair in self._pairs:
            for end in pair:
                end.close()
        for sock in self._listening:
            sock.close()
        self._board.close()

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """Collect signals and wake up for each of them."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)

        def note(signum: int, frame: FrameType | None) -> None:
            if signum != signal.SIGCHLD:
                self._signals.append(signum)

        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
        self._selector.register(ours, selectors.EVENT_READ, None)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            ours.close()
            theirs.close()


def serve_workers(target: str, options: ServeOptions, on_started: Callable[[Any, int], None]) -> None:
    """Serve with several processes until interrupted.

    Args:
        target: The environment or application to serve.
        options: The options of the whole server.
        on_started: Called with the application and its port, in the first worker.

    Raises:
        TargetError: The target cannot be served, or this system cannot run workers.
        SystemExit: Some environment could not be closed.
        KeyboardInterrupt: Ctrl-C ended the server.
    """
    if sys.platform == "win32":
        raise TargetError("workers hand connections over to each other, which Windows cannot; leave --workers out")
    if options.workers > MOST_WORKERS:
        raise TargetError(f"--workers {options.workers} is too many: {MOST_WORKERS} at most")
    gc.enable()
    logging.config.dictConfig(log_config(options))
    supervisor = Supervisor(target, options, on_started)
    status = supervisor.run()
    if supervisor.was_interrupted:
        raise KeyboardInterrupt
    if status:
        sys.exit(status)
