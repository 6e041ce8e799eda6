"""Servers on a real cluster: sessions over several pods, pods that die, updates, errors, rights, leftovers.

Clients are on the node: they reach pods through the API server, or by the addresses of pods and Services. The cluster
has no DNS, so nothing here uses names of Services.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

if "OPENENV_TEST_CLUSTER" not in os.environ:
    pytest.skip("there is no real cluster: make test-k8s starts one", allow_module_level=True)

from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod, ResourceQuota, Service
from lightkube.resources.networking_v1 import NetworkPolicy

from gridworld_env.models import GridworldAction
from gridworld_env.server.gridworld_environment import GridworldEnvironment
from openenv import GenericEnvClient, VectorEnv
from openenv.cli.__main__ import build
from openenv.errors import (
    ConnectFailed,
    ImagePullFailed,
    OpenEnvError,
    ProviderError,
    ServerDied,
    ServerNotReady,
    SessionLost,
    SlotsFailed,
    Unschedulable,
)
from openenv.providers import KubernetesProvider
from openenv.sandboxes.cluster import Cluster, ClusterAddress
from real_cluster import Space, until

MOVES = ("right", "down", "left", "up")
SESSIONS = 64
LIMITS = {"OPENENV_MAX_SESSIONS": "32"}


@pytest.fixture
def make(kubeconfig: Path) -> Iterator[Callable[..., KubernetesProvider]]:
    """Make providers; what they started is removed when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            KubernetesProvider(**{"kubeconfig": kubeconfig, "ready_timeout_s": 120.0, **options})
        )


def call(*arguments: str) -> Result:
    return CliRunner().invoke(build(arguments), list(arguments), env={"COLUMNS": "200"})


