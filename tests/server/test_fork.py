"""Forks of running episodes over real sockets: sessions of their own, all or none, and every failure typed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from websockets.sync.client import connect

from environments import fresh
from forked_environments import Bookkeeper, Forgetful, Go, Locked, Seen, Single, Walker, go
from openenv import GenericEnvClient
from openenv.errors import (
    NotForkable,
    ProtocolError,
    RequestTimeout,
    RequestValidationError,
    SessionCapacityError,
    SessionLost,
)
from openenv.server.access import AccessPolicy
from openenv.server.app import HTTPEnvServer, create_app, new_application
from openenv.server.sessions import lifetime
from openenv.server.sessions.lifetime import SessionLimits
from servers import RunningServer, Serve
from waiting import holds_for_async, wait_until, wait_until_async

RUNNERS = ("thread", "inline")


@pytest.fixture
def start(serve: Serve) -> Callable[..., RunningServer]:
    """Serve an environment, by default in threads and with eight slots."""

    def start(env_cls: type[Any] = Walker, *, runner: str = "thread", **limits: Any) -> RunningServer:
        server = HTTPEnvServer(env_cls, Go, Seen, runner=runner, limits=SessionLimits(**{"sessions": 8, **limits}))
        app = new_application()
        app.state.openenv_server = server
        server.register_routes(app)
        return serve(app)

    return start


@pytest.fixture
def client() -> Iterator[Callable[..., Any]]:
    """Make blocking clients, which are closed when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda server, **options: stack.enter_context(GenericEnvClient(server.url, **options).sync())


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("env_cls", [Walker, Bookkeeper])
def test_forks_go_on_as_their_parent_does(
    start: Callable[..., Any], client: Callable[..., Any], runner: str, env_cls: type[Any]
) -> None:
    server = start(env_cls, runner=runner)
    env = client(server)
    env.reset(seed=3)
    go(env, 1, 2)
    forks = env.fork(3)
    assert server.manager.active == 4
    assert [go(one, 4, 5, 6) for one in forks] == [go(env, 4, 5, 6)] * 3
    go(forks[0], 50)
    assert go(forks[1], 7) == go(env, 7)
    assert len({one.resume_token for one in (env, *forks)}) == 4
    for one in forks:
        one.close()
    wait_until(lambda: server.manager.active == 1)


def test_forks_are_awaited_too(start: Callable[..., Any]) -> None:
    server = start()

    async def play() -> list[Any]:
        async with GenericEnvClient(server.url) as env:
            await env.reset(seed=3)
            forks = await env.fork(2)
            steps = [await one.step({"by": 2}) for one in (env, *forks)]
            for one in forks:
                await one.close()
            return [(step.observation["at"], step.observation["luck"]) for step in steps]

    first, *others = asyncio.run(play())
    assert others == [first, first]


def test_a_fork_outlives_its_parent_and_can_be_forked(start: Callable[..., Any], client: Callable[..., Any]) -> None:
    server = start()
    with GenericEnvClient(server.url).sync() as env:
        env.reset(seed=3)
        go(env, 1)
        (child,) = env.fork()
    wait_until(lambda: server.manager.active == 1)
    (grandchild,) = child.fork(1)
    assert go(grandchild, 2, 3) == go(child, 2, 3)
    child.close()
    grandchild.close()


def test_a_fork_survives_the_loss_of_its_connection(start: Callable[..., Any], client: Callable[..., Any]) -> None:
    env = client(start())
    env.reset(seed=3)
    (child,) = env.fork(1)
    token = child.detach()
    again = GenericEnvClient(env.async_client.base_url, resume_token=token).sync()
    assert go(again, 2) == go(env, 2)
    again.close()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("env_cls", [Walker, Bookkeeper])
def test_a_snapshot_is_restored_any_number_of_times(
    start: Callable[..., Any], client: Callable[..., Any], runner: str, env_cls: type[Any]
) -> None:
    server = start(env_cls, runner=runner)
    env = client(server)
    env.reset(seed=3)
    go(env, 1)
    snapshot = env.snapshot()
    ways = []
    for _ in range(3):
        env.restore(snapshot)
        ways.append(go(env, 2, 3))
    assert ways == [ways[0]] * 3
    assert ways[0][-1][0] == 6
    assert server.manager.active == 2
    snapshot.close()
    assert go(env, 1)[0][0] == 7


def test_a_snapshot_fits_into_a_full_server(start: Callable[..., Any], client: Callable[..., Any]) -> None:
    env = client(start(sessions=2))
    env.reset(seed=3)
    snapshot = env.snapshot()
    go(env, 1)
    env.restore(snapshot)
    assert go(env, 4)[0][0] == 4
    snapshot.close()


