"""A worker: one of the processes of `openenv serve --workers N`, from its start to its drain.

The supervisor starts it, sends its setup over a control socket, and receives its reports there. A server with one
process does not import this module.

    control socket:  setup -->   <-- failed | ready   go -->   <-- started        end of the socket: drain

`ready` carries the drain timeout for sessions, so that the supervisor waits as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import uvicorn

from ..app import HTTPEnvServer
from ..loading import TargetError, TargetFailed
from ..process_tuning import keep_freed_memory, tune_garbage_collection
from ..run import (
    SAME_SIGNAL_S,
    EnvironmentServer,
    ServeOptions,
    check_closed,
    environment_server,
    log_config,
    mark_logs,
    prepare,
    uvicorn_settings,
)
from ..runners import cores
from ..sessions.manager import SessionManager
from ..telemetry.prometheus import Family, merge, render
from ..telemetry.server_metrics import MERGED_BY
from .board import DOWN, QUIET, SERVING, Board, SharedPeers, WorkerPlace
from .channel import PeerChannel, PeerMessage, PeerMessageKind
from .protocols import AdoptedConnection, RoutedFirstRead, RoutedUpgrade, Stage
from .routing import Destination, Router

logger = logging.getLogger(__name__)

_SIZE: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<BII")  # a connection's stage, the sessions that it opens, the length of its handshake
_ARRIVAL_S: Final = 1.0  # how long a request may take to open its session
_OPENING_S: Final = 0.01  # more time for each announced session,
_LONGEST_OPENING_S: Final = 30.0  # up to this much
_LOOK_S: Final = 0.02
BEATS_PER_TIMEOUT: Final = 10
"""Heartbeats in the time after which a worker counts as hung."""
METRICS: Final = "metrics"

OnStarted = Callable[[Any, int], None]


@dataclass(frozen=True)
class ServerWorkerSetup:
    """The setup that the supervisor sends to a new worker.

    Args:
        target: The environment or application to serve.
        options: The options; limits count for the whole server.
        place: The worker's index and generation.
        workers: The number of workers.
        boot: The first part of every resume token.
        path: The supervisor's `sys.path`.
        listening: Descriptors of the listening sockets.
        board: The descriptor of the shared memory.
        reader: The descriptor for the worker's messages.
        writers: Descriptors for messages to each worker.
        on_started: Announces the server, once.
    """

    target: str
    options: ServeOptions
    place: WorkerPlace
    workers: int
    boot: str
    path: list[str]
    listening: list[int]
    board: int
    reader: int
    writers: list[int]
    on_started: OnStarted | None

    @property
    def descriptors(self) -> list[int]:
        """All descriptors that the worker inherits."""
        return [*self.listening, self.board, self.reader, *self.writers]


def send_control(control: socket.socket, *message: Any) -> None:
    """Send a message over a control socket."""
    payload = pickle.dumps(message)
    control.sendall(_SIZE.pack(len(payload)) + payload)


def receive_control(control: socket.socket) -> tuple[Any, ...]:
    """Return the next message of a control socket.

    Raises:
        EOFError: The other side has closed the socket.
    """
    size = _SIZE.unpack(_exactly(control, _SIZE.size))[0]
    message: tuple[Any, ...] = pickle.loads(_exactly(control, size))
    return message


def _exactly(control: socket.socket, size: int) -> bytes:
    chunks = b""
    while len(chunks) < size:
        chunk = control.recv(size - len(chunks))
        if not chunk:
            raise EOFError
        chunks += chunk
    return chunks


def sessions_opened_by(payload: bytes) -> int:
    """Return how many sessions a handed-over connection opens."""
    return int(_HEAD.unpack_from(payload)[1])


class ServerWorker:
    """The state that all connections and sessions of a worker share.

    Args:
        setup: The worker's setup.
        server: The environment's server.
    """

    def __init__(self, setup: ServerWorkerSetup, server: HTTPEnvServer) -> None:
        self.index = setup.place.index
        self.workers = setup.workers
        self.has_short_steps = server.manager.has_short_steps
        self.board = Board(setup.workers, setup.board)
        self.router = Router(self.board, setup.place.index)
        self._server = server
        manager = server.manager
        reader, *writers = (socket.socket(fileno=fd) for fd in (setup.reader, *setup.writers))
        self.channel = PeerChannel(self.index, reader, writers, self._answer)
        self.channel.handlers = {
            PeerMessageKind.CONNECTION: self._adopt,
            PeerMessageKind.WAKE: lambda _: manager.slots.wake(),
            PeerMessageKind.EVICT: lambda message: manager.slots.evict_for_peer(for_soft=message.payload == b"\x01"),
        }
        self._peers = SharedPeers(self.board, self.channel, setup.place, setup.boot)
        manager.share(self._peers)
        manager.answers[METRICS] = self._keep_metrics
        server.monitoring.collect = self.collect_metrics
        self._make: Callable[..., RoutedFirstRead] | None = None
        self._adoptions: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._beat_s = setup.options.heartbeat.timeout_s / BEATS_PER_TIMEOUT
        self._heart: asyncio.TimerHandle | None = None

    def begin(self, make: Callable[..., RoutedFirstRead]) -> None:
        """Start to read messages and to accept connections.

        Args:
            make: Makes the protocol of a connection.
        """
        self._make = make
        self.channel.begin()
        self._beat()
        self.board.set_state(self.index, SERVING)

    def _beat(self) -> None:
        """Write a heartbeat. On the loop: a blocked loop serves nobody, even if other threads run."""
        self.board.beat(self.index)
        self._heart = asyncio.get_running_loop().call_later(self._beat_s, self._beat)

    @property
    def finish_s(self) -> float:
        """How long sessions may continue after SIGTERM."""
        return self._server.manager.limits.finish_s

    @property
    def is_last_call_over(self) -> bool:
        """Whether all draining workers have finished their calls. They close the port together."""
        self.board.set_state(self.index, QUIET)
        return not self.board.is_draining or all(
            self.board.state(other) == QUIET for other in self.board.others(self.index)
        )

    def end(self) -> None:
        """Stop accepting connections and messages."""
        self.board.set_state(self.index, DOWN)
        if self._heart is not None:
            self._heart.cancel()
        self.channel.end()

    # -- connections ----------------------------------------------------------------------------------------------

    def hand_over(self, transport: asyncio.Transport, choice: Destination, connection: AdoptedConnection) -> bool:
        """Give a connection to another worker; False, without any effect, if that is not possible.

        Args:
            transport: The connection.
            choice: The worker.
            connection: Its stage, and the bytes that this worker has read.
        """
        sock = transport.get_extra_info("socket")
        if sock is None or transport.is_closing():
            return False
        transport.pause_reading()
        head = _HEAD.pack(connection.stage, choice.sessions, len(connection.head))
        payload = head + connection.head + connection.early
        try:
            self.channel.send(choice.place, PeerMessageKind.CONNECTION, payload, [sock.fileno()])
        except OSError:  # no descriptors or memory left: then it is served here
            logger.exception("a connection could not be handed over")
            self.board.send(self.index, choice.place, -choice.sessions)
            transport.resume_reading()
            return False
        transport.abort()  # closes this end only: the connection lives on in the message
        return True

    def _adopt(self, message: PeerMessage) -> None:
        """Serve a connection that another worker has accepted."""
        assert self._make is not None
        stage, sessions, size = _HEAD.unpack_from(message.payload)
        start = _HEAD.size
        head, early = message.payload[start : start + size], message.payload[start + size :]
        sock = socket.socket(fileno=message.descriptors.pop())
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        make = functools.partial(self._make, adopted=AdoptedConnection(Stage(stage), head, early))
        task = loop.create_task(loop.connect_accepted_socket(make, sock))
        self._adoptions.add(task)
        task.add_done_callback(functools.partial(self._adopted, sock))
        self.arrived(sessions)

    def _adopted(self, sock: socket.socket, task: asyncio.Task[Any]) -> None:
        self._adoptions.discard(task)
        if task.cancelled() or task.exception() is not None:
            sock.close()
            if not task.cancelled():
                logger.debug("a connection that was handed over could not be served", exc_info=task.exception())

    def arrived(self, sessions: int) -> None:
        """Record a request that opens sessions: they count as load until they are opened or a short time passes."""
        if not sessions:
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + _ARRIVAL_S + min(sessions * _OPENING_S, _LONGEST_OPENING_S)
        self._peers.arrived(sessions, until)
        if self._timer is None or until < self._timer.when():  # one timer for all arrivals
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(until, self._expire_arrivals)

    def _expire_arrivals(self) -> None:
        loop = asyncio.get_running_loop()
        until = self._peers.expire_arrivals(loop.time())
        self._timer = None if until is None else loop.call_at(until, self._expire_arrivals)

    # -- questions ------------------------------------------------------------------------------------------------

    def _answer(self, question: str) -> bytes:
        answer = self._server.manager.answers.get(question)
        return b"" if answer is None else answer()

    def _keep_metrics(self) -> bytes:
        self.board.keep_text(self.index, self._server.monitoring.metrics.text())
        return b""

    async def collect_metrics(self) -> bytes:
        """Return the metrics of the whole server, including ended workers."""
        self._keep_metrics()
        await self._server.manager.peers.ask(METRICS)
        # Read the board: it has the last values of a worker that is too busy to answer.
        serving = [index for index in range(self.workers) if index == self.index or self.board.pid(index)]
        texts = [self.board.kept_text(index) for index in serving]
        count = len(self.board.others(self.index)) + 1
        workers = Family("openenv_workers", "gauge", "Worker processes that serve.").add(count)
        hung = Family("openenv_workers_hung", "gauge", "Worker processes that do not respond.")
        hung.add(len(self.board.hung()))
        return merge([*texts, self.board.kept_text(self.workers), render([workers, hung])], MERGED_BY)


class WorkerServer(EnvironmentServer):
    """A uvicorn server that listens when the supervisor sends `go`, and drains when the supervisor ends."""

    def __init__(
        self, config: uvicorn.Config, worker: ServerWorker, setup: ServerWorkerSetup, control: socket.socket
    ) -> None:
        super().__init__(config, self._announce)
        self._worker = worker
        self._setup = setup
        self._control = control
        self._may_listen = False

    def _announce(self, port: int) -> None:
        if self._setup.on_started is not None:
            self._setup.on_started(self.config.app, port)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await uvicorn.Server.startup(self, sockets=[])  # the lifespan; the port follows
        if not self.started:
            return
        if self._setup.place.index == 0 and not await self._can_build():
            assert self.failure is not None
            send_control(self._control, "failed", str(self.failure), self.failure.report())
            return
        loop = asyncio.get_running_loop()
        make = functools.partial(
            RoutedFirstRead, self.config, self.server_state, self.lifespan.state, worker=self._worker
        )
        send_control(self._control, "ready", self._worker.finish_s)
        self._control.setblocking(False)
        loop.add_reader(self._control.fileno(), self._read_control)
        while not (self._may_listen or self.should_exit):  # noqa: ASYNC110 - a plain flag
            await asyncio.sleep(_LOOK_S)
        if self.should_exit:
            return
        self._worker.begin(make)
        for sock in sockets or ():
            self.servers.append(await loop.create_server(make, sock=sock, backlog=self.config.backlog))
        self._on_started(self.servers[0].sockets[0].getsockname()[1])
        self._control.setblocking(True)
        send_control(self._control, "started")
        self._control.setblocking(False)

    def _read_control(self) -> None:
        """Start listening at `go`; drain when the supervisor has ended."""
        try:
            data = self._control.recv(1024)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self._may_listen = True
        else:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            logger.error("The supervisor is gone; this worker shuts down")
            self.handle_exit(signal.SIGTERM, None)

    async def _finish_calls(self, manager: SessionManager) -> None:
        await super()._finish_calls(manager)
        self._worker.end()

    def _is_quiet(self, manager: SessionManager) -> bool:
        return super()._is_quiet(manager) and self._worker.is_last_call_over

    def handle_exit(self, sig: int, frame: Any) -> None:
        # Ctrl-C arrives twice: from the terminal, which signals the whole group, and from the supervisor.
        if not (self.should_exit and sig == signal.SIGINT and time.monotonic() - self._signalled_at < SAME_SIGNAL_S):
            super().handle_exit(sig, frame)


def share_of(total: int, workers: int, index: int) -> int:
    """Return one worker's share of a limit of the whole server: at least 1."""
    size, more = divmod(total, workers)
    return max(1, size + (index < more))


