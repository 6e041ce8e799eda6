"""`openenv top`: one reading of a real server, the live view, and mistakes that are reported in one line."""

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
from environments import Move, Place
from openenv import Observation, create_app
from openenv.cli.top import Snapshot, _durations, _is_another, read_snapshot
from openenv.server.access import AccessPolicy

PLACE = """
from openenv import Action, Environment, Observation, State

class Place(Environment[Action, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, **kwargs):
        return Observation()
    def step(self, action, **kwargs):
        return Observation()
    @property
    def state(self):
        return State()
"""


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
    assert re.search(r"^place +ready +up [\dmin ]*\d+ s +thread runner", shown, re.MULTILINE)
    assert "1 of 4" in shown
    match = re.search(r"steps +([\d,]+) per second, ([\d,]+) in all", shown)
    assert match is not None
    assert 0 < int(match[1].replace(",", "")) <= 2 * int(match[2].replace(",", ""))
    assert len(re.findall(r"[\d.]+(?: µs| ms| s)? / [\d.]+ (?:µs|ms|s)", shown.partition("step ")[2])) == 3
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


@pytest.mark.slow
def test_a_server_that_goes_away_is_waited_for_and_its_last_figures_stay(
    command: Callable[..., Any], tmp_path: Path, free_port: Callable[[], int]
) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    port = str(free_port())
    first = command("serve", "place.py", "--port", port)
    first.says("is served")
    watching = command("top", f"http://127.0.0.1:{port}", "--every", "0.2")
    watching.says(f"http://127.0.0.1:{port}")
    assert first.stop(signal.SIGTERM) == 0
    watching.says("Trying again", times=2)
    lost = watching.output[watching.output.index("Trying again") :]
    assert "Last seen" in lost
    watching.wait_for(lambda: "0 of 256" in watching.output.partition("Trying again")[2])
    command("serve", "place.py", "--port", port).says("is served")
    seen = len(watching.output)
    watching.wait_for(lambda: re.search(r"Place +ready", watching.output[seen:].rpartition("Last seen")[2]))
    assert watching.stop(signal.SIGINT) == 0
    assert "Traceback" not in watching.output


def test_another_process_at_the_same_address_is_noticed_by_its_age() -> None:
    def snapshot(uptime: float) -> Snapshot:
        return read_snapshot(f'openenv_info{{environment="x"}} 1\nopenenv_uptime_seconds {uptime}\n')

    assert not _is_another(snapshot(11.0), snapshot(10.0), 1.0)
    assert _is_another(snapshot(0.5), snapshot(10.0), 1.0)
    assert _is_another(snapshot(6.0), snapshot(5.0), 20.0)  # older than the last one was, but too young all the same


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [((2e-5, 6e-5), "20 / 60 µs"), ((1e-4, 1.6e-3), "100 µs / 1.6 ms"), ((0.0014, 0.0091), "1.4 / 9.1 ms")],
)
def test_two_durations_share_their_unit_where_they_can(seconds: tuple[float, float], shown: str) -> None:
    assert _durations(*seconds) == shown


def test_a_token_is_sent_and_its_absence_is_reported(serve: Callable[..., Any]) -> None:
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
    wrong = top(server.url, "--once", "--token", "no-such-one")
    assert wrong.returncode == 1
    assert "does not know this token" in wrong.stderr


class _Page(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"<html>welcome</html>")

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize(("status", "message"), [(200, "is no OpenEnv server"), (404, "has no metrics (404)")])
def test_another_server_is_not_mistaken_for_one_of_ours(status: int, message: str) -> None:
    page = HTTPServer(("127.0.0.1", 0), type("Page", (_Page,), {"status": status}))
    threading.Thread(target=page.serve_forever, daemon=True).start()
    try:
        done = top(f"http://127.0.0.1:{page.server_port}", "--once")
    finally:
        page.shutdown()
        page.server_close()
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://127.0.0.1:1", "nothing answers at http://127.0.0.1:1"), ("ftp://x", "address of a server")],
)
def test_an_invalid_address_or_one_without_a_server_is_one_line(url: str, message: str) -> None:
    began = time.monotonic()
    done = top(url, "--once")
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert time.monotonic() - began < 60


def test_help_teaches() -> None:
    shown = top("--help").stdout
    for word in ("--once", "--every", "--token", "/metrics", "openenv top http"):
        assert word in shown
