"""Services of a real swarm: started, awaited, reported when they cannot run, and gone afterwards."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openenv.errors import ProviderUnavailable, ServerDied, ServerNotReady
from openenv.providers import DockerSwarmProvider
from openenv.providers.health import ask_health
from openenv.sandboxes.container_cli import ContainerCli
from waiting import wait_until

SOURCE = Path(__file__).resolve().parents[2] / "src"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def swarm_host(docker_host: str, engine: ContainerCli) -> str:
    """The address of an engine that is a swarm; several of them on one machine need addresses of their own."""
    with pytest.raises(RuntimeError, match="Docker Swarm is not active"):
        DockerSwarmProvider(host=docker_host, auto_init_swarm=False)
    here = f"127.{random.SystemRandom().randrange(1, 250)}.{os.getpid() % 250}.2"
    place = ("--advertise-addr", here, "--listen-addr", f"{here}:2377", "--data-path-addr", here)
    done = engine.run("swarm", "init", *place)
    if done.returncode != 0:
        pytest.skip(f"no swarm can be made here: {done.stderr.decode()}")
    return docker_host


@pytest.fixture
def provider(swarm_host: str, left_behind: object) -> Iterator[DockerSwarmProvider]:
    """A provider whose replicas have ports of their own: spreading requests needs what a kernel need not have."""
    with DockerSwarmProvider(host=swarm_host, publish_mode="host", auto_init_swarm=False) as provider:
        yield provider


@pytest.fixture
def left_behind(engine: ContainerCli) -> Iterator[Callable[[], list[str]]]:
    """List the services and containers of the engine; none may be left at the test's end."""

    def all_of_them() -> list[str]:
        return [*engine.output("service", "ls", "-q").split(), *engine.output("ps", "-aq").split()]

    yield all_of_them
    wait_until(lambda: all_of_them() == [])


def test_replicas_are_started_awaited_and_gone_afterwards(
    provider: DockerSwarmProvider, image: str, engine: ContainerCli, left_behind: Callable[[], list[str]]
) -> None:
    url = provider.start_container(
        image,
        env_vars={"GREETING": "hello, all"},
        replicas=2,
        cpu_limit=0.5,
        memory_limit="64m",
        constraints=["node.role==manager"],
        labels={"run": "7"},
    )
    provider.wait_for_ready(url, timeout_s=60)
    service = json.loads(engine.output("service", "inspect", str(provider.service_name)))[0]["Spec"]
    assert service["Mode"]["Replicated"]["Replicas"] == 2
    task = service["TaskTemplate"]
    assert task["Resources"]["Limits"] == {"NanoCPUs": 500_000_000, "MemoryBytes": 64 << 20}
    assert task["Placement"]["Constraints"] == ["node.role==manager"]
    assert task["ContainerSpec"]["Env"] == ["GREETING=hello, all"]
    assert service["Labels"]["run"] == "7"
    assert service["Labels"]["openenv.provider"] == "swarm"
    wait_until(lambda: len(provider.urls) == 2, 120)
    for one in provider.urls:
        wait_until(lambda one=one: ask_health(one, 5) is None)  # type: ignore[misc]
    wait_until(lambda: "serving hello, all" in provider.log())
    with pytest.raises(RuntimeError, match="already running"):
        provider.start_container(image)
    provider.stop_container()
    assert left_behind() == []
    assert provider.urls == []
    provider.stop_container()


def test_a_command_is_split_as_a_shell_would_and_a_port_is_the_one_asked_for(
    provider: DockerSwarmProvider, image: str, free_port: Callable[[], int], left_behind: Callable[[], list[str]]
) -> None:
    port = free_port()
    with provider:
        command = "sh -c 'echo > /www/health; trap \"exit 0\" TERM; httpd -p 8000 -h /www; sleep 600 & wait'"
        url = provider.start_container(image, port, replicas=1, command=command)
        assert url == f"http://localhost:{port}"
        provider.wait_for_ready(url, timeout_s=60)


