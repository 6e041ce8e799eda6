"""`VectorEnv` on a real server: batched steps, autoreset, first-ready, typed hooks, placement."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from openenv.client.env_client import EnvClient
from openenv.client.vector.results import ended
from openenv.client.vector.session_pool import placements
from openenv.client.vector.vector_env import VectorEnv
from openenv.errors import AccessDenied, ClientModeError, ConnectFailed, SessionCapacityError
from openenv.server.app import create_app
from openenv.types import Action, Observation, State, StepResult
from servers import Serve

CODECS = pytest.mark.parametrize("codec", ["json", "msgpack"])


def adds(*numbers: int) -> list[dict[str, Any]]:
    return [{"add": number} for number in numbers]


@CODECS
def test_sessions_have_names_of_their_own_and_connections_the_codec(adder: Any, codec: Any) -> None:
    with VectorEnv(adder.url, 10, connections=3, codec=codec) as env:
        assert env.codecs == [f"openenv.v2.{codec}"] * 3
        assert len({session for session in env.sessions if session}) == 10


@pytest.mark.parametrize(("n", "connections"), [(1, 1), (64, 1), (65, 2), (256, 4), (1000, 4)])
def test_few_sessions_share_one_connection(n: int, connections: int) -> None:
    env = VectorEnv("http://127.0.0.1:9", n)
    assert len(env.codecs) == connections


def test_256_sessions_take_four_connections(serve: Serve, adder_cls: Any) -> None:
    server = serve(create_app(adder_cls, sys.modules[adder_cls.__module__].Move, Observation, max_concurrent_envs=256))
    with VectorEnv(server.url, 256) as env:
        assert len(env.codecs) == 4
        env.reset()
        for _ in range(3):
            result = env.step(adds(*range(256)))
        assert result.rewards.tolist() == [float(add) for add in range(256)]
        assert adder_cls.ran == {"reset": 256, "step": 768}


def test_a_reset_leaves_a_step_behind_that_has_not_come_back(adder: Any, adder_cls: Any) -> None:
    with VectorEnv(adder.url, 1) as env:
        env.reset()
        env.step_async([{"add": 1, "wait": "gate"}])
        adder_cls.gates["gate"].set()
        result = env.reset(seed=7)
        assert result.observations[0] is not None
        assert result.observations[0]["seed"] == 7
        assert env.step(adds(2)).rewards.tolist() == [2.0]


def test_a_step_of_no_slots_has_no_results(adder: Any) -> None:
    with VectorEnv(adder.url, 2) as envs:
        envs.reset(seed=0)
        assert len(envs.step({}).slots) == 0


def test_some_slots_can_be_reset_and_stepped_alone(adder: Any) -> None:
    with VectorEnv(adder.url, 3) as env:
        env.reset()
        assert env.step({2: {"add": 2}, 0: {"add": 1}}).slots == [0, 2]
        result = env.reset(seed=[5], slots=[1])
        assert result.slots == [1]
        assert [seen["seed"] for seen in result.observations if seen] == [5]
        totals = [seen["total"] for seen in env.step(adds(1, 1, 1)).observations if seen]
        assert totals == [2, 1, 3]


class Typed(BaseModel):
    """A client's own model."""

    total: int


class AdderClient(EnvClient[int, Typed, int]):
    """A typed client: an action is a number."""

    def _step_payload(self, action: int) -> dict[str, Any]:
        return {"add": action}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Typed]:
        return StepResult(Typed(total=payload["observation"]["total"]), payload["reward"], payload["done"])

    def _parse_state(self, payload: dict[str, Any]) -> int:
        return int(payload["step_count"])


@pytest.mark.parametrize("as_object", [False, True])
def test_the_hooks_of_a_client_class_are_used(adder: Any, as_object: bool) -> None:
    client = AdderClient(base_url=adder.url) if as_object else AdderClient
    with VectorEnv(adder.url, 3, client=client) as env:
        assert set(env.codecs) == {"openenv.v2.json"}
        env.reset()
        assert env.step([1, 2, 3]).observations == [Typed(total=1), Typed(total=2), Typed(total=3)]
        assert env.states() == [1, 1, 1]


class Pixels(Observation):
    """An image."""

    image: Any = None
    raw: bytes = b""


