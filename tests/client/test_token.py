"""Clients and tokens: what they send, and what they say when a server does not accept it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

from dict_client import DictHTTPClient
from environments import Idle, Tools
from openenv import GenericEnvClient, MCPToolClient, VectorEnv, connect
from openenv.client.network import with_token
from openenv.client.task_client import TaskClient
from openenv.errors import AccessDenied, ConnectFailed, Forbidden
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from openenv.types import Action, Observation
from servers import Serve


class Still(Idle):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation(done=False)

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(reward=1.0)


class Bell(Tools):
    TOOLS = ("ring",)

    def ring(self) -> str:
        return "ding"


@pytest.fixture(scope="module")
def url(serve_once: Serve) -> str:
    policy = AccessPolicy(orchestrator="main", agent="tools", observer="eyes")
    return str(serve_once(create_app(Still, Action, Observation, max_concurrent_envs=16, access=policy)).url)


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENENV_TOKEN", raising=False)


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_a_token_opens_the_server_to_a_client_and_its_further_sessions(url: str, protocol: Any) -> None:
    with GenericEnvClient(url, token="main", protocol=protocol).sync() as client:
        client.reset()
        assert client.step({}).reward == 1.0
        child = client.new_session()
        child.reset()
        assert child.step({}).reward == 1.0


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", ["v1", "v2"])
async def test_a_token_opens_the_server_to_awaiting_code(url: str, protocol: Any) -> None:
    async with GenericEnvClient(url, token="main", protocol=protocol) as client:
        await client.reset()
    with pytest.raises(AccessDenied, match="OPENENV_TOKEN"):
        await GenericEnvClient(url, protocol=protocol).connect()


def test_the_setting_is_used_where_no_token_is_given(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_TOKEN", "main,older")
    with GenericEnvClient(url).sync() as client:
        client.reset()
    with DictHTTPClient(url) as other:
        other.reset()
    with pytest.raises(AccessDenied):
        GenericEnvClient(url, token="wrong").sync().connect()


def test_a_token_works_over_http(url: str) -> None:
    with DictHTTPClient(url, token="main") as client:
        client.reset()
        assert client.step({}).reward == 1.0
    with DictHTTPClient(url) as client, pytest.raises(AccessDenied, match="OPENENV_TOKEN"):
        client.reset()
    with DictHTTPClient(url, token="tools") as client, pytest.raises(Forbidden) as caught:
        client.reset()
    assert caught.value.role == "agent"


@pytest.mark.parametrize("protocol", ["v1", "v2", "auto"])
@pytest.mark.parametrize(("token", "kind"), [(None, AccessDenied), ("wrong", AccessDenied), ("eyes", Forbidden)])
def test_a_refusal_at_the_handshake_says_what_to_do_and_is_not_tried_again(
    url: str, token: str | None, kind: type[AccessDenied], protocol: Any
) -> None:
    client = GenericEnvClient(url, token=token, protocol=protocol).sync()
    for request in (client.connect, client.reset):
        with pytest.raises(kind, match="token=") as caught:
            request()
        assert isinstance(caught.value, PermissionError)
        assert not isinstance(caught.value, (ConnectionError, ConnectFailed))


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_an_agent_cannot_reset_and_hears_why(url: str, protocol: Any) -> None:
    with GenericEnvClient(url, token="tools", protocol=protocol).sync() as client:
        with pytest.raises(Forbidden, match="agent") as caught:
            client.reset()
        assert caught.value.role == "agent"


def test_an_agent_calls_tools(serve: Serve) -> None:
    policy = AccessPolicy(agent="tools")
    url = serve(create_app(Bell, CallToolAction, CallToolObservation, access=policy)).url
    with MCPToolClient(url, token="tools").sync() as client:
        assert client.call_tool("ring") == "ding"
        with pytest.raises(Forbidden):
            client.reset()
    with pytest.raises(AccessDenied, match="token="):
        MCPToolClient(url).sync().list_tools()


def test_a_token_replaces_a_header_and_a_header_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_TOKEN", "setting")
    assert with_token(None, None) == {"Authorization": "Bearer setting"}
    assert with_token({"authorization": "Basic x"}, None) == {"authorization": "Basic x"}
    assert with_token({"authorization": "Basic x", "A": "b"}, "given") == {"A": "b", "Authorization": "Bearer given"}


def test_a_token_is_not_shown() -> None:
    client = GenericEnvClient("http://localhost:9", token="hidden")
    assert "hidden" not in f"{client!r} {client._options!r}"
    for address in ("http://x/?token=hidden", "http://user:hidden@x"):
        assert "hidden" not in f"{GenericEnvClient(address)!r} {VectorEnv(address, 1)!r} {TaskClient(address)!r}"


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/?token=hidden", "http://user:hidden@127.0.0.1:9"])
@pytest.mark.parametrize("kind", ["v1", "v2", "schemas", "vector", "http", "tasks"])
def test_errors_do_not_show_a_token_of_the_address(address: str, kind: str) -> None:
    options: dict[str, Any] = {"connect_timeout_s": 0.2}
    clients: dict[str, Callable[[], object]] = {
        "v1": lambda: GenericEnvClient(address, protocol="v1", **options).sync().reset(),
        "v2": lambda: GenericEnvClient(address, protocol="v2", **options).sync().reset(),
        "schemas": lambda: connect(address, **options).sync().reset(),
        "vector": lambda: VectorEnv(address, 1, **options).reset(),
        "http": lambda: DictHTTPClient(address).reset(),
        "tasks": lambda: TaskClient(address).environments(),
    }
    with pytest.raises(ConnectFailed) as caught:
        clients[kind]()
    text = "".join(traceback.format_exception(caught.value))
    assert "127.0.0.1:9" in text
    assert "hidden" not in text