class Mirror:
    """The same episodes in this process: what a session must answer if it is neither reset nor stepped twice."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.steps = 0
        self._environments: dict[int, GridworldEnvironment] = {}
        self.begin(slots)

    @property
    def playing(self) -> list[int]:
        """The slots whose episode goes on."""
        return sorted(self._environments)

    def begin(self, slots: Sequence[int], seed: int = 0) -> None:
        for slot in slots:
            environment = self._environments[slot] = GridworldEnvironment()
            environment.reset(seed=seed + slot)

    def lose(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._environments.pop(slot, None)

    def step(self, step: Callable[[dict[int, dict[str, str]]], Any]) -> None:
        """Make a move in all episodes, there and here, and compare."""
        move: Any = MOVES[self.steps // 2 % 4]
        self.steps += 1
        self.compare(step({slot: {"move": move} for slot in self.playing}), move)

    def compare(self, result: Any, move: Any) -> None:
        for slot, answer, reward in zip(result.slots, result.observations, result.rewards, strict=True):
            if answer is None:
                continue
            expected = self._environments[slot].step(GridworldAction(move=move))
            assert answer["board"] == expected.board, f"slot {slot}"
            assert answer["steps_left"] == expected.steps_left, f"slot {slot}"
            assert reward == pytest.approx(expected.reward), f"slot {slot}"
            if expected.done:
                del self._environments[slot]


def pod_urls(space: Space, image: str) -> list[str]:
    return [f"http://{pod.status.podIP}:8000" for pod in space.pods(image=image)]


# -- pods that die -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pod", "container"])
def test_64_sessions_over_3_pods_of_which_one_dies(
    make: Callable[..., KubernetesProvider], space: Space, how: str
) -> None:
    provider = make()
    url = provider.start_container("gridworld:1", replicas=3, env_vars=LIMITS)
    provider.wait_for_ready(url)
    assert len(provider.urls()) == 3
    with VectorEnv(provider.urls(), n=SESSIONS, autoreset="disabled") as vector:
        vector.reset(seed=0)
        mirror = Mirror(range(SESSIONS))
        for _ in range(3):
            mirror.step(vector.step)
        pods = space.pods()
        if how == "pod":
            space.delete_pod(pods[1].metadata.name)
        else:
            space.kill_container(pods[1])
        before = set(mirror.playing)
        lost = lose_some(vector, mirror)
        assert 0 < len(lost) <= 22  # a third of them, but for those that had ended
        assert {type(error) for error in lost.values()} == {SessionLost}
        assert before - lost.keys() >= set(mirror.playing)
        for _ in range(3):  # the others go on
            mirror.step(vector.step)
        until(lambda: [is_ready(pod) for pod in space.pods()] == [True] * 3, 120, what="three pods that are ready")
        vector.reset(seed=0, slots=list(lost))
        mirror.begin(list(lost))
        mirror.step(vector.step)
    provider.stop_container()
    assert provider.urls() == []


def is_ready(pod: Any) -> bool:
    return any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())


def lose_some(vector: Any, mirror: Mirror) -> dict[int, OpenEnvError]:
    """Go on until sessions are lost; return their errors."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            mirror.step(vector.step)
        except SlotsFailed as error:
            mirror.compare(error.result, MOVES[(mirror.steps - 1) // 2 % 4])
            mirror.lose(list(error.errors))
            return error.errors
    raise AssertionError("no session was lost")


# -- updates -----------------------------------------------------------------------------------------------------------


def deploy(kubeconfig: Path, image: str, *options: str) -> Result:
    where = ("--kubeconfig", str(kubeconfig), "--apply", "--timeout", "200")
    return call("deploy", "k8s", image, "--name", "maze", *where, *options)


@pytest.fixture
def deployed(space: Space, kubeconfig: Path) -> Iterator[Callable[..., Result]]:
    """Deploy versions of a server; all of it is removed when the test ends."""
    yield lambda image, *options: deploy(kubeconfig, image, *options)
    budget = create_namespaced_resource("policy", "v1beta1", "PodDisruptionBudget", "poddisruptionbudgets")
    for kind in (budget, NetworkPolicy, Service, Deployment):
        space.cluster.client.delete(kind, "maze", namespace=space.name)
    for pod in space.list(Pod):
        with contextlib.suppress(Exception):
            space.delete_pod(pod.metadata.name)


def test_an_update_loses_no_session_that_can_finish(deployed: Callable[..., Result], space: Space) -> None:
    options = ("--replicas", "3", "--max-sessions", "40", "--drain-timeout", "400")
    first = deployed("gridworld:1", *options)
    assert first.exit_code == 0, first.output
    assert "applied PodDisruptionBudget maze" in first.stdout
    assert f"http://maze.{space.name}.svc:8000" in first.stdout
    old = pod_urls(space, "gridworld:1")
    assert len(old) == 3
    with VectorEnv(old, n=SESSIONS, autoreset="disabled") as vector, NewSessions(space) as visitors:
        vector.reset(seed=0)
        mirror = Mirror(range(SESSIONS))
        mirror.step(vector.step)
        second = deployed("gridworld:2", *options)
        assert second.exit_code == 0, second.output
        assert len(pod_urls(space, "gridworld:2")) == 3
        assert len(mirror.playing) > SESSIONS // 2
        while mirror.playing:  # each episode ends
            mirror.step(vector.step)
        assert len(space.list(Pod)) == 6  # the old ones wait for their sessions
        refused = until(lambda: refusal_of(old[0]), what="a refusal")  # for 5 s it only leaves the Service
        assert isinstance(refused, OpenEnvError), refused
    # Not the whole drain timeout; on a busy machine the end of three pods took a minute.
    until(lambda: len(space.list(Pod)) == 3, what="the end of the old pods", within_s=200)
    assert visitors.failures == []
    assert visitors.versions  # the Service had a pod for every one of them


def refusal_of(url: str) -> BaseException | None:
    """Open a session on a server that drains; return what it raises."""
    try:
        with GenericEnvClient(url, connect_timeout_s=10).sync() as client:
            client.reset(seed=1)
    except (OpenEnvError, OSError) as error:
        return error
    return None


class NewSessions:
    """A client that opens a session through the Service, plays, ends it, and begins again. A context manager."""

    def __init__(self, space: Space) -> None:
        service = space.find(Service, "maze")
        self.url = f"http://{service.spec.clusterIP}:{service.spec.ports[0].port}"
        self.failures: list[str] = []
        self.versions = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> NewSessions:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with GenericEnvClient(self.url).sync() as client:
                    client.reset(seed=1)
                    for _ in range(3):
                        client.step({"move": "right"})
                self.versions += 1
            except Exception as error:
                self.failures.append(repr(error))


def test_sessions_that_do_not_finish_in_time_are_lost_with_a_typed_error(
    deployed: Callable[..., Result], space: Space
) -> None:
    options = ("--max-sessions", "4", "--drain-timeout", "3")
    assert deployed("gridworld:1", *options).exit_code == 0
    (url,) = pod_urls(space, "gridworld:1")
    with GenericEnvClient(url).sync() as client:
        client.reset(seed=1)
        assert deployed("gridworld:2", *options).exit_code == 0
        with pytest.raises((SessionLost, ConnectFailed)) as info:
            for _ in range(600):
                client.state()
                time.sleep(0.1)
    assert isinstance(info.value, OpenEnvError)


def test_an_update_that_cannot_start_is_reported_and_the_old_version_goes_on(
    deployed: Callable[..., Result], space: Space
) -> None:
    assert deployed("gridworld:1", "--max-sessions", "4", "--drain-timeout", "0").exit_code == 0
    (url,) = pod_urls(space, "gridworld:1")
    with GenericEnvClient(url).sync() as client:
        client.reset(seed=1)
        broken = deployed("gridworld:crash", "--max-sessions", "4", "--drain-timeout", "0")
        assert broken.exit_code == 1
        assert "exit code 4" in broken.stderr
        assert "no such map" in broken.stderr
        missing = deployed("nowhere:1", "--max-sessions", "4", "--drain-timeout", "0")
        assert missing.exit_code == 1
        assert "nowhere:1" in missing.stderr
        assert client.step({"move": "right"}).done is False
    assert pod_urls(space, "gridworld:1") == [url]


def test_nodes_are_emptied_one_pod_at_a_time(deployed: Callable[..., Result], space: Space) -> None:
    assert deployed("gridworld:1", "--replicas", "2", "--drain-timeout", "0").exit_code == 0
    first, second = (pod.metadata.name for pod in space.pods())
    evict(space, first)
    with pytest.raises(Exception, match="disruption budget"):
        evict(space, second)


def evict(space: Space, pod: str) -> None:
    cluster = Cluster(ClusterAddress(space.cluster.folder / "kubeconfig", namespace=space.name))
    body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": space.name}}
    answer = cluster._raw.post(f"api/v1/namespaces/{space.name}/pods/{pod}/eviction", json=body)
    if answer.status_code >= 400:
        raise RuntimeError(answer.text)


# -- the cluster's words -----------------------------------------------------------------------------------------------


def test_an_image_that_cannot_be_pulled(make: Callable[..., KubernetesProvider]) -> None:
    provider = make()
    url = provider.start_container("nowhere/maze:7")
    with pytest.raises(ImagePullFailed, match=r"nowhere/maze:7"):
        provider.wait_for_ready(url)
    assert provider.name is None


def test_a_server_that_ends(make: Callable[..., KubernetesProvider]) -> None:
    provider = make()
    url = provider.start_container("gridworld:crash")
    with pytest.raises(ServerDied, match="its container ended with exit code 4") as info:
        provider.wait_for_ready(url)
    assert "no such map" in info.value.log


def test_a_command_that_does_not_exist(make: Callable[..., KubernetesProvider]) -> None:
    provider = make()
    url = provider.start_container("gridworld:1", command=["/no/such/program"])
    with pytest.raises(ProviderError, match=r"/no/such/program.*no such file"):
        provider.wait_for_ready(url)


def test_a_server_for_which_there_is_no_node(make: Callable[..., KubernetesProvider]) -> None:
    provider = make()
    url = provider.start_container("gridworld:1", cpu_request=1000)
    with pytest.raises(Unschedulable, match="Insufficient cpu"):
        provider.wait_for_ready(url, 5)


def test_a_server_that_is_never_ready(make: Callable[..., KubernetesProvider]) -> None:
    provider = make()
    url = provider.start_container("gridworld:1", ready_path="/nothing")
    with pytest.raises(ServerNotReady, match=r"0 of 1 pods became ready within 20 s.*Readiness probe failed.*404"):
        provider.wait_for_ready(url, 20)


def test_a_quota_that_is_used_up(make: Callable[..., KubernetesProvider], space: Space) -> None:
    quota = {"metadata": {"name": "few", "namespace": space.name}, "spec": {"hard": {"pods": "1"}}}
    space.cluster.client.create(ResourceQuota.from_dict(quota))
    until(lambda: (one := space.find(ResourceQuota, "few")) and one.status and one.status.hard)
    provider = make()
    url = provider.start_container("gridworld:1", replicas=2)
    with pytest.raises(ProviderError, match="exceeded quota: few, requested: pods=1, used: pods=1, limited: pods=1"):
        provider.wait_for_ready(url)


def test_memory_that_runs_out(make: Callable[..., KubernetesProvider]) -> None:
    provider = make()
    hog = ["python3", "-c", "x = bytearray(1 << 30); print(len(x))"]
    url = provider.start_container("gridworld:1", command=hog, memory_limit="64Mi")
    with pytest.raises(ServerDied, match="OOMKilled"):
        provider.wait_for_ready(url)


def test_pods_that_have_names_and_an_end(make: Callable[..., KubernetesProvider], space: Space) -> None:
    provider = make()
    url = provider.start_container("gridworld:1", replicas=2, workload="pods", ttl_s=25)
    provider.wait_for_ready(url)
    assert [pod.metadata.name for pod in space.pods()] == [f"{provider.name}-0", f"{provider.name}-1"]
    with VectorEnv(provider.urls(), n=4) as vector:
        vector.reset(seed=1)
    assert "Uvicorn" in provider.log() or "openenv" in provider.log().lower()
    until(lambda: all(pod.status.phase == "Failed" for pod in space.list(Pod)), what="the end of the pods")


# -- rights ------------------------------------------------------------------------------------------------------------


def rule(resources: str, verbs: str, group: str = "") -> dict[str, Any]:
    return {"apiGroups": [group], "resources": resources.split(), "verbs": verbs.split()}


# What docs/howto/kubernetes.md asks for.
RIGHTS = [
    rule("services", "create delete get list"),
    rule("deployments", "create get", "apps"),
    rule("secrets", "create"),
    rule("pods", "get list watch"),
    rule("pods/log", "get"),
    rule("pods/portforward", "get create"),
    rule("events", "list"),
]


def test_the_documented_rights_are_enough(
    make: Callable[..., KubernetesProvider], space: Space, tmp_path: Path
) -> None:
    path = space.kubeconfig(tmp_path / "user", token=space.token(RIGHTS))
    provider = make(kubeconfig=path)
    url = provider.start_container("gridworld:1", env_vars=LIMITS)
    provider.wait_for_ready(url)
    with GenericEnvClient(url).sync() as client:
        client.reset(seed=1)
        client.step({"move": "right"})
    assert provider.log()
    provider.stop_container()
    fewer = space.kubeconfig(tmp_path / "less", token=space.token(RIGHTS[:1]))
    with pytest.raises(ProviderError, match='cannot create resource "deployments" in API group "apps"'):
        make(kubeconfig=fewer).start_container("gridworld:1")


TRAINER = """
import signal, time
from openenv import VectorEnv
from openenv.providers import KubernetesProvider
provider = KubernetesProvider()
url = provider.start_container("gridworld:1", replicas=2)
assert url.startswith(f"http://{provider.name}."), url
while len(provider.urls()) < 2:
    time.sleep(0.1)
with VectorEnv(provider.urls(), n=8) as vector:
    vector.reset(seed=1)
    print("stepped", len(vector.step([{"move": "right"}] * 8).rewards), flush=True)
signal.pause()
"""


def test_a_program_in_a_pod_owns_what_it_starts(space: Space) -> None:
    """It finds the cluster by its service account; when its pod is deleted, the cluster deletes its servers."""
    space.token(RIGHTS)
    spec = {
        "serviceAccountName": space.account,
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "main", "image": "gridworld:1", "command": ["python3", "-c", TRAINER]}],
    }
    trainer = {"metadata": {"name": "trainer", "namespace": space.name}, "spec": spec}
    client = space.cluster.client
    client.create(Pod.from_dict(trainer))

    def written() -> str:
        state = space.find(Pod, "trainer").status
        if state.phase not in ("Running", "Failed", "Succeeded"):
            return ""
        return "".join(client.log("trainer", namespace=space.name))

    until(lambda: "stepped 8" in written() or space.find(Pod, "trainer").status.phase == "Failed", 120)
    assert "stepped 8" in written()
    assert len(space.pods()) == 3
    space.delete_pod("trainer")  # nothing runs in it any more that could tidy up
    until(lambda: not space.left(), what="the end of its servers")


