"""A package under test, served by a process of its own on a free loopback port, and what /proc reports of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
_START_S = 180.0
_STOP_S = 15.0
_NOT_PASSED_ON = ("OPENENV_MODE", "OPENENV_AGENT_TOKEN", "OPENENV_OBSERVER_TOKEN")
CLOSE_FAILED = "close() of the environment failed"


class NotServed(Exception):
    """The package cannot be served; the text is its server's output."""


@dataclass(frozen=True, slots=True)
class Handles:
    """What a process holds open."""

    files: int
    threads: int
    children: int


class ServedPackage:
    """A served package. A context manager: it serves from enter to exit.

    Args:
        folder: The package.
        hash_seed: PYTHONHASHSEED of its process, which decides the iteration order of sets of strings.
    """

    def __init__(self, folder: Path, *, hash_seed: int = 0) -> None:
        self.folder = folder
        self.url = ""
        self.start_s = 0.0
        self._hash_seed = hash_seed
        self._process: subprocess.Popen[bytes] | None = None
        self._home = tempfile.TemporaryDirectory(prefix="openenv-validate-", ignore_cleanup_errors=True)
        self._log = Path(self._home.name, "log")

    def __enter__(self) -> Self:
        started = time.monotonic()
        command = [sys.executable, "-m", "openenv", "serve", str(self.folder), "--port", "0", "--host", "127.0.0.1"]
        command += ["--log-level", "warning", "--log-format", "text", "--grace", "0"]
        environ = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    cwd=self._home.name,
                    env={**environ, "PYTHONHASHSEED": str(self._hash_seed), "PYTHONPATH": _absolute(environ)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            self.url = self._address(started + _START_S)
        except BaseException:
            self._stop()
            raise
        self.start_s = time.monotonic() - started
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()

    def _address(self, deadline: float) -> str:
        assert self._process is not None
        while True:
            ended = self._process.poll() is not None
            if address := _ADDRESS.search(self.output()):
                return address.group()
            if ended:
                raise NotServed(self.output().strip() or f"its server ended with exit code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise NotServed(f"its server did not listen within {_START_S:g} s")
            time.sleep(0.02)

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._home.cleanup()

    def output(self) -> str:
        """Return everything the server has printed."""
        try:
            return self._log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def peak_memory_mb(self) -> float | None:
        """Return the most memory that the server has held so far; None without /proc."""
        peak = re.search(r"VmHWM:\s+(\d+) kB", self._status())
        return None if peak is None else int(peak.group(1)) / 1024

    def handles(self) -> Handles | None:
        """Count what the server holds open; None without /proc."""
        threads = re.search(r"Threads:\s+(\d+)", self._status())
        if threads is None or self._process is None:
            return None
        pid = self._process.pid
        try:
            files = len(os.listdir(f"/proc/{pid}/fd"))
            children = len(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())
        except OSError:
            return None
        return Handles(files, int(threads.group(1)), children)

    def _status(self) -> str:
        try:
            return Path(f"/proc/{self._process.pid}/status").read_text() if self._process is not None else ""
        except OSError:
            return ""


def _absolute(environ: dict[str, str]) -> str:
    """Return PYTHONPATH with absolute paths, for a process in another folder."""
    parts = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return os.pathsep.join(os.path.abspath(part) for part in parts)
