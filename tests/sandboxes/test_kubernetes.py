"""Sandboxes in a cluster: the contract, what a pod is like, and the cluster's words when there is none.

The cluster is a double of the API server whose sandboxes are containers of a real engine.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from waiting import wait_until

pytest.importorskip("lightkube")
pytest.importorskip("kubernetes_validate")

from kubernetes_double import AGENT_SANDBOX, Image, KubernetesDouble
from kubernetes_schemas import problems, versions
from openenv.errors import SandboxError, SandboxGone, SandboxUnavailable, SandboxUnsupported
from openenv.sandboxes import Limits, Mount, SandboxSnapshot, SandboxSpec, backend, seccomp
from openenv.sandboxes.checks import CHECKS, self_check
from openenv.sandboxes.container_cli import ContainerCli
from openenv.sandboxes.kubernetes import KubernetesSandboxes

V4 = ("v4.channel.k8s.io",)
V5 = ("v5.channel.k8s.io", "v4.channel.k8s.io")


@pytest.fixture(scope="module")
def engine(docker_host: str) -> ContainerCli:
    program = shutil.which("docker")
    assert program is not None
    return ContainerCli("docker", program, docker_host)


@pytest.fixture(scope="module")
def double(engine: ContainerCli) -> Iterator[KubernetesDouble]:
    with KubernetesDouble({"host": Image(engine=engine)}, resources=AGENT_SANDBOX) as double:
        (double.folder() / "openenv.json").write_text(json.dumps(seccomp.container_profile()))
        yield double


@pytest.fixture
def make(double: KubernetesDouble, tmp_path: Path) -> Iterator[Callable[..., KubernetesSandboxes]]:
    made: list[KubernetesSandboxes] = []

    def backend_of(**options: Any) -> KubernetesSandboxes:
        path = double.kubeconfig(tmp_path / f"config-{len(made)}")
        made.append(KubernetesSandboxes("host", kubeconfig=path, seccomp_profile="openenv.json", **options))
        return made[-1]

    yield backend_of
    for one in made:
        one.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("protocols", [V5, V4], ids=["v5", "v4"])
def test_the_contract_is_kept(
    make: Callable[..., KubernetesSandboxes], double: KubernetesDouble, protocols: tuple[str, ...]
) -> None:
    double.exec_protocols = list(protocols)
    sandboxes = make()
    results = self_check(sandboxes)
    failed = {one.id: one.detail for one in results if one.status == "failed"}
    assert failed == {}
    missing = {one.id for one in results if one.status == "not offered"}
    assert missing == {"isolation.mounts", *(check.id for check in CHECKS if check.feature == "snapshots")}
    assert sandboxes.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("protocols", [V5, V4], ids=["v5", "v4"])
def test_commands_files_and_ends(
    make: Callable[..., KubernetesSandboxes], double: KubernetesDouble, protocols: tuple[str, ...]
) -> None:
    double.exec_protocols = list(protocols)
    sandboxes = make()
    with sandboxes.open(SandboxSpec(metadata={"task": "maze"}, envs={"A": "1"})) as box:
        assert box.exec("echo $A; id -un; exit 3").exit_code == 3
        box.write_text("note.txt", "for Ada")
        assert box.exec(["cat", "note.txt"]).stdout == "for Ada"
        data = bytes(range(256)) * 2000
        assert box.exec("md5sum", stdin=data).stdout.split()[0] == hashlib.md5(data).hexdigest()
        assert box.exec("head -c 3", stdin=data).exit_code == 0
        (pod,) = double.objects("Pod")
        assert pod["metadata"]["annotations"]["openenv.metadata.task"] == "maze"
        double.kill_pod(box.sandbox_id)
        with pytest.raises(SandboxGone, match="its pod was deleted"):
            box.exec("echo on")
    wait_until(lambda: not double.objects("Pod"), 20)


@pytest.mark.slow
def test_a_cluster_that_keeps_no_network_policies_is_refused(
    make: Callable[..., KubernetesSandboxes], double: KubernetesDouble
) -> None:
    sandboxes = make()
    sandboxes.check()
    kind = double.kind("NetworkPolicy")

    async def forget() -> None:
        double._remove(kind, "default", "openenv-sandboxes")

    double.call(forget())
    with pytest.raises(SandboxUnavailable, match="does not keep network policies"):
        sandboxes.open()
    assert sandboxes.leftovers() == []


@pytest.mark.slow
def test_sandboxes_are_taken_from_a_warm_pool(
    make: Callable[..., KubernetesSandboxes], double: KubernetesDouble
) -> None:
    plain = make()
    cluster = plain._cluster
    policy, template, pool = plain.pool_manifests("agents", 1)
    cluster.apply(policy)
    for manifest, plural in ((template, "sandboxtemplates"), (pool, "sandboxwarmpools")):
        path = f"apis/{manifest['apiVersion']}/namespaces/default/{plural}"
        assert cluster._raw.post(path, json=manifest).status_code == 201
    sandboxes = make(warm_pool="agents")
    sandboxes.check()
    with sandboxes.open(SandboxSpec(timeout_s=60)) as box:
        box.write_text("note.txt", "warm")
        assert box.exec("cat note.txt; id -un").stdout == "warmuser\n"
        (claim,) = double.objects("SandboxClaim")
        assert claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"
    assert double.objects("SandboxClaim") == []
    with pytest.raises(SandboxUnsupported, match="limits of its template"):
        sandboxes.open(SandboxSpec(limits=Limits(pids=10)))
    with pytest.raises(SandboxUnavailable, match="WarmPoolNotFound"):
        make(warm_pool="none").open()
    for kind in ("SandboxWarmPool", "SandboxTemplate"):

        async def forget(kind: str = kind) -> None:
            double._remove(double.kind(kind), "default", "agents")

        double.call(forget())


def test_a_sandbox_waits_for_a_slow_node_and_fails_at_once_for_a_missing_secret(tmp_path: Path) -> None:
    slow = "failed to sync secret cache: timed out waiting for the condition"
    with KubernetesDouble({"x": Image([sys.executable, "-c", "pass"])}) as double:
        path = double.kubeconfig(tmp_path / "config")
        double.container_errors = [slow] * 1000
        sandboxes = KubernetesSandboxes("x", kubeconfig=path, start_timeout_s=1.5)
        with pytest.raises(
            SandboxUnavailable, match=r"within 1\.5 s: CreateContainerConfigError: failed to sync secret"
        ):
            sandboxes.open()
        double.container_errors = [slow, *['secret "token" not found'] * 1000]
        with pytest.raises(SandboxUnavailable, match=r"of 'x': CreateContainerConfigError: secret \"token\" not found"):
            sandboxes.open()
        for missing in ('secret "read-timeout" not found', "couldn't find key TIMEOUT in Secret default/app"):
            double.container_errors = [missing] * 1000
            with pytest.raises(SandboxUnavailable, match=f"of 'x': CreateContainerConfigError: {missing}"):
                sandboxes.open()
        double.container_errors = []
        sandboxes.close()


def test_a_sandbox_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    with KubernetesDouble({}) as double:
        path = double.kubeconfig(tmp_path / "config")
        sandboxes = KubernetesSandboxes("nowhere:1", kubeconfig=path)
        with pytest.raises(SandboxUnavailable, match=r"ImagePullBackOff.*nowhere:1"):
            sandboxes.open()
        assert double.objects("Pod") == []
        with pytest.raises(SandboxUnsupported, match="bake them into the image"):
            sandboxes.open(SandboxSpec(mounts=(Mount(tmp_path, "/opt/x"),)))
        with pytest.raises(SandboxUnsupported, match="The backend kubernetes has no snapshots; local and docker do"):
            sandboxes.open(SandboxSpec(from_snapshot=SandboxSnapshot("local", "/home/user", tmp_path / "none", {})))
        double.forbidden = {("patch", "networkpolicies")}
        with pytest.raises(SandboxUnavailable, match='cannot patch resource "networkpolicies"'):
            KubernetesSandboxes("nowhere:1", kubeconfig=path).check()
        with pytest.raises(SandboxUnavailable, match="install SIG agent-sandbox"):
            double.forbidden = set()
            KubernetesSandboxes("nowhere:1", kubeconfig=path, warm_pool="pool").check()
        sandboxes.close()
        (pod,) = [one for one in double.manifests if one["kind"] == "Pod"]
        (policy, *_) = [one for one in double.manifests if one["kind"] == "NetworkPolicy"]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & policy["spec"].keys()  # nothing in, nothing out
    for version in versions():
        assert problems(pod, version) == []
        assert problems(policy, version) == []
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_a_sandbox_with_small_limits_asks_for_no_more_than_them(tmp_path: Path) -> None:
    with KubernetesDouble({}) as double:
        sandboxes = KubernetesSandboxes("x", kubeconfig=double.kubeconfig(tmp_path / "config"))
        with pytest.raises(SandboxUnavailable, match=r"started no sandbox of 'x': ImagePullBackOff"):
            sandboxes.open(SandboxSpec(limits=Limits(memory_mb=100, disk_mb=60, cpus=0.05)))
        sandboxes.close()
        larger = KubernetesSandboxes("x", kubeconfig=double.kubeconfig(tmp_path / "config"), memory_request="4Gi")
        with pytest.raises(SandboxError, match="must be less than or equal to memory limit"):
            larger.open(SandboxSpec(limits=Limits(memory_mb=100, disk_mb=60)))
        larger.close()
        (pod, *_) = [one for one in double.manifests if one["kind"] == "Pod"]
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"] == {"cpu": "0.05", "memory": "176Mi"}


def test_the_backend_is_found_by_name_and_its_options_are_in_the_pod(tmp_path: Path) -> None:
    with KubernetesDouble({}) as double:
        path = double.kubeconfig(tmp_path / "config")
        sandboxes = backend(
            "kubernetes",
            image="x",
            kubeconfig=path,
            runtime_class="gvisor",
            node_selector={"a": "b"},
            tolerations=[{"key": "k", "operator": "Exists"}],
            image_pull_secrets=["s"],
            pod_spec={"hostUsers": False},
            start_timeout_s=1,
        )
        with pytest.raises(SandboxUnavailable):
            sandboxes.open()
        (pod,) = [one for one in double.manifests if one["kind"] == "Pod"]
        spec = pod["spec"]
        assert spec["runtimeClassName"] == "gvisor"
        assert spec["nodeSelector"] == {"a": "b"}
        assert spec["tolerations"] == [{"key": "k", "operator": "Exists"}]
        assert spec["imagePullSecrets"] == [{"name": "s"}]
        assert spec["hostUsers"] is False
        assert isinstance(sandboxes, KubernetesSandboxes)
        sandboxes.close()


def test_a_sandbox_may_have_an_image_a_work_folder_and_a_network_of_its_own(tmp_path: Path) -> None:
    with KubernetesDouble({}) as double:
        path = double.kubeconfig(tmp_path / "config")
        sandboxes = KubernetesSandboxes("x", kubeconfig=path, start_timeout_s=1)
        spec = SandboxSpec(
            image="task:1", workdir="/app", fills_workdir=True, folders=("/tests", "/logs"), network=True
        )
        with pytest.raises(SandboxUnavailable, match="started no sandbox of 'task:1'"):
            sandboxes.open(spec)
        with pytest.raises(SandboxUnavailable):
            sandboxes.open(SandboxSpec(image="task:1", workdir="/app"))
        with pytest.raises(SandboxUnsupported, match=r"cannot build .*task\.toml"):
            sandboxes.open(SandboxSpec(image="task:1", build=tmp_path))
        pooled = KubernetesSandboxes("x", kubeconfig=path, warm_pool="pool")
        with pytest.raises(SandboxUnsupported, match="warm pool starts no images"):
            pooled.open(SandboxSpec(image="task:1"))
        sandboxes.close()
        pooled.close()
        manifests = double.manifests
    assert [wrong for one in manifests for wrong in problems(one, versions()[-1])] == []
    first, second = [one for one in manifests if one["kind"] == "Pod"]
    box = first["spec"]["containers"][0]
    mounts = {mount["mountPath"]: mount["name"] for mount in box["volumeMounts"]}
    assert {"/app", "/tests", "/logs", "/home/user"} < set(mounts)
    (fill,) = first["spec"]["initContainers"]
    assert (fill["image"], fill["volumeMounts"][0]["name"]) == ("task:1", mounts["/app"])
    assert fill["securityContext"] == box["securityContext"]
    assert fill["command"][-1] == "/app"
    assert "initContainers" not in second["spec"]
    assert second["spec"]["dnsPolicy"] == "None"
    policy = next(one for one in manifests if one["metadata"]["name"] == "openenv-sandboxes-network")
    chosen = policy["spec"]["podSelector"]["matchLabels"].items()
    assert chosen <= first["metadata"]["labels"].items()
    assert not chosen <= second["metadata"]["labels"].items()
