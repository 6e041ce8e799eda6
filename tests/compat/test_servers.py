"""Servers and environments as existing code makes them: the rules of their constructors, modes, defaults."""

from __future__ import annotations

from typing import Any

import pytest

from openenv.core.env_server import exceptions, http_server, interfaces, types
from openenv.core.env_server.http_server import HTTPEnvServer, create_app, create_fastapi_app
from openenv.core.utils import run_async_safely


class Env(interfaces.Environment):
    """A minimal environment of one session."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> types.Observation:
        return types.Observation()

    def step(self, action: types.Action, timeout_s: float | None = None, **kwargs: Any) -> types.Observation:
        return types.Observation(reward=1)

    @property
    def state(self) -> types.State:
        return types.State()


class ManyEnv(Env):
    """The same, many at once."""

    SUPPORTS_CONCURRENT_SESSIONS = True


# -- servers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [HTTPEnvServer, create_app, create_fastapi_app])
def test_an_instance_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match="must be a callable"):
        make(Env(), types.Action, types.Observation)


@pytest.mark.parametrize("make", [HTTPEnvServer, create_app, create_fastapi_app])
def test_the_two_ways_to_say_how_many_sessions_exclude_each_other(make: Any) -> None:
    config = types.ConcurrencyConfig(max_concurrent_envs=2)
    with pytest.raises(ValueError):
        make(ManyEnv, types.Action, types.Observation, max_concurrent_envs=2, concurrency_config=config)


@pytest.mark.parametrize("make", [HTTPEnvServer, create_app, create_fastapi_app])
def test_many_sessions_need_a_class_that_allows_them(make: Any) -> None:
    with pytest.raises(exceptions.ConcurrencyConfigurationError) as caught:
        make(Env, types.Action, types.Observation, max_concurrent_envs=2)
    assert caught.value.max_concurrent_envs == 2
    assert caught.value.environment_name == "Env"
    make(ManyEnv, types.Action, types.Observation, max_concurrent_envs=2)
    make(Env, types.Action, types.Observation, max_concurrent_envs=1)


def test_a_server_tells_its_capacity() -> None:
    server = HTTPEnvServer(ManyEnv, types.Action, types.Observation, 3)
    assert (server.active_sessions, server.max_concurrent_envs) == (0, 3)
    assert server.is_concurrency_safe
    assert server.concurrency_config == types.ConcurrencyConfig(max_concurrent_envs=3)
    assert server.get_capacity_status() == types.ServerCapacityStatus(active_sessions=0, max_sessions=3)
    assert server.get_session_info("nobody") is None
    assert (server.action_cls, server.observation_cls) == (types.Action, types.Observation)
    timed = types.ConcurrencyConfig(max_concurrent_envs=2, session_timeout=30)
    assert HTTPEnvServer(ManyEnv, None, None, concurrency_config=timed).concurrency_config is timed
    assert not HTTPEnvServer(Env, None, None).is_concurrency_safe


def test_a_server_can_be_made_without_models() -> None:
    server = HTTPEnvServer(Env, action_cls=None, observation_cls=None)
    assert server.action_cls is None
    assert server.max_concurrent_envs == 1


@pytest.mark.parametrize("mode", ["simulation", "PRODUCTION", types.ServerMode.SIMULATION])
def test_a_mode_may_be_a_word_in_any_case_or_a_member(mode: Any) -> None:
    app = create_app(Env, types.Action, types.Observation, mode=mode)
    paths = {getattr(route, "path", None) for route in app.routes}
    assert ("/reset" in paths) == (str(getattr(mode, "value", mode)).lower() == "simulation")
    assert {"/health", "/schema", "/metadata", "/ws", "/mcp"} <= paths


def test_the_mode_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_MODE", "production")
    app = create_app(Env, types.Action, types.Observation)
    assert "/reset" not in {getattr(route, "path", None) for route in app.routes}


def test_an_unknown_mode_of_a_server_is_refused_with_what_would_do() -> None:
    server = HTTPEnvServer(Env, types.Action, types.Observation)
    app = http_server.create_fastapi_app(Env, types.Action, types.Observation)
    with pytest.raises(ValueError) as caught:
        server.register_routes(app, mode="turbo")
    for fragment in ("mode", "simulation", "production"):
        assert fragment in str(caught.value)


# -- environments ---------------------------------------------------------------------------------------------------


def test_an_environment_has_the_attributes_and_defaults_that_authors_use() -> None:
    env = Env()
    assert Env.SUPPORTS_CONCURRENT_SESSIONS is False
    assert Env.REQUIRES_SINGLE_THREAD_EXECUTOR is False
    assert env.rubric is None
    assert env.transform is None
    assert env.get_metadata() == types.EnvironmentMetadata(
        name="Env", description=Env.__doc__ or "Env environment", version="1.0.0"
    )
    assert env.render_web({}) is None
    assert env.web_actions({}) == []
    assert env._apply_rubric(types.Action(), types.Observation()) == 0.0
    observation = types.Observation()
    assert env._apply_transform(observation) is observation
    assert env.close() is None  # type: ignore[func-returns-value]


def test_the_asynchronous_methods_call_the_others() -> None:
    env = Env()
    assert run_async_safely(env.reset_async(seed=1)) == types.Observation()
    assert run_async_safely(env.step_async(types.Action())).reward == 1
    assert run_async_safely(env._apply_rubric_async(types.Action(), types.Observation())) == 0.0


def test_an_environment_without_its_methods_cannot_be_made() -> None:
    with pytest.raises(TypeError):
        interfaces.Environment()  # type: ignore[abstract]
