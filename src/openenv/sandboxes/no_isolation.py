"""The backend `process`: child processes in a temporary folder, for debugging. It isolates nothing.

Commands can read and write everything that this process can. Works on every POSIX system, even without /proc.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket as sockets
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone, SandboxTreeError, SandboxUnavailable, SandboxUnsupported
from openenv.sandboxes import trees
from openenv.sandboxes.base import (
    HOME,
    MAX_TREE,
    CommandSpec,
    ExecResult,
    Sandbox,
    Sandboxes,
    SandboxSpec,
    refuse_image,
    refuse_snapshot,
)
from openenv.sandboxes.exposed_ports import Exposure, Relay
from openenv.sandboxes.streams import Pipes, follow_output, run_to_end

_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_SERIALS = "openenv-process-"


class ProcessSandboxes(Sandboxes):
    """Child processes without any isolation.

    Args:
        i_know_there_is_no_isolation: Must be true. Commands can do everything that you can do.
        path: The PATH of commands.
    """

    name = "process"
    features = frozenset({"expiry"})

    def __init__(self, *, i_know_there_is_no_isolation: bool = False, path: str = _PATH) -> None:
        if not i_know_there_is_no_isolation:
            raise SandboxUnavailable(
                "The backend 'process' isolates nothing: commands can do everything you can. For debugging your own "
                "code, pass i_know_there_is_no_isolation=True; otherwise use 'local' or 'docker'."
            )
        self._path = path
        self._relay = Relay()
        self._serial = itertools.count(1)
        self._opened: list[tuple[Path, weakref.ref[ProcessSandbox]]] = []

    def check(self) -> None:
        """Return when processes can be started in groups here."""
        if os.name != "posix":
            raise SandboxUnavailable("The backend 'process' needs a POSIX system.")

    def open(self, spec: SandboxSpec | None = None) -> ProcessSandbox:
        """Make a temporary folder to run commands in."""
        self.check()
        spec = spec or SandboxSpec()
        refuse_snapshot(spec, self.name)
        refuse_image(spec, self.name)
        if spec.mounts:
            raise SandboxUnsupported("The backend 'process' cannot mount anything.")
        if spec.home != HOME:
            raise SandboxUnsupported("The home of a 'process' sandbox is a temporary folder; leave home out.")
        root = Path(tempfile.mkdtemp(prefix=_SERIALS)).resolve()
        sandbox = ProcessSandbox(f"process-{os.getpid()}-{next(self._serial)}", root, spec, self._path, self._relay)
        self._opened = [(path, one) for path, one in self._opened if path.exists()]
        self._opened.append((root, weakref.ref(sandbox)))
        return sandbox

    def leftovers(self) -> list[str]:
        """List the folders of ended sandboxes that are still there."""
        ended = (root for root, sandbox in self._opened if (living := sandbox()) is None or not living.is_alive())
        return [str(root) for root in ended if root.exists()]


class ProcessSandbox(Sandbox):
    """A temporary folder and the child processes started in it."""

    def __init__(self, sandbox_id: str, root: Path, spec: SandboxSpec, path: str, relay: Relay) -> None:
        self.sandbox_id = sandbox_id
        self.home = str(root / "home")
        self._root = root
        self._relay = relay
        self._lock = threading.RLock()
        self._running: set[ProcessJob] = set()
        self._exposures: list[Exposure] = []
        self._reason: str | None = None
        Path(self.workdir).mkdir(parents=True)
        (root / "tmp").mkdir()
        places = {"HOME": self.home, "TMPDIR": str(root / "tmp"), "PATH": path}
        self._environment = {**places, "LANG": "C.UTF-8", "USER": "user", **spec.envs}
        self._free = weakref.finalize(self, shutil.rmtree, str(root), ignore_errors=True)
        self._timer = threading.Timer(spec.timeout_s, _expire, (weakref.ref(self),))
        self._timer.daemon = True
        self._timer.start()

    def _exec(self, command: CommandSpec, timeout: float | None) -> ExecResult:
        with Pipes.open(with_stdin=command.stdin is not None) as pipes:
            try:
                job = self._start(command, pipes)
            except _CannotStart as refusal:
                return refusal.result
            end = job.ended.fileno()
            return run_to_end(command, timeout, pipes, end=end, exit_code=job.wait, kill=job.kill_and_wait)

    def _start_bg(self, command: CommandSpec) -> ProcessJob:
        if command.on_output is None:
            return self._start(command, None)
        pipes = Pipes.open(with_stdin=False)
        try:
            job = self._start(command, pipes)
        except BaseException:
            pipes.close()
            raise
        follow_output(pipes, command.on_output)
        return job

    def read_bytes(self, path: str, *, max_bytes: int | None = None) -> bytes:
        self._check_alive()
        with self._opened(path).open("rb") as file:
            return file.read() if max_bytes is None else file.read(max_bytes)

    def write_bytes(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._check_alive()
        target = self._opened(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(mode)

    def exists(self, path: str) -> bool:
        self._check_alive()
        return self._path(path).exists()

    def pack(self, path: str, archive: Path, *, max_bytes: int = MAX_TREE) -> None:
        self._check_alive()
        try:
            with archive.open("wb") as file:
                trees.pack(str(self._path(path)), file, force=True, max_bytes=max_bytes)
        except BaseException as error:
            archive.unlink(missing_ok=True)
            if isinstance(error, ValueError):
                raise SandboxTreeError(f"{path}: {error}") from error
            raise

    def unpack(self, archive: Path, path: str) -> None:
        self._check_alive()
        try:
            with archive.open("rb") as file:
                trees.unpack(file, str(self._path(path)))
        except ValueError as error:
            raise SandboxError(f"{path}: {error}") from error

    def expose(self, socket: Path, *, port: int) -> str:
        """Open the port on this machine's loopback address and pass it on to a unix socket."""
        self._check_alive()
        try:
            listener = sockets.create_server(("127.0.0.1", port), backlog=256)
        except OSError as error:
            raise SandboxError(f"Port {port} cannot be opened on this machine: {error}") from error
        self._exposures.append(self._relay.add(listener, socket))
        return f"http://127.0.0.1:{port}"

    def stop_processes(self) -> None:
        """Kill the process groups of all commands; a process that left its group survives."""
        self._check_alive()
        self._kill_all()

    def is_alive(self) -> bool:
        """Return whether the sandbox has not ended yet."""
        return self._reason is None

    def kill(self) -> None:
        """Kill the commands and remove the folder."""
        self._end("killed")

    def close(self) -> None:
        """Kill the commands and remove the folder."""
        self._end("closed")

    def expire(self) -> None:
        """End the sandbox because its time is over."""
        self._end("expired")

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        self._timer.cancel()
        self._kill_all()
        for exposure in self._exposures:
            exposure.close()
        self._free()

    def _kill_all(self) -> None:
        with self._lock:
            running, self._running = self._running, set()
        for job in running:
            job.free()

    def _start(self, command: CommandSpec, pipes: Pipes | None) -> ProcessJob:
        self._check_alive()
        argv = command.argv
        ends = list(pipes.theirs) if pipes is not None else []
        stdin = ends.pop(0) if len(ends) == 3 else subprocess.DEVNULL
        stdout, stderr = ends or (subprocess.DEVNULL, subprocess.DEVNULL)
        folder = self._path(command.cwd or self.workdir)
        if not folder.is_dir():
            raise _CannotStart(f"cannot start in {folder}: No such file or directory", 126)
        environment = {**self._environment, **command.envs}
        try:
            with self._lock:
                self._check_alive()
                process = subprocess.Popen(
                    argv, stdin=stdin, stdout=stdout, stderr=stderr, cwd=folder, env=environment, start_new_session=True
                )
                job = ProcessJob(process, self._check_alive)
                self._running.add(job)
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            raise _CannotStart(f"{argv[0]}: {error.strerror}", code) from error
        finally:
            if pipes is not None:
                pipes.close_theirs()
        return job

    def _check_alive(self) -> None:
        if self._reason is not None:
            raise SandboxGone(self.sandbox_id, self._reason)

    def _path(self, path: str) -> Path:
        return Path(self.workdir, path)

    def _opened(self, path: str) -> Path:
        file = self._path(path)
        if file.exists() and not file.is_file() and not file.is_dir():  # a pipe or device: opening it might block
            raise OSError(22, "Invalid argument", path)
        return file


