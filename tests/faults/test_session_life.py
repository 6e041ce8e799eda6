"""A session's life: who ends it and when, what that does to its environment, and what the client and the log hear."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI

from openenv.core.env_server.http_server import HTTPEnvServer
from openenv.core.env_server.types import Action, Observation
from openenv.errors import SessionClosedError
from openenv.server.runners import current_dispatcher
from openenv.server.sessions.lifetime import SessionLimits
from openenv.server.sessions.manager import SessionManager
from openenv.server.sessions.operations import CALL, Operation
from openenv.server.sessions.session import SessionKind, SessionState
from openenv.types import ConcurrencyConfig
from servers import Serve
from waiting import holds_for

HEADER = "X-OpenEnv-Session"
Wait = Callable[..., None]


# -- the reaper (W4) ----------------------------------------------------------------------------------------------


def test_the_reaper_spares_a_session_whose_socket_is_open(serve: Serve, probe: Any, peer: Any) -> None:
    """W4: however long an attached client thinks, its environment and its slot stay."""
    server = serve(probe.app(concurrency_config=ConcurrencyConfig(max_concurrent_envs=1, session_timeout=0.1)))
    one = peer(server.port)
    one.reset()
    one.step()
    holds_for(0.6, lambda: probe.count("closed") == 0)
    assert one.step()["data"]["observation"]["count"] == 2
    assert probe.count("closed") == 0
    assert peer(server.port).receive()["data"]["code"] == "CAPACITY_REACHED"


def test_the_reaper_spares_a_session_while_its_step_runs(
    serve: Serve, probe: Any, http: Any, wait_for: Wait, clock: Any
) -> None:
    """W4: a step longer than the idle limit runs to its end, and the session is idle only from then on."""
    app = probe.app(concurrency_config=ConcurrencyConfig(max_concurrent_envs=2, session_timeout=0.2))
    app.state.openenv_server.manager._clock = clock
    server = serve(app)
    client = http(server.url)
    named = {HEADER: client.post("/reset", headers={HEADER: "new"}).headers[HEADER]}
    client.post("/reset", headers={HEADER: "new"})  # unused, so that the reaper is seen to have looked
    probe.hold("step")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.post, "/step", json={"action": {}}, headers=named)
        probe.wait_entered("step")
        clock.now += 10
        wait_for(lambda: probe.count("closed") == 1)
        clock.now += 10
        probe.release("step")
        answer = running.result()
    assert (answer.status_code, answer.json()["observation"]["count"]) == (200, 1)
    assert client.post("/step", json={"action": {}}, headers=named).json()["observation"]["count"] == 2
    clock.now += 10
    wait_for(lambda: probe.alive == 0)


def test_the_reaper_spares_an_http_session_with_a_socket_attached(
    serve: Serve, probe: Any, http: Any, peer: Any, wait_for: Wait, clock: Any
) -> None:
    """W4: attaching a socket holds a named session; letting go starts its idle time."""
    app = probe.app(concurrency_config=ConcurrencyConfig(max_concurrent_envs=2, session_timeout=0.2))
    app.state.openenv_server.manager._clock = clock
    server = serve(app)
    client = http(server.url)
    name = client.post("/reset", headers={HEADER: "new"}).headers[HEADER]
    one = peer(server.port, f"/ws?session_id={name}")
    one.step()
    client.post("/reset", headers={HEADER: "new"})  # unused, so that the reaper is seen to have looked
    clock.now += 10
    wait_for(lambda: probe.count("closed") == 1)
    assert one.step()["data"]["observation"]["count"] == 2
    one.vanish()
    wait_for(lambda: not any(session.is_attached for session in server.manager.sessions()))
    clock.now += 10
    wait_for(lambda: probe.alive == 0)


# -- ends that come early (W5, W7) --------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [True, False])
def test_a_client_that_goes_during_construction_frees_its_slot(
    serve: Serve, probe: Any, peer: Any, wait_for: Wait, hard: bool
) -> None:
    """W5: an environment without a waiting client is closed, and the only slot is free again."""
    server = serve(probe.app(max_concurrent_envs=1))
    probe.hold("construct")
    one = peer(server.port)
    probe.wait_entered("construct")
    one.vanish(hard=hard)
    wait_for(lambda: [session.state for session in server.manager.sessions()] == [SessionState.CLOSING])
    probe.release("construct")
    wait_for(lambda: server.manager.active == 0)
    assert (probe.count("built"), probe.count("closed")) == (1, 1)
    assert peer(server.port).reset()["type"] == "observation"


def test_a_client_that_goes_while_it_waits_for_a_slot_leaves_nothing_behind(
    serve: Serve, probe: Any, peer: Any, wait_for: Wait
) -> None:
    """W5, W7: the slot it waited for goes to the next client and not to a session without an owner."""
    server = serve(probe.app(max_concurrent_envs=1))
    first = peer(server.port)
    first.reset()
    probe.hold("close")
    first.vanish()
    probe.wait_entered("close")
    waiting = peer(server.port)  # gets the slot as soon as the first session has closed
    waiting.send({"type": "reset"})
    holds_for(0.1, lambda: server.manager.active == 1)
    waiting.vanish()
    holds_for(0.1, lambda: server.manager.active == 1)
    probe.release("close")
    wait_for(lambda: server.manager.active == 0)
    wait_for(lambda: probe.alive == 0)
    assert peer(server.port).reset()["type"] == "observation"


@pytest.mark.anyio
async def test_a_cancelled_open_frees_the_slot_and_closes_the_environment(probe: Any, wait_for: Wait) -> None:
    """W5: cancelling the task that opens a session leaves neither a slot nor an environment behind."""
    manager = SessionManager(probe.factory(), SessionLimits(sessions=1))
    probe.hold("construct")
    opening = asyncio.create_task(manager.open(SessionKind.HTTP))
    await asyncio.to_thread(probe.wait_entered, "construct")
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert manager.active == 1  # the constructor still runs, and its environment still needs the slot
    probe.release("construct")
    await asyncio.to_thread(wait_for, lambda: manager.active == 0)
    assert (probe.count("built"), probe.count("closed")) == (1, 1)
    assert (await manager.open(SessionKind.HTTP)).state is SessionState.READY
    await manager.drain()


@pytest.mark.anyio
async def test_a_cancelled_plain_request_closes_its_environment(probe: Any, wait_for: Wait) -> None:
    """W5: the same for an environment that was built for one request."""
    manager = SessionManager(probe.factory(), SessionLimits(sessions=1))
    probe.hold("construct")

    async def request() -> None:
        async with manager.borrow() as session:
            await session.run(CALL, lambda env: None)

    running = asyncio.create_task(request())
    await asyncio.to_thread(probe.wait_entered, "construct")
    running.cancel()
    probe.release("construct")
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.to_thread(wait_for, lambda: probe.count("closed") == 1)
    await request()
    await manager.drain()


@pytest.mark.anyio
async def test_a_session_closed_while_it_is_created_never_over_admits(probe: Any) -> None:
    """W7: its slot stays taken until its environment is closed, and its client gets the error."""
    manager = SessionManager(probe.factory(), SessionLimits(sessions=1, closing_wait_s=0.1))
    probe.hold("construct")
    opening = asyncio.create_task(manager.open(SessionKind.HTTP))
    await asyncio.to_thread(probe.wait_entered, "construct")
    [session] = manager.sessions()
    session.close("asked to")
    assert session.state is SessionState.CLOSING
    with pytest.raises(Exception, match="at capacity"):
        await manager.open(SessionKind.HTTP)
    probe.release("construct")
    with pytest.raises(SessionClosedError, match="asked to"):
        await opening
    await manager.drain()
    assert (probe.count("built"), probe.count("closed"), manager.active) == (1, 1, 0)


@pytest.mark.anyio
async def test_a_session_closed_between_reservation_and_construction_ends(probe: Any) -> None:
    """W7: closing the very moment the slot is reserved is an end like any other, without an environment."""
    manager = SessionManager(probe.factory(), SessionLimits(sessions=1))
    with pytest.raises(SessionClosedError):
        await manager.open(SessionKind.SOCKET, on_reserved=lambda session: session.close("too late"))
    await asyncio.wait_for(manager.drain(), 30)
    assert manager.active == 0
    assert probe.alive == 0


@pytest.mark.anyio
async def test_requests_that_wait_behind_a_close_are_refused(probe: Any) -> None:
    """W7: every request gets exactly one answer, also those that the close overtakes."""
    manager = SessionManager(probe.factory(), SessionLimits(sessions=1))
    session = await manager.open(SessionKind.HTTP)
    probe.hold("state")
    answers: list[BaseException | None] = []
    hub = current_dispatcher()
    for _ in range(3):
        session.submit(READ_STATE, None, lambda _, error: answers.append(error), hub)
    await asyncio.to_thread(probe.wait_entered, "state")
    session.close("asked to")
    session.submit(READ_STATE, None, lambda _, error: answers.append(error), hub)
    probe.release("state")
    await manager.drain()
    await asyncio.sleep(0)
    assert [type(error) for error in answers] == [SessionClosedError] * 3 + [type(None)]
    assert probe.count("state") == 1


def _read_state(env: Any, _: Any) -> Any:
    return env.state


READ_STATE = Operation("state", _read_state)


# -- shutdown (W8) ------------------------------------------------------------------------------------------------


def app_with_lifespan(probe: Any, entered: list[str]) -> FastAPI:
    """An application of a user's own, with a lifespan and two environment servers."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        entered.append("start")
        yield
        entered.append("stop")

    app = FastAPI(lifespan=lifespan)
    server = HTTPEnvServer(probe.factory(), Action, Observation, max_concurrent_envs=8)
    app.state.openenv_server = server
    server.register_routes(app)
    return app