def test_arrays_and_bytes_arrive_as_they_are(serve: Serve, adder_cls: Any) -> None:
    image = np.arange(84 * 84 * 4, dtype=np.uint8).reshape(84, 84, 4)

    class Camera(adder_cls):  # type: ignore[misc]
        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
            return Pixels(image=image, raw=b"\x00\xff", reward=np.float32(0.5))

    server = serve(create_app(Camera, Action, Pixels, max_concurrent_envs=5))
    with VectorEnv(server.url, 4, codec="msgpack") as env, VectorEnv(server.url, 1, codec="json") as plain:
        seen = env.reset()
        assert all((one["image"] == image).all() for one in seen.observations if one)
        assert seen.observations[3] is not None
        assert seen.observations[3]["image"].dtype == np.uint8
        assert seen.observations[3]["raw"] == b"\x00\xff"
        assert seen.rewards.tolist() == [0.5] * 4
        env.close()
        server.wait_for(lambda: server.manager.active <= 1)
        listed = plain.reset().observations[0]
        assert listed is not None
        assert listed["image"] == image.tolist()
        assert listed["raw"] == "AP8="


def test_slots_are_spread_over_servers(serve: Serve, adder_cls: Any) -> None:
    models = sys.modules[adder_cls.__module__]
    servers = [serve(create_app(adder_cls, models.Move, models.Sum, max_concurrent_envs=8)) for _ in range(3)]
    with VectorEnv([server.url for server in servers], 8, connections=4) as env:
        assert [server.manager.active for server in servers] == [3, 3, 2]
        env.reset()
        assert env.step(adds(*range(8))).rewards.tolist() == [float(add) for add in range(8)]


@pytest.mark.parametrize("n", [1, 2, 5, 17, 256])
@pytest.mark.parametrize("servers", [1, 2, 3, 7])
@pytest.mark.parametrize("connections", [1, 4, 9])
def test_placement_is_even_and_complete(n: int, servers: int, connections: int) -> None:
    urls = [f"http://s{number}" for number in range(servers)]
    places = placements(urls, n, connections)
    assert [slot for _, slots in places for slot in slots] == list(range(n))
    loads = [sum(len(slots) for place, slots in places if place == url) for url in urls]
    assert max(loads) - min(loads) <= 1
    assert all(slots for _, slots in places)
    assert len(places) <= max(connections, min(servers, n))


def test_a_full_server_says_so(serve: Serve, adder_cls: Any) -> None:
    models = sys.modules[adder_cls.__module__]
    server = serve(create_app(adder_cls, models.Move, models.Sum, max_concurrent_envs=3))
    with pytest.raises(SessionCapacityError) as caught:
        VectorEnv(server.url, 5).connect()
    assert caught.value.max_sessions == 3
    server.wait_for(lambda: server.manager.active == 0)


def test_sessions_wait_for_slots_where_asked_to(serve: Serve, adder_cls: Any) -> None:
    models = sys.modules[adder_cls.__module__]
    server = serve(create_app(adder_cls, models.Move, models.Sum, max_concurrent_envs=3))
    with VectorEnv(server.url, 3) as first:
        first.reset()
        with pytest.raises(SessionCapacityError):
            VectorEnv(server.url, 2, wait_s=0.1).connect()
    with VectorEnv(server.url, 3, wait_s=10) as second:
        assert second.reset().ok.all()


def test_a_server_that_is_not_there_is_a_connect_failure() -> None:
    with pytest.raises(ConnectFailed):
        VectorEnv("http://127.0.0.1:9", 2, reconnect_s=0.1).connect()


def test_what_makes_no_sense_is_refused(adder: Any) -> None:
    for wrong in (
        {"n": 0},
        {"connections": 0},
        {"codec": "xml"},
        {"autoreset": "maybe"},
        {"on_failure": "ignore"},
        {"url": []},
    ):
        with pytest.raises(ValueError):
            VectorEnv(**{"url": adder.url, "n": 1, **wrong})  # type: ignore[arg-type]
    with VectorEnv(adder.url, 2) as env:
        env.reset()
        with pytest.raises(ValueError, match="one for each of the 2 slots"):
            env.step(adds(1))
        with pytest.raises(ValueError, match="by slot, from 0 to 1, not"):
            env.step({2: {}})
        with pytest.raises(ValueError, match="seed"):
            env.reset(seed=[1])
        with pytest.raises(TypeError, match="an action must be"):
            env.step([1, 2])
    with pytest.raises(ClientModeError, match="closed"):
        env.reset()
    env.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_leaves_the_sessions_alone(adder: Any) -> None:
    with VectorEnv(adder.url, 2) as env:
        env.reset()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                env.step(adds(1, 1))
            except ClientModeError:
                env.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert env.step(adds(1, 2)).rewards.tolist() == [1.0, 2.0]


