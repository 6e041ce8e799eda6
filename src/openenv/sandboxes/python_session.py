"""`PyExecutor`: pieces of Python code that share their variables, run in a sandbox instead of in this process."""

from __future__ import annotations

import importlib.util
import json
import logging
import queue
import site
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone, SandboxUnavailable
from openenv.types import CodeExecResult

from . import python_worker
from .base import Limits, Mount, Sandboxes, SandboxSpec, Stream, backend
from .no_isolation import ProcessSandboxes

logger = logging.getLogger(__name__)

BASE_IMPORTS = (
    *("collections", "datetime", "itertools", "math", "queue", "random"),
    *("re", "stat", "statistics", "time", "unicodedata"),
)
"""What code may import without `additional_imports`, as in the published package."""

_START_S = 30.0
_WRITE_S = 10.0
_POLL_S = 0.05
_LIFE_S = 7 * 24 * 3600.0
_TIMED_OUT = 124
_PIPE = "requests"
_LOST = "The process was replaced: variables, functions and imports of earlier runs are gone."


class PyExecutor:
    """Runs Python code. Variables, functions and imports stay for the next run; also a context manager.

    The code runs in a process of its own in a sandbox: by default a local one (bubblewrap: no network, no files of the
    host), and where that cannot run here in a child process with limits only, which a warning says.

    Args:
        additional_imports: Modules that code may import beside `BASE_IMPORTS`, each with its submodules; `*` is all.
            Installed packages are visible inside where they are named.
        sandbox: A backend or its name, in place of the choice above.
        timeout_s: How long one run may take; then its process is killed.
        limits: Memory, processes, disk and processors of the sandbox.

    Raises:
        SandboxUnavailable: The backend that `sandbox` names cannot run here.
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
        self._backend = _available() if sandbox is None else _checked(sandbox)
        self._timeout_s = timeout_s
        self._limits = limits or Limits(memory_mb=1024, pids=64, cpus=1.0, disk_mb=256)
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._runs = 0
        self._is_closed = False

    def run(self, code: str) -> CodeExecResult:
        """Run a piece of code.

        Returns:
            What it printed and, behind that, the value of its last line where it has one (as JSON where it can be);
            the traceback of an exception; and 0, 1 after an exception, the code of `sys.exit`, or 124 after
            `timeout_s`.

        Raises:
            SandboxError: The sandbox failed, not the code; or the executor was closed.
        """
        with self._lock:
            if self._is_closed:
                raise SandboxGone("python-executor", "closed")
            if self._worker is None:
                self._worker = _Worker(self._backend, self._limits, self.imports)
            self._runs += 1
            try:
                return self._worker.run(self._runs, code, self._timeout_s)
            finally:
                if self._worker.is_over:
                    self._worker.close()
                    self._worker = None

    def close(self) -> None:
        """End the process and its sandbox."""
        with self._lock:
            self._is_closed = True
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def __enter__(self) -> PyExecutor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Worker:
    """A process that runs code, in its sandbox.

    Raises:
        SandboxError: It does not start.
    """

    def __init__(self, sandboxes: Sandboxes, limits: Limits, imports: Sequence[str]) -> None:
        is_isolated = "isolation" in sandboxes.features
        folders = _package_folders(imports)
        mounts = tuple(Mount(Path(folder), folder) for folder in folders) if sandboxes.name == "local" else ()
        self._sandbox = sandboxes.open(SandboxSpec(limits=limits, mounts=mounts, timeout_s=_LIFE_S))
        # A sandbox must not outlive an executor that is dropped without `close`.
        self.close = weakref.finalize(self, self._sandbox.close)
        self._output = _Output()
        self.is_over = False
        try:
            source = Path(python_worker.__file__)
            program = f"{self._sandbox.home}/{source.name}"
            self._sandbox.write_bytes(program, source.read_bytes())
            options = {
                "imports": imports,
                "paths": folders,
                "memory_mb": None if is_isolated else limits.memory_mb,
                "max_file_mb": None if is_isolated else limits.disk_mb,
            }
            python = "python3" if is_isolated else sys.executable
            command = [python, "-I", "-B", program, f"{self._sandbox.home}/{_PIPE}", json.dumps(options)]
            self._job = self._sandbox.start_bg(command, on_output=self._output)
            if self._reply(0, _START_S) is None:
                raise SandboxError(f"Python did not start in the sandbox: {self._output.errors() or 'no answer'}")
        except BaseException:
            self.close()
            raise

    def run(self, number: int, code: str, timeout_s: float) -> CodeExecResult:
        """Run a piece of code; `is_over` says afterwards that the process has ended with it."""
        request = json.dumps({"id": number, "code": code}).encode() + b"\n"
        self.is_over = True  # until it has answered
        # Through a shell: opening a pipe whose reader has died blocks, and must not block here.
        sent = self._sandbox.exec(f"cat > '{self._sandbox.home}/{_PIPE}'", stdin=request, timeout=_WRITE_S)
        reply = self._reply(number, timeout_s) if sent.exit_code == 0 else None
        if reply is not None:
            self.is_over = False
            return reply
        try:
            exit_code = self._job.wait(0)
        except TimeoutError:
            stderr = f"The code did not end within {timeout_s:g} s and was killed. {_LOST}"
            return CodeExecResult(stdout="", stderr=stderr, exit_code=_TIMED_OUT)
        stderr = f"The process ended with code {exit_code}. {self._output.errors()}\n{_LOST}"
        return CodeExecResult(stdout="", stderr=stderr, exit_code=exit_code or 1)

    def _reply(self, number: int, timeout_s: float) -> CodeExecResult | None:
        """Return the reply to a request; None where the process ends, the time is over, or the line is no reply."""
        deadline = time.monotonic() + timeout_s
        has_ended = False
        while True:
            try:
                line = self._output.lines.get(timeout=0 if has_ended else _POLL_S)
                document = json.loads(line)
                if document.pop("id") != number:
                    return None  # code of an earlier run has written to the descriptor of replies
                return CodeExecResult.model_validate({"stdout": "", "stderr": "", "exit_code": 0, **document})
            except queue.Empty:
                if has_ended or time.monotonic() > deadline:
                    return None
            except (ValueError, KeyError, AttributeError):
                return None
            try:
                self._job.wait(0)
                has_ended = True  # what it wrote last may still come
                self._output.settle()
            except TimeoutError:
                pass


class _Output:
    """What a worker writes: lines on stdout, and the end of stderr."""

    def __init__(self) -> None:
        self.lines: queue.Queue[bytes] = queue.Queue()
        self._rest = b""
        self._errors = b""

    def __call__(self, stream: Stream, data: bytes) -> None:
        """Take output, in the thread that reads it."""
        if stream == "stderr":
            self._errors = (self._errors + data)[-4000:]
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.lines.put(line)

    def settle(self) -> None:
        """Wait until output that is in the pipe has been read."""
        time.sleep(_POLL_S)

    def errors(self) -> str:
        """Return the end of stderr."""
        return self._errors.decode("utf-8", "replace").strip()


def _available() -> Sandboxes:
    """Return the local backend, or child processes where it cannot run."""
    try:
        return _checked("local")
    except SandboxUnavailable as exc:
        logger.warning("Code runs in a child process with limits, but without isolation from this machine: %s", exc)
        return ProcessSandboxes(i_know_there_is_no_isolation=True)


def _checked(sandbox: str | Sandboxes) -> Sandboxes:
    chosen = backend(sandbox) if isinstance(sandbox, str) else sandbox
    chosen.check()
    return chosen


def _package_folders(imports: Sequence[str]) -> list[str]:
    """Return the folders in which installed packages are that code may import."""
    tops = {name.partition(".")[0] for name in imports if name not in BASE_IMPORTS}
    if "*" in tops:
        return [folder for folder in site.getsitepackages() if Path(folder).is_dir()]
    folders = {}
    for name in tops - sys.stdlib_module_names:
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        for place in places:
            is_package = spec is not None and spec.submodule_search_locations is not None and spec.origin is not None
            folders[str(Path(place).parent.parent if is_package else Path(place).parent)] = True
    return sorted(folders)
