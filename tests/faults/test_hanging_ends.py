"""Environments that do not end: slots are given up and reported, other sessions go on, and a shutdown is bounded."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from environments import Idle
from openenv import GenericEnvClient
from openenv.errors import SessionCapacityError
from openenv.server.app import HTTPEnvServer, create_app
from openenv.server.sessions.events import SessionEvent
from openenv.server.sessions.lifetime import SessionLimits
from openenv.server.sessions.manager import SessionManager
from openenv.server.sessions.operations import CALL
from openenv.server.sessions.session import SessionKind, SessionState
from openenv.types import Action, Observation
from servers import Serve
from waiting import holds_for, holds_for_async, wait_until, wait_until_async

SOURCE = Path(sys.modules["openenv"].__file__ or "").resolve().parent.parent
SOON_S = 20.0


class Stuck(Idle):
    """Its `close` hangs until the gate is open, if its reset has said so."""

    gate = threading.Event()
    closed = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.hangs = bool(kwargs.get("hangs"))
        return Observation()

    def close(self) -> None:
        if getattr(self, "hangs", False):
            self.gate.wait()
        type(self).closed += 1


class StuckAsync(Stuck):
    """The same as a coroutine."""

    async def close(self) -> None:  # type: ignore[override]
        if getattr(self, "hangs", False):
            await asyncio.Event().wait()
        type(self).closed += 1


@pytest.fixture(params=["thread", "inline"])
def runner(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def fresh_env() -> Iterator[Callable[[type[Stuck]], type[Stuck]]]:
    """A class with a gate of its own, which is open when the test ends."""
    made: list[type[Stuck]] = []

    def new(base: type[Stuck]) -> type[Stuck]:
        made.append(type(base.__name__, (base,), {"gate": threading.Event(), "closed": 0}))
        return made[-1]

    yield new
    for env_cls in made:
        env_cls.gate.set()


def app_of(env_cls: type[Any], *, sessions: int = 2, runner: str = "thread", **options: Any) -> Any:
    options = {"close_timeout_s": 0.3, **options}
    return create_app(env_cls, Action, Observation, max_concurrent_envs=sessions, runner=runner, **options)


def leave_hanging(url: str, count: int = 1) -> None:
    """Open sessions whose close hangs, and leave."""
    for _ in range(count):
        client = GenericEnvClient(url, protocol="v1").sync()
        client.reset(hangs=True)
        client.close()


# -- slots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_cls", [Stuck, StuckAsync])
def test_a_close_that_hangs_gives_its_slot_up_and_is_reported(
    serve: Serve, fresh_env: Any, env_cls: type[Stuck], runner: str, caplog: pytest.LogCaptureFixture
) -> None:
    env_cls = fresh_env(env_cls)
    server = serve(app_of(env_cls, sessions=1, runner=runner))
    manager = server.manager
    events: list[SessionEvent] = []
    manager.listeners.append(events.append)
    leave_hanging(server.url)
    server.wait_for(lambda: any(event.name == "abandoned" for event in events), SOON_S)
    (name,) = [event.session_id for event in events if event.name == "abandoned"]
    assert f"session {name}" in caplog.text
    assert "close()" in caplog.text
    server.wait_for(lambda: manager.active == 0)
    with GenericEnvClient(server.url).sync() as client:
        client.reset()
        with httpx2.Client(base_url=server.url, trust_env=False) as http:
            assert "openenv_sessions_abandoned_total 1\n" in http.get("/metrics").text
            if env_cls.__name__ == "Stuck":  # a coroutine was cancelled, and has ended
                assert http.get(f"/sessions/{name}").json()["state"] == "abandoned"
                assert 'openenv_sessions{state="abandoned"} 1\n' in http.get("/metrics").text
        assert manager.active == 1
        env_cls.gate.set()
        server.wait_for(lambda: not manager.abandoned)
        assert manager.active == 1, "the slot was given back once"
    server.wait_for(lambda: manager.active == 0)
    with httpx2.Client(base_url=server.url, trust_env=False) as http:
        assert http.get(f"/sessions/{name}").status_code in (404, 410)


def test_the_server_goes_on_while_a_close_hangs(serve: Serve, fresh_env: Any, runner: str) -> None:
    """Sessions on the same thread too: fast ones share one."""
    env_cls = fresh_env(Stuck)
    server = serve(app_of(env_cls, sessions=64, runner=runner, close_timeout_s=60))
    with GenericEnvClient(server.url).sync() as proof:
        proof.reset()
        for _ in range(50):  # now they are known to be fast, and share a thread
            proof.step({})
    hanging = [GenericEnvClient(server.url, protocol="v1").sync() for _ in range(4)]
    for client in hanging:
        client.reset(hangs=True)
    others = [GenericEnvClient(server.url, message_timeout_s=15).sync() for _ in range(4)]
    for client in others:
        client.reset()
    hanging[0].close()
    for client in others:
        client.step({})
        client.close()
    for client in hanging[1:]:
        client.close()
    with GenericEnvClient(server.url, message_timeout_s=15).sync() as late:
        late.reset()
    env_cls.gate.set()
    server.wait_for(lambda: server.manager.active == 0)
    assert env_cls.closed == 10


def test_no_more_sessions_are_abandoned_than_there_are_slots(
    serve: Serve, fresh_env: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Each keeps its environment and a thread: more and more of them would take all memory."""
    env_cls = fresh_env(Stuck)
    server = serve(app_of(env_cls, sessions=2))
    manager = server.manager
    leave_hanging(server.url, 2)
    server.wait_for(lambda: len(manager.abandoned) == 2, SOON_S)
    leave_hanging(server.url, 2)
    server.wait_for(lambda: "keep their slots" in caplog.text, SOON_S)
    assert (len(manager.abandoned), manager.active) == (2, 2)
    env_cls.gate.set()
    server.wait_for(lambda: manager.active == 0 and not manager.abandoned)
    with GenericEnvClient(server.url).sync() as client:
        client.reset()