# -- leftovers ---------------------------------------------------------------------------------------------------------

ORPHAN = """
import os, signal, sys
from openenv.providers import KubernetesProvider
provider = KubernetesProvider(kubeconfig=sys.argv[1])
provider.wait_for_ready(provider.start_container("gridworld:1"))
print(provider.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ps_and_gc_find_what_a_killed_process_left(
    make: Callable[..., KubernetesProvider], space: Space, kubeconfig: Path
) -> None:
    mine = make()
    mine.start_container("gridworld:1")
    done = subprocess.run([sys.executable, "-c", ORPHAN, str(kubeconfig)], capture_output=True, text=True, check=False)
    orphan = done.stdout.strip()
    assert orphan, done.stderr
    options = ("--only", "kubernetes", "--kubeconfig", str(kubeconfig))
    listed = {one["name"]: one for one in json.loads(call("ps", "--json", *options).stdout)["items"]}
    assert {name: one["leftover"] for name, one in listed.items()} == {orphan: True, mine.name: False}
    assert listed[orphan]["what"] == "gridworld:1"
    assert orphan in call("ps", "--only", "kubernetes", "--all-namespaces", "--kubeconfig", str(kubeconfig)).stdout
    assert f"would remove kubernetes server {orphan}" in call("gc", "--dry-run", *options).stdout
    assert f"removed kubernetes server {orphan}" in call("gc", *options).stdout
    until(lambda: not any(orphan in one for one in space.left()), what="the end of the leftover")
    assert any(str(mine.name) in one for one in space.left())
    assert "No leftovers." in call("gc", *options).stdout


def test_the_snippet_of_the_documentation(kubeconfig: Path, space: Space) -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs_src" / "use_kubernetes.py").read_text().replace('"gridworld"', '"gridworld:1"')
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
    )
    assert (done.stdout, done.returncode) == ("8\n", 0), done.stderr
