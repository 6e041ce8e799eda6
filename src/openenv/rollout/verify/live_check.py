"""Checks with a port: both parts run at the same time, and the judge connects to the agent's server.

Knows sandboxes and bytes. The bytes are opaque: neither the verifier nor the host reads them.
"""

# judge's sandbox                    host                                     sandbox of `run`
#
#   judge ──> 127.0.0.1:PORT  ══>  judge.sock ──┐                             the agent's server, 127.0.0.1:PORT
#             (`Sandbox.expose`)                ├── Splice                            ▲
#                                  run.sock  ───┘  <══  127.0.0.1:OUT  <──  connector ┘   (`openenv_calls connect`)
#                                                       (`Sandbox.expose`)
#
# Both sandboxes connect outwards, as an agent does to the capture proxy: each reaches only one port. One connection:
#
#   connector   opens a few connections to run.sock and waits on each
#   judge       connects to PORT; the splice takes a waiting connection of the connector and sends a byte on it
#   connector   connects to the agent's server, then sends the byte back
#   splice      joins both sides; bytes flow until both directions have ended
#
# The connector shares a sandbox with the agent's code, and is not trusted: it can only send other bytes to the judge.

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from openenv.errors import SandboxError
from openenv.rollout.tasks.task import CommandResult
from openenv.sandboxes.base import BgJob, Sandbox, Stream

CALLS = "openenv_calls.py"
_START_S = 30.0
"""How long a connection of the judge waits for the agent's server to start; at most half of its time limit."""
_GRACE_S = 1.0
"""The same after `run` has ended; it may have left a server in the background."""
_FOLDER = ".openenv-live"
_OUT_PORT = 7001
_SPARE = 8
"""The limit of waiting connections; code in the sandbox could open any number."""
_CONNECTIONS = 32
_CHUNK = 64 * 1024
_MAX_PATH = 100
_POLL_S = 0.1
_CONNECTOR_S = 60.0
_MAX_OUTPUT = 256 * 1024


class Splice:
    """Joins connections of two unix sockets of the host. A context manager.

    Args:
        folder: The folder of the sockets.
        start_s: How long a connection of the judge may wait for one of the other side.
        is_over: Returns whether `run` has ended.
    """

    def __init__(self, folder: Path, *, start_s: float, is_over: Callable[[], bool]) -> None:
        self.judge, self.run = folder / "judge.sock", folder / "run.sock"
        self._waiting: queue.Queue[socket.socket] = queue.Queue(_SPARE)
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self._until = time.monotonic() + start_s
        self._is_over = is_over

    def __enter__(self) -> Splice:
        try:
            for path, take in ((self.run, self._take_run), (self.judge, self._take_judge)):
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._keep(listener)
                path.unlink(missing_ok=True)
                _bind(listener, path)
                listener.listen(16)
                self._start(self._accept, listener, take)
        except OSError:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection and wait for the threads."""
        with self._lock:
            self._closed = True
            sockets = list(self._sockets)
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads or accepts
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            alive[0].join()
        self._drop(*sockets)  # last: another socket could reuse the number of a closed one
        for path in (self.judge, self.run):
            path.unlink(missing_ok=True)

    def _keep(self, each: socket.socket) -> bool:
        with self._lock:
            if not self._closed:
                self._sockets.add(each)
                return True
        each.close()
        return False

    def _drop(self, *ends: socket.socket) -> None:
        with self._lock:
            self._sockets.difference_update(ends)
        for end in ends:
            end.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="openenv-splice", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.01)  # the process has no free descriptor
                continue
            if self._keep(connection):
                take(connection)

    def _take_run(self, connection: socket.socket) -> None:
        try:
            self._waiting.put_nowait(connection)
        except queue.Full:
            self._drop(connection)

    def _take_judge(self, connection: socket.socket) -> None:
        self._slots.acquire()
        self._start(self._carry, connection)

    def _carry(self, judge: socket.socket) -> None:
        """Join a connection of the judge to one of the connector, until both directions have ended."""
        run: socket.socket | None = None
        try:
            run = self._answered()
            if run is not None:
                back = threading.Thread(target=_pass_on, args=(run, judge), name="openenv-splice", daemon=True)
                back.start()
                _pass_on(judge, run)
                back.join()
        finally:
            self._drop(judge, *(() if run is None else (run,)))
            self._slots.release()

    def _answered(self) -> socket.socket | None:
        """Return a connection that the agent's server has accepted, or None."""
        run: socket.socket | None = None
        until = max(self._until, time.monotonic() + _GRACE_S)
        while not self._closed and time.monotonic() < until:
            if self._is_over():
                until = min(until, time.monotonic() + _GRACE_S)
            try:
                if run is None:
                    run = self._waiting.get(timeout=_POLL_S)
                    run.settimeout(_POLL_S)
                    run.sendall(b"\1")
                if run.recv(1) == b"\1":
                    run.settimeout(None)
                    return run
                break
            except (queue.Empty, TimeoutError):
                continue
            except OSError:
                break
        if run is not None:
            self._drop(run)
        return None


