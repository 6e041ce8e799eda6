"""Containers of a real engine: started on loopback, awaited, stopped, and never left behind whatever fails."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from openenv.errors import ProviderError, ProviderUnavailable, ServerDied, ServerNotReady
from openenv.providers import LocalDockerProvider
from openenv.providers.health import ask_health
from openenv.sandboxes import Mount
from openenv.sandboxes.container_cli import ContainerCli
from waiting import wait_until

SOURCE = Path(__file__).resolve().parents[2] / "src"
LeftBehind = Callable[[], list[str]]


@pytest.fixture
def provider(docker_host: str) -> LocalDockerProvider:
    return LocalDockerProvider(engine="docker", host=docker_host, stop_timeout_s=1)


def get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        return answer.read().decode()


def test_a_container_is_started_awaited_and_gone_afterwards(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind, engine: ContainerCli
) -> None:
    url = provider.start_container(image)
    name = provider.container_name
    assert name is not None
    assert url.startswith("http://localhost:")
    provider.wait_for_ready(url, timeout_s=60)
    assert get(f"{url}/health") == "ok\n"
    assert len(left_behind()) == 1
    provider.stop_container()
    assert provider.container_name is None
    assert left_behind() == []
    provider.stop_container()
    provider.close()
    assert engine.run("inspect", name).returncode != 0
    with pytest.raises(OSError):
        get(f"{url}/health")


def test_a_container_listens_on_loopback_only_and_is_labelled_with_its_owner(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind, engine: ContainerCli
) -> None:
    with provider:
        url = provider.start_container(image, labels={"run": "7"}, cpu_limit=0.5, memory_limit="64m")
        container = json.loads(engine.output("inspect", str(provider.container_name)))[0]
        [binding] = container["NetworkSettings"]["Ports"]["8000/tcp"]
        assert binding["HostIp"] == "127.0.0.1"
        assert url == f"http://localhost:{binding['HostPort']}"
        labels = container["Config"]["Labels"]
        assert labels["run"] == "7"
        assert labels["openenv.provider"] == "docker"
        assert f"/{os.getpid()}/" in labels["openenv.owner"]
        assert container["HostConfig"]["NanoCpus"] == 500_000_000
        assert container["HostConfig"]["Memory"] == 64 << 20
        assert left_behind() == [container["Id"]]
    assert left_behind() == []


@pytest.mark.slow
def test_a_port_that_was_asked_for_is_the_one_that_is_got(
    provider: LocalDockerProvider, image: str, free_port: Callable[[], int], left_behind: LeftBehind
) -> None:
    port = free_port()
    with provider:
        url = provider.start_container(image, port, {"PORT": "9000"}, container_port=9000)
        assert url == f"http://localhost:{port}"
        provider.wait_for_ready(url, timeout_s=60)


def test_variables_arrive_as_they_are_and_are_in_no_argument_list(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind, tmp_path: Path
) -> None:
    values = {"PLAIN": "a b", "QUOTED": "'x' \"y\" $HOME #z", "LINES": "one\ntwo\n", "EMPTY": "", "LONG": "x" * 40_000}
    command = 'for n in PLAIN QUOTED LINES EMPTY LONG; do eval "printf %s \\"\\$$n\\"" > /www/$n; done; ' + (
        "echo > /www/health; httpd -f -p 8000 -h /www"
    )
    seen, real = tmp_path / "seen", shutil.which("docker")
    program = tmp_path / "docker"
    program.write_text(f'#!/bin/sh\necho "$@" >> {seen}\nexec {real} "$@"\n')
    program.chmod(0o755)
    provider._engine = replace(provider._engine, program=str(program), host=provider._engine.host)
    with provider:
        url = provider.start_container(image, env_vars=values, command=["sh", "-c", command])
        provider.wait_for_ready(url, timeout_s=60)
        for name, value in values.items():
            assert get(f"{url}/{name}") == value
    assert "create" in seen.read_text()
    assert "a b" not in seen.read_text()
    assert "two" not in seen.read_text()


@pytest.mark.parametrize("variables", [{"A=B": "x"}, {"": "x"}, {"#A": "x"}, {"A": "\0"}, {"A B": "x"}])
def test_what_cannot_be_a_variable_is_refused_before_anything_is_started(
    provider: LocalDockerProvider, image: str, variables: dict[str, str], left_behind: LeftBehind
) -> None:
    with pytest.raises(ValueError, match="cannot be an environment variable"):
        provider.start_container(image, env_vars=variables)


@pytest.mark.slow
def test_folders_of_the_host_are_seen_read_only(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind, tmp_path: Path
) -> None:
    (tmp_path / "health").write_text("from the host")
    tmp_path.chmod(0o755)
    command = "touch /data/x 2> /dev/null && exit 9; exec httpd -f -p 8000 -h /data"
    with provider:
        url = provider.start_container(image, command=["sh", "-c", command], mounts=[Mount(tmp_path, "/data")])
        provider.wait_for_ready(url, timeout_s=60)
        assert get(f"{url}/health") == "from the host"
    assert not (tmp_path / "x").exists()


def test_an_option_that_is_not_known_is_refused_with_those_that_are(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind
) -> None:
    with pytest.raises(ValueError, match=r"wait_timeout.*memory_limit"):
        provider.start_container(image, wait_timeout=3)


@pytest.mark.slow
def test_a_provider_that_runs_a_container_does_not_lose_it_to_another(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind
) -> None:
    with provider:
        provider.start_container(image)
        with pytest.raises(RuntimeError, match="already running"):
            provider.start_container(image)
        assert len(left_behind()) == 1
        provider.stop_container()
        provider.start_container(image)


@pytest.mark.slow
def test_a_server_that_dies_is_reported_at_once_with_its_last_output(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind
) -> None:
    command = ["sh", "-c", "sleep 1; echo no such module >&2; exit 3"]
    url = provider.start_container(image, command=command)
    with pytest.raises(ServerDied, match=r"exit code 3(.|\n)*no such module") as caught:
        provider.wait_for_ready(url, timeout_s=280)  # more than the test has
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.log == "no such module"
    assert left_behind() == []


@pytest.mark.slow
def test_a_container_that_dies_before_it_has_a_port_shows_its_log(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind
) -> None:
    with pytest.raises(RuntimeError, match=r"(exit code 4|ended)(.|\n)*gone already"):
        url = provider.start_container(image, command=["sh", "-c", "echo gone already; exit 4"])
        provider.wait_for_ready(url, timeout_s=280)
    assert left_behind() == []


@pytest.mark.slow
def test_memory_that_ran_out_is_reported(provider: LocalDockerProvider, image: str, left_behind: LeftBehind) -> None:
    command = ["sh", "-c", "sleep 1; tail /dev/zero"]
    url = provider.start_container(image, command=command, memory_limit="16m", run_args=["--memory-swap", "16m"])
    with pytest.raises(ServerDied, match=r"out of memory|exit code 137"):
        provider.wait_for_ready(url, timeout_s=280)


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_a_timeout_with_its_log_and_is_removed(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind
) -> None:
    url = provider.start_container(image, command=["sh", "-c", "echo still loading; sleep 600"])
    wait_until(lambda: "still loading" in provider.log())
    with pytest.raises(ServerNotReady, match=r"did not become ready within 1 s(.|\n)*still loading") as caught:
        provider.wait_for_ready(url, timeout_s=1.0)
    assert isinstance(caught.value, TimeoutError)
    assert "0.0.0.0" in str(caught.value)
    assert left_behind() == []


@pytest.mark.slow
def test_a_server_that_answers_with_an_error_is_not_ready(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind
) -> None:
    url = provider.start_container(image, command=["httpd", "-f", "-p", "8000", "-h", "/tmp"])
    wait_until(lambda: ask_health(url, 5) == "/health answered 404")
    with pytest.raises(TimeoutError, match="answered 404"):
        provider.wait_for_ready(url, timeout_s=2.0)


@pytest.mark.slow
def test_a_command_that_the_image_does_not_have_leaves_nothing(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind
) -> None:
    with pytest.raises(RuntimeError, match=r"Failed to start Docker container(.|\n)*no-such-program"):
        provider.start_container(image, command="no-such-program --flag")
    assert left_behind() == []


@pytest.mark.slow
def test_a_port_that_is_taken_is_reported_with_what_to_do_and_leaves_nothing(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RuntimeError, match="Choose another port"):
            provider.start_container(image, port=taken.getsockname()[1])
    assert left_behind() == []


@pytest.mark.slow
def test_a_network_that_publishes_nothing_is_reported(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind
) -> None:
    with pytest.raises(RuntimeError, match="network does not publish ports"):
        provider.start_container(image, network="none")
    assert left_behind() == []


def test_an_image_that_cannot_be_had_is_named_with_the_command_that_gets_it(
    provider: LocalDockerProvider, left_behind: LeftBehind
) -> None:
    with pytest.raises(RuntimeError, match=r"docker pull no\.such\.registry\.invalid/env:1"):
        provider.start_container("no.such.registry.invalid/env:1")
    assert provider.container_name is None


@pytest.mark.slow
def test_a_container_removed_from_outside_is_reported_and_stopping_it_is_harmless(
    provider: LocalDockerProvider, image: str, left_behind: LeftBehind, engine: ContainerCli
) -> None:
    provider.start_container(image)
    engine.output("rm", "-f", str(provider.container_name))
    provider.stop_container()
    url = provider.start_container(image, command=["sleep", "600"])
    engine.output("rm", "-f", str(provider.container_name))
    with pytest.raises(ServerDied, match="removed"):
        provider.wait_for_ready(url, timeout_s=280)


def test_stopping_when_the_engine_is_gone_warns_with_what_to_remove(
    provider: LocalDockerProvider,
    image: str,
    left_behind: LeftBehind,
    engine: ContainerCli,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    provider.start_container(image)
    name = str(provider.container_name)
    provider._engine = replace(provider._engine, program=engine.program, host=f"unix://{tmp_path}/gone.sock")
    with caplog.at_level(logging.WARNING):
        provider.stop_container()
        provider.stop_container()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"docker rm -f {name}" in caplog.text
    engine.output("rm", "-f", name)


INTERRUPTED = """
import os, signal, sys, threading
from openenv.providers import LocalDockerProvider

