"""`OPENENV_FAST=0` and `fast=False`: uvicorn's own protocols and plain ASGI, with the same behaviour."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from uvicorn.config import Config
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from environments import Heard, Parrot, Say
from openenv import GenericEnvClient
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from openenv.server.fast.http import FirstRead, LimitedHttpProtocol
from openenv.server.fast.upgrade import UpgradeProtocol
from openenv.server.options import ServerOptions
from openenv.server.run import ServeOptions, uvicorn_settings
from openenv.server.sockets import AsgiSocket
from openenv.server.ws import WsEndpoint
from servers import RunningServer, Serve


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> list[type[Any]]:
    """The class of each connection's socket."""
    seen: list[type[Any]] = []
    begin = WsEndpoint.begin

    def watching(endpoint: Any, scope: Any, socket: Any, subprotocol: Any) -> Any:
        seen.append(type(socket))
        return begin(endpoint, scope, socket, subprotocol)

    monkeypatch.setattr(WsEndpoint, "begin", watching)
    return seen


@pytest.fixture
def server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    monkeypatch.setenv("OPENENV_FAST", "0")
    Parrot.gate.set()
    return serve(create_app(Parrot, Say, Heard, max_concurrent_envs=4, max_message_bytes=4096))


def test_uvicorns_own_protocols_are_used() -> None:
    fast, plain = (
        uvicorn_settings(ServeOptions(), ServerOptions()),
        uvicorn_settings(ServeOptions(), ServerOptions(fast=False)),
    )
    assert (fast["http"], fast["ws"]) == (FirstRead, UpgradeProtocol)
    assert plain["http"] is LimitedHttpProtocol  # uvicorn's, with limits on heads and on unread responses
    config = Config(create_app(Parrot, Say, Heard, fast=False), log_config=None, **plain)
    config.load()
    assert config.ws_protocol_class is not None
    assert config.ws_protocol_class.__module__.startswith("uvicorn.")


def test_a_client_steps_and_resumes_as_with_it(server: RunningServer, sockets: list[type[Any]]) -> None:
    with GenericEnvClient(server.url).sync() as env:
        env.reset()
        for text in ("a", "b"):
            assert env.step({"message": text}).observation["text"] == text
    assert sockets == [AsgiSocket]
    server.wait_for(lambda: server.manager.active == 0)


def test_a_message_over_the_limit_is_refused_and_the_session_lives_on(server: RunningServer) -> None:
    with GenericEnvClient(server.url).sync() as env:
        env.reset()
        with pytest.raises(Exception, match="over the limit of 4096 bytes"):
            env.step({"message": "x" * 5000})
        assert env.step({"message": "a"}).observation["text"] == "a"


def test_http_requests_are_answered(server: RunningServer) -> None:
    reply = httpx.post(f"{server.url}/reset", headers={"X-OpenEnv-Session": "new"}, json={})
    session = {"X-OpenEnv-Session": reply.headers["x-openenv-session"]}
    step = httpx.post(f"{server.url}/step", headers=session, json={"action": {"message": "a"}})
    assert step.json()["observation"]["text"] == "a"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_handshake_without_a_token_is_refused_with_401(serve: Serve, monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENENV_FAST", "0")
    server = serve(create_app(Parrot, Say, Heard, access=AccessPolicy(orchestrator="secret")))
    with pytest.raises(InvalidStatus) as caught, connect(f"ws://127.0.0.1:{server.port}/ws", proxy=None):
        pass
    assert caught.value.response.status_code == 401