@pytest.mark.anyio
async def test_a_call_that_never_returns_gives_its_slot_up_after_the_session_timeout(fresh_env: Any) -> None:
    """It may be a long step, so it has as long as a session that is not used."""
    env_cls, gate = fresh_env(Stuck), threading.Event()
    manager = SessionManager(env_cls, SessionLimits(sessions=1, idle_s=0.3, close_s=0.05, closing_wait_s=0.02))
    session = await manager.open(SessionKind.SOCKET)
    running = asyncio.ensure_future(session.run(CALL, lambda _: gate.wait(SOON_S)))
    await asyncio.sleep(0)
    session.close("the client is gone")
    await holds_for_async(0.15, lambda: manager.active == 1)
    with pytest.raises(SessionCapacityError):
        await manager.open(SessionKind.SOCKET)
    await wait_until_async(lambda: manager.active == 0)
    assert session.state is SessionState.ABANDONED
    other = await manager.open(SessionKind.SOCKET)
    assert await other.run(CALL, lambda _: 7) == 7, "on a thread of its own"
    gate.set()
    await running
    await wait_until_async(lambda: session.state is SessionState.CLOSED)
    assert (env_cls.closed, manager.active, manager.abandoned) == (1, 1, {})
    assert await manager.drain() == []


@pytest.mark.anyio
async def test_a_constructor_that_never_returns_gives_its_slot_up_too() -> None:
    gate = threading.Event()

    def build() -> Idle:
        gate.wait(SOON_S)
        return Idle()

    manager = SessionManager(build, SessionLimits(sessions=1, idle_s=0.1))
    manager.env_cls = Idle
    opening = asyncio.ensure_future(manager.open(SessionKind.SOCKET))
    await holds_for_async(0.02, lambda: not opening.done())
    opening.cancel()
    await wait_until_async(lambda: manager.active == 0)
    gate.set()
    await wait_until_async(lambda: not manager.abandoned)
    await manager.drain()


@pytest.mark.anyio
async def test_a_single_requests_environment_that_hangs_gives_its_place_up(fresh_env: Any) -> None:
    env_cls = fresh_env(Stuck)
    manager = SessionManager(env_cls, SessionLimits(sessions=1, close_s=0.1))
    async with manager.borrow() as session:
        await session.run(CALL, lambda env: env.reset(hangs=True))

    async def borrow_again() -> Any:
        async with manager.borrow() as session:
            return await session.run(CALL, lambda env: 1)

    assert await asyncio.wait_for(borrow_again(), SOON_S) == 1
    env_cls.gate.set()
    await manager.drain()


# -- shutdown -----------------------------------------------------------------------------------------------------


def test_a_shutdown_names_what_it_could_not_close(
    serve: Serve, fresh_env: Any, runner: str, caplog: pytest.LogCaptureFixture
) -> None:
    env_cls = fresh_env(Stuck)
    limits = SessionLimits(sessions=4, drain_s=0.3, close_s=60)
    app = FastAPI()
    app.state.openenv_server = HTTPEnvServer(env_cls, Action, Observation, limits=limits, runner=runner)
    app.state.openenv_server.register_routes(app)
    server = serve(app)
    clients = [GenericEnvClient(server.url, protocol="v1").sync() for _ in range(3)]
    for client in clients:
        client.reset(hangs=client is clients[0])
    names = {session.id for session in server.manager.sessions()}
    server.server.should_exit = True
    server.wait_for(lambda: bool(server.manager.unclosed), SOON_S)
    (name,) = server.manager.unclosed
    assert name in names
    server.wait_for(lambda: env_cls.closed == 2)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert any(name in text and "close()" in text for text in said), said
    assert not any(other in text for other in names - {name} for text in said)


