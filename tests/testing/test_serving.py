"""`openenv.testing.serve`: environments and applications on a free port, for as long as a block runs."""

from __future__ import annotations

import socket
from collections.abc import Callable

import httpx2
import pytest

from openenv import Action, Environment, GenericEnvClient, Observation, State, create_app
from openenv.server.loading import TargetError
from openenv.testing import Served, serve

pytest_plugins = ["openenv.testing.plugin"]


class Counter(Environment[Action, Observation, State]):
    """Counts its steps and pays for each."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    @property
    def state(self) -> State:
        return self._state

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: object) -> Observation:
        self._state = State(episode_id=episode_id)
        return Observation()

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: object) -> Observation:
        self._state.step_count += 1
        return Observation(reward=float(self._state.step_count))


def make_counter() -> Counter:
    return Counter()


def unclear():  # type: ignore[no-untyped-def]  # the missing annotation is the point
    return Counter()


def reward_of_two_steps(url: str) -> float | None:
    with GenericEnvClient(base_url=url).sync() as env:
        env.reset()
        env.step({})
        return env.step({}).reward


@pytest.mark.parametrize("served", [Counter, make_counter, create_app(Counter, Action, Observation)])
def test_a_class_a_factory_and_an_application_are_served(served: object) -> None:
    with serve(served) as server:
        assert reward_of_two_steps(server.url) == 2.0
        assert server.url == f"http://127.0.0.1:{server.port}"


def test_the_port_is_free_again_after_the_block() -> None:
    with serve(Counter) as server:
        assert httpx2.get(f"{server.url}/health", trust_env=False).status_code == 200
    with serve(Counter, port=server.port) as again:
        assert again.port == server.port


def test_a_server_stops_when_the_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), serve(Counter) as server:
        raise ZeroDivisionError
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0


@pytest.mark.parametrize(("target", "reason"), [(unclear, "no return annotation"), (42, "neither an application")])
def test_what_cannot_be_served_is_refused_with_the_reason(target: object, reason: str) -> None:
    with pytest.raises(TargetError, match=reason), serve(target):
        pass


def test_the_fixture_serves_several_at_once(serve_env: Callable[..., Served]) -> None:
    one, two = serve_env(Counter), serve_env(make_counter)
    assert one.port != two.port
    assert reward_of_two_steps(one.url) == reward_of_two_steps(two.url) == 2.0
