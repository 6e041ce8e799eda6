"""`VectorEnv` and servers without protocol v2: a socket for each session, the same results, and nothing in silence."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from openenv import AsyncVectorEnv, VectorEnv
from openenv.env.binding import infer_models
from openenv.errors import (
    ClientModeError,
    ConnectFailed,
    EnvironmentFactoryError,
    ExecutionError,
    RequestTimeout,
    RequestValidationError,
    SessionCapacityError,
    SessionLost,
    SlotsFailed,
)
from openenv.server.app import create_app
from servers import Serve

FAIL, FINE = {"fail": True}, {"add": 1}


def adds(*numbers: int) -> list[dict[str, Any]]:
    return [{"add": number} for number in numbers]


def small(adder_cls: Any, sessions: int) -> Any:
    models = infer_models(adder_cls)
    return create_app(adder_cls, models.action, models.observation, max_concurrent_envs=sessions)


# -- what works as with protocol v2 ---------------------------------------------------------------------------------


def test_every_slot_has_a_socket_of_its_own(old: Any, adder_cls: Any) -> None:
    with VectorEnv(old.url, 10, connections=3) as env:
        assert env.codecs == ["v1"] * 10
        assert env.sessions == [None] * 10
        assert old.manager.active == 10
        assert adder_cls.ran == {}
        env.reset()
        assert env.step(adds(*range(10))).ok.all()
        assert all(env.traffic)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("openenv-dial")]
    assert adder_cls.ran == {"reset": 10, "step": 10}


def test_steps_of_all_slots_run_side_by_side(old: Any, adder_cls: Any) -> None:
    with VectorEnv(old.url, 6) as env:
        env.reset()
        env.step_async([{"add": 1, "wait": "gate"}, *adds(*range(1, 6))])
        old.wait_for(lambda: adder_cls.ran["step"] == 5)
        adder_cls.gates["gate"].set()
        assert env.step_wait().rewards.tolist() == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_the_answer_to_a_step_that_was_left_behind_is_not_taken_for_that_of_the_reset(old: Any, adder_cls: Any) -> None:
    with VectorEnv(old.url, 1) as env:
        env.reset(seed=1)
        with pytest.raises(RequestTimeout):
            env.step([{"add": 7, "wait": "gate"}], timeout_s=0.2)
        threading.Timer(0.2, adder_cls.gates["gate"].set).start()
        begun = env.reset(seed=5)
        assert [seen and (seen["seed"], seen["steps"]) for seen in begun.observations] == [(5, 0)]
        assert env.step(adds(2)).rewards.tolist() == [2.0]
        assert adder_cls.ran == {"reset": 2, "step": 2}


@pytest.mark.parametrize("policy", ["raise", "mask", "restart"])
def test_failures_of_the_environment_follow_the_policy(old: Any, policy: Any) -> None:
    with VectorEnv(old.url, 3, on_failure=policy) as env:
        env.reset(word="same")
        env.step([FINE] * 3)
        try:
            result = env.step([FINE, FAIL, {"add": "much"}])
        except SlotsFailed as exc:
            assert policy == "raise"
            result = exc.result
        assert [type(result.errors[slot]) for slot in (1, 2)] == [ExecutionError, RequestValidationError]
        assert math.isnan(result.rewards[1])
        assert [one.restarted for one in result.by_slot] == [False, policy == "restart", False]
        if policy == "mask":
            assert env.step([FINE] * 3).ok.tolist() == [True, False, True]
            env.reset(slots=[1])
        assert env.step([FINE] * 3).ok.all()


@pytest.mark.anyio
async def test_an_old_server_is_stepped_from_an_event_loop(old: Any) -> None:
    async with AsyncVectorEnv(old.url, 3) as env:
        await env.reset()
        assert (await env.step(adds(1, 2, 3))).rewards.tolist() == [1.0, 2.0, 3.0]
        assert env.codecs == ["v1"] * 3
    old.wait_for(lambda: old.manager.active == 0)


# -- what protocol v1 cannot do -------------------------------------------------------------------------------------


def test_a_line_that_is_cut_between_steps_is_a_lost_session(
    old: Any, adder_cls: Any, proxied: Callable[[int], Any]
) -> None:
    proxy = proxied(old.port)
    with VectorEnv(proxy.url, 3) as env:
        first = env.reset()
        env.step([FINE] * 3)
        assert proxy.cut() == 3
        for _ in range(2):  # it stays so until reset
            with pytest.raises(SlotsFailed) as caught:
                env.step([FINE] * 3)
            assert [type(error) for error in caught.value.errors.values()] == [SessionLost] * 3
            assert all(math.isnan(reward) for reward in caught.value.result.rewards)
        assert adder_cls.ran == {"reset": 3, "step": 3}
        again = env.reset()
        before, after = ({seen["env"] for seen in one.observations if seen} for one in (first, again))
        assert not before & after
        assert [seen["steps"] for seen in env.step([FINE] * 3).observations if seen] == [1] * 3


def test_a_step_whose_reply_was_lost_is_neither_repeated_nor_guessed(
    old: Any, adder_cls: Any, proxied: Callable[[int], Any]
) -> None:
    proxy = proxied(old.port)
    with VectorEnv(proxy.url, 4, on_failure="mask") as env:
        env.reset()
        proxy.swallowing = True
        env.step_async([FINE] * 4)
        old.wait_for(lambda: adder_cls.ran["step"] == 4)
        with pytest.raises(SlotsFailed) as caught:
            env.step_wait()
        assert [type(error) for error in caught.value.errors.values()] == [SessionLost] * 4
        proxy.swallowing = False
        assert adder_cls.ran["step"] == 4


def test_lost_episodes_start_over_where_that_is_the_policy_and_it_is_reported(
    old: Any, adder_cls: Any, proxied: Callable[[int], Any]
) -> None:
    proxy = proxied(old.port)
    with VectorEnv(proxy.url, 3, on_failure="restart") as env:
        env.reset(word="same")
        env.step([FINE] * 3)
        proxy.cut()
        result = env.step([FINE] * 3)
        assert [type(error) for error in result.errors.values()] == [SessionLost] * 3
        assert [one.restarted for one in result.by_slot] == [True] * 3
        assert [(seen["steps"], seen["word"]) for seen in result.observations if seen] == [(0, "same")] * 3
        assert env.step([FINE] * 3).ok.all()
        assert adder_cls.ran == {"reset": 6, "step": 6}


def test_a_reset_replaces_connections_that_broke_unnoticed(old: Any, proxied: Callable[[int], Any]) -> None:
    proxy = proxied(old.port)
    with VectorEnv(proxy.url, 3) as env:
        env.reset()
        proxy.cut()
        assert env.reset(seed=3).ok.all()
        proxy.cut()
        env.keep_alive()
        assert [seen["seed"] for seen in env.reset(seed=6).observations if seen] == [6, 7, 8]
        old.wait_for(lambda: old.manager.active == 3)


def test_a_server_that_stays_away_is_an_error_in_every_slot(old: Any, proxied: Callable[[int], Any]) -> None:
    proxy = proxied(old.port)
    with VectorEnv(proxy.url, 3, on_failure="mask", connect_timeout_s=3) as env:
        env.reset()
        proxy.refusing = True
        proxy.cut()
        with pytest.raises(SlotsFailed) as caught:
            env.step([FINE] * 3)
        assert [type(error) for error in caught.value.errors.values()] == [SessionLost] * 3
        with pytest.raises(SlotsFailed) as caught:
            env.reset()
        assert [type(error) for error in caught.value.errors.values()] == [ConnectFailed] * 3
        proxy.refusing = False
        assert env.reset().ok.all()
        assert env.step([FINE] * 3).rewards.tolist() == [1.0] * 3


def test_a_silent_server_is_found_out(old: Any, proxied: Callable[[int], Any]) -> None:
    proxy = proxied(old.port)
    with VectorEnv(proxy.url, 2, ping_interval_s=0.2, ping_timeout_s=4, on_failure="restart") as env:
        env.reset()
        proxy.half_open()
        result = env.step([FINE] * 2, timeout_s=30)
        assert [type(error) for error in result.errors.values()] == [SessionLost] * 2
        assert [one.restarted for one in result.by_slot] == [True] * 2


@pytest.mark.parametrize("policy", ["raise", "mask", "restart"])
def test_a_server_without_room_is_reported_at_once_and_with_advice(
    old_server: Callable[[Any], Any], adder_cls: Any, policy: Any
) -> None:
    server = old_server(small(adder_cls, 3))
    with pytest.raises(SessionCapacityError, match=r"wait_s does not help.*max_concurrent_envs"):
        VectorEnv(server.url, 5, on_failure=policy, wait_s=10).connect()
    server.wait_for(lambda: server.manager.active == 0)
    with VectorEnv(server.url, 3, on_failure=policy) as env:
        assert env.reset().ok.all()


def test_an_environment_that_cannot_be_built_is_reported_at_once(
    old_server: Callable[[Any], Any], adder_cls: Any
) -> None:
    class Broken(adder_cls):  # type: ignore[misc]
        def __init__(self) -> None:
            raise OSError("out of order")

    with pytest.raises(EnvironmentFactoryError, match="out of order"):
        VectorEnv(old_server(small(Broken, 3)).url, 2).connect()


# -- which protocol -------------------------------------------------------------------------------------------------


def test_old_and_new_servers_work_side_by_side(
    old: Any, adder: Any, adder_cls: Any, proxied: Callable[[int], Any]
) -> None:
    first, second = proxied(old.port), proxied(adder.port)
    with VectorEnv([first.url, second.url], 6, connections=4, codec="json", on_failure="mask") as env:
        assert sorted(name for name in env.codecs if name) == ["openenv.v2.json"] * 2 + ["v1"] * 3
        assert (old.manager.active, adder.manager.active) == (3, 3)
        assert [bool(name) for name in env.sessions] == [False] * 3 + [True] * 3
        env.reset()
        assert env.step(adds(*range(6))).rewards.tolist() == [float(add) for add in range(6)]
        first.cut()
        second.cut()
        result = env.step([FINE] * 6)
        assert result.ok.tolist() == [False] * 3 + [True] * 3
        assert [type(error) for error in result.errors.values()] == [SessionLost] * 3
        env.reset(slots=[0, 1, 2])
        following = env.step([FINE] * 6)
        assert [seen["steps"] for seen in following.observations if seen] == [1] * 3 + [3] * 3


def test_the_protocol_is_a_choice(adder: Any, old: Any) -> None:
    with VectorEnv(adder.url, 3, protocol="v1") as env:
        assert env.codecs == ["v1"] * 3
        env.reset()
        assert env.step(adds(1, 2, 3)).rewards.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ConnectFailed, match=r"openenv 0\.10.*protocol='auto'") as caught:
        VectorEnv(old.url, 3, protocol="v2").connect()
    assert caught.value.attempts == 1
    with pytest.raises(ConnectFailed, match=r"codec='json'"):
        VectorEnv(old.url, 3, codec="msgpack").connect()
    with pytest.raises(ValueError, match="protocol v1"):
        VectorEnv(old.url, 3, codec="msgpack", protocol="v1")
    with pytest.raises(ValueError, match="protocol: one of"):
        VectorEnv(old.url, 3, protocol="v3")  # type: ignore[arg-type]
    old.wait_for(lambda: old.manager.active == 0)


@pytest.mark.parametrize("policy", ["raise", "restart"])
def test_an_older_server_in_the_place_of_a_new_one_has_lost_the_sessions(
    old: Any, adder: Any, proxied: Callable[[int], Any], policy: Any
) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 4, connections=2, codec="json", on_failure=policy) as env:
        env.reset()
        env.step([FINE] * 4)
        proxy.target = old.port
        proxy.cut()
        try:
            result = env.step([FINE] * 4)
        except SlotsFailed as exc:
            assert policy == "raise"
            result = exc.result
        assert [type(error) for error in result.errors.values()] == [SessionLost] * 4
        assert [one.restarted for one in result.by_slot] == [policy == "restart"] * 4
        if policy == "raise":
            assert env.reset().ok.all()
        assert env.codecs == ["v1"] * 4
        assert [seen["steps"] for seen in env.step([FINE] * 4).observations if seen] == [1] * 4
        proxy.target = adder.port  # and back
        proxy.cut()
        assert env.reset().ok.all()
        assert env.codecs == ["openenv.v2.json"] * 4
        assert env.step([FINE] * 4).ok.all()


# -- with either ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_a_reset_that_timed_out_while_connecting_is_waited_for_and_no_step_overtakes_it(
    serve: Serve, adder_cls: Any, protocol: Any
) -> None:
    class Slow(adder_cls):  # type: ignore[misc]
        def __init__(self) -> None:
            assert self.gates["built"].wait(60)
            super().__init__()

    env: VectorEnv[Any, Any] = VectorEnv(
        serve(small(Slow, 4)).url, 2, protocol=protocol, autoreset="disabled", message_timeout_s=0.5
    )
    with pytest.raises(RequestTimeout):
        env.reset(seed=7)
    with pytest.raises(ClientModeError, match="have not answered yet"):
        env.step([FINE] * 2)
    adder_cls.gates["built"].set()
    begun = env.step_wait(60)
    assert [one.started for one in begun.by_slot] == [True, True]
    assert [seen["seed"] for seen in begun.observations if seen] == [7, 8]
    assert [seen["steps"] for seen in env.step([FINE] * 2, timeout_s=60).observations if seen] == [1, 1]
    assert adder_cls.ran == {"reset": 2, "step": 2}
    env.close()
