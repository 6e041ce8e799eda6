"""Clients as existing code has them: arguments, modes and URLs, helper methods of their own, containers."""

from __future__ import annotations

from typing import Any

import pytest
from sample_echo import EchoAction, EchoEnv, echo_app

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server import types
from openenv.core.generic_client import GenericAction, GenericEnvClient
from openenv.core.sync_client import SyncEnvClient
from openenv.core.utils import convert_to_ws_url, hf_space_subdomain, run_async_safely
from servers import Serve

# -- constructors and what they refuse --------------------------------------------------------------------------------


def test_a_step_result_has_four_fields_and_three_defaults() -> None:
    result: StepResult[str] = StepResult("seen")
    assert (result.observation, result.reward, result.done, result.metadata) == ("seen", None, False, None)
    assert StepResult(observation=1, reward=2.0, done=True, metadata={}) == StepResult(1, 2.0, True, {})


def test_a_generic_action_is_a_dict_that_shows_its_fields() -> None:
    action = GenericAction(message="hi", count=2)
    assert action == {"message": "hi", "count": 2}
    assert isinstance(action, dict)
    assert repr(action) == "GenericAction(message='hi', count=2)"
    assert repr(GenericAction()) == "GenericAction()"


def test_a_generic_client_takes_dicts_models_and_objects_as_actions() -> None:
    class Plain:
        def __init__(self) -> None:
            self.amount = 1

    client = GenericEnvClient(base_url="http://127.0.0.1:1")
    assert client._step_payload({"a": 1}) == {"a": 1}
    assert client._step_payload(GenericAction(a=1)) == {"a": 1}
    assert client._step_payload(types.Action(metadata={"k": 1})) == {"metadata": {"k": 1}}
    assert client._step_payload(Plain()) == {"amount": 1}


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        ("http://host:8000", "ws://host:8000/ws"),
        ("https://host", "wss://host/ws"),
        ("https://host/", "wss://host/ws"),
        ("ws://host:1/", "ws://host:1/ws"),
        ("wss://host/prefix/", "wss://host/prefix/ws"),
        ("localhost:8000", "ws://localhost:8000/ws"),
    ],
)
def test_a_client_turns_a_base_url_into_the_socket_url(base_url: str, expected: str) -> None:
    client = GenericEnvClient(base_url=base_url)
    assert client._ws_url == expected
    assert convert_to_ws_url(base_url) + "/ws" == expected


def test_a_client_needs_a_base_url_or_a_provider() -> None:
    with pytest.raises(ValueError, match="base_url"):
        GenericEnvClient()
    GenericEnvClient(provider=object())


