"""`openenv serve` for those who look after it: SIGTERM drains and says so on `/ready`, logs can be JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import http_calls
import openenv
from waiting import wait_until

ENV = """
import logging, pathlib
from openenv import Action, Environment, Observation, State
from waiting import wait_until

class Go(Action):
    where: str = "north"

class Walk(Environment[Go, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, **kwargs):
        logging.getLogger("walk").warning("off we go")
        return Observation()
    def step(self, action, **kwargs):
        if action.where == "nowhere":
            raise RuntimeError("a dead end")
        if action.where == "slowly":
            pathlib.Path("started").touch()
            wait_until(pathlib.Path("go on").exists)
        return Observation(reward=1.0)
    @property
    def state(self):
        return State()
    def close(self):
        pathlib.Path("closed").touch()
"""


class Served:
    """A running `openenv serve` and what it has printed."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        source = os.pathsep.join(map(str, (Path(openenv.__file__).parents[1], Path(__file__).parents[1] / "support")))
        kept = {key: value for key, value in os.environ.items() if not key.startswith("OPENENV_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "openenv", "serve", "walk.py", "--port", "0", *arguments],
            cwd=folder,
            env={
                **kept,
                "PYTHONPATH": source,
                "PYTHONUNBUFFERED": "1",
                "COLUMNS": "200",
                "NO_COLOR": "1",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
        return wait_until(condition, timeout_s, lambda: "".join(self.lines), every_s=0.02)

    @property
    def url(self) -> str:
        match = self.wait_for(lambda: re.search(r"http://127\.0\.0\.1:(\d+)", "".join(self.lines)))
        return f"http://127.0.0.1:{match[1]}"

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        self._reader.join(10)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    (tmp_path / "walk.py").write_text(ENV)
    running: list[Served] = []

    def start(*arguments: str, **environment: str) -> Served:
        running.append(Served(tmp_path, *arguments, **environment))
        return running[-1]

    yield start
    for served in running:
        served.end()


def ready(url: str) -> tuple[int, str]:
    response = http_calls.get(f"{url}/ready", trust_env=False)
    return response.status_code, response.json()["status"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_while_a_step_runs_sigterm_turns_ready_off_refuses_sessions_and_lets_the_step_finish(
    started: Callable[..., Served], tmp_path: Path
) -> None:
    served = started()
    address = f"ws{served.url.removeprefix('http')}/ws"
    probe = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))  # its request comes later
    with probe, connect(address, proxy=None) as busy, connect(address, proxy=None) as idle:
        for connection in (busy, idle):
            connection.send('{"type": "reset"}')
            connection.recv(20)
        assert ready(served.url) == (200, "ready")
        busy.send('{"type": "step", "data": {"where": "slowly"}}')
        served.wait_for((tmp_path / "started").exists)
        served.process.send_signal(signal.SIGTERM)
        served.wait_for(lambda: ready(served.url) == (503, "draining"))
        assert http_calls.get(f"{served.url}/health", trust_env=False).status_code == 200
        probe.settimeout(20)
        probe.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert probe.recv(4096).startswith(b"HTTP/1.1 503")
        with connect(address, proxy=None) as late:
            assert json.loads(late.recv(20))["data"]["code"] == "CAPACITY_REACHED"
        with pytest.raises(ConnectionClosed) as ended:
            idle.recv(20)
        assert ended.value.rcvd is not None
        assert ended.value.rcvd.code == 1012
        (tmp_path / "go on").touch()
        assert json.loads(busy.recv(20))["data"]["reward"] == 1.0
    assert served.process.wait(30) == 0, "".join(served.lines)
    assert (tmp_path / "closed").exists()
    assert "Traceback" not in "".join(served.lines)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_client_that_resumes_while_the_server_shuts_down_still_gets_its_reply(
    started: Callable[..., Served], tmp_path: Path
) -> None:
    served = started()
    address = f"ws{served.url.removeprefix('http')}/ws"
    step = '{"type": "step", "id": 1, "data": {"where": "slowly"}}'
    with connect(address, proxy=None, subprotocols=["openenv.v2.json"]) as first:  # type: ignore[list-item]
        first.send('{"type": "open", "id": 1}')
        token = json.loads(first.recv(20))["token"]
        first.send(step)
        served.wait_for((tmp_path / "started").exists)
        served.process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed):
            first.recv(20)
    with connect(address, proxy=None, subprotocols=["openenv.v2.json"]) as second:  # type: ignore[list-item]
        second.send(json.dumps({"type": "open", "id": 2, "resume": token}))
        assert json.loads(second.recv(20))["resumed"] is True
        second.send(step)
        (tmp_path / "go on").touch()
        reply = json.loads(second.recv(20))
        assert (reply["id"], reply["data"]["reward"]) == (1, 1.0)
    assert served.process.wait(30) == 0, "".join(served.lines)
    assert "Traceback" not in "".join(served.lines)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("how", ["option", "variable"])
def test_json_logs_are_nothing_but_json_and_name_sessions(started: Callable[..., Served], how: str) -> None:
    served = started("--log-format", "json") if how == "option" else started(OPENENV_LOG_FORMAT="json")
    with connect(f"ws{served.url.removeprefix('http')}/ws", proxy=None) as connection:
        for frame in ('{"type": "reset"}', '{"type": "step", "data": {"where": "nowhere"}}'):
            connection.send(frame)
            connection.recv(20)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(30) == 0
    served.end()
    lines = [json.loads(line) for line in served.lines]
    (greeting,) = (line for line in lines if line["message"] == "off we go")
    assert (greeting["logger"], greeting["level"], greeting["operation"]) == ("walk", "warning", "reset")
    (failure,) = (line for line in lines if "error" in line)
    assert failure["error"]["message"] == "a dead end"
    assert failure["session"] == greeting["session"]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)


def test_an_unknown_log_format_is_a_usage_error(started: Callable[..., Served]) -> None:
    served = started("--log-format", "xml")
    assert served.process.wait(30) == 2
    served.end()
    assert "--log-format" in "".join(served.lines)
