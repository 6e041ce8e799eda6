"""What runs and what is left over: of processes, containers, local sandboxes and clusters, by `openenv ps` and `gc`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from openenv.cli.__main__ import build
from openenv.errors import SandboxUnavailable
from openenv.providers import LocalDockerProvider, ProcessProvider
from openenv.providers.inventory import take_inventory
from openenv.sandboxes import LocalSandboxes
from openenv.sandboxes.container_cli import OWNER_LABEL, ContainerCli
from openenv.sandboxes.host import ProcessOwner
from waiting import wait_until

SLEEP = [sys.executable, "-S", "-c", "import signal; signal.pause()", "--port", "{port}"]
# Starts a server, and is killed together with its guardian, so that nothing ends the server.
ORPHAN = """
import os, signal, sys, time
from openenv.providers import ProcessProvider
provider = ProcessProvider(command=sys.argv[1:])
provider.start()
guardian = provider._server.pid
def is_started():
    children = open(f"/proc/{guardian}/task/{guardian}/children").read().split()
    return any(sys.argv[-1] in open(f"/proc/{child}/cmdline").read() for child in children)
while not is_started():
    time.sleep(0.01)
os.kill(guardian, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""
DEAD = str(ProcessOwner(ProcessOwner.current().place, 999_999_999, "1"))


def call(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(build(arguments), list(arguments), env={"COLUMNS": "200", **variables})


def listed(*arguments: str, **variables: str) -> dict[str, Any]:
    result = call("ps", "--json", *arguments, **variables)
    assert result.exit_code == 0, result.output
    return {item["name"]: item for item in json.loads(result.stdout)["items"]}


@pytest.fixture
def orphan() -> Iterator[int]:
    """The group of a server whose owner and guardian were killed."""
    word = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    subprocess.run([sys.executable, "-c", ORPHAN, *SLEEP, word], timeout=60, check=False)
    (name,) = wait_until(lambda: [one.name for one in take_inventory(("process",)).items if word in one.what])
    group = os.getpgid(int(name))
    yield group
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def test_a_server_process_is_listed_with_its_owner_while_it_runs() -> None:
    provider = ProcessProvider(command=SLEEP)
    url = provider.start()
    try:
        ours = [one for one in listed("--only", "process").values() if one["address"] == url.removeprefix("http://")]
        assert len(ours) == 1
        assert ours[0]["owner"] == str(ProcessOwner.current())
        assert ours[0]["leftover"] is False
        assert "signal.pause()" in ours[0]["what"]
        assert str(os.getpid()) in call("ps", "--only", "process").stdout
    finally:
        provider.stop()
    assert not any(one["address"] == url.removeprefix("http://") for one in listed("--only", "process").values())


def test_a_server_process_without_an_owner_is_left_over_and_removed(orphan: int) -> None:
    provider = ProcessProvider(command=SLEEP)
    provider.start()
    try:
        dry = call("gc", "--only", "process", "--dry-run")
        assert "would remove process server" in dry.stdout
        os.killpg(orphan, 0)  # it is still there
        done = call("gc", "--only", "process")
        assert done.exit_code == 0, done.output
        assert "removed process server" in done.stdout
        with pytest.raises(ProcessLookupError):
            os.killpg(orphan, 0)
        assert provider._server is not None
        assert provider._server.ended(0) is None  # what has a living owner stays
    finally:
        provider.stop()


def test_a_local_sandbox_is_listed(tmp_path: Path) -> None:
    backend = LocalSandboxes()
    try:
        backend.check()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with backend.open():
        ours = [one for one in listed("--only", "local").values() if one["owner"] == str(ProcessOwner.current())]
        assert [(one["use"], one["leftover"]) for one in ours] == [("sandbox", False)]


def test_servers_in_a_cluster_are_listed_and_leftovers_removed(tmp_path: Path) -> None:
    pytest.importorskip("lightkube")
    pytest.importorskip("kubernetes_validate")
    from kubernetes_double import Image, KubernetesDouble
    from openenv.providers import KubernetesProvider
    from openenv.sandboxes.cluster import OWNER_ANNOTATION

    with KubernetesDouble({"sleep": Image(SLEEP[:-2])}) as double:
        path = str(double.kubeconfig(tmp_path / "config"))
        with KubernetesProvider(kubeconfig=path) as mine, KubernetesProvider(kubeconfig=path) as theirs:
            mine.start_container("sleep")
            theirs.start_container("sleep")

            def orphan(service: Any) -> None:
                service["metadata"]["annotations"][OWNER_ANNOTATION] = DEAD

            double.update("Service", str(theirs.name), orphan)
            items = listed("--only", "kubernetes", KUBECONFIG=path)
            assert {name: (one["what"], one["leftover"]) for name, one in items.items()} == {
                str(mine.name): ("sleep", False),
                str(theirs.name): ("sleep", True),
            }
            assert listed("--kubeconfig", path, "--all-namespaces", "--only", "kubernetes").keys() == items.keys()
            assert listed("--kubeconfig", path, "--namespace", "other", "--only", "kubernetes") == {}
            done = call("gc", "--only", "kubernetes", "--kubeconfig", path)
            assert f"removed kubernetes server {theirs.name}" in done.stdout
            assert listed("--only", "kubernetes", KUBECONFIG=path).keys() == {mine.name}
            double.forbidden = {("list", "services")}
            noted = call("gc", "--only", "kubernetes", "--kubeconfig", path)
            assert 'cannot list resource "services"' in noted.stderr


def test_sandboxes_in_a_cluster_are_listed_and_leftovers_removed(tmp_path: Path) -> None:
    pytest.importorskip("lightkube")
    pytest.importorskip("kubernetes_validate")
    from kubernetes_double import AGENT_SANDBOX, Image, KubernetesDouble
    from openenv.sandboxes.cluster import EXPIRES_ANNOTATION, OWNER_ANNOTATION, Cluster, ClusterAddress
    from openenv.sandboxes.kubernetes import BACKEND_LABEL, KubernetesSandboxes

    image = Image(SLEEP[:-2])
    with KubernetesDouble({"sleep": image}, resources=AGENT_SANDBOX) as double:
        path = str(double.kubeconfig(tmp_path / "config"))
        cluster = Cluster(ClusterAddress(path))
        mine, past = str(ProcessOwner.current()), "2020-01-01T00:00:00Z"
        box = {"containers": [{"name": "box", "image": "sleep"}], "terminationGracePeriodSeconds": 0}

        def make(name: str, notes: dict[str, str], **fields: Any) -> None:
            metadata = {"name": name, "labels": {BACKEND_LABEL: "x"}, "annotations": notes}
            base = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": box}
            manifest = {**base, **fields}
            if manifest["kind"] == "Pod":
                cluster.create(manifest)
            else:
                route = f"apis/{manifest['apiVersion']}/namespaces/default/sandboxclaims"
                assert cluster._raw.post(route, json=manifest).status_code == 201

        make("openenv-sandbox-mine", {OWNER_ANNOTATION: mine})
        make("openenv-sandbox-dead", {OWNER_ANNOTATION: DEAD})
        make("openenv-sandbox-late", {OWNER_ANNOTATION: "elsewhere/1/1", EXPIRES_ANNOTATION: past})
        make("agents-7", {OWNER_ANNOTATION: DEAD})  # a warm pool's: its claim stands for it
        claim = {"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim"}
        make("openenv-claim-dead", {OWNER_ANNOTATION: DEAD}, **claim, spec={"warmPoolRef": {"name": "agents"}})
        items = listed("--only", "kubernetes", KUBECONFIG=path)
        assert {name: (one["use"], one["what"], one["leftover"]) for name, one in items.items()} == {
            "openenv-sandbox-mine": ("sandbox", "sleep", False),
            "openenv-sandbox-dead": ("sandbox", "sleep", True),
            "openenv-sandbox-late": ("sandbox", "sleep", True),
            "openenv-claim-dead": ("sandbox", "pool agents", True),
        }
        done = call("gc", "--only", "kubernetes", "--kubeconfig", path)
        assert done.stdout.count("removed kubernetes sandbox") == 3
        assert double.objects("SandboxClaim") == []
        make("openenv-sandbox-other", {OWNER_ANNOTATION: DEAD})
        with contextlib.closing(KubernetesSandboxes("sleep", kubeconfig=path)) as sandboxes:
            sandboxes.check()  # the first use sweeps
        wait_until(
            lambda: {one["metadata"]["name"] for one in double.objects("Pod")} == {"openenv-sandbox-mine", "agents-7"},
            10,
        )


def test_without_a_cluster_there_is_a_note_only_where_it_was_asked_for(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    asked = call("ps", "--only", "kubernetes", KUBECONFIG=missing)
    assert "Note:" in asked.stdout
    assert "Nothing runs." in asked.stdout
    result = call("ps", "--only", "nowhere")
    assert result.exit_code == 2
    assert "docker, podman, swarm, process, local, kubernetes" in result.output


@pytest.mark.slow
def test_containers_are_listed_and_leftovers_removed(
    use_engine: str, engine: ContainerCli, image: str, left_behind: Callable[[], list[str]]
) -> None:
    with LocalDockerProvider(engine="docker") as provider:
        url = provider.start_container(image)
        orphan = engine.output("create", "--label", f"{OWNER_LABEL}={DEAD}", "--name", "openenv-orphan", image)
        items = listed("--only", "docker")
        mine = items[str(provider.container_name)]
        assert (mine["use"], mine["what"], mine["leftover"]) == ("server", image, False)
        assert mine["address"] == url.removeprefix("http://").replace("localhost", "127.0.0.1")
        assert items["openenv-orphan"]["leftover"] is True
        assert "removed docker sandbox openenv-orphan" in call("gc", "--only", "docker").stdout
        assert orphan not in left_behind()
        assert listed("--only", "docker").keys() == {provider.container_name}