def test_restored_environments_are_closed(start: Callable[..., Any], client: Callable[..., Any]) -> None:
    class Closing(Walker):
        closed = 0

        def close(self) -> None:
            type(self).closed += 1

    server = start(Closing)
    env = client(server)
    env.reset(seed=3)
    snapshot = env.snapshot()
    env.restore(snapshot)
    wait_until(lambda: Closing.closed == 1)
    snapshot.close()
    env.close()
    wait_until(lambda: Closing.closed == 3)


@pytest.mark.parametrize("wait_s", [None, 0.3])
def test_either_all_forks_are_made_or_none(
    start: Callable[..., Any], client: Callable[..., Any], wait_s: float | None
) -> None:
    server = start(sessions=3)
    env = client(server, wait_s=wait_s)
    env.reset(seed=3)
    with pytest.raises(SessionCapacityError):
        env.fork(3)
    wait_until(lambda: server.manager.active == 1)
    assert [go(one, 1) for one in env.fork(2)] == [go(env, 1)] * 2


def test_a_fork_waits_for_slots_as_long_as_its_client_says(
    start: Callable[..., Any], client: Callable[..., Any]
) -> None:
    server = start(sessions=2)
    env, other = client(server, wait_s=30.0), client(server)
    env.reset(seed=3)
    other.reset()
    threading.Timer(0.2, other.close).start()
    (child,) = env.fork(1)
    assert go(child, 1) == go(env, 1)


def test_a_fork_waits_for_the_step_that_runs(start: Callable[..., Any]) -> None:
    gated = fresh(Walker)
    server = start(gated)

    async def play() -> tuple[int, int]:
        async with GenericEnvClient(server.url) as env:
            await env.reset(seed=3)
            step = asyncio.create_task(env.step({"by": 5, "wait": True}))
            await asyncio.to_thread(gated.entered.wait, 30)
            (session,) = server.manager.sessions()  # calls of one client take turns anyhow
            fork = asyncio.run_coroutine_threadsafe(server.manager.fork(session, 1, kind=session.kind), session.loop)
            await holds_for_async(0.1, lambda: not fork.done())
            gated.gate.set()
            after = (await step).observation["at"]
            (copied,) = await asyncio.wrap_future(fork)
            return after, copied.env.at

    assert asyncio.run(play()) == (5, 5)


def test_a_parent_that_is_closed_takes_the_forks_that_wait_with_it(start: Callable[..., Any]) -> None:
    gated = fresh(Walker)
    server = start(gated)

    async def play() -> BaseException:
        async with GenericEnvClient(server.url) as env:
            await env.reset(seed=3)
            step = asyncio.create_task(env.step({"wait": True}))
            await asyncio.to_thread(gated.entered.wait, 30)
            (session,) = server.manager.sessions()
            fork = asyncio.run_coroutine_threadsafe(server.manager.fork(session, 2, kind=session.kind), session.loop)
            await holds_for_async(0.1, lambda: not fork.done())
            session.close("closed by a test")
            gated.gate.set()
            await step  # it had begun
            error = await asyncio.to_thread(fork.exception, 30)
            assert error is not None
            return error

    assert asyncio.run(play()).code == "SESSION_CLOSED"  # type: ignore[attr-defined]
    wait_until(lambda: server.manager.active == 0)


def test_a_fork_that_is_cancelled_while_it_waits_leaves_nothing(start: Callable[..., Any]) -> None:
    server = start(sessions=2)

    async def play() -> None:
        async with GenericEnvClient(server.url, wait_s=60.0) as env, GenericEnvClient(server.url) as other:
            await env.reset(seed=3)
            await other.reset()
            forking = asyncio.create_task(env.fork(1))
            await wait_until_async(lambda: server.manager.queue)
            forking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await forking
            await asyncio.to_thread(wait_until, lambda: not server.manager.queue)
            assert server.manager.active <= 2
            with pytest.raises(SessionLost):  # as after every request that was interrupted
                await env.step({"by": 1})

    asyncio.run(play())
    wait_until(lambda: server.manager.active == 0)


def test_a_fork_that_does_not_come_in_time_loses_the_episode(
    start: Callable[..., Any], in_a_hurry: Callable[..., Any]
) -> None:
    gated = fresh(Walker)

    def wait(env: Walker) -> Any:
        assert gated.gate.wait(30)
        return {}

    gated.snapshot, gated.restore = wait, lambda env, snapshot: None
    server = start(gated)
    with GenericEnvClient(server.url).sync() as env:
        env.reset(seed=3)
        with in_a_hurry(env, 0.2), pytest.raises(RequestTimeout):
            env.fork(1)
        gated.gate.set()
    wait_until(lambda: server.manager.active == 0)


