"""Providers: objects that start a real server, here in this process, for a client and stop it with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from openenv import GenericEnvClient, HTTPEnvClient
from openenv.client.bootstrap import load_provider, stop_provider
from openenv.errors import ConnectFailed
from servers import Serve


class InProcess:
    """A provider in all its forms: containers by image, runtimes by `start`."""

    def __init__(self, start_server: Callable[[], Any], *, fail: str = "") -> None:
        self._start_server = start_server
        self._fail = fail
        self.log: list[Any] = []
        self.url = ""

    def start_container(self, image: str, **kwargs: Any) -> str:
        self.log.append(("start", image, kwargs))
        return self._begin()

    def start(self, **kwargs: Any) -> str:
        self.log.append(("start", None, kwargs))
        return self._begin()

    def _begin(self) -> str:
        if self._fail == "start":
            raise RuntimeError("cannot start")
        self.url = self._start_server().url
        return self.url

    def wait_for_ready(self, base_url: str | None = None, timeout_s: float = 30.0) -> None:
        self.log.append("ready")
        if self._fail == "ready":
            raise TimeoutError("not ready")

    def stop_container(self) -> None:
        self.log.append("stop")

    def close(self) -> None:
        self.log.append("close")


class Runtime(InProcess):
    """One that has `stop` and no containers."""

    stop_container = None  # type: ignore[assignment]
    close = None  # type: ignore[assignment]

    def stop(self) -> None:
        self.log.append("stopped")


@pytest.fixture
def start_server(serve: Serve, parrot_app: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: serve(parrot_app())


@pytest.mark.anyio
async def test_an_image_is_started_awaited_used_and_stopped(start_server: Callable[[], Any]) -> None:
    provider = InProcess(start_server)
    client = await GenericEnvClient.from_docker_image("img:1", provider, port=9)
    assert client.base_url == provider.url
    assert (await client.reset(seed=1)).observation["text"] == "seed 1"
    await client.close()
    assert provider.log == [("start", "img:1", {"port": 9}), "ready", "stop", "close"]


def test_an_image_is_started_for_a_blocking_client_too(start_server: Callable[[], Any]) -> None:
    provider = InProcess(start_server)
    with GenericEnvClient.from_docker_image("img:1", provider).sync() as client:
        assert client.reset().observation["text"] == "seed None"
    assert provider.log[-2:] == ["stop", "close"]


def test_nothing_is_started_before_it_is_asked_for(start_server: Callable[[], Any]) -> None:
    provider = InProcess(start_server)
    GenericEnvClient.from_docker_image("img:1", provider)
    assert provider.log == []


@pytest.mark.parametrize("fail", ["start", "ready"])
def test_a_start_that_fails_leaves_nothing_running(start_server: Callable[[], Any], fail: str) -> None:
    provider = InProcess(start_server, fail=fail)
    with pytest.raises((RuntimeError, TimeoutError)):
        GenericEnvClient.from_docker_image("img:1", provider).sync()
    assert provider.log[-2:] == ["stop", "close"]


def test_a_space_is_an_image_of_the_hub_or_a_runtime(start_server: Callable[[], Any]) -> None:
    provider = InProcess(start_server)
    with GenericEnvClient.from_env("Org/My_Env", provider=provider, tag="v2").sync() as client:
        client.reset()
    assert provider.log[0] == ("start", "registry.hf.space/org-my-env:v2", {})
    runtime = Runtime(start_server)
    with GenericEnvClient.from_env("Org/My_Env", use_docker=False, provider=runtime, port=3).sync() as client:
        client.reset()
    assert runtime.log == [("start", None, {"port": 3}), "ready", "stopped"]


def test_a_provider_given_to_the_client_is_started_by_its_first_use(start_server: Callable[[], Any]) -> None:
    runtime = Runtime(start_server)
    client = GenericEnvClient(provider=runtime)
    with pytest.raises(ValueError, match="connect"):
        client.new_session()
    with client:
        assert client.reset().observation["text"] == "seed None"
        assert client.new_session().reset().observation["text"] == "seed None"
    assert runtime.log == [("start", None, {}), "ready", "stopped"]


@pytest.mark.anyio
async def test_a_provider_is_started_off_the_loop(start_server: Callable[[], Any]) -> None:
    runtime = Runtime(start_server)
    async with GenericEnvClient(provider=runtime) as client:
        assert (await client.reset()).observation["text"] == "seed None"
    assert runtime.log[-1] == "stopped"


@pytest.mark.parametrize("fail", ["start", "ready"])
def test_a_provider_that_fails_is_stopped(start_server: Callable[[], Any], fail: str) -> None:
    runtime = Runtime(start_server, fail=fail)
    with pytest.raises((RuntimeError, TimeoutError)):
        GenericEnvClient(provider=runtime).sync().reset()
    assert runtime.log[-1] == "stopped"


def test_a_server_that_cannot_be_reached_has_its_provider_stopped() -> None:
    runtime = Runtime(lambda: None)
    runtime._begin = lambda: "http://127.0.0.1:9"  # type: ignore[method-assign]
    with pytest.raises(ConnectFailed):
        GenericEnvClient(provider=runtime).sync().connect()
    assert runtime.log[-1] == "stopped"


def test_the_http_client_starts_images_too(start_server: Callable[[], Any]) -> None:
    class Client(HTTPEnvClient[Any, Any, Any]):
        def _step_payload(self, action: Any) -> dict[str, Any]:
            return dict(action)

        def _parse_result(self, payload: dict[str, Any]) -> Any:
            return payload

        def _parse_state(self, payload: dict[str, Any]) -> Any:
            return payload

    provider = InProcess(start_server)
    with Client.from_docker_image("img", provider) as client:
        assert client.reset()["observation"]["text"] == "seed None"
    assert provider.log[-2:] == ["stop", "close"]


def test_a_client_that_cannot_be_made_leaves_nothing_running(start_server: Callable[[], Any]) -> None:
    class Picky(GenericEnvClient):
        def __init__(self, **kwargs: Any) -> None:
            raise ValueError("not like this")

    provider = InProcess(start_server)
    with pytest.raises(ValueError, match="not like this"):
        Picky.from_docker_image("img:1", provider).sync()
    assert provider.log[-2:] == ["stop", "close"]


def test_an_error_of_stopping_does_not_hide_why_the_start_failed(
    start_server: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Sticky(InProcess):
        def stop_container(self) -> None:
            raise OSError("cannot stop")

    with pytest.raises(TimeoutError, match="not ready"):
        GenericEnvClient.from_docker_image("img:1", Sticky(start_server, fail="ready")).sync()
    assert "could not be stopped" in caplog.text


def test_a_provider_that_is_not_installed_is_named() -> None:
    with pytest.raises(ImportError, match="MartianProvider"):
        load_provider("MartianProvider")


def test_stopping_something_that_cannot_be_stopped_is_harmless() -> None:
    stop_provider(object())
    stop_provider(None)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
