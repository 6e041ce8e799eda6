"""Fixtures that put this package beside the published one: servers and clients of each as processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from waiting import wait_until_healthy

HERE = Path(__file__).resolve().parent
START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class ServerProcess:
    """A server in a process of its own."""

    url: str
    log: Path


@dataclass
class Peer:
    """A process that plays client scripts."""

    process: subprocess.Popen[str]

    def play(self, url: str, calls: list[list[Any]], *, client: str = "typed", use: str = "async") -> list[Any]:
        """Run the calls against a server and return an outcome for each."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        script = {"url": url, "client": client, "use": use, "calls": calls}
        self.process.stdin.write(json.dumps(script) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the client process has ended"
        outcomes: list[Any] = json.loads(line)
        return outcomes


@pytest.fixture(scope="session", params=["ours", pytest.param("published", marks=pytest.mark.published)])
def either(request: pytest.FixtureRequest) -> Any:
    """Each of the two interpreters."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[Callable[..., ServerProcess]]:
    """Start the sample environment under an interpreter; the same server is started once."""
    started: dict[Any, ServerProcess] = {}
    with contextlib.ExitStack() as stack:

        def start(interpreter: Any, how: str = "uvicorn", **extra: str) -> ServerProcess:
            key = (interpreter.name, how, tuple(sorted(extra.items())))
            if key not in started:
                log = tmp_path_factory.mktemp("server") / "log"
                started[key] = stack.enter_context(_server_process(interpreter, how, extra, log, free_port))
            return started[key]

        yield start


@contextlib.contextmanager
def _server_process(
    interpreter: Any, how: str, extra: Mapping[str, str], log: Path, free_port: Callable[[], int]
) -> Iterator[ServerProcess]:
    with log.open("wb") as output:
        for attempt in range(3):
            port = free_port()
            process = subprocess.Popen(
                [interpreter.python, *_command(how, port)],
                env=interpreter.environment(HERE, extra),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            if _healthy(process, port):
                break
            _stop(process)
            assert attempt < 2, log.read_text()
        try:
            yield ServerProcess(f"http://127.0.0.1:{port}", log)
        finally:
            _stop(process)


def _command(how: str, port: int) -> list[str]:
    if how == "serve":
        return ["-m", "openenv", "serve", "sample_env.app:app", "--port", str(port)]
    return ["-m", "uvicorn", "sample_env.app:app", "--host", "127.0.0.1", "--port", str(port)]


def _healthy(process: subprocess.Popen[bytes], port: int) -> bool:
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", process, timeout_s=START_TIMEOUT_S)
    except AssertionError:
        return False
    return process.poll() is None


def _stop(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], Peer]]:
    """Start a client process under an interpreter, once for each."""
    started: dict[str, Peer] = {}
    with contextlib.ExitStack() as stack:

        def start(interpreter: Any) -> Peer:
            if interpreter.name not in started:
                log = stack.enter_context((tmp_path_factory.mktemp("peer") / "log").open("w"))
                process = stack.enter_context(_peer_process(interpreter, log))
                started[interpreter.name] = Peer(process)
            return started[interpreter.name]

        yield start


@contextlib.contextmanager
def _peer_process(interpreter: Any, log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [interpreter.python, str(HERE / "peer.py")],
        env=interpreter.environment(HERE),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        _stop(process)
        assert process.stdout is not None
        process.stdout.close()
