"""Fixtures for the command line: commands in processes of their own, with what they have printed so far."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import openenv


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

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
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

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Wait until a condition holds, or fail with what the command has printed."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)
        return found

    def says(self, text: str, times: int = 1) -> None:
        """Wait until something was printed, so many times."""
        self.wait_for(lambda: self.output.count(text) >= times)

    def stop(self, sign: signal.Signals) -> int:
        """Send a signal to all its processes, as a terminal does; return the exit code."""
        os.killpg(self.process.pid, sign)
        return self.process.wait(60)

    def end(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start commands in the test's folder; all are ended with the test."""
    running: list[Command] = []

    def start(*arguments: str, folder: Path = tmp_path, **variables: str) -> Command:
        running.append(Command(folder, *arguments, **variables))
        return running[-1]

    yield start
    for one in running:
        one.end()


@pytest.fixture
def openenv_command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command to its end, in the test's folder."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "openenv", *arguments],
            cwd=tmp_path,
            env=environ(**variables),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )

    return run