def _bind(listener: socket.socket, path: Path) -> None:
    """Bind a unix socket, even if its path is too long for sockaddr_un."""
    if len(os.fsencode(path)) <= _MAX_PATH:
        listener.bind(str(path))
        return
    folder = os.open(path.parent, os.O_PATH)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until the sender closes; a slow reader slows down the writer."""
    try:
        while data := source.recv(_CHUNK):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """The `run` of a check with a port.

    Args:
        line: The line of `run`.
        port: The port that the agent's server listens on.
        envs: The environment of both parts.
        seconds: The time limit of the judge.
        isolated: Whether each sandbox has its own network; if not, they share this machine's ports.
    """

    line: str
    port: int
    envs: Mapping[str, str]
    seconds: float
    isolated: bool = True


class LiveRun:
    """The `run` of a check while its judge works: a context manager around the judge.

    Args:
        running: The sandbox of `run`, with the agent's work tree.
        judging: The sandbox of the judge.
        folder: A folder of the host, for sockets.
        options: The check.
    """

    def __init__(self, running: Sandbox, judging: Sandbox, folder: Path, options: LiveOptions) -> None:
        self._running, self._judging = running, judging
        port, seconds = options.port, options.seconds
        self._line, self._port, self._seconds = options.line, port, seconds
        self._out = _OUT_PORT if port != _OUT_PORT else _OUT_PORT + 1
        self._judge_port = port
        if not options.isolated:
            self._out, self._judge_port = _free_ports(2)
        self._envs = dict(options.envs)
        self._start_s = min(_START_S, seconds / 2)
        self._splice = Splice(folder, start_s=self._start_s, is_over=lambda: self._exit_code() is not None)
        self._output: dict[Stream, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._job: BgJob | None = None
        self._begun = time.monotonic()

    def __enter__(self) -> LiveRun:
        self._splice.__enter__()
        try:
            calls = resources.files(__package__).joinpath(CALLS).read_text("utf-8")
            for sandbox in (self._running, self._judging):
                sandbox.write_text(f"{_place(sandbox)}/{CALLS}", calls)
            self._judging.expose(self._splice.judge, port=self._judge_port)
            self._running.expose(self._splice.run, port=self._out)
            self._start_connector()  # before the agent's code runs, which then cannot cause a failure here
            self._job = self._running.start_bg(
                self._line,
                envs={**self._envs, "PYTHONPATH": _place(self._running), "PORT": str(self._port)},
                cwd=self._running.workdir,
                on_output=self._feed,
            )
        except BaseException:
            self._splice.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._splice.close()

    def _start_connector(self) -> None:
        ready = threading.Event()
        program = ["python3", f"{_place(self._running)}/{CALLS}", "connect", str(self._out), str(self._port)]
        job = self._running.start_bg(
            [*program, f"{self._start_s:g}"], envs=self._envs, cwd="/", on_output=lambda stream, chunk: ready.set()
        )
        until = time.monotonic() + _CONNECTOR_S
        while not ready.wait(_POLL_S):
            with contextlib.suppress(TimeoutError):
                exit_code = job.wait(0)
                raise SandboxError(
                    f"A check with a port needs `python3` in the sandbox (exit code {exit_code}); add it to the image."
                )
            if time.monotonic() > until:
                raise SandboxError("The connector of a check with a port did not start.")

    @property
    def judge_environment(self) -> dict[str, str]:
        """The judge's variables, with the address of the agent's server."""
        return {
            **self._envs,
            "PYTHONPATH": _place(self._judging),
            "PORT": str(self._judge_port),
            "URL": f"http://127.0.0.1:{self._judge_port}",
            "OPENENV_CALLS_S": f"{0.8 * self._seconds:g}",
        }

    def result(self) -> CommandResult:
        """Return the result of `run` so far."""
        exit_code = self._exit_code()
        note = "it was stopped when the judge had ended" if exit_code is None else "it ended before the judge"
        stdout, stderr = (bytes(self._output[name]).decode("utf-8", "replace") for name in ("stdout", "stderr"))
        spent = time.monotonic() - self._begun
        return CommandResult(
            cmd=self._line, exit_code=exit_code or 0, stdout=stdout, stderr=stderr, duration_s=spent, note=note
        )

    def _exit_code(self) -> int | None:
        """Return the exit code of `run`, or None while it runs."""
        if self._job is None:
            return None
        try:
            return self._job.wait(0)
        except TimeoutError:
            return None
        except SandboxError:  # `run` killed its sandbox
            return 137

    def _feed(self, stream: Stream, chunk: bytes) -> None:
        received = self._output[stream]
        received += chunk[: _MAX_OUTPUT - len(received)]


def _place(sandbox: Sandbox) -> str:
    return f"{sandbox.home}/{_FOLDER}"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
