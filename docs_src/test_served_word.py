import pytest
from word_client import WordEnv
from word_env import WordAction, WordGame

from openenv.testing import serve

pytest_plugins = ["openenv.testing.plugin"]


@pytest.fixture(scope="module")
def url():
    with serve(WordGame) as served:
        yield served.url


def test_two_clients_play_two_games(url):
    with WordEnv(base_url=url).sync() as one, WordEnv(base_url=url).sync() as two:
        one.reset(seed=5)
        two.reset(seed=6)
        one.step(WordAction(guess="apple"))
        assert (one.state().step_count, two.state().step_count) == (1, 0)


def test_an_environment_of_this_test_alone(serve_env):
    with WordEnv(base_url=serve_env(WordGame).url).sync() as env:
        assert env.reset().observation.tries_left == 6