@pytest.mark.parametrize(
    ("env_cls", "why"),
    [(Locked, "lock"), (Single, "SUPPORTS_CONCURRENT_SESSIONS"), (Forgetful, "what was it")],
)
def test_what_cannot_be_forked_says_so_and_goes_on(
    start: Callable[..., Any],
    client: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    env_cls: type[Any],
    why: str,
) -> None:
    server = start(env_cls, sessions=1 if env_cls is Single else 4)
    env = client(server)
    env.reset(seed=3)
    with pytest.raises(NotForkable, match=why):
        env.fork(2)
    assert go(env, 2)[0][0] == 2
    (record,) = [one for one in caplog.records if "fork failed" in one.getMessage()]
    assert bool(record.exc_info) is (env_cls is Forgetful)  # the only one with an error in the author's code
    wait_until(lambda: server.manager.active == 1)


def test_the_texts_of_environments_are_kept_from_clients_where_that_is_asked_for(
    serve: Serve, client: Callable[..., Any]
) -> None:
    env = client(serve(create_app(Forgetful, Go, Seen, max_concurrent_envs=4, redact_errors=True)))
    env.reset()
    with pytest.raises(NotForkable, match="log has more") as caught:
        env.fork(1)
    assert "what was it" not in str(caught.value)


def test_a_restore_that_fails_ends_its_session(start: Callable[..., Any], client: Callable[..., Any]) -> None:
    class Once(Bookkeeper):
        fails = False

        def restore(self, snapshot: Any) -> None:
            if type(self).fails:
                raise KeyError("half way")
            super().restore(snapshot)

    server = start(Once)
    env = client(server)
    env.reset(seed=3)
    snapshot = env.snapshot()
    Once.fails = True
    with pytest.raises(NotForkable, match="half way"):
        env.restore(snapshot)
    with pytest.raises(SessionLost, match="could not be restored"):
        env.step({"by": 1})
    snapshot.close()


def test_a_snapshot_that_is_gone_says_so_and_the_session_goes_on(
    start: Callable[..., Any], client: Callable[..., Any]
) -> None:
    env = client(start())
    env.reset(seed=3)
    snapshot = env.snapshot()
    token = snapshot.resume_token
    snapshot.close()
    with pytest.raises(NotForkable, match="gone"):
        env.restore(token)
    with pytest.raises(ValueError, match="no session"):
        env.restore(snapshot)
    with pytest.raises(NotForkable, match="gone"):
        env.restore("no.such.token")
    assert go(env, 2)[0][0] == 2


def test_sessions_are_not_restored_from_each_other_at_once(start: Callable[..., Any]) -> None:
    gated = fresh(Walker)
    server = start(gated)

    async def play() -> list[Any]:
        async with GenericEnvClient(server.url) as one, GenericEnvClient(server.url) as other:
            for env in (one, other):
                await env.reset(seed=3)
            first, second = server.manager.sessions()

            async def both() -> list[Any]:
                restores = (server.manager.restore(first, second), server.manager.restore(second, first))
                return await asyncio.gather(*restores, return_exceptions=True)

            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(both(), first.loop))

    outcomes = asyncio.run(play())
    assert any(isinstance(outcome, RequestValidationError) for outcome in outcomes)
    assert any(outcome is None for outcome in outcomes)


def test_a_session_is_not_restored_from_itself(start: Callable[..., Any], client: Callable[..., Any]) -> None:
    env = client(start())
    env.reset(seed=3)
    with pytest.raises(RequestValidationError, match="from itself"):
        env.restore(env)
    assert go(env, 2)[0][0] == 2


def test_v1_has_no_forks(start: Callable[..., Any], client: Callable[..., Any]) -> None:
    env = client(start(), protocol="v1")
    env.reset(seed=3)
    with pytest.raises(ProtocolError, match="v2"):
        env.fork(2)
    assert go(env, 2)[0][0] == 2


def test_forks_that_no_client_attaches_to_are_freed(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "UNCLAIMED_S", 0.3)
    server = start(grace_s=0.2)
    with connect(server.url.replace("http", "ws") + "/ws", subprotocols=["openenv.v2.json"]) as peer:  # type: ignore[list-item]
        ask(peer, type="open", id=1)
        ask(peer, type="reset", id=1, data={"seed": 3})
        assert len(ask(peer, type="fork", id=2, data={"n": 3})["data"]["sessions"]) == 3
        assert server.manager.active == 4
        wait_until(lambda: server.manager.active == 1)


