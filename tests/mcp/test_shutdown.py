"""A server stops while MCP clients are connected: open streams end, and so does what runs."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from program_interpreters import Interpreter
from waiting import wait_until

HERE = Path(__file__).resolve().parent


class Served:
    """The conformance suite's environment in a process of its own."""

    def __init__(self, interpreter: Any, log: Path, *server: str) -> None:
        self._log = log
        command = [interpreter.python, "-m", *server, "conformance_env:app", "--port", "0"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=interpreter.environment(HERE, {"COLUMNS": "200"}), stdout=output, stderr=output
            )
        self.url = self._find_url()

    def _find_url(self) -> str:
        def address() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log
            return re.search(r"(?:ws|http)://(127\.0\.0\.1:\d+)", self.log)

        return f"http://{wait_until(address, 60, lambda: self.log)[1]}"  # type: ignore[index]

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")


@pytest.fixture
def served(ours: Interpreter, tmp_path: Path) -> Iterator[Served]:
    """Serve it, and end it with the test."""
    server = Served(ours, tmp_path / "log", "openenv", "serve")
    yield server
    server.process.kill()
    server.process.wait(10)


@pytest.fixture(params=["h11", "httptools"])
def on_uvicorn(ours: Interpreter, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """The same with a server that knows nothing of it."""
    server = Served(ours, tmp_path / "log", "uvicorn", "--http", request.param)
    yield server
    server.process.kill()
    server.process.wait(10)


def test_an_open_stream_does_not_keep_the_server_from_stopping(served: Served, handshake: Any) -> None:
    client = handshake(served.url)
    with client.http.stream("GET", "/mcp", headers=client.headers) as stream:
        signs_of_life = stream.iter_raw()
        assert next(signs_of_life).startswith(b":")
        served.process.send_signal(signal.SIGTERM)
        assert all(sign.startswith(b":") for sign in signs_of_life), "the stream ends, and ends well"
    assert served.process.wait(20) == 0
    assert "Traceback" not in served.log


@pytest.mark.slow
def test_an_open_stream_does_not_keep_plain_uvicorn_from_stopping_either(on_uvicorn: Served, handshake: Any) -> None:
    client = handshake(on_uvicorn.url)
    with client.http.stream("GET", "/mcp", headers=client.headers) as stream:
        signs_of_life = stream.iter_raw()
        assert next(signs_of_life).startswith(b":")
        on_uvicorn.process.send_signal(signal.SIGTERM)
        assert all(sign.startswith(b":") for sign in signs_of_life), "the stream ends, and ends well"
    assert on_uvicorn.process.wait(20) in (0, -signal.SIGTERM)
    assert "Traceback" not in on_uvicorn.log


@pytest.mark.slow
def test_a_call_that_runs_is_answered_before_the_server_stops(served: Served, handshake: Any) -> None:
    client = handshake(served.url)
    params = {"name": "test_tool_with_progress", "_meta": {"progressToken": 1}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    with client.http.stream("POST", "/mcp", json=body, headers=client.headers) as response:
        events = response.iter_text()
        assert "notifications/progress" in next(events)
        served.process.send_signal(signal.SIGTERM)
        assert '"result":' in "".join(events)
    assert served.process.wait(20) == 0
    assert "Traceback" not in served.log