# A test run in the background ignores Ctrl-C, and so would this program.
signal.signal(signal.SIGINT, signal.default_int_handler)
from openenv.sandboxes.container_cli import ContainerCli

provider = LocalDockerProvider(engine="docker", host=sys.argv[1])
moment = sys.argv[3]
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
try:
    if moment == "create":
        output = ContainerCli.output
        def interrupted_output(engine, *args, **options):
            if args[0] == "create":
                threading.Timer(0.03, interrupt).start()
            return output(engine, *args, **options)
        ContainerCli.output = interrupted_output
    url = provider.start_container(sys.argv[2], command=["sleep", "600"])
    if moment == "ready":
        threading.Timer(0.5, interrupt).start()
    provider.wait_for_ready(url, timeout_s=60)
except KeyboardInterrupt:
    print("interrupted", provider.container_name)
"""
FORGOTTEN = """
import os, signal, sys
from openenv.providers import LocalDockerProvider

provider = LocalDockerProvider(engine="docker", host=sys.argv[1], stop_timeout_s=0)
url = provider.start_container(sys.argv[2])
print(provider.container_name, flush=True)
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if os.fork() == 0:
    sys.exit(0)  # a fork does not stop what its parent has started
os.wait()
provider.wait_for_ready(url, timeout_s=60)
print("ready", flush=True)
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("moment", ["create", "ready"])
@pytest.mark.slow
def test_an_interrupt_leaves_nothing(docker_host: str, image: str, left_behind: LeftBehind, moment: str) -> None:
    done = run(INTERRUPTED, docker_host, image, moment)
    assert done.stdout == "interrupted None\n", done.stderr
    assert left_behind() == []