def ask(peer: Any, **message: Any) -> dict[str, Any]:
    peer.send(json.dumps(message))
    reply: dict[str, Any] = json.loads(peer.recv(timeout=10))
    return reply


def test_a_repeated_fork_is_answered_and_not_made_again(start: Callable[..., Any]) -> None:
    server = start()
    address = server.url.replace("http", "ws") + "/ws"
    with connect(address, subprotocols=["openenv.v2.json"]) as peer:  # type: ignore[list-item]
        token = ask(peer, type="open", id=1)["token"]
        ask(peer, type="reset", id=1, data={"seed": 3})
        first = ask(peer, type="fork", id=2, data={"n": 2})
    with connect(address, subprotocols=["openenv.v2.json"]) as peer:  # type: ignore[list-item]
        ask(peer, type="open", id=1, resume=token)
        again = ask(peer, type="fork", id=2, data={"n": 2})
        assert again == first
        assert ask(peer, type="fork", id=2, data={"n": 3})["data"]["code"] == "VALIDATION_ERROR"
        assert server.manager.active == 3


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 1, "wait_s": -1}, "wait_s"),
        ({"m": 1}, "m"),
    ],
)
def test_a_fork_that_makes_no_sense_is_refused(start: Callable[..., Any], data: Any, where: str) -> None:
    server = start()
    with connect(server.url.replace("http", "ws") + "/ws", subprotocols=["openenv.v2.json"]) as peer:  # type: ignore[list-item]
        ask(peer, type="open", id=1)
        refused = ask(peer, type="fork", id=1, data=data)["data"]
        assert refused["code"] == "VALIDATION_ERROR"
        assert refused["errors"][0]["loc"] == [where]
        assert ask(peer, type="restore", id=2, data={"from": 5})["data"]["code"] == "VALIDATION_ERROR"
        assert ask(peer, type="reset", id=3)["type"] == "observation"


def test_agents_do_not_fork(serve: Serve) -> None:
    access = AccessPolicy(orchestrator="owner", agent="helper")
    server = serve(create_app(Walker, Go, Seen, max_concurrent_envs=4, access=access))
    header = {"Authorization": "Bearer helper"}
    url = server.url.replace("http", "ws") + "/ws"
    with connect(url, subprotocols=["openenv.v2.json"], additional_headers=header) as peer:  # type: ignore[list-item]
        ask(peer, type="open", id=1)
        for kind, data in (("fork", {"n": 1}), ("restore", {"from": "x"})):
            assert ask(peer, type=kind, id=2, data=data)["data"]["code"] == "FORBIDDEN"


# -- over HTTP ------------------------------------------------------------------------------------------------------


def test_a_session_of_http_is_forked_once_per_key(start: Callable[..., Any]) -> None:
    server = start()
    with httpx2.Client(base_url=server.url, trust_env=False) as http:
        opened = http.post("/reset", json={"seed": 3}, headers={"X-OpenEnv-Session": "new"})
        name = opened.headers["X-OpenEnv-Session"]

        def step(session: str) -> Any:
            seen = http.post("/step", json={"action": {"by": 2}}, headers={"X-OpenEnv-Session": session}).json()
            return seen["observation"]["at"], seen["observation"]["luck"]

        key = {"Idempotency-Key": "a-key-of-this-fork"}
        first = http.post(f"/sessions/{name}/fork", json={"n": 2}, headers=key)
        assert first.status_code == 200
        assert http.post(f"/sessions/{name}/fork", json={"n": 2}, headers=key).json() == first.json()
        assert http.post(f"/sessions/{name}/fork", json={"n": 3}, headers=key).status_code == 422
        one, other = first.json()["sessions"]
        assert step(one["session_id"]) == step(name)
        token = {"token": other["token"]}
        assert http.post(f"/sessions/{name}/restore", json=token).json() == {"session_id": name, "restored": True}
        assert step(name) == step(other["session_id"])
        assert http.post(f"/sessions/{name}/restore", json={"token": "x"}).status_code == 409
        assert http.post(f"/sessions/{name}/fork", json={"n": 0}).status_code == 422
        assert http.post(f"/sessions/{name}/fork", json={"n": 100}).status_code == 503
        assert http.post("/sessions/unknown/fork", json={"n": 1}).status_code == 404
        assert server.manager.active == 3
