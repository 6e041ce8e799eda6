"""A server that comes back and asks for another token: its sessions are lost, and the old token opens none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from openenv import VectorEnv
from openenv.env.binding import infer_models
from openenv.errors import AccessDenied, ConnectFailed, SessionLost, SlotsFailed
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from servers import Serve

FINE = {"add": 1}


@pytest.fixture
def servers(serve: Serve, adder_cls: Any) -> tuple[Any, Any]:
    """Two servers of the environment that ask for different tokens."""
    models = infer_models(adder_cls)

    def start(token: str) -> Any:
        policy = AccessPolicy(orchestrator=token)
        return serve(create_app(adder_cls, models.action, models.observation, max_concurrent_envs=8, access=policy))

    return start("first-token"), start("other-token")


@pytest.mark.parametrize("connections", [1, 2])
def test_a_token_that_is_refused_at_a_reconnect_loses_the_sessions_at_once(
    servers: tuple[Any, Any], proxied: Callable[[int], Any], connections: int
) -> None:
    first, other = servers
    proxy = proxied(first.port)
    with VectorEnv(proxy.url, 2, connections=connections, token="first-token", on_failure="mask") as env:
        env.reset()
        env.step([FINE, FINE])
        accepted = proxy.accepted
        proxy.target = other.port
        proxy.cut()
        with pytest.raises(SlotsFailed) as caught:
            env.step([FINE, FINE])
        for error in caught.value.errors.values():
            assert isinstance(error, SessionLost)
            assert "token" in str(error)
        assert proxy.accepted <= accepted + connections  # it is not tried again and again
        with pytest.raises(SlotsFailed) as caught:
            env.reset()
        assert all(isinstance(error, AccessDenied) for error in caught.value.errors.values())
        assert other.manager.active == 0
        proxy.target = first.port
        assert env.reset().ok.all()  # in the sessions that were there all the time
        assert first.manager.active == 2


def test_a_token_that_is_refused_at_first_is_said_so_and_not_tried_again(
    servers: tuple[Any, Any], proxied: Callable[[int], Any]
) -> None:
    proxy = proxied(servers[0].port)
    with pytest.raises(AccessDenied) as caught:
        VectorEnv(proxy.url, 4, connections=4, token="wrong-token").connect()
    assert not isinstance(caught.value, ConnectFailed)
    assert proxy.accepted == 1