def test_replicas_that_all_die_are_reported_with_their_last_output(
    provider: DockerSwarmProvider, image: str, left_behind: Callable[[], list[str]]
) -> None:
    with pytest.raises(RuntimeError, match=r"every replica has ended(.|\n)*no such module"):
        url = provider.start_container(image, replicas=1, command=["sh", "-c", "sleep 1; echo no such module; exit 3"])
        provider.wait_for_ready(url, timeout_s=200)
    assert left_behind() == []


def test_an_image_that_is_nowhere_is_reported(
    provider: DockerSwarmProvider, left_behind: Callable[[], list[str]]
) -> None:
    with pytest.raises(RuntimeError, match=r"Failed to start Docker Swarm service(.|\n)*no\.such\.registry"):
        provider.start_container("no.such.registry.invalid/env:1", replicas=1)


def test_what_does_not_answer_in_time_is_removed(
    provider: DockerSwarmProvider, image: str, left_behind: Callable[[], list[str]]
) -> None:
    command = ["sh", "-c", "echo still loading; trap 'exit 0' TERM; sleep 600 & wait"]
    url = provider.start_container(image, replicas=1, command=command)
    with pytest.raises(ServerNotReady, match="did not become ready within 2 s") as caught:
        provider.wait_for_ready(url, timeout_s=2)
    assert isinstance(caught.value, TimeoutError)
    assert not isinstance(caught.value, ServerDied)
    assert left_behind() == []


def test_where_nothing_may_run_the_swarm_says_why(
    provider: DockerSwarmProvider, image: str, left_behind: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv.providers.swarm._SCHEDULED_S", 3.0)
    with pytest.raises(RuntimeError, match="no suitable node"):
        provider.start_container(image, constraints=["node.labels.gpu==yes"])


def test_the_swarm_chooses_the_port_behind_which_it_spreads_requests(
    swarm_host: str, image: str, left_behind: Callable[[], list[str]]
) -> None:
    with DockerSwarmProvider(host=swarm_host) as provider:
        try:
            url = provider.start_container(image)
        except RuntimeError as error:
            pytest.skip(f"this kernel cannot spread requests: {str(error)[:200]}")
        assert provider.urls == [url]


def test_a_network_is_made_where_it_is_missing_and_removed_by_who_made_it(
    swarm_host: str, image: str, engine: ContainerCli, left_behind: Callable[[], list[str]]
) -> None:
    name = f"overlay-{os.getpid()}"
    with DockerSwarmProvider(host=swarm_host, publish_mode="host", overlay_network=name) as provider:
        assert engine.output("network", "inspect", "--format", "{{.Driver}} {{.Attachable}}", name) == "overlay true"
        with DockerSwarmProvider(host=swarm_host, overlay_network=name):
            pass
        assert engine.run("network", "inspect", name).returncode == 0
        del provider
    assert engine.run("network", "inspect", name).returncode != 0


def test_an_option_that_is_not_known_is_refused(provider: DockerSwarmProvider, image: str) -> None:
    with pytest.raises(ValueError, match="Unsupported kwargs for DockerSwarmProvider: gpus"):
        provider.start_container(image, gpus=1)
    with pytest.raises(ValueError, match="publish_mode"):
        DockerSwarmProvider(publish_mode="mesh")  # type: ignore[arg-type]


KILLED = """
import os, signal, sys
from openenv.providers import DockerSwarmProvider
provider = DockerSwarmProvider(host=sys.argv[1], publish_mode="host")
provider.start_container(sys.argv[2], replicas=1)
print(provider.service_name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_service_of_a_killed_process_is_removed_by_the_next_start(
    provider: DockerSwarmProvider,
    swarm_host: str,
    image: str,
    engine: ContainerCli,
    left_behind: Callable[[], list[str]],
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, swarm_host, image],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    name = done.stdout.strip()
    assert engine.run("service", "inspect", name).returncode == 0
    with provider:
        provider.start_container(image, replicas=1)
        assert engine.run("service", "inspect", name).returncode != 0
        label = f"label=com.docker.swarm.service.name={name}"
        wait_until(lambda: engine.output("ps", "-aq", "--filter", label) == "")


def test_an_engine_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ProviderUnavailable, match="Docker is not available"):
        DockerSwarmProvider(host=f"unix://{tmp_path}/none.sock")
