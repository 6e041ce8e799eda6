"""A Python interpreter in a sandbox, seen from the host. Knows sandboxes; must not know episodes or rewards.

The worker inside connects to a socket of the host, the only thing that it can reach. Code that takes too long is
interrupted, as with Ctrl-C. Code that does not stop, or ends the interpreter, costs the names that were defined: the
next piece runs in a new interpreter with the same files.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openenv.errors import SandboxError
from openenv.sandboxes import BgJob, Limits, Sandboxes, SandboxSpec
from openenv.sandboxes.base import TIMED_OUT

_START_S = 20.0
_GRACE_S = 1.0
_PORTS = range(20_000, 30_000)
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class InterpreterLimits:
    """What the code of one episode may use."""

    step_s: float = 10.0
    episode_s: float = 3600.0
    output_bytes: int = 64 * 1024
    sandbox: Limits = field(default_factory=lambda: Limits(memory_mb=512, pids=64, cpus=1.0, disk_mb=256))


@dataclass(frozen=True, slots=True)
class CodeResult:
    """What a piece of code wrote, and how it ended."""

    stdout: str
    stderr: str
    exit_code: int


class WorkerGone(Exception):
    """The interpreter ended, or sent what is no reply."""


class PythonInterpreter:
    """Runs pieces of code that share their names and files."""

    def __init__(self, backend: Sandboxes, limits: InterpreterLimits) -> None:
        self._limits = limits
        self._connection: socket.socket | None = None
        self._job: BgJob | None = None
        self._sandbox = backend.open(SandboxSpec(limits=limits.sandbox, timeout_s=limits.episode_s))
        self._folder = f"{self._sandbox.home}/.interpreter"
        try:
            self._sandbox.write_text(f"{self._folder}/worker.py", _WORKER.read_text())
            self._start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the sandbox."""
        self._hang_up()
        self._sandbox.close()

    def run(self, code: str, timeout_s: float | None = None) -> CodeResult:
        """Run a piece of code; a shorter limit than the usual one may be set.

        Raises:
            SandboxGone: The sandbox has ended: the episode took too long.
        """
        seconds = self._limits.step_s if timeout_s is None else min(timeout_s, self._limits.step_s)
        if self._connection is None:
            self._start()
        try:
            self._send(code)
            result = self._receive(seconds)
            return result if result is not None else self._interrupt(seconds)
        except WorkerGone:
            return self._ended()

    def _start(self) -> None:
        """Start a worker and wait until it connects; each has a port of its own, as the last one may still be open."""
        folder = Path(tempfile.mkdtemp(prefix="openenv-coding-"))
        errors: list[bytes] = []
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / "socket"))
                listener.listen(1)
                listener.settimeout(_START_S)
                port = secrets.choice(_PORTS)
                self._sandbox.expose(folder / "socket", port=port)
                worker = f"{self._folder}/worker.py"
                command = ["python3", worker, str(port), str(self._limits.output_bytes), self._folder]
                self._job = self._sandbox.start_bg(command, on_output=lambda _, chunk: errors.append(chunk))
                self._connection, _ = listener.accept()  # of one connection only: code must not make another
        except TimeoutError:
            text = b"".join(errors).decode("utf-8", "replace").strip()
            raise SandboxError(f"Python did not start in the sandbox within {_START_S:g} s: {text[-500:]}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _send(self, code: str) -> None:
        assert self._connection is not None
        self._connection.settimeout(_START_S)
        try:
            self._connection.sendall(json.dumps({"code": code}).encode() + b"\n")
        except OSError as error:
            raise WorkerGone from error

    def _receive(self, seconds: float) -> CodeResult | None:
        """Return the reply, or None if there is none in time."""
        assert self._connection is not None
        longest = 12 * self._limits.output_bytes + 4096  # two streams, at six bytes for each character in JSON
        deadline = time.monotonic() + seconds
        line = bytearray()
        while not line.endswith(b"\n"):
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                chunk = self._connection.recv(65536)
            except TimeoutError:
                return None
            except OSError as error:
                raise WorkerGone from error
            line += chunk
            if not chunk or len(line) > longest:
                raise WorkerGone
        return _parse(bytes(line))

    def _interrupt(self, seconds: float) -> CodeResult:
        """Stop code whose time is over; its names stay, if it lets itself be interrupted."""
        assert self._job is not None
        self._sandbox.exec(["kill", "-INT", str(self._job.pid)], timeout=_START_S)
        late = self._receive(_GRACE_S)
        reason = f"TimeoutError: the code took longer than {seconds:g} s"
        if late is not None:
            return CodeResult(late.stdout, f"{late.stderr}{reason} and was interrupted.\n", TIMED_OUT)
        return self._ended(f"{reason}.", TIMED_OUT)

    def _ended(self, reason: str = "", exit_code: int | None = None) -> CodeResult:
        """Return what is left of code that ended the interpreter; the next code starts another one."""
        assert self._job is not None
        if exit_code is None:
            try:
                exit_code = self._job.wait(_GRACE_S) or 1
            except TimeoutError:  # it closed the connection and went on
                exit_code = 1
            reason = f"The interpreter ended with exit code {exit_code}."
        self._hang_up()
        text = f"{self._written('stderr')}{reason} All names are lost; files are kept.\n"
        return CodeResult(self._written("stdout"), text, exit_code)

    def _written(self, stream: str) -> str:
        try:
            content = self._sandbox.read_bytes(f"{self._folder}/{stream}", max_bytes=self._limits.output_bytes)
        except OSError:  # the code removed it
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


def _parse(line: bytes) -> CodeResult:
    """Read a reply: code can write to the connection too, so it may be anything."""
    try:
        fields: dict[str, Any] = json.loads(line)
        return CodeResult(str(fields["stdout"]), str(fields["stderr"]), int(fields["exit_code"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WorkerGone from error