def worker_threads() -> set[threading.Thread]:
    """Threads that run environments."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("openenv-")}


def test_shutdown_closes_every_environment_also_under_a_lifespan_of_the_users(
    serve: Serve, probe: Any, peer: Any, http: Any, wait_for: Wait
) -> None:
    """W8: sockets, named and soft sessions are all closed, the user's lifespan ends, and no thread is left."""
    before = worker_threads()
    entered: list[str] = []
    server = serve(app_with_lifespan(probe, entered))
    for _ in range(3):
        peer(server.port).reset()
    client = http(server.url)
    client.post("/reset", headers={HEADER: "new"})
    client.post("/reset")
    assert (server.manager.active, probe.alive) == (5, 5)
    server.server.should_exit = True
    wait_for(lambda: probe.alive == 0)
    wait_for(lambda: entered == ["start", "stop"])
    wait_for(lambda: not worker_threads() - before)
    assert server.manager.active == 0


def test_shutdown_lets_a_running_step_finish(serve: Serve, probe: Any, peer: Any, wait_for: Wait) -> None:
    """W8: the environment is closed after its step, on the same thread, and never during it."""
    server = serve(probe.app())
    one = peer(server.port)
    one.reset()
    one.send({"type": "step", "data": {"sleep_s": 0.4}})
    probe.wait_entered("step")
    server.server.should_exit = True
    wait_for(lambda: probe.alive == 0)
    assert [event.name for event in probe.events][-3:] == ["step", "close", "closed"]
    assert len(probe.threads(1)) == 1