def test_results_are_lists_where_numpy_is_not_installed(adder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with VectorEnv(adder.url, 2) as env:
        env.reset()
        result = env.step(adds(1, 2))
        assert result.rewards == [1.0, 2.0]
        assert result.dones == [False, False]
        assert result.ok == [True, True]


def test_replies_are_compressed_where_asked_for(adder: Any) -> None:
    sizes = {}
    for compress in (None, 1000):
        with VectorEnv(adder.url, 8, connections=1, codec="json", compress=compress) as env:
            env.reset(word="again and " * 50)
            before = env.traffic[1]
            result = env.step(adds(*range(8)))
            assert result.rewards.tolist() == [float(add) for add in range(8)]
            sizes[compress] = env.traffic[1] - before
    assert sizes[1000] < sizes[None] / 3


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (True, False)),
        ({"terminated": True}, (True, False)),
        ({"terminated": False}, (False, True)),
        ({"truncated": False}, (True, False)),
        ({"terminated": False, "truncated": False}, (True, False)),
        ({"truncated": True}, (False, True)),
        ({"terminated": True, "truncated": True}, (True, True)),
        ("text", (True, False)),
    ],
)
def test_terminated_and_truncated_are_read_from_any_reply(said: Any, expected: tuple[bool, bool]) -> None:
    assert ended(said) == expected


def test_a_reward_that_is_none_is_no_zero(serve: Serve, adder_cls: Any) -> None:
    models = sys.modules[adder_cls.__module__]

    class Silent(adder_cls):  # type: ignore[misc]
        def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
            return models.Sum(reward=None)

    server = serve(create_app(Silent, models.Move, models.Sum, max_concurrent_envs=1))
    with VectorEnv(server.url, 1) as env:
        env.reset()
        assert math.isnan(env.step(adds(1)).rewards[0])


def test_the_state_of_all_is_the_state_of_each(adder: Any) -> None:
    with VectorEnv(adder.url, 2) as env:
        env.reset()
        env.step({1: {"add": 1}})
        assert [State(**state).step_count for state in env.states()] == [0, 1]


def test_a_token_opens_the_door(serve: Serve, adder_cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    models = sys.modules[adder_cls.__module__]
    monkeypatch.setenv("OPENENV_TOKEN", "secret")
    server = serve(create_app(adder_cls, models.Move, models.Sum, max_concurrent_envs=4))
    monkeypatch.delenv("OPENENV_TOKEN")
    with pytest.raises(AccessDenied, match="401"):
        VectorEnv(server.url, 2).connect()
    with VectorEnv(server.url, 2, token="secret") as env:
        assert env.reset().ok.all()
    monkeypatch.setenv("OPENENV_TOKEN", "secret")
    with VectorEnv(server.url, 2) as env:
        assert env.reset().ok.all()


@CODECS
def test_an_array_may_stand_for_a_list_in_an_action(serve: Serve, adder_cls: Any, codec: Any) -> None:
    models = sys.modules[adder_cls.__module__]

    class Numbers(Action):
        numbers: list[int]

    class Adds(adder_cls):  # type: ignore[misc]
        def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
            return models.Sum(total=sum(action.numbers), reward=1)

    server = serve(create_app(Adds, Numbers, models.Sum, max_concurrent_envs=1))
    with VectorEnv(server.url, 1, codec=codec, on_failure="mask") as env:
        env.reset()
        assert [seen and seen["total"] for seen in env.step([{"numbers": np.arange(4)}]).observations] == [6]
        refused = env.step([{"numbers": np.array([0.5])}])
        assert [type(error).__name__ for error in refused.errors.values()] == ["RequestValidationError"]
