"""Connections of a `VectorEnv` break at every point: steps are run once, and no episode is replaced in silence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from openenv.client.network import ConnectionOptions, parse_ws_url, socket_url
from openenv.client.vector.connection import VectorConnection
from openenv.client.vector.vector_env import VectorEnv
from openenv.errors import SessionLost, SlotsFailed
from openenv.protocol.codec import SUBPROTOCOLS

CODECS = pytest.mark.parametrize("codec", ["json", "msgpack"])


def adds(*numbers: int) -> list[dict[str, Any]]:
    return [{"add": number} for number in numbers]


@CODECS
def test_episodes_go_on_when_lines_are_cut_between_steps(
    adder: Any, adder_cls: Any, proxied: Callable[[int], Any], codec: Any
) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 8, connections=2, codec=codec) as env:
        first = env.reset(seed=1)
        for turn in range(1, 6):
            assert proxy.cut() == 2
            result = env.step(adds(*range(8)))
            assert [seen["total"] for seen in result.observations if seen] == [turn * add for add in range(8)]
        assert [one["env"] for one in result.observations] == [one["env"] for one in first.observations]
        assert adder_cls.ran == {"reset": 8, "step": 40}
        assert adder.manager.active == 8


@CODECS
@pytest.mark.parametrize("each", [False, True])
def test_a_step_whose_reply_was_lost_is_answered_and_not_run_again(
    adder: Any, adder_cls: Any, proxied: Callable[[int], Any], codec: Any, each: bool
) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 6, connections=2, codec=codec) as env:
        env.reset()
        proxy.swallowing = True
        env.step_async(adds(*range(6)), each=each)
        adder.wait_for(lambda: adder_cls.ran["step"] == 6)
        proxy.swallowing = False
        result = env.step_wait()
        assert result.rewards.tolist() == [float(add) for add in range(6)]
        assert [seen["steps"] for seen in result.observations if seen] == [1] * 6
        assert adder_cls.ran["step"] == 6


def test_a_step_that_runs_while_its_line_is_cut_is_waited_for(
    adder: Any, adder_cls: Any, proxied: Callable[[int], Any]
) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 2, connections=1) as env:
        env.reset()
        env.step_async([{"add": 1, "wait": "gate"}, {"add": 2}])
        adder.wait_for(lambda: adder_cls.ran["step"] == 1)
        proxy.cut()
        threading.Timer(0.2, adder_cls.gates["gate"].set).start()
        assert env.step_wait().rewards.tolist() == [1.0, 2.0]
        assert adder_cls.ran["step"] == 2


def test_lines_that_are_cut_all_the_time_lose_nothing(
    adder: Any, adder_cls: Any, proxied: Callable[[int], Any]
) -> None:
    proxy, stop = proxied(adder.port), threading.Event()

    def harass() -> None:
        pause_s = 0.05
        while not stop.wait(pause_s):
            proxy.cut()
            pause_s *= 1.05  # or a busy machine would never get anywhere

    with VectorEnv(proxy.url, 8, connections=4) as env:
        env.reset()
        nuisance = threading.Thread(target=harass)
        nuisance.start()
        try:
            for turn in range(1, 31):
                result = env.step(adds(*range(8)))
                assert [seen["steps"] for seen in result.observations if seen] == [turn] * 8
        finally:
            stop.set()
            nuisance.join()
        env.step(adds(*range(8)))  # all lines are up again, so that closing reaches every session
    assert adder_cls.ran == {"reset": 8, "step": 248}
    adder.wait_for(lambda: adder.manager.active == 0)


def test_an_episode_that_is_gone_is_an_error_and_never_a_new_one(
    adder: Any, adder_cls: Any, proxied: Callable[[int], Any]
) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 4, connections=2) as env:
        env.reset()
        env.step(adds(1, 1, 1, 1))
        proxy.refusing = True
        proxy.cut()
        end_session(adder.url, env._pool.slots[1].token)
        adder.wait_for(lambda: adder.manager.active == 3)
        proxy.refusing = False
        with pytest.raises(SlotsFailed) as caught:
            env.step(adds(1, 1, 1, 1))
        assert list(caught.value.errors) == [1]
        assert isinstance(caught.value.errors[1], SessionLost)
        assert caught.value.result.ok.tolist() == [True, False, True, True]
        assert [seen and seen["steps"] for seen in caught.value.result.observations] == [2, None, 2, 2]
        with pytest.raises(SlotsFailed):
            env.step(adds(1, 1, 1, 1))
        assert env.reset(slots=[1]).ok.all()
        assert [seen and seen["steps"] for seen in env.step(adds(1, 1, 1, 1)).observations] == [4, 1, 4, 4]


def end_session(url: str, token: str | None) -> None:
    """Attach to a session on another connection and close it there."""
    connection = VectorConnection(parse_ws_url(socket_url(url)), ConnectionOptions(subprotocols=SUBPROTOCOLS))
    connection.open()
    connection.send([{"type": "open", "id": 1, "resume": token}, {"type": "close", "id": 1000}])
    answers: list[Any] = []
    while len(answers) < 2:
        connection.receive()
        answers += connection.take()
    assert [answer["type"] for answer in answers] == ["opened", "closed"]
    connection.close()


def test_a_session_that_another_client_took_is_lost_here(adder: Any) -> None:
    with VectorEnv(adder.url, 2, on_failure="mask") as env:
        env.reset()
        end_session(adder.url, env._pool.slots[0].token)
        result = env.step(adds(1, 1))
        assert result.ok.tolist() == [False, True]
        assert isinstance(result.errors[0], SessionLost)


def test_a_server_that_stays_away_is_an_error_in_every_slot(adder: Any, proxied: Callable[[int], Any]) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 3, reconnect_s=0.3) as env:
        env.reset()
        proxy.refusing = True
        proxy.cut()
        with pytest.raises(SlotsFailed) as caught:
            env.step(adds(1, 1, 1))
        assert set(caught.value.errors) == {0, 1, 2}
        assert all(isinstance(error, SessionLost) for error in caught.value.errors.values())
        proxy.refusing = False
        assert env.reset().ok.all()
        assert env.step(adds(1, 1, 1)).rewards.tolist() == [1.0] * 3
        assert adder.manager.active == 3  # what was out of reach has been found again


def test_sessions_that_are_gone_for_good_are_replaced_at_the_next_reset(
    adder: Any, proxied: Callable[[int], Any]
) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 2, reconnect_s=0.2) as env:
        env.reset()
        tokens = [slot.token for slot in env._pool.slots]
        proxy.refusing = True
        proxy.cut()
        with pytest.raises(SlotsFailed):
            env.step(adds(1, 1))
        for token in tokens:
            end_session(adder.url, token)
        proxy.refusing = False
        assert env.reset().ok.all()
        assert env.step(adds(1, 1)).rewards.tolist() == [1.0] * 2


def test_a_server_that_takes_connections_only_to_drop_them_is_not_tried_forever(
    adder: Any, proxied: Callable[[int], Any]
) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 2, connections=1, reconnect_s=0.5) as env:
        env.reset()
        proxy.swallowing = True
        with pytest.raises(SlotsFailed):
            env.step(adds(1, 1))
        assert proxy.accepted < 30


def test_a_connection_that_breaks_between_steps_is_replaced_at_the_next_step(
    adder: Any, proxied: Callable[[int], Any]
) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 2) as env:
        env.reset()
        proxy.cut()
        env.keep_alive()
        assert env.step(adds(1, 2)).rewards.tolist() == [1.0, 2.0]


def test_connections_that_break_together_are_replaced_whatever_their_descriptors(
    adder: Any, proxied: Callable[[int], Any]
) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 6, connections=6) as env:
        env.reset()
        for _ in range(3):
            proxy.cut()
            env.keep_alive()
            env._pool.connections.reverse()  # the first to be repaired gets the descriptor that the last one had
            assert env.step(adds(*range(6))).rewards.tolist() == [float(add) for add in range(6)]


def test_messages_that_arrive_between_calls_are_kept(adder: Any, adder_cls: Any) -> None:
    with VectorEnv(adder.url, 2) as env:
        env.reset()
        env.step_async(adds(1, 2))
        adder.wait_for(lambda: adder_cls.ran["step"] == 2)
        for _ in range(20):
            env.keep_alive()
        assert env.step_wait().rewards.tolist() == [1.0, 2.0]


def test_a_silent_server_is_found_out(adder: Any, proxied: Callable[[int], Any]) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 1, ping_interval_s=0.1, ping_timeout_s=0.2, reconnect_s=5) as env:
        env.reset()
        proxy.half_open()
        assert env.step(adds(3), timeout_s=20).rewards.tolist() == [3.0]
