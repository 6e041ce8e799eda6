"""Sandboxes on a real cluster: the whole contract, the network policy, rights, what ends them, what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

if "OPENENV_TEST_CLUSTER" not in os.environ:
    pytest.skip("there is no real cluster: make test-k8s starts one", allow_module_level=True)

from lightkube.resources.networking_v1 import NetworkPolicy

from openenv.cli.__main__ import build
from openenv.errors import SandboxError, SandboxGone, SandboxUnavailable
from openenv.sandboxes import Limits, SandboxSpec, seccomp
from openenv.sandboxes.checks import CHECKS, CheckBench, ContractCheck, NotOffered
from openenv.sandboxes.kubernetes import POLICY, KubernetesSandboxes
from real_cluster import IGNORE_POLICIES, RealCluster, Space

IMAGE, PROFILE = "sandbox:1", "openenv.json"


@pytest.fixture(scope="module")
def profile(cluster: RealCluster) -> str:
    """Put our filter of system calls onto the node, as the documentation says."""
    (cluster.folder / "kubelet" / "seccomp" / PROFILE).write_text(json.dumps(seccomp.container_profile()))
    return PROFILE


@contextlib.contextmanager
def policed(cluster: RealCluster, **options: Any) -> Iterator[Space]:
    """A namespace whose network policy is removed with it: the backend leaves it there for the next."""
    with cluster.space(**options) as space:
        yield space
        if space.find(NetworkPolicy, POLICY) is not None:
            cluster.client.delete(NetworkPolicy, POLICY, namespace=space.name)


@pytest.fixture(scope="module")
def bench(cluster: RealCluster, profile: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckBench]:
    with policed(cluster) as space:
        path = space.kubeconfig(tmp_path_factory.mktemp("bench") / "kubeconfig")
        sandboxes = KubernetesSandboxes(IMAGE, kubeconfig=path, seccomp_profile=profile)
        with CheckBench(sandboxes) as bench:
            yield bench
        assert sandboxes.leftovers() == []
        sandboxes.close()


@pytest.fixture
def space(cluster: RealCluster) -> Iterator[Space]:
    with policed(cluster) as space:
        yield space


@pytest.fixture
def make(space: Space, tmp_path: Path, profile: str) -> Iterator[Callable[..., KubernetesSandboxes]]:
    with contextlib.ExitStack() as stack:

        def backend_of(**options: Any) -> KubernetesSandboxes:
            defaults = {"kubeconfig": space.kubeconfig(tmp_path / "kubeconfig"), "seccomp_profile": profile}
            sandboxes = KubernetesSandboxes(IMAGE, **{**defaults, **options})
            stack.callback(sandboxes.close)
            return sandboxes

        yield backend_of


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_the_contract_is_kept(check: ContractCheck, bench: CheckBench) -> None:
    if check.feature is not None and check.feature not in bench.backend.features:
        pytest.skip(f"{bench.backend.name} does not offer {check.feature}")
    try:
        check.run(bench)
    except NotOffered as error:
        pytest.skip(str(error))
    finally:
        bench.tidy()


def test_a_cluster_that_ignores_network_policies_is_refused(cluster: RealCluster, profile: str, tmp_path: Path) -> None:
    with policed(cluster, labels=IGNORE_POLICIES) as space:
        path = space.kubeconfig(tmp_path / "kubeconfig")
        sandboxes = KubernetesSandboxes(IMAGE, kubeconfig=path, seccomp_profile=profile)
        with pytest.raises(SandboxUnavailable, match="does not keep network policies"):
            sandboxes.open()
        assert sandboxes.leftovers() == []
        sandboxes.close()


def test_the_runtimes_own_filter_is_the_default(make: Callable[..., KubernetesSandboxes]) -> None:
    with make(seccomp_profile=None).open() as box:
        assert "Seccomp:\t2" in box.exec(["cat", "/proc/self/status"]).stdout


def test_a_profile_that_the_node_does_not_have_is_an_error_with_the_clusters_words(
    make: Callable[..., KubernetesSandboxes],
) -> None:
    with pytest.raises(SandboxUnavailable, match=r"missing\.json"):
        make(seccomp_profile="missing.json").open()


def test_a_sandbox_whose_pod_is_deleted_is_gone(make: Callable[..., KubernetesSandboxes], space: Space) -> None:
    with make().open() as box:
        job = box.start_bg("sleep 600")
        space.delete_pod(box.sandbox_id)
        with pytest.raises(SandboxGone):
            job.wait(60)
        with pytest.raises(SandboxGone, match="its pod was deleted"):
            box.exec("true")


def test_a_sandbox_ends_in_time(make: Callable[..., KubernetesSandboxes]) -> None:
    with make().open(SandboxSpec(timeout_s=4)) as box:
        started = time.monotonic()
        with pytest.raises(SandboxGone, match="expired"):
            while time.monotonic() < started + 60:
                box.exec("sleep 1")


def test_the_clusters_words_when_none_starts(make: Callable[..., KubernetesSandboxes]) -> None:
    with pytest.raises(SandboxUnavailable, match="Insufficient cpu"):
        make(cpu_request=900, start_timeout_s=5).open(SandboxSpec(limits=Limits(cpus=900)))
    with pytest.raises(SandboxError, match="must be less than or equal to memory limit"):
        make(memory_request="4Gi").open(SandboxSpec(limits=Limits(memory_mb=100, disk_mb=100)))


RIGHTS = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]},
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["patch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
]


def test_the_documented_rights_are_enough(
    make: Callable[..., KubernetesSandboxes], space: Space, tmp_path: Path
) -> None:
    token = space.token([*RIGHTS, {**RIGHTS[2], "verbs": ["patch", "create"]}])
    sandboxes = make(kubeconfig=space.kubeconfig(tmp_path / "user", token=token))
    sandboxes.check()
    with sandboxes.open() as box:
        assert box.exec("echo on").stdout == "on\n"
    assert sandboxes.leftovers() == []


OWNER = """
import os, signal, sys
from openenv.sandboxes import SandboxSpec
from openenv.sandboxes.kubernetes import KubernetesSandboxes
box = KubernetesSandboxes("sandbox:1", kubeconfig=sys.argv[1]).open(SandboxSpec(timeout_s=3600))
print(box.sandbox_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(build(arguments), list(arguments), env={"COLUMNS": "200"})


def test_ps_and_gc_find_the_sandbox_of_a_killed_process(
    make: Callable[..., KubernetesSandboxes], space: Space, tmp_path: Path
) -> None:
    keeper = make()
    keeper.check()  # the first use of a backend sweeps
    path = str(space.kubeconfig(tmp_path / "kubeconfig"))
    done = subprocess.run([sys.executable, "-c", OWNER, path], capture_output=True, text=True, check=False)
    orphan = done.stdout.strip()
    assert orphan, done.stderr
    options = ("--only", "kubernetes", "--kubeconfig", path)
    with keeper.open(SandboxSpec(timeout_s=600)) as box:
        listed = {one["name"]: one for one in json.loads(call("ps", "--json", *options).stdout)["items"]}
        assert {name: one["leftover"] for name, one in listed.items()} == {orphan: True, box.sandbox_id: False}
        assert {(one["use"], one["what"]) for one in listed.values()} == {("sandbox", IMAGE)}
        assert f"removed kubernetes sandbox {orphan}" in call("gc", *options).stdout
        assert box.exec("echo on").stdout == "on\n"