@pytest.mark.slow
def test_a_container_ends_with_the_process_that_forgot_it_and_not_with_a_fork_of_it(
    docker_host: str, image: str, left_behind: LeftBehind
) -> None:
    done = run(FORGOTTEN, docker_host, image, "forgotten")
    assert done.stdout.splitlines()[1:] == ["ready"], done.stderr
    assert left_behind() == []


@pytest.mark.slow
def test_the_container_of_a_killed_process_is_removed_by_the_next_start(
    provider: LocalDockerProvider, docker_host: str, image: str, left_behind: LeftBehind, engine: ContainerCli
) -> None:
    done = run(FORGOTTEN, docker_host, image, "killed")
    assert done.returncode == -9, done.stderr
    name = done.stdout.strip()
    assert len(left_behind()) == 1
    with provider:
        provider.start_container(image)
        assert engine.run("inspect", name).returncode != 0
        assert len(left_behind()) == 1


def test_an_engine_that_does_not_answer_is_distinguished_from_one_that_is_missing(
    engine: ContainerCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"Docker is not available: .*does not answer"):
        LocalDockerProvider(engine="docker", host=f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProviderUnavailable, match=r"Docker is not available: .*apt-get install"):
        LocalDockerProvider()
    with pytest.raises(ProviderUnavailable, match="Podman is not available"):
        LocalDockerProvider(engine="podman")


def test_an_engine_that_hangs_is_a_provider_error(docker_host: str, tmp_path: Path) -> None:
    slow = tmp_path / "docker"
    slow.write_text("#!/bin/sh\nsleep 600\n")
    slow.chmod(0o755)
    provider = LocalDockerProvider(engine="docker", host=docker_host)
    provider._engine = replace(provider._engine, program=str(slow), host=None)
    with pytest.raises(ProviderError, match="gave no answer"):
        provider._engine.run("ps", timeout=0.3)


def test_a_pull_that_takes_long_is_reported(
    provider: LocalDockerProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("openenv.providers.provider.PATIENCE_S", 0.05)
    slow = tmp_path / "docker"
    slow.write_text('#!/bin/sh\ncase "$*" in *pull*) sleep 1; exit 0;; *) exit 1;; esac\n')
    slow.chmod(0o755)
    provider._engine = replace(provider._engine, program=str(slow), host=None)
    provider._ensure_image("big:1")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "openenv: pulling big:1 ..."
    assert lines[1].startswith("openenv: pulling big:1: ")


def test_an_engine_on_another_machine_is_distinguished_from_one_that_is_here(
    provider: LocalDockerProvider, engine: ContainerCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not provider._is_elsewhere()
    provider._engine = replace(provider._engine, program=engine.program, host="tcp://10.0.0.1:2375")
    assert provider._is_elsewhere()
    assert "another machine" in provider._advice_when_late()
    provider._engine = replace(provider._engine, program=engine.program, host=None)
    for host, elsewhere in (("ssh://user@10.0.0.1", True), ("unix:///var/run/docker.sock", False)):
        monkeypatch.setenv("DOCKER_HOST", host)
        assert provider._is_elsewhere() is elsewhere


def test_waiting_for_an_address_needs_no_container(provider: LocalDockerProvider) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        provider.wait_for_ready("http://127.0.0.1:9", timeout_s=0)
    assert time.monotonic() - began < 60
