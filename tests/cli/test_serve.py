"""`openenv serve` in a process of its own: banner, ports, mistakes, signals."""

from __future__ import annotations

import functools
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.sync.client import connect

import http_calls
import openenv
from openenv import GenericEnvClient
from openenv.cli.serve import Introduction
from openenv.errors import ExecutionError

Start = Callable[..., Any]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
ENV = """
import pathlib, threading
from openenv import Action, Environment, Observation, State

class Go(Action):
    where: str = "north"

class Seen(Observation):
    place: str = ""

class Walk(Environment[Go, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, **kwargs):
        return Seen(place="GREETING")
    def step(self, action, **kwargs):
        if action.where in ("slowly", "for ever"):
            pathlib.Path("started").touch()
            threading.Event().wait(0.5 if action.where == "slowly" else None)
        return Seen(place=action.where)
    @property
    def state(self):
        return State()
    def close(self):
        pathlib.Path("closed").touch()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "walk.py").write_text(ENV)
    return tmp_path


@pytest.fixture
def started(folder: Path, command: Start) -> Start:
    """Start `openenv serve`."""

    def start(*arguments: str, columns: int = 200, **variables: str) -> Any:
        return command("serve", *arguments, patience_s=30.0, COLUMNS=str(columns), **variables)

    return start


@pytest.fixture
def run(folder: Path, openenv_command: Run) -> Run:
    """Run a command to its end."""
    return functools.partial(openenv_command, timeout_s=60.0, COLUMNS="200")


def test_a_class_in_a_file_is_served_on_any_free_port_and_introduced(started: Start) -> None:
    served = started("walk.py", "--port", "0")
    with GenericEnvClient(served.url).sync() as client:
        assert client.reset().observation["place"] == "GREETING"
        assert client.step({"where": "south"}).observation["place"] == "south"
    for expected in ("Walk is served", "/ws", "/docs", "up to 256, thread runner", "GenericEnvClient"):
        assert expected in served.output
    assert served.stop(signal.SIGINT) == 130


def test_options_are_applied_and_a_quiet_server_prints_no_banner(
    started: Start, folder: Path, free_port: Callable[[], int]
) -> None:
    port = free_port()
    arguments = ("walk.py:Walk", "-p", str(port), "--max-sessions", "1", "--runner", "inline", "--log-level", "warning")
    served = started(*arguments)
    url = f"http://127.0.0.1:{port}"
    served.wait_for(lambda: _answers(url))
    first = GenericEnvClient(url).sync()
    first.reset()
    with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
        GenericEnvClient(url).sync().reset()
    first.close()
    assert "is served" not in served.output


def test_the_grace_period_has_an_option_of_its_own(started: Start, folder: Path) -> None:
    served = started("walk.py", "--port", "0", "--session-timeout", "2", "--grace", "7.5")
    served.wait_for(lambda: "ws://" in served.output)
    match = re.search(r"ws://\S+", served.output)
    assert match is not None
    with connect(match.group(), subprotocols=["openenv.v2.json"], proxy=None) as peer:  # type: ignore[list-item]
        peer.send('{"type":"open","id":1}')
        assert json.loads(peer.recv(timeout=20))["grace_s"] == 7.5


def test_the_banner_has_lines_that_can_be_copied_and_run(
    variables: Callable[..., dict[str, str]], started: Start, folder: Path
) -> None:
    served = started("walk.py", "--port", "0", columns=60)
    served.wait_for(lambda: "env.reset())" in served.output)
    lines = served.output.partition("Try it:\n")[2].splitlines()[:2]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=variables(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "GREETING" in done.stdout, done.stderr
    assert "authentication" not in served.output


def test_a_quiet_server_on_any_port_says_which(started: Start) -> None:
    served = started("walk.py", "--port", "0", "--log-level", "warning")
    served.wait_for(lambda: _answers(served.url))
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+\n", served.output)


@pytest.mark.parametrize(
    ("host", "place", "warned"),
    [
        ("0.0.0.0", "127.0.0.1:80", True),
        ("::", "[::1]:80", True),
        ("192.0.2.1", "192.0.2.1:80", True),
        ("::1", "[::1]:80", False),
        ("localhost", "localhost:80", False),
    ],
)
def test_the_banner_shows_an_address_that_can_be_used_and_warns_of_the_network(
    capsys: pytest.CaptureFixture[str], host: str, place: str, warned: bool
) -> None:
    Introduction("[target]", host, 80).announce(object(), 80)
    shown = capsys.readouterr().err
    assert f"http://{place}" in shown
    assert ("without authentication" in shown) is warned
    assert "[target] is served" in shown


def _answers(url: str) -> bool:
    try:
        return http_calls.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


def test_sigterm_lets_a_running_step_finish_closes_the_environment_and_exits_with_0(
    started: Start, folder: Path
) -> None:
    served = started("walk.py", "--port", "0")
    client = GenericEnvClient(served.url).sync()
    client.reset()
    answers: list[Any] = []
    stepping = threading.Thread(target=lambda: answers.append(client.step({"where": "slowly"}).observation["place"]))
    stepping.start()
    served.wait_for((folder / "started").exists)
    assert served.stop(signal.SIGTERM) == 0, served.output
    stepping.join(30)
    assert answers == ["slowly"]
    assert (folder / "closed").exists()
    assert "Traceback" not in served.output


@pytest.mark.parametrize("fast", ["0", "1"])
def test_sigterm_with_an_open_connection_exits_with_0(started: Start, fast: str) -> None:
    served = started("walk.py", "--port", "0", OPENENV_FAST=fast)
    with GenericEnvClient(served.url).sync() as client:
        client.reset()
        assert served.stop(signal.SIGTERM) == 0, served.output
    assert "Traceback" not in served.output


@pytest.mark.slow
@pytest.mark.parametrize("client_stays", [True, False])
def test_a_second_ctrl_c_ends_it_at_once_and_names_what_is_not_closed(
    started: Start, folder: Path, client_stays: bool
) -> None:
    served = started("walk.py", "--port", "0")
    with connect(f"ws{served.url.removeprefix('http')}/ws", proxy=None) as client:
        client.send('{"type": "step", "data": {"where": "for ever"}}')
        served.wait_for((folder / "started").exists)
        if not client_stays:
            client.socket.shutdown(socket.SHUT_RDWR)
        served.process.send_signal(signal.SIGINT)
        served.wait_for(lambda: "Shutting down" in served.output)
        shown = served.output.index("Shutting down")
        assert served.stop(signal.SIGINT) == 130
    assert "Traceback" not in served.output
    *lines, last = served.output[shown:].splitlines()[1:]
    assert all(line.startswith("INFO:") for line in lines)
    assert last.startswith("Not closed: the environments of the sessions ")


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("missing.py", "no file missing.py"),
        pytest.param("no_such_module", "no folder, file or module 'no_such_module'", marks=pytest.mark.slow),
        (".", "has no openenv.yaml"),
        ("walk.py:Missing", "has no 'Missing'"),
        ("[/nonsense]", "no folder, file or module '[/nonsense]'"),
    ],
)
def test_a_wrong_target_is_one_line_on_stderr_and_exit_code_1(run: Run, folder: Path, target: str, error: str) -> None:
    done = run("serve", target, "--port", "0")
    assert done.returncode == 1
    assert error in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_target_that_fails_to_import_says_why(run: Run, folder: Path) -> None:
    (folder / "broken.py").write_text("import a_package_nobody_has\n")
    done = run("serve", "broken.py", "--port", "0")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert 'broken.py", line 1, in <module>' in lines[1]
    assert lines[-1] == (
        "Error: broken.py cannot be loaded: ModuleNotFoundError: No module named 'a_package_nobody_has'. "
        "Install it with: pip install a_package_nobody_has"
    )


def test_a_busy_port_is_reported_with_a_way_out(run: Run, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", "walk.py", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "cannot listen on" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize(
    "arguments", [("--runner", "warp"), ("--log-level", "loud"), ("--port", "70000"), ("--max-sessions", "0")]
)
def test_a_wrong_option_is_a_usage_error(run: Run, folder: Path, arguments: tuple[str, str]) -> None:
    done = run("serve", "walk.py", *arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr


def test_too_many_sessions_for_the_class_is_one_line(run: Run, folder: Path) -> None:
    (folder / "single.py").write_text(ENV.replace("SESSIONS = True", "SESSIONS = False"))
    done = run("serve", "single.py", "--port", "0", "--max-sessions", "4")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: --max-sessions 4 is too many for Walk")
    assert "SUPPORTS_CONCURRENT_SESSIONS" in done.stderr
    assert "max_concurrent_envs" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_and_version(run: Run, folder: Path) -> None:
    shown = run("serve", "--help")
    assert shown.returncode == 0
    assert "openenv.yaml" in shown.stdout
    assert "--max-sessions" in shown.stdout
    version = run("--version")
    assert (version.returncode, version.stdout.strip()) == (0, f"openenv {openenv.__version__}")
    assert "serve" in run("--help").stdout


@pytest.mark.slow
def test_the_banner_notes_what_a_newcomer_has_left_out(started: Start, folder: Path) -> None:
    (folder / "bare.py").write_text(
        "from openenv import Environment, Observation, State\n"
        "class Bare(Environment):\n"
        "    state = State()\n"
        "    seen = []\n"
        "    def reset(self, **kwargs): return Observation()\n"
        "    def step(self, action, **kwargs): return Observation()\n"
    )
    served = started("bare.py", "--port", "0")
    served.wait_for(lambda: "Try it:" in served.output)
    assert "one session at a time, the web page's included: instances of Bare share seen;" in served.output
    assert "actions have no fields: declare them with Bare(Environment" in served.output
    other = started("walk.py", "--port", "0")
    other.wait_for(lambda: "Try it:" in other.output)
    assert "Note:" not in other.output


def test_an_environment_that_a_file_only_names_is_suggested(run: Run, folder: Path) -> None:
    (folder / "names.py").write_text("from walk import Walk as Stroll\n")
    done = run("serve", "names.py", "--port", "0")
    assert done.returncode == 1
    assert "did you mean names.py:Stroll?" in done.stderr


def test_an_environment_that_cannot_be_built_is_reported_at_the_start(run: Run, folder: Path) -> None:
    (folder / "broken.py").write_text(ENV + "    def __init__(self):\n        self.maze = open('no such maze')\n")
    done = run("serve", "broken.py", "--port", "0")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(
        "Error: Walk cannot be built: FileNotFoundError: [Errno 2] No such file or directory: 'no such maze'"
    )
    assert done.stderr.count("self.maze = open('no such maze')") == 1
    assert "is served" not in done.stderr
    assert "runners/" not in done.stderr  # no frames of ours


def test_a_class_that_says_nothing_has_separate_sessions(started: Start, folder: Path) -> None:
    (folder / "quiet.py").write_text(ENV.replace("    SUPPORTS_CONCURRENT_SESSIONS = True\n", ""))
    served = started("quiet.py", "--port", "0")
    with GenericEnvClient(served.url).sync() as one, GenericEnvClient(served.url).sync() as two:
        one.reset()
        two.reset()
        assert one.step({"where": "south"}).observation["place"] == "south"
        assert [copied.close() for copied in one.fork(2)] == [None, None]
    assert "up to 256" in served.output
    assert "Note:" not in served.output


def test_what_an_environment_raises_is_shown_with_its_place(started: Start, folder: Path) -> None:
    (folder / "failing.py").write_text(
        ENV.replace("        if action.where in", "        1 / 0\n        if action.where in")
    )
    line = next(n for n, text in enumerate((folder / "failing.py").read_text().splitlines(), 1) if "1 / 0" in text)
    served = started("failing.py", "--port", "0", "--log-level", "error")
    with GenericEnvClient(served.url).sync() as env:
        env.reset()
        with pytest.raises(ExecutionError) as caught:
            env.step({"where": "south"})
    assert f"division by zero (ZeroDivisionError at failing.py:{line}, in step)" in str(caught.value)
    assert caught.value.details == {"exception": "ZeroDivisionError", "place": f"failing.py:{line}, in step"}
    served.wait_for(lambda: "ZeroDivisionError" in served.output)
    assert "ERROR:" in served.output
    assert "sessions/operations.py" not in served.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "needs --workers from 2"),
        (("--workers", "9999"), "one per core"),
        (("--workers", "2", "--runner", "process"), ""),  # which of both is named depends on the cores
    ],
)
def test_workers_are_pinned_only_where_each_has_a_core(arguments: tuple[str, ...], expected: str) -> None:
    command = [sys.executable, "-m", "openenv", "serve", "nothing.py", "--pin-workers", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--pin-workers" in done.stderr
    assert expected in done.stderr
