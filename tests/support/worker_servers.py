"""`openenv serve --workers N`, and plain uvicorn, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import openenv
from openenv import GenericEnvClient
from waiting import wait_until

APP = Path(__file__).resolve().parent / "counting_app.py"
PATIENCE_S = 60.0


OURS = ("openenv", "serve")


class WorkersServer:
    """A running server with several workers.

    Args:
        arguments: Options of the command line.
        target: What is served.
        command: The module that serves, and its first arguments.
        variables: Environment variables.
    """

    def __init__(
        self, *arguments: str, target: str = f"{APP}:app", command: Sequence[str] = OURS, **variables: str
    ) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("OPENENV_")}
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command, target, "--port", "0", *arguments],
            env={**kept, "PYTHONPATH": str(Path(openenv.__file__).parents[1]), "PYTHONUNBUFFERED": "1", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
        """Wait until a condition holds, or fail with what the server has printed."""
        return wait_until(condition, patience_s, lambda: self.output, every_s=0.05)

    @property
    def url(self) -> str:
        """Where it serves, once it has said so."""
        match = self.wait_for(lambda: re.search(r"http://127\.0\.0\.1:(\d+)", self.output))
        return f"http://127.0.0.1:{match[1]}"

    @property
    def ready(self) -> dict[str, Any]:
        """What `/ready` answers."""
        answer: dict[str, Any] = json.loads(self._get("/ready"))
        return answer

    def _get(self, path: str) -> str:
        """Read a page over a connection of its own, which any worker may get; the client of the tests takes longer."""
        try:
            with urlopen(f"{self.url}{path}", timeout=PATIENCE_S) as answer:
                return str(answer.read().decode())
        except HTTPError as error:
            return error.read().decode()

    def metric(self, name: str) -> float | None:
        """Return the value of a series in `/metrics`."""
        text = self._get("/metrics")
        match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return None if match is None else float(match[1])

    def client(self, **options: Any) -> Any:
        """Return a blocking client."""
        return GenericEnvClient(self.url, **options).sync()

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to the supervisor; return the exit code."""
        self.process.send_signal(sign)
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(20)
