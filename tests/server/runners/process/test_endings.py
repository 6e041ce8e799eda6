"""Servers and their workers end together: drained, killed, or with workers that do not want to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import openenv
from openenv.server.app import HTTPEnvServer
from openenv.server.runners import ProcessOptions
from openenv.server.sessions.lifetime import SessionLimits
from servers import Serve

SUPPORT = Path(__file__).parents[3] / "support"
SOURCE = os.pathsep.join([str(Path(openenv.__file__).resolve().parents[1]), str(SUPPORT)])
ENVIRONMENTS = Path(__file__).with_name("environments.py")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Start a real server, and return it and its address."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, cwd: Path = tmp_path) -> tuple[subprocess.Popen[str], str]:
        log = tmp_path / f"log{len(started)}"
        environment = {**os.environ, "PYTHONPATH": SOURCE}
        with log.open("w", encoding="utf-8") as stderr:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=cwd,
                env=environment,
                stderr=stderr,
                text=True,
                stdin=subprocess.DEVNULL,
            )
        started.append(process)
        for _ in range(6000):
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text(encoding="utf-8"))
            if found:
                return process, found.group()
            assert process.poll() is None, log.read_text(encoding="utf-8")
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.01)
        raise AssertionError("the server did not start")

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def serve_command(*more: str, target: Path | str = f"{ENVIRONMENTS}:Perilous") -> list[str]:
    return ["-m", "openenv", "serve", str(target), "--port", "0", "--runner", "process", *more]


def test_a_server_that_is_killed_leaves_no_worker_behind(
    start: Callable[..., Any],
    connect: Callable[..., Any],
    eventually: Callable[..., Any],
    is_alive: Callable[[int], bool],
    tmp_path: Path,
) -> None:
    process, url = start(*serve_command("--env-processes", "2"))
    idle, busy = connect(url), connect(url)
    pids = {idle.reset().observation["pid"], busy.reset().observation["pid"]}
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    process.kill()
    process.wait(30)
    eventually(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
def test_a_server_that_is_killed_takes_a_worker_with_it_that_is_busy_or_does_not_close(
    start: Callable[..., Any],
    connect: Callable[..., Any],
    eventually: Callable[..., Any],
    is_alive: Callable[[int], bool],
    tmp_path: Path,
) -> None:
    import threading

    process, url = start(*serve_command("--env-processes", "1"))
    client = connect(url, "v1")  # which does not try to come back
    pid = client.reset().observation["pid"]
    client.step({"what": "hang in close"})

    def step() -> None:
        with pytest.raises(Exception):  # noqa: B017 - the connection breaks in one way or another
            client.step({"what": "wait for file", "value": str(tmp_path / "never")})

    thread = threading.Thread(target=step)
    thread.start()
    process.kill()
    process.wait(30)
    eventually(lambda: not is_alive(pid))
    client.close()
    thread.join(90)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_stops_ends_its_workers(
    start: Callable[..., Any], connect: Callable[..., Any], is_alive: Callable[[int], bool], number: signal.Signals
) -> None:
    process, url = start(*serve_command("--env-processes", "2"))
    pids = {connect(url).reset().observation["pid"] for _ in range(2)}
    process.send_signal(number)
    process.wait(60)
    assert not any(map(is_alive, pids))


def test_a_worker_leaves_signals_of_the_whole_group_to_the_server(
    start: Callable[..., Any], connect: Callable[..., Any], is_alive: Callable[[int], bool]
) -> None:
    _, url = start(*serve_command("--env-processes", "1"))
    client = connect(url)
    pid = client.reset().observation["pid"]
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert client.step({}).observation["pid"] == pid


@pytest.mark.slow
def test_a_shutdown_kills_a_worker_that_does_not_close(
    perilous: Callable[..., Any], serve: Serve, envs: ModuleType, connect: Callable[..., Any], is_alive: Any
) -> None:
    from fastapi import FastAPI

    app = FastAPI()
    limits = SessionLimits(sessions=2, drain_s=0.5)
    app.state.openenv_server = HTTPEnvServer(envs.Perilous, envs.Do, envs.Saw, limits=limits, runner="process")
    app.state.openenv_server.register_routes(app)
    from contextlib import ExitStack

    with ExitStack():
        server = serve(app)
        client = connect(server)
        pid = client.reset().observation["pid"]
        client.step({"what": "hang in close"})
        server.server.should_exit = True
        server.wait_for(lambda: not is_alive(pid), 30)


@pytest.mark.slow
def test_a_worker_whose_only_session_does_not_end_is_killed_after_a_while(
    serve: Serve,
    envs: ModuleType,
    connect: Callable[..., Any],
    eventually: Callable[..., Any],
    is_alive: Callable[[int], bool],
) -> None:
    from openenv.server.app import create_app

    app = create_app(envs.Perilous, envs.Do, envs.Saw, max_concurrent_envs=2)
    app.state.openenv_server.service.manager.reconfigure(
        SessionLimits(sessions=2), runner="process", processes=ProcessOptions(sessions_each=1, hang_s=0.3)
    )
    server = serve(app)
    hanging, other = connect(server), connect(server)
    pid = hanging.reset().observation["pid"]
    other.reset()
    hanging.step({"what": "hang in close"})
    hanging.close()
    eventually(lambda: not is_alive(pid))
    eventually(lambda: server.manager.active == 1)
    assert other.step({}).observation["count"] == 1


def test_a_close_that_hangs_gives_its_slot_up_and_its_worker_ends_with_the_other_sessions(
    perilous: Callable[..., Any], connect: Callable[..., Any], eventually: Callable[..., Any], is_alive: Any
) -> None:
    server = perilous(sessions=2, env_processes=1, close_timeout_s=0.3)
    hanging, other = connect(server, "v1"), connect(server)
    pid = hanging.reset().observation["pid"]
    assert other.reset().observation["pid"] == pid
    hanging.step({"what": "hang in close"})
    hanging.close()
    eventually(lambda: len(server.manager.abandoned) == 1)
    assert server.manager.active == 1
    late = connect(server)
    assert late.reset().observation["pid"] != pid, "no session comes to a worker that is to end"
    assert other.step({}).observation["count"] == 1, "and none is lost with it"
    other.close()
    eventually(lambda: not is_alive(pid))
    eventually(lambda: not server.manager.abandoned)
    assert late.step({}).observation["count"] == 1
    assert server.manager.active == 1


PROGRAM = """
import uvicorn
from openenv import Action, Environment, Observation, State, create_app

