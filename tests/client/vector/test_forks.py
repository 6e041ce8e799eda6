"""`VectorEnv.fork`: another vector whose slots go on from where one slot is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from forked_environments import Go, Locked, Seen, Walker
from openenv import AsyncVectorEnv, GenericEnvClient, VectorEnv
from openenv.errors import ClientModeError, NotForkable, ProtocolError, SessionCapacityError, SessionLost
from openenv.server.app import create_app
from servers import Serve


@pytest.fixture
def start(serve: Serve) -> Callable[..., Any]:
    """Serve an environment with twelve slots."""
    return lambda env_cls=Walker, **options: serve(create_app(env_cls, Go, Seen, max_concurrent_envs=12, **options))


def seen(result: Any) -> list[tuple[int, float]]:
    return [(one["at"], one["luck"]) for one in result.observations]


@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_the_slots_of_a_fork_go_on_from_one_slot(start: Callable[..., Any], codec: Any) -> None:
    server = start()
    with VectorEnv(server.url, 3, codec=codec) as env:
        env.reset(seed=10)
        env.step([{"by": 1}, {"by": 2}, {"by": 3}])
        with env.fork(1, 4) as forks:
            assert len(forks) == 4
            assert server.manager.active == 7
            results = [seen(forks.step([{"by": by}] * 4)) for by in (5, 6)]
            for result in results:
                assert result == [result[0]] * 4
            own = [seen(env.step([{"by": by}] * 3))[1] for by in (5, 6)]
            assert [result[0] for result in results] == own
            spread = forks.step([{"by": by} for by in range(4)])
            assert [one["at"] for one in spread.observations] == [13, 14, 15, 16]
            with forks.fork(3, 2) as deeper:
                assert [one["at"] for one in deeper.step([{"by": 0}] * 2).observations] == [16, 16]
        server.wait_for(lambda: server.manager.active == 3)


def test_slots_are_restored_from_a_slot_or_a_client(start: Callable[..., Any]) -> None:
    server = start()
    with VectorEnv(server.url, 2) as env, GenericEnvClient(server.url).sync() as client:
        env.reset(seed=[1, 2])
        with env.fork(0, 1) as snapshot:
            env.step([{"by": 7}, {"by": 8}])
            env.restore(snapshot)
            first = seen(env.step([{"by": 1}] * 2))
            assert first[0] == first[1]
            env.restore(snapshot, slots=[1])
            assert seen(env.step({1: {"by": 1}})) == first[:1]
        client.reset(seed=5)
        client.step({"by": 40})
        env.restore(client, slots=[0])
        assert env.step({0: {"by": 2}}).observations[0]["at"] == 42  # type: ignore[index]
        with pytest.raises(NotForkable, match="gone"):
            env.restore("no.such.token")
        with pytest.raises(ValueError, match="one slot"):
            env.restore(env)


def test_a_fork_is_refused_by_type(start: Callable[..., Any]) -> None:
    server = start()
    with VectorEnv(server.url, 2) as env:
        env.reset()
        with pytest.raises(SessionCapacityError):
            env.fork(0, 11)
        with pytest.raises(ValueError, match="slot"):
            env.fork(2, 1)
        with pytest.raises(ValueError, match="at least one"):
            env.fork(0, 0)
        env.step_async([{}, {}])
        with pytest.raises(ClientModeError, match="not answered"):
            env.fork(0, 1)
        env.step_wait()
        server.wait_for(lambda: server.manager.active == 2)
        server.manager.sessions()[0].close("closed by a test")
        server.wait_for(lambda: server.manager.active == 1)
        with pytest.raises(SessionLost):
            env.fork(0, 1)
    with VectorEnv(start(Locked).url, 1) as env, pytest.raises(NotForkable, match="lock"):
        env.reset()
        env.fork(0, 1)
    with VectorEnv(server.url, 1, protocol="v1") as env, pytest.raises(ProtocolError, match="v2"):
        env.reset()
        env.fork(0, 1)


def test_a_copy_that_is_gone_is_an_error_and_no_new_session(start: Callable[..., Any]) -> None:
    server = start()
    with VectorEnv(server.url, 1) as env:
        env.reset()
        copies: Any = VectorEnv(server.url, 1)
        copies._pool.slots[0].continue_copy("no.such.token")
        with pytest.raises(SessionLost):
            copies.connect()
        assert server.manager.active == 1


def test_forks_are_awaited_too(start: Callable[..., Any]) -> None:
    server = start()

    async def play() -> None:
        async with AsyncVectorEnv(server.url, 2) as env:
            await env.reset(seed=[1, 2])
            async with await env.fork(1, 2) as forks:
                assert len(forks) == 2
                ours, theirs = await asyncio.gather(env.step([{"by": 3}] * 2), forks.step([{"by": 3}] * 2))
                assert seen(theirs) == [seen(ours)[1]] * 2
                snapshot = await forks.fork(0, 1)
                await env.restore(snapshot, slots=[0])
                assert seen(await env.step({0: {"by": 1}})) == seen(await forks.step({0: {"by": 1}}))
                await snapshot.close()
            forking = asyncio.create_task(env.fork(0, 2))
            await asyncio.sleep(0)
            forking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await forking
            await asyncio.to_thread(server.wait_for, lambda: server.manager.active == 2)

    asyncio.run(play())
