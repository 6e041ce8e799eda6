import pytest
from word_env import WordAction, WordGame

from openenv import LocalEnv
from openenv.errors import RequestValidationError


def test_the_right_word_ends_the_episode_with_a_reward():
    with LocalEnv(WordGame).sync() as env:
        env.reset(seed=5)
        result = env.step(WordAction(guess=env.state().word))
        assert (result.reward, result.done) == (1.0, True)
        assert result.observation.terminated


def test_a_word_of_another_length_is_refused():
    with LocalEnv(WordGame).sync() as env:
        env.reset()
        with pytest.raises(RequestValidationError):
            env.step({"guess": "no"})