class Own(Action):
    text: str = ""

class Walk(Environment[Own, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, **kwargs):
        return Observation()

    def step(self, action, **kwargs):
        import os
        return Observation(metadata={"text": action.text, "pid": os.getpid(), "module": type(self).__module__})

app = create_app(Walk, Own, Observation, max_concurrent_envs=4, runner="process", env_processes=1)

if __name__ == "__main__":
    uvicorn.run(app, port=0, log_level="info")
"""


@pytest.mark.slow_but_for("as a program")
@pytest.mark.parametrize("way", ["as a program", "as a file with a name of Python's", "as a folder's module"])
def test_environments_are_found_wherever_they_are_defined(
    start: Callable[..., Any], connect: Callable[..., Any], tmp_path: Path, way: str
) -> None:
    if way == "as a program":
        file = tmp_path / "program.py"
        file.write_text(PROGRAM, encoding="utf-8")
        process, url = start(str(file))
    elif way == "as a file with a name of Python's":
        file = tmp_path / "apart" / "queue.py"
        file.parent.mkdir()
        file.write_text(PROGRAM, encoding="utf-8")
        process, url = start(*serve_command(target=f"{file}:Walk"))
    else:
        folder = tmp_path / "package" / "inner"
        folder.mkdir(parents=True)
        (folder / "walk.py").write_text(PROGRAM, encoding="utf-8")
        process, url = start(*serve_command(target="package.inner.walk:app"))
    client = connect(url)
    client.reset()
    seen = client.step({"text": "ahoj"}).metadata
    assert seen["text"] == "ahoj"
    assert seen["pid"] != process.pid


def test_the_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "closed.py"
    file.write_text(
        PROGRAM.replace("create_app(Walk", "create_app(lambda: Walk()").replace(
            'runner="process", env_processes=1', ""
        ),
        encoding="utf-8",
    )

    def said(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, *serve_command(*arguments, target=file)],
            env={**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stderr

    code, text = said()
    assert code == 1
    assert "top level of a module" in text
    assert "Traceback" not in text
    done = subprocess.run(
        [sys.executable, "-m", "openenv", "serve", str(file), "--env-processes", "2"],
        env={**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--runner process" in done.stderr
