"""Docker sandboxes on a real engine: the contract, the hardening, what is swept, what needs no rights, and errors."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv.errors import SandboxError, SandboxGone, SandboxUnavailable, SandboxUnsupported
from openenv.sandboxes import DockerSandboxes, Limits, Mount, Sandbox, SandboxSpec
from openenv.sandboxes.checks import CHECKS, CheckBench, ContractCheck, NotOffered
from openenv.sandboxes.container_cli import ContainerCli, find_engine
from openenv.sandboxes.shell import ShellSandbox
from waiting import wait_until

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(scope="module")
def bench(docker: DockerSandboxes) -> Iterator[CheckBench]:
    with CheckBench(docker) as bench:
        yield bench


@pytest.fixture(scope="module")
def box(docker: DockerSandboxes) -> Iterator[Sandbox]:
    with docker.open(SandboxSpec(timeout_s=600)) as box:
        yield box


@pytest.fixture
def engine(docker_host: str) -> ContainerCli:
    program = shutil.which("docker")
    assert program is not None
    return ContainerCli("docker", program, docker_host)


def areas_and_all() -> list[Any]:
    """The first check of each area, and all others as slow tests: the contract as a whole runs on the local backend."""
    first = {check.id.partition(".")[0]: check for check in reversed(CHECKS) if check.id != "use.threads"}.values()
    return [pytest.param(c, id=c.id, marks=() if c in first else pytest.mark.slow) for c in CHECKS]


@pytest.mark.parametrize("check", areas_and_all())
def test_docker_keeps_the_contract(check: ContractCheck, bench: CheckBench) -> None:
    try:
        check.run(bench)
    except NotOffered as error:
        pytest.skip(str(error))
    finally:
        bench.tidy()


def test_the_files_and_processes_of_a_container_are_visible_from_outside(docker: DockerSandboxes) -> None:
    with docker.open() as box:
        box.write_text("one.txt", "1")
        root = box.open_root()
        try:
            file = os.open("home/user/workdir/one.txt", os.O_RDONLY, dir_fd=root)
            with os.fdopen(file) as opened:
                assert opened.read() == "1"
            processes = os.open("proc", os.O_RDONLY, dir_fd=root)
            wait_until(lambda: sum(name.isdigit() for name in os.listdir(processes)) == box.own_processes)
            os.close(processes)
        finally:
            os.close(root)
    with pytest.raises(SandboxGone):
        box.open_root()


def test_a_container_has_no_network_no_rights_and_every_limit(docker: DockerSandboxes, engine: ContainerCli) -> None:
    with docker.open(SandboxSpec(limits=Limits(memory_mb=300, pids=77, cpus=0.5, disk_mb=100))) as box:
        container = json.loads(engine.output("inspect", box.sandbox_id))[0]
    config = container["HostConfig"]
    assert config["NetworkMode"] == "none"
    assert config["ReadonlyRootfs"] is True
    assert config["CapDrop"] == ["ALL"]
    option, profile = config["SecurityOpt"]
    assert option == "no-new-privileges"
    assert json.loads(profile.removeprefix("seccomp="))["defaultAction"] == "SCMP_ACT_ERRNO"
    assert config["PidsLimit"] == 77
    assert config["NanoCpus"] == 500_000_000
    assert config["Memory"] == config["MemorySwap"] >= 400 << 20
    assert "size=75m" in config["Tmpfs"]["/home/user"]
    assert not config["Privileged"]
    assert config["AutoRemove"] is True


def test_commands_and_variables_are_in_no_argument_list(box: Sandbox, engine: ContainerCli) -> None:
    word = "a-very-secret-word"
    job = box.start_bg("sleep 30", envs={"TOKEN": word})
    try:
        seen = b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK))
        assert word.encode() not in seen
        assert word not in engine.output("inspect", box.sandbox_id)
        assert box.exec('printf "%s" "$TOKEN"', envs={"TOKEN": word}).stdout == word
    finally:
        job.kill()


@pytest.mark.slow
def test_metadata_become_labels_and_mounts_may_have_odd_names(
    docker: DockerSandboxes, engine: ContainerCli, tmp_path: Path
) -> None:
    folder = tmp_path / "a, b"
    folder.mkdir()
    (folder / "file").write_text("seen")
    (folder / "file").chmod(0o644)
    tmp_path.chmod(0o755)
    spec = SandboxSpec(mounts=(Mount(folder, "/home/user/in, side"),), metadata={"task": "t 1"})
    with docker.open(spec) as box:
        assert box.read_text("/home/user/in, side/file") == "seen"
        labels = json.loads(engine.output("inspect", box.sandbox_id))[0]["Config"]["Labels"]
        assert labels["openenv.metadata.task"] == "t 1"


OWNER = """
import os, signal, sys
from openenv.sandboxes import DockerSandboxes, SandboxSpec
box = DockerSandboxes("host", engine="docker", host=sys.argv[1]).open(SandboxSpec(timeout_s=float(sys.argv[2])))
box.start_bg("sleep 600")
print(box.sandbox_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_owner(host: str, timeout_s: float) -> str:
    """Have a process open a sandbox and die of SIGKILL; return the container's name."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", OWNER, host, str(timeout_s)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_containers_of_a_dead_owner_are_swept_and_those_of_a_living_one_never(
    docker: DockerSandboxes, docker_host: str, engine: ContainerCli, box: Sandbox
) -> None:
    name = killed_owner(docker_host, 600)
    left = engine.output("inspect", "--format", "{{.Id}}", name)
    assert docker.sweep() == [left]
    assert engine.run("inspect", name).returncode != 0
    assert box.exec("echo on").stdout == "on\n"
    assert docker.sweep() == []


@pytest.mark.slow
def test_a_container_ends_by_itself_when_its_owner_is_dead(docker_host: str, engine: ContainerCli) -> None:
    name = killed_owner(docker_host, 2)
    wait_until(lambda: engine.run("inspect", name).returncode != 0, 30, "it lives on")


WITHOUT_RIGHTS = """
import os, socket, sys, threading
from pathlib import Path
from openenv.sandboxes import DockerSandboxes, SandboxSpec

assert "CapEff:\\t0000000000000000" in Path("/proc/self/status").read_text()
path = Path(sys.argv[2])
server = socket.socket(socket.AF_UNIX)
server.bind(str(path))
server.listen()

def serve():
    while True:
        end, _ = server.accept()
        end.recv(1000)
        end.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\nfrom the host")
        end.close()

threading.Thread(target=serve, daemon=True).start()
with DockerSandboxes("host", engine="docker", host=sys.argv[1]).open() as box:
    other = box.start_bg("sleep 5551")
    result = box.exec("(setsid env -i sh -c 'sleep 5552 & sleep 5552' &); sleep 5552", timeout=1)
    assert (result.exit_code, result.timed_out) == (124, True), result
    running = box.exec("cat /proc/[0-9]*/cmdline | tr '\\\\0' ' '").stdout
    assert "sleep 5551" in running and "sleep 5552" not in running, running
    url = box.expose(path, port=7070)
    ask = "import urllib.request as u; print(u.urlopen('%s').read())" % url
    for _ in range(2):
        assert "from the host" in box.exec(["python3", "-c", ask]).stdout
        box.stop_processes()
print("all well")
"""


@pytest.mark.slow
def test_without_rights_trees_are_killed_and_ports_opened_from_inside(docker_host: str, tmp_path: Path) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed: apt-get install -y util-linux")
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"]
    done = subprocess.run(
        [*drop, sys.executable, "-c", WITHOUT_RIGHTS, docker_host, str(tmp_path / "socket")],
        capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=False,
    )  # fmt: skip
    assert done.stdout == "all well\n", done.stderr


@pytest.fixture(scope="module")
def bare(docker_host: str, busybox_archive: Callable[..., Path]) -> DockerSandboxes:
    """A backend with an image in which there is nothing but busybox."""
    archive = busybox_archive("home/user", "tmp", "proc", "sys", "dev", "etc")
    subprocess.run(["docker", "--host", docker_host, "import", str(archive), "bare:1"], check=True, capture_output=True)
    return DockerSandboxes("bare:1", engine="docker", host=docker_host)


BARE_CHECKS = {
    "exec.exit-code", "exec.signal", "exec.missing", "exec.arguments", "exec.environment", "exec.folder", "exec.input",
    "output.streams", "output.binary", "time.timeout", "time.daemon", "time.others", "time.background", "job.kill",
    "stop.daemons", "file.content", "file.missing", "file.part", "tree.specials", "tree.closed", "tree.upload",
}  # fmt: skip
BARE_EVERY_TIME = {"output.streams", "stop.daemons", "tree.upload"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=check.id, marks=() if check.id in BARE_EVERY_TIME else pytest.mark.slow)
        for check in CHECKS
        if check.id in BARE_CHECKS
    ],
)
def test_an_image_needs_no_more_than_a_shell_and_tar(check: ContractCheck, bare_bench: CheckBench) -> None:
    try:
        check.run(bare_bench)
    except NotOffered as error:
        pytest.skip(str(error))
    finally:
        bare_bench.tidy()


@pytest.fixture(scope="module")
def bare_bench(bare: DockerSandboxes) -> Iterator[CheckBench]:
    with CheckBench(bare) as bench:
        yield bench


def test_a_port_is_exposed_from_outside_where_nothing_inside_could(bare: DockerSandboxes, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, bare.open() as box:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        threading.Thread(target=answer_once, args=(server,), daemon=True).start()
        url = box.expose(tmp_path / "socket", port=8000)
        assert box.exec(["wget", "-q", "-O", "-", url]).stdout == "hello"


def answer_once(server: socket.socket) -> None:
    end, _ = server.accept()
    with end:
        end.recv(1000)
        end.sendall(b"HTTP/1.0 200 OK\r\n\r\nhello")


@pytest.mark.slow
def test_a_relay_that_cannot_run_inside_is_reported_as_unsupported(bare: DockerSandboxes, tmp_path: Path) -> None:
    with bare.open() as box, pytest.raises(SandboxUnsupported, match="python3"):
        ShellSandbox.expose(box, tmp_path / "socket", port=8000)


def test_a_port_that_is_taken_is_refused(box: Sandbox, tmp_path: Path) -> None:
    job = box.start_bg(["python3", "-m", "http.server", "--bind", "127.0.0.1", "8123"])
    try:
        ready = box.exec(
            "until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8123))'; do :; done"
        )
        assert ready.exit_code == 0
        with pytest.raises(SandboxError, match="taken"):
            box.expose(tmp_path / "socket", port=8123)
    finally:
        job.kill()


def test_the_host_image_has_the_python_that_runs_here_and_no_private_keys(box: Sandbox) -> None:
    result = box.exec(["python3", "-c", "import os, sys; print(sys.version_info[:2], sys.prefix, os.environ['USER'])"])
    assert result.stdout == f"{sys.version_info[:2]} {os.path.realpath(sys.base_prefix)} user\n"
    assert not box.exists("/etc/ssl/private")
    assert not box.exists("/etc/shadow")


def test_memory_that_ran_out_is_reported(docker: DockerSandboxes) -> None:
    with docker.open(SandboxSpec(limits=Limits(memory_mb=64, disk_mb=16))) as box:
        result = box.exec(["python3", "-c", "x = bytearray(500_000_000)"])
        assert (result.exit_code, result.oom) == (137, True)
        assert box.exec("true").oom is False


def test_a_container_that_was_ended_from_outside_is_reported(docker: DockerSandboxes, engine: ContainerCli) -> None:
    box = docker.open()
    threading.Timer(0.5, engine.run, args=("rm", "-f", box.sandbox_id)).start()
    with pytest.raises(SandboxGone, match="ended"):
        box.exec("sleep 60")
    with pytest.raises(SandboxGone):
        box.exists("/")
    box.close()


def test_an_image_that_cannot_be_had_is_named_with_the_command_that_gets_it(docker_host: str) -> None:
    backend = DockerSandboxes("no.such.registry.invalid/image:1", engine="docker", host=docker_host)
    with pytest.raises(SandboxUnavailable, match=r"docker pull no\.such\.registry\.invalid/image:1"):
        backend.check()


def test_the_image_comes_from_the_argument_the_environment_or_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DockerSandboxes().image == "python:3.12-slim"
    monkeypatch.setenv("OPENENV_SANDBOX_IMAGE", "mine:2")
    assert DockerSandboxes().image == "mine:2"
    assert DockerSandboxes("other:3").image == "other:3"


def test_an_engine_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"`docker` or `podman`.*apt-get install"):
        DockerSandboxes().check()
    with pytest.raises(SandboxUnavailable, match="`podman`"):
        DockerSandboxes(engine="podman").check()


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed: apt-get install -y docker.io")
def test_an_engine_that_does_not_answer_is_distinguished_from_one_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="does not answer"):
        DockerSandboxes("host", engine="docker", host=f"unix://{tmp_path}/none.sock").check()


def test_an_engine_that_does_not_answer_is_not_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, script in (("docker", "exit 1"), ("podman", "echo 5.0")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="docker engine does not answer"):
        DockerSandboxes().check()
    DockerSandboxes(engine="podman").check()
    assert find_engine("auto", None).kind == "podman"


PODMAN_CHECKS = {
    "exec.exit-code", "exec.environment", "exec.large", "output.binary", "time.daemon", "time.background",
    "stop.daemons", "kill.gone", "limit.processes", "file.content", "file.owner", "tree.round-trip",
    "isolation.first-process", "limit.memory", "port.ask",
}  # fmt: skip


@pytest.fixture(scope="module")
def podman_bench() -> Iterator[CheckBench]:
    """A bench with podman, where it is installed and can run containers."""
    words = "podman is not installed"
    for options in ((), ("--runtime", "runc", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")):
        backend = DockerSandboxes("host", engine="podman", run_args=options)
        try:
            backend.open(SandboxSpec(timeout_s=30)).close()
        except SandboxError as error:
            words = str(error)
            continue
        with CheckBench(backend) as bench:
            yield bench
        return
    pytest.skip(words)


@pytest.mark.slow
@pytest.mark.parametrize("check", [c for c in CHECKS if c.id in PODMAN_CHECKS], ids=lambda check: check.id)
def test_podman_keeps_the_contract(check: ContractCheck, podman_bench: CheckBench) -> None:
    try:
        check.run(podman_bench)
    except NotOffered as error:
        pytest.skip(str(error))
    finally:
        podman_bench.tidy()


def test_podman_gets_its_address_in_its_own_option() -> None:
    assert ContainerCli("podman", "podman", "unix:///x").argv("ps") == ["podman", "--url", "unix:///x", "ps"]
    assert ContainerCli("docker", "docker", "unix:///x").argv("ps") == ["docker", "--host", "unix:///x", "ps"]
    assert ContainerCli("docker", "docker").argv("ps") == ["docker", "ps"]
    assert not ContainerCli("docker", "docker", "tcp://10.0.0.1:2375").is_local
