"""Servers that go away for good: slots begin their next episodes on the servers that there are then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from openenv.client.vector.vector_env import AsyncVectorEnv, VectorEnv
from openenv.errors import ConnectFailed, SessionLost, SlotsFailed

FAST: dict[str, Any] = {"reconnect_s": 0.2, "retry_refused_s": 0.05}


def adds(*numbers: int) -> list[dict[str, Any]]:
    return [{"add": number} for number in numbers]


class Servers:
    """Two addresses of one server, each behind a proxy of its own; `urls` says which there are."""

    def __init__(self, port: int, proxied: Callable[[int], Any]) -> None:
        self._port, self._proxied = port, proxied
        self.proxies = [proxied(port), proxied(port)]
        self.asked = 0

    def urls(self) -> list[str]:
        self.asked += 1
        return [proxy.url for proxy in self.proxies]

    def lose(self) -> None:
        """End the last one; its address refuses connections from now on."""
        proxy = self.proxies.pop()
        proxy.refusing = True  # its thread waits for one more connection
        proxy.close()

    def add(self) -> None:
        self.proxies.append(self._proxied(self._port))

    def sessions_at(self, env: VectorEnv[Any, Any]) -> Counter[str]:
        return Counter(slot.shared.address.url for slot in env._pool.slots if slot.name is not None)


@pytest.fixture
def servers(adder: Any, proxied: Callable[[int], Any]) -> Servers:
    return Servers(adder.port, proxied)


def test_a_lost_server_costs_its_slots_their_episodes_and_a_reset_begins_new_ones_elsewhere(servers: Servers) -> None:
    with VectorEnv(servers.urls, 8, connections=4, on_failure="mask", **FAST) as env:
        env.reset()
        servers.lose()
        result = env.step(adds(*range(8)))
        assert result.ok.tolist() == [True] * 4 + [False] * 4
        assert all(isinstance(error, SessionLost) for error in result.errors.values())
        assert servers.asked == 1  # an episode that is gone is not replaced before a reset asks for it
        servers.add()
        assert env.reset(slots=[4, 5, 6, 7]).ok.all()
        again = env.step(adds(*range(8)))
        assert [seen["total"] for seen in again.observations if seen] == [0, 2, 4, 6, 4, 5, 6, 7]
        assert sorted(servers.sessions_at(env).values()) == [4, 4]  # the new server has those of the lost one
        assert servers.asked == 2


def test_without_a_new_server_the_one_that_is_left_takes_the_slots(servers: Servers) -> None:
    with VectorEnv(servers.urls, 6, connections=2, on_failure="restart", **FAST) as env:
        env.reset()
        servers.lose()
        result = env.step(adds(*range(6)))
        assert [one.restarted for one in result.by_slot] == [False] * 3 + [True] * 3
        assert {type(error) for error in result.errors.values()} == {SessionLost}
        assert env.step(adds(*range(6))).ok.all()
        assert list(servers.sessions_at(env).values()) == [6]


def test_where_no_server_is_left_the_error_says_so(servers: Servers) -> None:
    with VectorEnv(servers.urls, 2, **FAST) as env:
        env.reset()
        servers.lose()
        servers.lose()
        with pytest.raises(SlotsFailed):
            env.step(adds(1, 2))
        with pytest.raises(SlotsFailed) as failed:
            env.reset()
        assert {type(error) for error in failed.value.errors.values()} == {ConnectFailed}
        servers.add()
        assert env.reset().ok.all()


def test_addresses_that_are_given_as_a_list_are_kept(servers: Servers) -> None:
    with VectorEnv(servers.urls(), 2, on_failure="mask", **FAST) as env:
        env.reset()
        servers.lose()
        assert env.step(adds(1, 2)).ok.tolist() == [True, False]
        assert env.reset().ok.tolist() == [True, False]


def test_an_address_that_was_never_right_is_an_error_at_once(servers: Servers) -> None:
    gone = servers.proxies[1].url
    servers.proxies[1].refusing = True
    servers.proxies[1].close()
    with pytest.raises(ConnectFailed, match=gone.rpartition(":")[2]):
        VectorEnv(servers.urls, 2, **FAST).connect()


@pytest.mark.anyio
async def test_the_awaited_one_moves_as_well(servers: Servers) -> None:
    async with AsyncVectorEnv(servers.urls, 2, on_failure="mask", **FAST) as env:
        await env.reset()
        servers.lose()
        assert (await env.step(adds(1, 2))).ok.tolist() == [True, False]
        assert (await env.reset()).ok.all()
