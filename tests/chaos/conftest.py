"""Fixtures for chaos tests: servers in processes of their own, on ports that can be taken again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from program_interpreters import Interpreter
from waiting import wait_until_healthy

START_TIMEOUT_S = 100.0


class ServerProcess:
    """`openenv serve` of a file."""

    def __init__(self, interpreter: Any, file: Path, port: int, *options: str) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = file.with_suffix(f".{port}.log")
        command = [sys.executable, "-m", "openenv", "serve", str(file), "--port", str(port), *options]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=file.parent,
                env=interpreter.environment(file.parent),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_until_healthy(self) -> None:
        """Wait until it answers."""
        wait_until_healthy(self.url, self.process, self._log, timeout_s=START_TIMEOUT_S)

    @property
    def memory_mb(self) -> float:
        """What it holds in memory now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def kill(self) -> None:
        """End it without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


StartServer = Callable[..., ServerProcess]


@pytest.fixture
def start_server(ours: Interpreter, tmp_path: Path, free_port: Callable[[], int]) -> Iterator[StartServer]:
    """Start servers of a source; all are ended with the test."""
    servers: list[ServerProcess] = []

    def start(source: str, *options: str, port: int | None = None, wait: bool = True) -> ServerProcess:
        file = tmp_path / "served_env.py"
        file.write_text(source, encoding="utf-8")
        servers.append(ServerProcess(ours, file, port or free_port(), *options))
        if wait:
            servers[-1].wait_until_healthy()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