class _CannotStart(SandboxError):
    """A command cannot be started. A job raises this; a command to its end has the result that a shell would have."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(f"The command cannot be started: {reason}")
        self.result = ExecResult(exit_code, "", f"{reason}\n")


class ProcessJob:
    """A child process with its group, and a socket `ended` that becomes readable when it ends.

    The child is reaped after its group is killed, so that no other group can get its number in between.
    """

    def __init__(self, process: subprocess.Popen[bytes], check_alive: Callable[[], None]) -> None:
        self._process = process
        self._check_alive = check_alive
        self.ended, self._end = sockets.socketpair()
        self._code: int | None = None
        self._waiter = threading.Thread(target=self._wait, name="openenv-wait", daemon=True)
        self._waiter.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._waiter.join(timeout)
        if self._code is None:
            raise TimeoutError("the command still runs")
        self._check_alive()
        return self._code

    def kill(self) -> None:
        """Kill the whole group."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill_and_wait(self) -> None:
        """Kill the whole group and wait until the command has ended."""
        self.kill()
        self.wait()

    def free(self) -> None:
        """Kill the whole group and free its resources."""
        self.kill()
        self._waiter.join()
        self._process.wait()
        self.ended.close()

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            result = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            status = 0 if result is None else result.si_status
            self._code = status if result is None or result.si_code == os.CLD_EXITED else 128 + status
        else:
            code = self._process.wait()
            self._code = 128 - code if code < 0 else code
        self._end.close()


def _expire(sandbox: weakref.ref[ProcessSandbox]) -> None:
    living = sandbox()
    if living is not None:
        living.expire()
