"""Clients that start their server themselves, in a container of a real engine, and leave nothing behind."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenv import GenericEnvClient
from openenv.errors import ConnectFailed
from openenv.providers import LocalDockerProvider, ProcessProvider
from openenv.sandboxes import Mount
from openenv.sandboxes.container_cli import ContainerCli
from openenv.sandboxes.docker import ensure_host_image, host_mounts
from waiting import wait_until_async

ROOT = Path(__file__).resolve().parents[2]
LeftBehind = Callable[[], list[str]]


@pytest.fixture
def patient(use_engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the engine of these tests the default, and servers have more than their usual time."""
    defaults = LocalDockerProvider.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "ready_timeout_s", 200.0)


@pytest.fixture(scope="session")
def environment(engine: ContainerCli) -> dict[str, Any]:
    """What starts a real environment: this machine's Python and this project, seen in a container that has neither."""
    seen = [*host_mounts(), Mount(ROOT / "src", "/srv/src"), Mount(ROOT / "envs", "/srv/envs")]
    prefix = Path(sys.prefix)
    if not any(mount.target == str(prefix) or Path(mount.target) in prefix.parents for mount in seen):
        seen.append(Mount(prefix.resolve(), str(prefix)))
    serve = [sys.executable, "-m", "openenv", "serve", "/srv/envs/gridworld_env", "--host", "0.0.0.0", "--no-token"]
    return {
        "image": ensure_host_image(engine),
        "mounts": seen,
        "command": serve,
        "env_vars": {"PYTHONPATH": "/srv/src:/srv/envs", "PYTHONDONTWRITEBYTECODE": "1"},
    }


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_an_environment_in_an_image_is_played_without_naming_a_provider(
    environment: dict[str, Any], left_behind: LeftBehind
) -> None:
    with GenericEnvClient.from_docker_image(**environment).sync() as client:
        assert client.base_url.startswith("http://localhost:")
        assert client.reset(seed=3).done is False
        assert client.step({"move": "right"}).reward is not None
        assert client.state()["step_count"] == 1
        assert len(left_behind()) == 1
    assert left_behind() == []


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.usefixtures("patient")
async def test_an_environment_in_an_image_is_played_with_await(
    environment: dict[str, Any], left_behind: LeftBehind
) -> None:
    async with await GenericEnvClient.from_docker_image(**environment) as client:
        assert (await client.reset()).done is False
    assert left_behind() == []


@pytest.mark.slow
def test_an_image_whose_server_is_no_environment_leaves_nothing(
    docker_host: str, image: str, left_behind: LeftBehind
) -> None:
    provider = LocalDockerProvider(host=docker_host, stop_timeout_s=1, ready_timeout_s=200)
    with pytest.raises((ConnectFailed, RuntimeError)):
        GenericEnvClient.from_docker_image(image, provider).sync()
    assert left_behind() == []
    assert provider.container_name is None


@pytest.mark.slow
def test_an_image_that_does_not_get_ready_leaves_nothing(docker_host: str, image: str, left_behind: LeftBehind) -> None:
    provider = LocalDockerProvider(host=docker_host, stop_timeout_s=1, ready_timeout_s=200)
    with pytest.raises(RuntimeError, match="exit code 5"):
        GenericEnvClient.from_docker_image(image, provider, command=["sh", "-c", "sleep 1; exit 5"]).sync()
    assert left_behind() == []


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_start_that_is_cancelled_leaves_nothing(docker_host: str, image: str, left_behind: LeftBehind) -> None:
    provider = LocalDockerProvider(host=docker_host, stop_timeout_s=1, ready_timeout_s=200)
    command = ["sh", "-c", "sleep 2; echo > /www/health; httpd -f -p 8000 -h /www"]
    task = asyncio.ensure_future(GenericEnvClient.from_docker_image(image, provider, command=command))
    await wait_until_async(lambda: left_behind(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until_async(lambda: not left_behind(), 60)


@pytest.mark.anyio
@pytest.mark.parametrize("finished", [True, False])
async def test_what_a_cancelled_start_brings_is_stopped(finished: bool) -> None:
    stopped: list[str] = []
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Slow:
        def start_container(self, image: str) -> str:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait(30)
            return "http://127.0.0.1:9"

        def wait_for_ready(self, base_url: str) -> None:
            pass

        def stop_container(self) -> None:
            stopped.append("stopped")

    task = asyncio.ensure_future(GenericEnvClient.from_docker_image("image", Slow()))
    await begun.wait()
    if not finished:
        task.cancel()
    go_on.set()
    if finished:
        time.sleep(0.2)  # the loop has not yet seen that it is done
        task.cancel()
    with pytest.raises((asyncio.CancelledError, ConnectFailed)):
        await task
    await wait_until_async(lambda: stopped == ["stopped"], 30, lambda: stopped)


def test_a_client_says_what_a_provider_needs_that_cannot_start_by_itself(docker_host: str) -> None:
    provider = LocalDockerProvider(host=docker_host)
    with pytest.raises(ValueError, match="from_docker_image"):
        GenericEnvClient(provider=provider).sync().connect()
    with pytest.raises(TypeError, match="start"):
        GenericEnvClient(provider=object()).sync().connect()


@pytest.mark.slow
def test_a_container_provider_that_knows_its_image_is_started_by_its_client() -> None:
    class Own:
        """As existing code has them: the image is the constructor's."""

        def __init__(self) -> None:
            self.process = ProcessProvider(ROOT / "envs" / "echo_env", ready_timeout_s=60)
            self.stopped = 0

        def start_container(self, image: str = "", port: int | None = None, **kwargs: Any) -> str:
            return self.process.start(port)

        def wait_for_ready(self, base_url: str, timeout_s: float = 60.0) -> None:
            self.process.wait_for_ready(timeout_s)

        def stop_container(self) -> None:
            self.process.stop()
            self.stopped += 1

    own = Own()
    with GenericEnvClient(provider=own) as client:
        assert client.reset().done is False
    assert own.stopped == 1