PROGRAM = """
import threading, time
from contextlib import asynccontextmanager
from fastapi import FastAPI
from openenv import Action, Environment, Observation, State, create_app

class Stay(Environment[Action, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()
    hangs = False

    def reset(self, hangs=False, **kwargs):
        self.hangs = hangs
        return Observation()

    def step(self, action, **kwargs):
        threading.Event().wait(60)
        return Observation()

    def close(self):
        if self.hangs:
            threading.Event().wait()
        print("closed one", flush=True)

app = create_app(Stay, Action, Observation, max_concurrent_envs=8)
careless = FastAPI()
careless.mount("/inner", app)

@asynccontextmanager
async def lifespan(outer):
    async with app.router.lifespan_context(app):
        yield

outer = FastAPI(lifespan=lifespan)
outer.mount("/inner", app)
"""


class Program:
    """A server in a process of its own, and what it has printed."""

    def __init__(self, folder: Path, *command: str) -> None:
        (folder / "stay.py").write_text(PROGRAM, encoding="utf-8")
        self._log = folder / "log"
        environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{folder}", "COLUMNS": "200"}
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=folder, env=environment, stdout=output, stderr=output
            )
        self.url = self._find_url()

    def _find_url(self) -> str:
        def address() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log
            return re.search(r"(?:ws|http)://(127\.0\.0\.1:\d+)", self.log)

        return f"http://{wait_until(address, 60, lambda: self.log)[1]}"  # type: ignore[index]

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.log, SOON_S, lambda: self.log)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    made: list[Program] = []

    def start(*command: str) -> Program:
        made.append(Program(tmp_path, *command))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait(10)


def opened(url: str, path: str = "", **options: Any) -> str:
    """Open a session over HTTP, and return its name."""
    reply = httpx2.post(
        f"{url}{path}/reset", json=options, headers={"X-OpenEnv-Session": "new"}, trust_env=False, timeout=30
    )
    name: str = reply.headers["X-OpenEnv-Session"]
    return name


SERVE = ("openenv", "serve", "stay.py:app", "--port", "0")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_with_a_status_of_its_own_when_an_environment_is_not_closed(
    program: Callable[..., Program], number: signal.Signals
) -> None:
    server = program(*SERVE)
    stuck, fine = opened(server.url, hangs=True), opened(server.url)
    server.process.send_signal(number)
    assert server.process.wait(60) == 3, server.log
    assert f"session {stuck}: its environment was not closed: close() does not return" in server.log
    assert "Shut down without closing 1 environment(s)" in server.log
    assert fine not in server.log
    assert "closed one" in server.log
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_a_second_sigterm_closes_environments_too_and_does_not_wait_for_calls(
    program: Callable[..., Program],
) -> None:
    server = program(*SERVE)
    opened(server.url)
    busy = opened(server.url)

    def step() -> None:
        with pytest.raises(httpx2.HTTPError):
            httpx2.post(
                f"{server.url}/step",
                json={"action": {}},
                headers={"X-OpenEnv-Session": busy},
                trust_env=False,
                timeout=60,
            ).raise_for_status()

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    wait_until(lambda: httpx2.get(f"{server.url}/sessions/{busy}", trust_env=False).json()["state"] == "busy")
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("running calls have")
    holds_for(0.7, lambda: server.process.poll() is None)  # at once it would be the same signal, sent twice
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(12) == 3, "sooner than the 15 s that calls have"
    assert "closed one" in server.log
    assert f"session {busy}: its environment was not closed: a call (step) does not return" in server.log


@pytest.mark.slow_but_for("app-numbers0")
@pytest.mark.parametrize(
    ("target", "numbers"),
    [
        ("app", [signal.SIGTERM]),
        ("app", [signal.SIGTERM, signal.SIGTERM]),
        ("outer", [signal.SIGTERM]),
        ("careless", [signal.SIGINT]),
    ],
)
def test_plain_uvicorn_closes_environments_too(
    program: Callable[..., Program], target: str, numbers: list[signal.Signals]
) -> None:
    """An application that mounts ours and does not run our lifespan is warned; the exit closes what is left."""
    server = program("uvicorn", f"stay:{target}", "--port", "0")
    path = "" if target == "app" else "/inner"
    opened(server.url, path)
    opened(server.url, path)
    for number in numbers:
        server.process.send_signal(number)
    server.process.wait(30)
    assert server.log.count("closed one") == 2, server.log
    assert server.log.count("lifespan of this application does not run") == (target == "careless")


@pytest.mark.slow
@pytest.mark.parametrize(("target", "number"), [("outer", signal.SIGTERM), ("careless", signal.SIGINT)])
def test_plain_uvicorn_names_what_it_could_not_close(
    program: Callable[..., Program], target: str, number: signal.Signals
) -> None:
    server = program("uvicorn", f"stay:{target}", "--port", "0")
    stuck = opened(server.url, "/inner", hangs=True)
    server.process.send_signal(number)
    server.process.wait(40)
    assert f"session {stuck}: its environment was not closed" in server.log