def worker_options(options: ServeOptions, server: HTTPEnvServer | None, setup: ServerWorkerSetup) -> dict[str, Any]:
    """Return the server options that differ in a worker: its share of processes and memory."""
    if server is None:
        return {}
    whole = server.service.options
    workers, index = setup.workers, setup.place.index
    processes = whole.processes.processes or cores()
    return {
        "max_unread_bytes": max(1, whole.max_unread_bytes // workers),
        "env_processes": share_of(processes, workers, index),
    }


def pin(index: int) -> None:
    """Keep this process and its threads on one core: the interpreter lock then never moves between cores."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[index % len(cpus)]})


def main() -> None:
    """Serve in a process of the supervisor; the last argument is the control socket."""
    control = socket.socket(fileno=int(sys.argv[2]))
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # so that the supervisor can kill this process together with its children
    (setup,) = receive_control(control)
    assert isinstance(setup, ServerWorkerSetup)
    for fd in (control.fileno(), *setup.descriptors):  # an environment's child processes must not keep the port open
        os.set_inheritable(fd, False)
    sys.path[:] = setup.path
    gc.disable()  # imports create no garbage
    try:
        app = prepare(setup.target, setup.options)
        server = environment_server(app)
        if server is None:
            raise TargetError(
                f"{setup.target} was not made by create_app, so its sessions cannot be spread over workers"
            )
        if not server.service.options.fast:
            raise TargetError("workers hand connections over, which needs openenv.server.fast: unset OPENENV_FAST")
        server.reconfigure(**worker_options(setup.options, server, setup))
    except TargetError as exc:
        report = exc.report() if isinstance(exc, TargetFailed) else ""
        with contextlib.suppress(OSError):
            send_control(control, "failed", str(exc), report)
        sys.exit(1)
    _serve(app, server, setup, control)


def _serve(app: Any, server: HTTPEnvServer, setup: ServerWorkerSetup, control: socket.socket) -> None:
    if setup.options.pin_workers:
        pin(setup.place.index)
    keep_freed_memory()
    mark_logs(app, setup.options)
    tune_garbage_collection()
    worker = ServerWorker(setup, server)
    uses = uvicorn_settings(setup.options, server.service.options)
    uses["ws"] = functools.partial(RoutedUpgrade, worker=worker)
    config = uvicorn.Config(app, log_config=log_config(setup.options), **uses)
    sockets = [socket.socket(fileno=fd) for fd in setup.listening]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it once more after an orderly shutdown
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    try:
        WorkerServer(config, worker, setup, control).run(sockets)
    finally:
        check_closed(server.manager)
