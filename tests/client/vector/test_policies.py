"""What a `VectorEnv` does with slots that fail: raise, mask, restart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from openenv.client.vector.vector_env import VectorEnv
from openenv.errors import ExecutionError, RequestValidationError, SessionLost, SlotsFailed

FAIL, FINE = {"fail": True}, {"add": 1}


def test_a_failure_is_raised_once_all_have_answered(adder: Any, adder_cls: Any) -> None:
    with VectorEnv(adder.url, 3) as env:
        env.reset()
        with pytest.raises(SlotsFailed, match=r"slot 1 of 3 failed: .*no way") as caught:
            env.step([FINE, FAIL, FINE])
        assert isinstance(caught.value.errors[1], ExecutionError)
        assert caught.value.result.rewards.tolist()[::2] == [1.0, 1.0]
        assert math.isnan(caught.value.result.rewards[1])
        assert "no way" in caught.value.details["slots"][1]
        assert env.step([FINE, FINE, FINE]).rewards.tolist() == [1.0] * 3


def test_a_masked_slot_keeps_out_until_it_is_reset(adder: Any, adder_cls: Any) -> None:
    with VectorEnv(adder.url, 3, on_failure="mask") as env:
        env.reset()
        result = env.step([FINE, FAIL, FINE])
        assert result.ok.tolist() == [True, False, True]
        assert result.truncated.tolist() == [False, True, False]
        assert result.results[1] is None
        assert isinstance(result.errors[1], ExecutionError)
        ran = adder_cls.ran["step"]
        assert env.step([FINE, FINE, FINE]).ok.tolist() == [True, False, True]
        assert adder_cls.ran["step"] == ran + 2
        assert env.reset(slots=[1]).ok.all()
        assert env.step([FINE, FINE, FINE]).ok.all()


def test_a_failed_slot_starts_over_and_says_so(adder: Any) -> None:
    with VectorEnv(adder.url, 2, on_failure="restart") as env:
        env.reset(seed=4, word="same")
        env.step([FINE, FINE])
        result = env.step([FINE, FAIL])
        assert result.ok.tolist() == [True, False]
        assert math.isnan(result.rewards[1])
        assert result.truncated.tolist() == [False, True]
        assert result.by_slot[1].restarted
        assert not result.by_slot[0].restarted
        assert isinstance(result.errors[1], ExecutionError)
        assert [seen["steps"] for seen in result.observations if seen] == [2, 0]
        assert [seen["word"] for seen in result.observations if seen] == ["same", "same"]
        following = env.step([FINE, FINE])
        assert following.ok.all()
        assert [seen["steps"] for seen in following.observations if seen] == [3, 1]


def test_episodes_that_were_out_of_reach_start_over_and_the_loss_is_reported(
    adder: Any, proxied: Callable[[int], Any]
) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 2, connections=1, on_failure="restart", reconnect_s=0.2) as env:
        env.reset()
        env.step([FINE, FINE])
        proxy.refusing = True
        proxy.cut()
        with pytest.raises(SlotsFailed) as caught:
            env.step([FINE, FINE])
        assert [type(error) for error in caught.value.errors.values()] == [SessionLost, SessionLost]
        proxy.refusing = False
        result = env.step([FINE, FINE])
        assert set(result.errors) == {0, 1}
        assert [one.restarted for one in result.by_slot] == [True, True]
        assert [seen["steps"] for seen in result.observations if seen] == [0, 0]
        assert env.step([FINE, FINE]).ok.all()
        assert adder.manager.active == 2  # in the sessions that were there all the time


@pytest.mark.parametrize("policy", ["mask", "restart"])
def test_an_action_that_is_refused_leaves_the_episode_as_it_is(adder: Any, policy: Any) -> None:
    with VectorEnv(adder.url, 2, on_failure=policy) as env:
        env.reset()
        env.step([FINE, FINE])
        result = env.step([FINE, {"add": "much"}])
        assert isinstance(result.errors[1], RequestValidationError)
        assert result.dones.tolist() == [False, False]
        assert not result.by_slot[1].restarted
        following = env.step([FINE, FINE])
        assert following.ok.all()
        assert [seen["steps"] for seen in following.observations if seen] == [3, 2]


def test_an_error_is_raised_when_no_slot_is_left(adder: Any, proxied: Callable[[int], Any]) -> None:
    proxy = proxied(adder.port)
    with VectorEnv(proxy.url, 2, on_failure="mask", reconnect_s=0.2) as env:
        env.reset()
        proxy.refusing = True
        proxy.cut()
        with pytest.raises(SlotsFailed):
            env.step([FINE, FINE])


def test_a_last_result_is_kept_when_the_next_beginning_fails(adder: Any) -> None:
    with VectorEnv(adder.url, 2, autoreset="same_step", on_failure="mask") as env:
        env.reset()
        env._reset_kwargs = {"fail": True}
        result = env.step([{"add": 7, "end": True}, FINE])
        assert isinstance(result.errors[0], ExecutionError)
        assert result.finals[0] is not None
        assert result.finals[0].observation["total"] == 7
        assert result.rewards.tolist() == [7.0, 1.0]
        assert result.dones.tolist() == [True, False]


@pytest.mark.parametrize("policy", ["raise", "mask", "restart"])
def test_a_reset_that_fails_is_reported_and_tried_again(adder: Any, policy: Any) -> None:
    with VectorEnv(adder.url, 2, on_failure=policy) as env:
        try:
            result = env.reset(fail=True)
        except SlotsFailed as exc:
            assert policy == "raise"
            result = exc.result
        assert result.ok.tolist() == [False, False]
        assert env.reset().ok.all()
        assert env.step([FINE, FINE]).ok.all()
