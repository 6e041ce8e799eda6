"""Python code that keeps its variables, in a sandbox instead of in this process.

`PythonSession` runs the code; `PyExecutor` (the published interface) and `envs/coding_env` present its replies.

    host: PythonSession  -- unix socket, exposed as a port inside -->  sandbox: python_worker.py
            |  {"id": 3, "code": ...}                                         |  runs the code
            |  {"id": 3, "stdout": ..., "exit_code": 0, ...}  <---------------+
            |
            +-- no reply in time: SIGINT, one more second, then the process is killed
            +-- connection closed: the process has ended; its output files are still there

The worker connects once, and the host accepts one connection only. The code shares the worker's process, so a reply is
checked like any other input from the sandbox.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import secrets
import shutil
import site
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from openenv.errors import SandboxError, SandboxGone, SandboxUnavailable
from openenv.types import CodeExecResult

from . import python_worker
from .base import TIMED_OUT, BgJob, Limits, Mount, Sandboxes, SandboxSpec, backend
from .no_isolation import ProcessSandboxes

logger = logging.getLogger(__name__)

BASE_IMPORTS = (
    *("collections", "datetime", "itertools", "math", "queue", "random"),
    *("re", "stat", "statistics", "time", "unicodedata"),
)
"""Modules that `PyExecutor` allows without `additional_imports`, as in the published package."""

_START_S = 30.0
_NOT_STARTED = 126  # the exit code of shells for a program that cannot be started
_GRACE_S = 1.0
_PORTS = range(20_000, 30_000)
_PORT_TRIES = 5
_LIFE_S = 7 * 24 * 3600.0
_LOST = "The process was replaced: variables, functions and imports of earlier runs are gone."


@dataclass(frozen=True, slots=True)
class PythonOptions:
    """Resources and conventions of a `PythonSession`."""

    limits: Limits = field(default_factory=lambda: Limits(memory_mb=1024, pids=64, cpus=1.0, disk_mb=256))
    life_s: float = _LIFE_S
    output_bytes: int = 1024 * 1024
    """Bytes of each output stream that a reply contains."""
    imports: tuple[str, ...] | None = None
    """Modules that the code may import; None for all, including modules that it writes to its work folder."""
    prints_values: bool = False
    """Print the value of a last expression, as a notebook does. Otherwise, the reply has the value as JSON."""


@dataclass(frozen=True, slots=True)
class PythonReply:
    """Output and end of one piece of code."""

    stdout: str
    stderr: str
    exit_code: int
    error: str = ""
    """The traceback, or the text of `sys.exit`."""
    value: str | None = None
    end: Literal["finished", "interrupted", "timed out", "process ended"] = "finished"
    """After `timed out` and `process ended`, the variables are lost."""


class _WorkerGone(Exception):
    """The process ended, or sent an invalid reply."""


class PythonSession:
    """Runs pieces of code that share variables and files, in one sandbox.

    If the process ends, the next piece of code starts a new one in the same sandbox: variables are lost, files stay.

    Args:
        sandboxes: The backend that opens the sandbox.
        options: Resources and conventions.

    Raises:
        SandboxError: The sandbox or Python does not start.
    """

    def __init__(self, sandboxes: Sandboxes, options: PythonOptions) -> None:
        self._options = options
        self._is_isolated = "isolation" in sandboxes.features
        self._packages = [] if options.imports is None else _package_folders(options.imports)
        is_local = sandboxes.name == "local"
        mounts = tuple(Mount(Path(folder), folder) for folder in self._packages) if is_local else ()
        self._sandbox = sandboxes.open(SandboxSpec(limits=options.limits, mounts=mounts, timeout_s=options.life_s))
        # The sandbox must not outlive a session that is dropped without `close`.
        self._release = weakref.finalize(self, self._sandbox.close)
        self._folder = f"{self._sandbox.home}/.python"
        self._program = f"{self._folder}/{Path(python_worker.__file__).name}"
        self._connection: socket.socket | None = None
        self._job: BgJob | None = None
        self._runs = 0
        try:
            self._sandbox.write_bytes(self._program, Path(python_worker.__file__).read_bytes())
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def is_running(self) -> bool:
        """Whether the process with the variables of earlier runs still runs."""
        return self._connection is not None

    def close(self) -> None:
        """End the sandbox."""
        self._hang_up()
        self._release()

    def run(self, code: str, timeout_s: float, *, interrupts: bool = False) -> PythonReply:
        """Run a piece of code.

        Args:
            code: The code.
            timeout_s: The longest time it may take.
            interrupts: Whether code that takes too long is first interrupted, as by Ctrl-C, which keeps the variables.

        Code may use up the sandbox's processes, so that nothing can be started in it. That is a failure of the code:
        the reply says `timed out` or `process ended`.

        Raises:
            SandboxGone: The sandbox has ended.
        """
        if self._connection is None:
            try:
                self._start()
            except SandboxGone:
                raise
            except SandboxError as error:  # it did start before the code of earlier runs
                self._hang_up()
                return PythonReply("", f"{error}\n", _NOT_STARTED, end="process ended")
        self._runs += 1
        try:
            self._send(code)
            reply = self._receive(timeout_s)
            if reply is None and interrupts:
                late = self._interrupt()
                if late is not None:
                    return _read_reply(late, end="interrupted", exit_code=TIMED_OUT)
            return self._timed_out() if reply is None else _read_reply(reply)
        except _WorkerGone:
            return self._process_ended()
        except BaseException:  # the reply is still due, and would be taken for the reply to the next request
            self._hang_up()
            raise

    def _interrupt(self) -> dict[str, Any] | None:
        """Interrupt the code, and return its reply; None if it does not stop."""
        assert self._job is not None
        try:
            self._sandbox.exec(["kill", "-INT", str(self._job.pid)], timeout=_START_S)
        except SandboxGone:
            raise
        except SandboxError:  # no process is free for `kill`
            return None
        return self._receive(_GRACE_S)

    # -- the process ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the worker and wait until it connects."""
        folder = Path(tempfile.mkdtemp(prefix="openenv-python-"))
        log: list[bytes] = []
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / "socket"))
                listener.listen(1)
                listener.settimeout(_START_S)
                port = self._expose(folder / "socket")
                self._job = self._sandbox.start_bg(self._command(port), on_output=lambda _, chunk: log.append(chunk))
                self._connection, _ = listener.accept()  # one connection only: the code must not open another
            if self._receive(_START_S, number=0) is None:
                raise TimeoutError
        except (TimeoutError, _WorkerGone):
            self._hang_up()
            text = b"".join(log).decode("utf-8", "replace").strip()[-500:]
            raise SandboxError(
                f"Python did not start in the sandbox within {_START_S:g} s: {text or 'no answer'}"
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _expose(self, path: Path) -> int:
        """Expose the socket at a new port: the port of an ended process may still be open."""
        for attempt in range(_PORT_TRIES):
            port = secrets.choice(_PORTS)
            try:
                self._sandbox.expose(path, port=port)
            except SandboxGone:
                raise
            except SandboxError:  # taken by another program, which is likely without isolation only
                if attempt == _PORT_TRIES - 1:
                    raise
            else:
                break
        return port

    def _command(self, port: int) -> list[str]:
        limits = self._options.limits
        options = {
            "port": port,
            "folder": self._folder,
            "output_bytes": self._options.output_bytes,
            "imports": self._options.imports,
            "paths": self._packages,
            "prints_values": self._options.prints_values,
            "memory_mb": None if self._is_isolated else limits.memory_mb,
            "max_file_mb": None if self._is_isolated else limits.disk_mb,
        }
        python = "python3" if self._is_isolated else sys.executable
        return [python, "-I", "-B", self._program, json.dumps(options)]

    def _send(self, code: str) -> None:
        assert self._connection is not None
        self._connection.settimeout(_START_S)
        try:
            self._connection.sendall(json.dumps({"id": self._runs, "code": code}).encode() + b"\n")
        except OSError as error:
            raise _WorkerGone from error

    def _receive(self, seconds: float, *, number: int | None = None) -> dict[str, Any] | None:
        """Return the reply to a request, by default the last one; None if it does not come in time."""
        assert self._connection is not None
        value_bytes = 0 if self._options.prints_values else python_worker.VALUE_BYTES
        longest = 6 * (3 * self._options.output_bytes + value_bytes) + 4096  # JSON: up to six bytes per character
        deadline = time.monotonic() + seconds
        line = bytearray()
        while not line.endswith(b"\n"):
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                chunk = self._connection.recv(65536)
            except TimeoutError:
                return None
            except OSError as error:
                raise _WorkerGone from error
            line += chunk
            if not chunk or len(line) > longest:
                raise _WorkerGone
        try:
            reply: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _WorkerGone from error
        if not isinstance(reply, dict) or reply.get("id") != (self._runs if number is None else number):
            raise _WorkerGone  # the code has written to the connection
        return reply

    def _timed_out(self) -> PythonReply:
        self._hang_up()
        return PythonReply(self._output(1), self._output(2), TIMED_OUT, end="timed out")

    def _process_ended(self) -> PythonReply:
        assert self._job is not None
        try:
            exit_code = self._job.wait(_GRACE_S) or 1
        except TimeoutError:  # it closed the connection and continued
            exit_code = 1
        finally:
            self._hang_up()
        return PythonReply(self._output(1), self._output(2), exit_code, end="process ended")

    def _output(self, descriptor: int) -> str:
        """Return the output that the ended process left in a file."""
        try:
            path = f"{self._folder}/{descriptor}"
            content = self._sandbox.read_bytes(path, max_bytes=self._options.output_bytes)
        except SandboxGone:
            raise
        except (OSError, SandboxError):  # the code removed it, or left no process to read it with
            return ""
        return content.decode("utf-8", "replace")

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._job is not None:
            with contextlib.suppress(SandboxError):
                self._job.kill()
            self._job = None


def _read_reply(
    reply: dict[str, Any], *, end: Literal["finished", "interrupted"] = "finished", exit_code: int | None = None
) -> PythonReply:
    """Check a reply; the code can write to the connection, so the fields may be anything."""
    try:
        value = reply["value"]
        return PythonReply(
            stdout=str(reply["stdout"]),
            stderr=str(reply["stderr"]),
            exit_code=int(reply["exit_code"]) if exit_code is None else exit_code,
            error=str(reply["error"]),
            value=None if value is None else str(value),
            end=end,
        )
    except (ValueError, TypeError, KeyError) as error:
        raise _WorkerGone from error


class PyExecutor:
    """Runs Python code. Variables, functions and imports stay for the next run. Also a context manager.

    The code runs in a local sandbox (bubblewrap): no network and no files of the host. If that cannot run here, the
    code runs in a child process with limits but without isolation, and a warning is logged.

    Args:
        additional_imports: Modules that the code may import besides `BASE_IMPORTS`, each with its submodules; `*`
            allows all. Name an installed package to make it visible inside.
        sandbox: A backend or its name, instead of the local one.
        timeout_s: The longest time of one run; then the process is killed.
        limits: Memory, processes, disk and processors of the sandbox.

    Raises:
        SandboxUnavailable: The backend named by `sandbox` cannot run here.
        ValueError: A limit is out of range.
    """

    def __init__(
        self,
        additional_imports: Sequence[str] | None = None,
        *,
        sandbox: str | Sandboxes | None = None,
        timeout_s: float = 30.0,
        limits: Limits | None = None,
    ) -> None:
        if isinstance(additional_imports, str):
            raise ValueError(f"additional_imports must be a list of module names, not the text {additional_imports!r}")
        if timeout_s <= 0:
            raise ValueError("timeout_s must be greater than 0")
        self.imports = tuple(dict.fromkeys((*BASE_IMPORTS, *(additional_imports or ()))))
        self._backend = _default_backend() if sandbox is None else _checked(sandbox)
        self._timeout_s = timeout_s
        defaults = PythonOptions(imports=self.imports)
        self._options = defaults if limits is None else PythonOptions(limits=limits, imports=self.imports)
        self._lock = threading.Lock()
        self._session: PythonSession | None = None
        self._is_closed = False

    def run(self, code: str) -> CodeExecResult:
        """Run a piece of code.

        Returns:
            The printed text, followed by the value of the last line if it has one (as JSON if possible); the traceback
            of an exception; and the exit code: 0, 1 after an exception, the code of `sys.exit`, or 124 after
            `timeout_s`.

        Raises:
            SandboxError: The sandbox failed, not the code; or the executor was closed.
        """
        with self._lock:
            if self._is_closed:
                raise SandboxGone("python-executor", "closed")
            if self._session is None:
                self._session = PythonSession(self._backend, self._options)
            try:
                return self._result(self._session.run(code, self._timeout_s))
            finally:
                if not self._session.is_running:  # the next run gets a fresh sandbox
                    self._session.close()
                    self._session = None

    def _result(self, reply: PythonReply) -> CodeExecResult:
        if reply.end == "timed out":
            stderr = f"The code did not end within {self._timeout_s:g} s and was killed. {_LOST}"
            return CodeExecResult(stdout="", stderr=stderr, exit_code=TIMED_OUT)
        if reply.end == "process ended":
            stderr = f"The process ended with code {reply.exit_code}. {reply.stderr[-4000:].strip()}\n{_LOST}"
            return CodeExecResult(stdout="", stderr=stderr, exit_code=reply.exit_code)
        stdout = [reply.stdout] if reply.stdout else []
        if reply.value is not None:
            stdout.append(reply.value)
        return CodeExecResult(
            stdout="\n".join(stdout),
            stderr="\n".join(filter(None, (reply.stderr, reply.error))),
            exit_code=reply.exit_code,
        )

    def close(self) -> None:
        """End the process and its sandbox."""
        with self._lock:
            self._is_closed = True
            if self._session is not None:
                self._session.close()
                self._session = None

    def __enter__(self) -> PyExecutor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _default_backend() -> Sandboxes:
    """Return the local backend, or child processes if it cannot run here."""
    try:
        return _checked("local")
    except SandboxUnavailable as error:
        logger.warning("Code runs in a child process with limits, but without isolation from this machine: %s", error)
        return ProcessSandboxes(i_know_there_is_no_isolation=True)


def _checked(sandbox: str | Sandboxes) -> Sandboxes:
    chosen = backend(sandbox) if isinstance(sandbox, str) else sandbox
    chosen.check()
    return chosen


def _package_folders(imports: Sequence[str]) -> list[str]:
    """Return the folders of the installed packages that the code may import."""
    tops = {name.partition(".")[0] for name in imports if name not in BASE_IMPORTS}
    if "*" in tops:
        return [folder for folder in site.getsitepackages() if Path(folder).is_dir()]
    folders: set[str] = set()
    for name in tops - sys.stdlib_module_names:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        if spec.origin is None:  # a namespace package
            folders.update(str(Path(place).parent) for place in spec.submodule_search_locations or ())
        else:
            is_package = spec.submodule_search_locations is not None
            folders.add(str(Path(spec.origin).parents[1 if is_package else 0]))
    return sorted(folders)
