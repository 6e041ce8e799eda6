"""The Echo environment: in this process, and served from its folder."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from echo_env import EchoAction, EchoEnv
from echo_env.server.echo_environment import EchoEnvironment
from openenv import LocalEnv
from openenv.errors import RequestValidationError


def test_a_message_comes_back_with_its_length() -> None:
    with LocalEnv(EchoEnvironment).sync() as env:
        assert env.reset().observation.echoed_message == "Echo environment ready!"
        observation = env.step(EchoAction(message="héllo")).observation
        assert (observation.echoed_message, observation.message_length) == ("héllo", 5)


@pytest.mark.parametrize(("message", "reward"), [("", 0.0), ("abc", 0.3), ("x" * 10, 1.0), ("x" * 500, 1.0)])
def test_the_reward_grows_with_the_message_up_to_one(message: str, reward: float) -> None:
    with LocalEnv(EchoEnvironment).sync() as env:
        env.reset()
        assert env.step(EchoAction(message=message)).reward == pytest.approx(reward)


def test_a_reset_begins_a_new_episode() -> None:
    with LocalEnv(EchoEnvironment).sync() as env:
        env.reset(episode_id="first")
        env.step(EchoAction(message="a"))
        assert (env.state().episode_id, env.state().step_count) == ("first", 1)
        env.reset()
        assert env.state().episode_id not in (None, "first")
        assert env.state().step_count == 0


def test_the_typed_client_talks_to_the_environment_served_from_its_folder(serve_folder: Callable[[str], str]) -> None:
    url = serve_folder("echo_env")
    with EchoEnv(base_url=url).sync() as env, env.new_session() as other:
        env.reset(episode_id="mine")
        other.reset(episode_id="other")
        result = env.step(EchoAction(message="hello", metadata={"ignored": True}))
        assert result.observation.echoed_message == "hello"
        assert result.reward == result.observation.reward == pytest.approx(0.5)
        assert not result.done
        assert (env.state().episode_id, env.state().step_count) == ("mine", 1)
        assert (other.state().episode_id, other.state().step_count) == ("other", 0)


def test_an_action_that_does_not_fit_is_refused_and_the_session_lives_on(serve_folder: Callable[[str], str]) -> None:
    with EchoEnv(base_url=serve_folder("echo_env")).sync() as env:
        env.reset()
        with pytest.raises(RequestValidationError) as refused:
            env.step(EchoAction.model_construct(message=["no", "text"]))
        assert refused.value.details["errors"][0]["loc"] == ["message"]
        assert env.step(EchoAction(message="ok")).observation.echoed_message == "ok"
