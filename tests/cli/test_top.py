"""`openenv top`: one reading of a real server, the live view, and mistakes that are told in one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

import openenv
from openenv import Action, Environment, Observation, State, create_app
from openenv.server.access import AccessPolicy


class Move(Action):
    to: str = ""


class Place(Environment[Move, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, **kwargs: Any) -> Observation:
        return Observation()

    def step(self, action: Move, **kwargs: Any) -> Observation:
        if action.to == "nowhere":
            raise RuntimeError("there is no such place")
        return Observation()

    @property
    def state(self) -> State:
        return State()


def environ(**more: str) -> dict[str, str]:
    source = str(Path(openenv.__file__).parents[1])
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OPENENV_")}
    return {**kept, "PYTHONPATH": source, "NO_COLOR": "1", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8", **more}


def top(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "openenv", "top", *arguments],
        env=environ(**more),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


@pytest.fixture
def server(serve: Callable[..., Any]) -> Any:
    return serve(create_app(Place, Move, Observation, env_name="place", max_concurrent_envs=4))


def test_one_reading_shows_sessions_steps_times_and_errors(server: Any) -> None:
    stop = threading.Event()

    def play() -> None:
        with connect(f"ws{server.url.removeprefix('http')}/ws", proxy=None) as socket:
            count = 0
            while not stop.is_set():
                count += 1
                socket.send(json.dumps({"type": "step", "data": {"to": "nowhere" if count % 10 == 0 else "north"}}))
                socket.recv(20)

    player = threading.Thread(target=play)
    player.start()
    try:
        server.wait_for(lambda: server.manager.active == 1)
        done = top(server.url, "--once", "--every", "0.5")
    finally:
        stop.set()
        player.join()
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert re.search(r"^place +ready +up \d+ min \d+ s +thread runner", shown, re.MULTILINE)
    assert "1 of 4" in shown
    found = re.search(r"steps +([\d,]+) per second, ([\d,]+) in all", shown)
    assert found is not None
    assert 0 < int(found[1].replace(",", "")) <= 2 * int(found[2].replace(",", ""))
    assert len(re.findall(r"[\d.]+ (?:µs|ms|s) / [\d.]+ (?:µs|ms|s)", shown.partition("step ")[2])) == 3
    assert re.search(r"EXECUTION_ERROR +\d", shown)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_the_live_view_is_drawn_again_and_again_until_ctrl_c(server: Any, tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "openenv", "top", server.url, "--every", "0.1"],
            env=environ(TERM="xterm", FORCE_COLOR="1"),
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            server.wait_for(lambda: (tmp_path / "shown").read_text().count("0 of 4") >= 3, 30.0)
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(20)
    assert code == 0
    assert "Traceback" not in (tmp_path / "shown").read_text()


def test_a_token_is_sent_and_its_lack_is_told(serve: Callable[..., Any]) -> None:
    app = create_app(Place, Move, Observation)
    app.state.openenv_server.reconfigure(access=AccessPolicy(orchestrator="secret-one", observer="glasses"))
    server = serve(app)
    refused = top(server.url, "--once")
    assert refused.returncode == 1
    assert "asks for a token" in refused.stderr
    assert "OPENENV_TOKEN" in refused.stderr
    for done in (
        top(server.url, "--once", "--every", "0.1", "--token", "glasses"),
        top(server.url, "--once", "--every", "0.1", OPENENV_TOKEN="secret-one"),
    ):
        assert done.returncode == 0, done.stderr
        assert "0 of 1" in done.stdout


class _Page(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"<html>welcome</html>")

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.parametrize(("status", "said"), [(200, "is no OpenEnv server"), (404, "has no metrics (404)")])
def test_another_server_is_not_mistaken_for_one_of_ours(status: int, said: str) -> None:
    page = HTTPServer(("127.0.0.1", 0), type("Page", (_Page,), {"status": status}))
    threading.Thread(target=page.serve_forever, daemon=True).start()
    try:
        done = top(f"http://127.0.0.1:{page.server_port}", "--once")
    finally:
        page.shutdown()
        page.server_close()
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [("http://127.0.0.1:1", "nothing answers at http://127.0.0.1:1"), ("ftp://x", "address of a server")],
)
def test_an_address_where_nobody_is_or_that_is_none_is_one_line(url: str, said: str) -> None:
    began = time.monotonic()
    done = top(url, "--once")
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert time.monotonic() - began < 60


def test_help_teaches() -> None:
    shown = top("--help").stdout
    for word in ("--once", "--every", "--token", "/metrics", "openenv top http"):
        assert word in shown