def test_sessions_of_an_app_with_a_lifespan_expire(serve: Serve, probe: Any, http: Any, wait_for: Wait) -> None:
    """W8: the reaper needs no start-up hook."""
    app = FastAPI(lifespan=_quiet_lifespan)
    limits = SessionLimits(sessions=2, idle_s=0.2)
    server = HTTPEnvServer(probe.factory(), Action, Observation, limits=limits)
    app.state.openenv_server = server
    server.register_routes(app)
    http(serve(app).url).post("/reset", headers={HEADER: "new"})
    wait_for(lambda: probe.alive == 0)


@asynccontextmanager
async def _quiet_lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield


# -- disconnects (W9) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [True, False])
def test_a_client_that_goes_during_a_step_is_noticed_at_once(
    serve: Serve,
    probe: Any,
    peer: Any,
    wait_for: Wait,
    hard: bool,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """W9: the session is closing while its step still runs, the environment closes after it, nothing is printed."""
    server = serve(probe.app(max_concurrent_envs=1))
    one = peer(server.port)
    one.reset()
    probe.hold("step")
    one.send({"type": "step", "data": {}})
    probe.wait_entered("step")
    one.vanish(hard=hard)
    wait_for(lambda: [session.state for session in server.manager.sessions()] == [SessionState.CLOSING])
    assert probe.count("close") == 0
    probe.release("step")
    wait_for(lambda: server.manager.active == 0)
    assert probe.alive == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Traceback" not in "".join(capfd.readouterr())


def test_an_asynchronous_step_is_cancelled_when_its_client_goes(
    serve: Serve, probe: Any, peer: Any, async_env_cls: type[Any], wait_for: Wait, capfd: pytest.CaptureFixture[str]
) -> None:
    """W9: a coroutine does not run on without a client; its environment is closed and the slot is free."""
    server = serve(probe.app(env_cls=async_env_cls, max_concurrent_envs=1))
    one = peer(server.port)
    one.reset()
    one.send({"type": "step", "data": {"sleep_s": 60}})
    probe.wait_entered("step_async")
    one.vanish()
    wait_for(lambda: server.manager.active == 0)
    assert (probe.count("cancelled"), probe.count("closed"), probe.count("step")) == (1, 1, 0)
    assert peer(server.port).reset()["type"] == "observation"
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_client_that_says_goodbye_in_mid_step_ends_its_session(
    serve: Serve, probe: Any, peer: Any, async_env_cls: type[Any], wait_for: Wait
) -> None:
    """W9: frames that were sent ahead of a vanishing client are not run without a client."""
    server = serve(probe.app(max_concurrent_envs=1))
    one = peer(server.port)
    probe.hold("step")
    for _ in range(5):
        one.send({"type": "step", "data": {}})
    probe.wait_entered("step")
    one.vanish(hard=False)
    wait_for(lambda: [session.state for session in server.manager.sessions()] == [SessionState.CLOSING])
    probe.release("step")
    wait_for(lambda: server.manager.active == 0)
    assert probe.count("step") == 1


# -- what is reported (W15) -------------------------------------------------------------------------------------------


def test_why_a_factory_failed_is_on_the_wire_and_in_the_log(
    serve: Serve, probe: Any, peer: Any, http: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """W15: the client reads the cause, the log has the traceback, the slot is free for the next try."""
    probe.fail["construct"] = FileNotFoundError("no level file maze.txt")
    server = serve(probe.app(max_concurrent_envs=1))
    refused = peer(server.port).receive()
    assert refused["data"]["code"] == "FACTORY_ERROR"
    assert "no level file maze.txt" in refused["data"]["reason"]
    answer = http(server.url).post("/reset", headers={HEADER: "new"})
    assert (answer.status_code, answer.json()["code"]) == (500, "FACTORY_ERROR")
    assert "no level file maze.txt" in answer.json()["reason"]
    logged = [record for record in caplog.records if "factory" in record.message and record.exc_info]
    assert logged
    assert "no level file maze.txt" in str(logged[0].exc_info)
    del probe.fail["construct"]
    server.wait_for(lambda: server.manager.active == 0)
    assert peer(server.port).reset()["type"] == "observation"


def test_a_close_that_raises_is_logged_with_its_session(
    serve: Serve, probe: Any, peer: Any, wait_for: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    """W15: a failing `close()` is logged with the session's id and its traceback, and the slot comes back."""
    probe.fail["close"] = RuntimeError("the simulator is stuck")
    server = serve(probe.app(max_concurrent_envs=1))
    one = peer(server.port)
    one.reset()
    [session] = server.manager.sessions()
    one.send({"type": "close"})
    wait_for(lambda: server.manager.active == 0)
    [record] = [record for record in caplog.records if "close()" in record.message]
    assert session.id in record.message
    assert "the simulator is stuck" in str(record.exc_info)
    assert peer(server.port).reset()["type"] == "observation"


@pytest.fixture
def no_logs() -> Iterator[None]:
    """Log nothing: a report cannot carry text that is not Unicode from one test process to another."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Wordless(Exception):
    """An exception that cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error",
    [ValueError("lone surrogate \ud800"), Wordless(), SystemExit(3), KeyboardInterrupt(), StopIteration()],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("where", ["construct", "reset", "step", "state", "close"])
def test_whatever_an_environment_raises_is_answered(
    no_logs: None, serve: Serve, probe: Any, peer: Any, http: Any, where: str, error: BaseException
) -> None:
    """W15: no exception, however odd, leaves a request unanswered, a slot taken or the server dead."""
    server = serve(probe.app(max_concurrent_envs=1))
    probe.fail[where] = error
    one = peer(server.port)
    if where == "construct":
        assert one.receive()["data"]["code"] == "FACTORY_ERROR"
    else:
        frames = {"reset": {"type": "reset"}, "state": {"type": "state"}, "step": {"type": "step", "data": {}}}
        for name, frame in frames.items():
            answer = one.ask(frame)
            assert (answer["type"] == "error") is (name == where)
        one.send({"type": "close"})
    server.wait_for(lambda: server.manager.active == 0)
    client = http(server.url)
    opened = client.post("/reset", headers={HEADER: "new"})
    assert opened.status_code == (500 if where in ("construct", "reset") else 200)
    if where == "step":
        named = {HEADER: opened.headers[HEADER]}
        assert client.post("/step", json={"action": {}}, headers=named).status_code == 500
        client.delete(f"/sessions/{opened.headers[HEADER]}")
    plain = http(server.url).post("/reset")
    assert plain.status_code == (500 if where in ("construct", "reset") else 200)
    assert client.get("/health").status_code == 200