def test_a_clients_constructor_takes_the_known_arguments_in_order() -> None:
    client = GenericEnvClient("http://h", 1.0, 2.0, 3.0, 4.0, 5.0, None, "production", {"X-A": "b"})
    assert client.base_url == "http://h"
    assert client._mode == "production"
    GenericEnvClient(
        base_url="http://h",
        connect_timeout_s=1,
        message_timeout_s=2,
        max_message_size_mb=3,
        websocket_ping_interval_s=4,
        websocket_ping_timeout_s=5,
        provider=None,
        mode=None,
        headers=None,
    )


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [
        (None, None, "simulation"),
        (None, "production", "production"),
        (None, "Production", "production"),
        ("simulation", "production", "simulation"),
        ("PRODUCTION", None, "production"),
    ],
)
def test_the_mode_comes_from_the_argument_else_from_the_variable(
    monkeypatch: pytest.MonkeyPatch, argument: str | None, variable: str | None, expected: str
) -> None:
    monkeypatch.delenv("OPENENV_CLIENT_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("OPENENV_CLIENT_MODE", variable)
    assert GenericEnvClient(base_url="http://h", mode=argument)._mode == expected


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_an_unknown_mode_is_refused_with_what_would_do(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("OPENENV_CLIENT_MODE", "turbo" if how == "variable" else "simulation")
    with pytest.raises(ValueError) as caught:
        GenericEnvClient(base_url="http://h", mode="turbo" if how == "argument" else None)
    text = str(caught.value)
    for fragment in ("OPENENV_CLIENT_MODE", "simulation", "production"):
        assert fragment in text
    assert "invalid" in text.lower()


def test_the_mode_cannot_be_changed_afterwards() -> None:
    client = GenericEnvClient(base_url="http://h")
    with pytest.raises(AttributeError):
        client._mode = "production"
    assert client._mode == "simulation"


def test_a_client_without_its_hooks_cannot_be_made() -> None:
    class Half(EnvClient[Any, Any, Any]):
        def _step_payload(self, action: Any) -> dict[str, Any]:
            return {}

    with pytest.raises(TypeError):
        Half(base_url="http://h")


def test_a_sync_client_knows_its_client() -> None:
    client = GenericEnvClient(base_url="http://h")
    blocking = client.sync()
    assert isinstance(blocking, SyncEnvClient)
    assert blocking.async_client is client
    assert isinstance(SyncEnvClient(GenericEnvClient(base_url="http://h")), SyncEnvClient)


def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    with pytest.raises(ConnectionError):
        GenericEnvClient(base_url="http://127.0.0.1:9", connect_timeout_s=5).sync().connect()


def test_utilities() -> None:
    async def seven() -> int:
        return 7

    async def nested() -> int:
        return run_async_safely(seven())

    assert run_async_safely(seven()) == 7
    assert run_async_safely(nested()) == 7
    assert hf_space_subdomain("Org/My_Space.v2") == "org-my-space-v2"


# -- helper methods ---------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_clients_own_coroutines_are_awaited(serve: Serve) -> None:
    async with EchoEnv(base_url=serve(echo_app()).url) as client:
        await client.reset()
        assert await client.say("a", "b") == ["a", "b"]
        assert await client.say_twice("c") == "cc"
        assert (await client.step(client.greeting("you"))).observation.echoed == "hello you"
        assert (await client.state()).step_count == 5


def test_a_clients_own_coroutines_block_behind_sync(serve: Serve) -> None:
    with EchoEnv(base_url=serve(echo_app()).url).sync() as client:
        client.reset()
        assert client.say("a", "b") == ["a", "b"]
        assert client.say_twice("c") == "cc"
        assert client.step(client.greeting("you")).observation.echoed == "hello you"
        assert client.state().step_count == 5


def test_a_client_is_a_context_manager_where_no_loop_runs(serve: Serve) -> None:
    with EchoEnv(base_url=serve(echo_app()).url) as client:
        begun: Any = client.reset(episode_id="e")
        assert begun.observation.echoed == "ready"
        stepped: Any = client.step(EchoAction(message="abc"))
        assert (stepped.observation.echoed, stepped.reward) == ("abc", 3.0)
        state: Any = client.state()
        assert state.episode_id == "e"


def test_keywords_of_step_are_accepted_and_stay_at_home(serve: Serve) -> None:
    with EchoEnv(base_url=serve(echo_app()).url).sync() as client:
        client.reset()
        assert client.step(EchoAction(message="abc"), timeout_s=3).observation.echoed == "abc"


class Provider:
    """A container provider as existing code writes them; its container is a server that already runs."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.calls: list[Any] = []

    def start_container(self, image: str, port: int | None = None, env_vars: Any = None, **kwargs: Any) -> str:
        self.calls.append(("start", image, env_vars, kwargs))
        return self.url

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        self.calls.append(("wait", base_url))

    def stop_container(self) -> None:
        self.calls.append("stop")


STARTED = ("start", "echo:latest", {"A": "b"}, {"memory": "1g"})


def test_a_client_from_an_image_blocks_behind_sync(serve: Serve) -> None:
    provider = Provider(serve(echo_app()).url)
    made = EchoEnv.from_docker_image("echo:latest", provider=provider, env_vars={"A": "b"}, memory="1g")
    client = made.sync()
    try:
        assert client.reset().observation.echoed == "ready"
        assert provider.calls == [STARTED, ("wait", provider.url)]
    finally:
        client.close()
    assert provider.calls[-1] == "stop"


@pytest.mark.anyio
async def test_a_client_from_an_image_is_awaited(serve: Serve) -> None:
    provider = Provider(serve(echo_app()).url)
    client = await EchoEnv.from_docker_image("echo:latest", provider=provider, env_vars={"A": "b"}, memory="1g")
    assert (await client.reset()).observation.echoed == "ready"
    await client.close()
    assert provider.calls == [STARTED, ("wait", provider.url), "stop"]


def test_a_provider_is_stopped_when_its_server_cannot_be_reached() -> None:
    provider = Provider("http://127.0.0.1:9")
    with pytest.raises(ConnectionError):
        EchoEnv.from_docker_image("echo:latest", provider=provider).sync()
    assert provider.calls[-1] == "stop"
