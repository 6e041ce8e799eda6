"""SIGTERM with a drain timeout: sessions finish, new ones are refused, and then the server ends; under uvicorn, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import http_calls
from openenv import GenericEnvClient
from openenv.errors import OpenEnvError, SessionLost
from openenv.providers.server_process import PortReservation
from openenv.server.options import ServerOptions
from waiting import holds_for, wait_until, wait_until_healthy

Start = Callable[..., "Served"]


class Served:
    """A server process and its address."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process, self.url = process, url

    def ready(self) -> int:
        return http_calls.get(f"{self.url}/ready", trust_env=False).status_code


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a gridworld in a process, as an image does: with `openenv serve`, or with uvicorn."""
    running: list[subprocess.Popen[bytes]] = []

    def serve(with_uvicorn: bool, drain_timeout: str) -> Served:
        reservation = PortReservation("127.0.0.1")
        target, port = "gridworld_env.server.app:app", str(reservation.port)
        words = ["uvicorn", target] if with_uvicorn else ["openenv", "serve", target, "--no-web"]
        environ = {**os.environ, "OPENENV_DRAIN_TIMEOUT": drain_timeout, "OPENENV_MAX_SESSIONS": "4"}
        process = subprocess.Popen([sys.executable, "-m", *words, "--port", port], env=environ)
        running.append(process)
        served = Served(process, f"http://127.0.0.1:{port}")
        wait_until_healthy(served.url, process)
        assert served.ready() == 200
        reservation.release()
        return served

    yield serve
    for process in running:
        process.kill()
        process.wait(20)


@pytest.mark.parametrize("with_uvicorn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sessions_finish_and_new_ones_are_refused(start: Start, with_uvicorn: bool) -> None:
    served = start(with_uvicorn, "120")
    with GenericEnvClient(served.url).sync() as client:
        client.reset(seed=1)
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: served.ready() == 503, 20)
        for _ in range(3):
            client.step({"move": "right"})
        client.reset(seed=2)
        assert client.state()["step_count"] == 0
        with pytest.raises(OpenEnvError), GenericEnvClient(served.url, reconnect_timeout_s=0).sync() as late:
            late.reset()
        assert served.process.poll() is None
    assert served.process.wait(30) in ((0,) if not with_uvicorn else (0, -signal.SIGTERM))


@pytest.mark.slow
def test_a_session_that_does_not_finish_is_lost_with_a_typed_error(start: Start) -> None:
    served = start(False, "0.5")
    with GenericEnvClient(served.url, reconnect_timeout_s=0).sync() as client:
        client.reset(seed=1)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0
        with pytest.raises((SessionLost, OpenEnvError)):
            client.step({"move": "right"})


@pytest.mark.slow
def test_a_second_sigterm_does_not_wait(start: Start) -> None:
    served = start(False, "600")
    with GenericEnvClient(served.url, reconnect_timeout_s=0).sync() as client:
        client.reset(seed=1)
        served.process.send_signal(signal.SIGTERM)
        holds_for(1.0, lambda: served.process.poll() is None)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0


def test_a_drain_timeout_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the drain timeout must be a number of seconds"):
        ServerOptions.build({"drain_timeout_s": -1.0})
    monkeypatch.setenv("OPENENV_DRAIN_TIMEOUT", "30")
    assert ServerOptions.build({}).limits.finish_s == 30
