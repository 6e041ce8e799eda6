"""Fixtures for the command line: commands in processes of their own, with what they have printed so far."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import openenv
from waiting import wait_until, wait_until_healthy


def environ(**more: str) -> dict[str, str]:
    """The variables of the tests without settings of ours, for a terminal of 120 columns without colours."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OPENENV_", "COLUMNS"))}
    fixed = {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", "COLUMNS": "120", "NO_COLOR": "1"}
    return {**kept, "PYTHONPATH": str(Path(openenv.__file__).parents[1]), **fixed, **more}


def _hear_ctrl_c() -> None:
    """Do not inherit that a test run in the background ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Command:
    """A running command of ours."""

    def __init__(self, folder: Path, *arguments: str, patience_s: float, **variables: str) -> None:
        self._patience_s = patience_s
        self.process = subprocess.Popen(
            [sys.executable, "-m", "openenv", *arguments],
            cwd=folder,
            env=environ(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            preexec_fn=_hear_ctrl_c,
        )
        self.output = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Wait until a condition holds, or fail with what the command has printed."""
        return wait_until(condition, self._patience_s, lambda: self.output, every_s=0.02)

    def finds(self, pattern: str) -> str:
        """Wait until something was printed that a pattern matches; return its first group."""
        group: str = self.wait_for(lambda: re.search(pattern, self.output))[1]
        return group

    @property
    def url(self) -> str:
        """Where it serves, once it has said so."""
        port = self.finds(r"http://127\.[0.]*1:(\d+)")
        return f"http://127.0.0.1:{port}"

    def says(self, text: str, times: int = 1) -> None:
        """Wait until something was printed, so many times."""
        self.wait_for(lambda: self.output.count(text) >= times)

    def stop(self, sign: signal.Signals) -> int:
        """Send a signal to all its processes, as a terminal does; return the exit code."""
        os.killpg(self.process.pid, sign)
        return self.process.wait(self._patience_s)

    def end(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start commands in the test's folder; all are ended with the test."""
    running: list[Command] = []

    def start(*arguments: str, folder: Path = tmp_path, patience_s: float = 60.0, **variables: str) -> Command:
        running.append(Command(folder, *arguments, patience_s=patience_s, **variables))
        return running[-1]

    yield start
    for one in running:
        one.end()


@pytest.fixture
def variables() -> Callable[..., dict[str, str]]:
    """The variables that commands are started with, and those that are named."""
    return environ


@pytest.fixture
def openenv_command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command to its end, in the test's folder."""

    def run(*arguments: str, timeout_s: float = 120.0, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "openenv", *arguments],
            cwd=tmp_path,
            env=environ(**variables),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=timeout_s,
            check=False,
        )

    return run


@pytest.fixture
def serve_package() -> Callable[..., contextlib.AbstractContextManager[str]]:
    """Run the `main` of a package `maze_env` in a folder under an interpreter; gives its address."""

    @contextlib.contextmanager
    def served(interpreter: Any, folder: Path, port: int) -> Iterator[str]:
        url, printed = f"http://127.0.0.1:{port}", folder / f"{interpreter.name}.log"
        with printed.open("wb") as log:
            process = subprocess.Popen(
                [interpreter.python, "-m", "maze_env.server.app", "--port", str(port)],
                env=interpreter.environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            wait_until_healthy(url, process, printed)
            yield url
        finally:
            process.terminate()
            process.wait(30)

    return served
