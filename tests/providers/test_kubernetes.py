"""Servers in a cluster: what is created, how it is reached, the cluster's words when it fails, what is left: nothing.

The cluster is a double of the API server on loopback whose pods are real processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from waiting import wait_until

pytest.importorskip("lightkube")
pytest.importorskip("kubernetes_validate")

from kubernetes_double import Image, KubernetesDouble, Node
from kubernetes_schemas import problems, versions
from openenv import GenericEnvClient, VectorEnv
from openenv.errors import (
    ImagePullFailed,
    ProviderError,
    ProviderUnavailable,
    ServerDied,
    ServerNotReady,
    SlotsFailed,
    Unschedulable,
)
from openenv.providers import IngressRoute, KubernetesProvider
from openenv.providers.kubernetes import servers_in, sweep
from openenv.providers.kubernetes_objects import IMAGE_ANNOTATION, ServerManifests, ServerPods, server_name
from openenv.sandboxes import cluster as cluster_module
from openenv.sandboxes.cluster import EXPIRES_ANNOTATION, OWNER_ANNOTATION, Cluster, ClusterAddress
from openenv.sandboxes.host import ProcessOwner

# Answers /health, /ready and /name as a server does, and starts quickly.
TINY = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        known = {"/health": "{}", "/name": " ".join([os.environ.get("NAME", ""), *sys.argv[1:]])}
        if os.environ.get("READY", "yes") == "yes":
            known["/ready"] = "{}"
        body = known.get(self.path, "").encode()
        self.send_response(200 if self.path in known else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
print("serving", os.environ.get("NAME"))
http.server.ThreadingHTTPServer((sys.argv[1], 8000), Handler).serve_forever()
"""
CRASH = "import sys; print('no such map: maze.txt'); sys.exit(3)"
SERVE = ("-m", "openenv", "serve", "gridworld_env.server.app:app", "--host", "{ip}", "--no-token", "--no-web")
IMAGES = {
    "tiny:1": Image([sys.executable, "-c", TINY, "{ip}", "{args}"]),
    "tiny:2": Image([sys.executable, "-c", TINY, "{ip}", "{args}"]),
    "private/tiny": Image([sys.executable, "-c", TINY, "{ip}"], pull_secret="registry"),
    "crash:1": Image([sys.executable, "-c", CRASH]),
    "gridworld": Image([sys.executable, *SERVE]),
}
NODES = (Node("node-1", {"disk": "ssd"}), Node("node-2", {"zone": "b"}, gpus=2, taint="gpu-only"))


@pytest.fixture(scope="module")
def double() -> Iterator[KubernetesDouble]:
    with KubernetesDouble(IMAGES, nodes=NODES) as double:
        yield double


@pytest.fixture
def kubeconfig(double: KubernetesDouble, tmp_path: Path) -> Iterator[Path]:
    """The double's configuration; nothing may be left in it when the test ends."""
    yield double.kubeconfig(tmp_path / "config")
    wait_until(lambda: not double.names(), 10)
    assert double.names() == []


@pytest.fixture
def make(kubeconfig: Path) -> Iterator[Callable[..., KubernetesProvider]]:
    """Make providers; what they started is removed when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(KubernetesProvider(kubeconfig=kubeconfig, **options))


def read(url: str) -> str:
    with urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def test_a_server_is_reached_through_the_api_and_leaves_nothing(
    make: Callable[..., KubernetesProvider], double: KubernetesDouble
) -> None:
    provider = make()
    url = provider.start_container("tiny:1", env_vars={"NAME": "one"}, command=["--flag", "two words"])
    provider.wait_for_ready(url)
    assert url.startswith("http://127.0.0.1:")
    assert provider.urls() == [url]
    name, address, *rest = read(f"{url}/name").split()
    assert (name, rest) == ("one", ["--flag", "two", "words"])
    assert address == double.objects("Pod")[0]["status"]["podIP"]
    assert provider.log() == "serving one"
    kinds = {one.partition("/")[0] for one in double.names()}
    assert kinds == {"Service", "Secret", "Deployment", "ReplicaSet", "Pod"}
    provider.stop_container()
    provider.stop_container()
    assert provider.urls() == []
    assert provider.log() == ""
    with pytest.raises(OSError):
        read(f"{url}/name")


def test_variables_are_kept_out_of_the_pod(make: Callable[..., KubernetesProvider], double: KubernetesDouble) -> None:
    make().start_container("tiny:1", env_vars={"OPENENV_TOKEN": "very-secret-token"})
    assert "very-secret-token" not in str(double.objects("Deployment"))
    assert len(double.objects("Secret")) == 1
    with pytest.raises(ValueError, match="'a-b' cannot be an environment variable"):
        make().start_container("tiny:1", env_vars={"a-b": "1"})


def test_an_image_that_cannot_be_pulled_is_a_typed_error_with_the_clusters_words(
    make: Callable[..., KubernetesProvider],
) -> None:
    provider = make()
    url = provider.start_container("nowhere/maze:7")
    with pytest.raises(
        ImagePullFailed, match=r"ImagePullBackOff.*nowhere/maze:7.*not found.*image_pull_secret"
    ) as info:
        provider.wait_for_ready(url, 30)
    assert info.value.code == "IMAGE_PULL_FAILED"
    assert provider.name is None


NODE_IS_SLOW = [
    "failed to sync secret cache: timed out waiting for the condition",
    "failed to sync configmap cache: timed out waiting for the condition",
    "context deadline exceeded",
]


def test_a_container_that_a_slow_node_could_not_configure_is_waited_for(
    make: Callable[..., KubernetesProvider], double: KubernetesDouble
) -> None:
    double.container_errors = list(NODE_IS_SLOW)
    provider = make()
    url = provider.start_container("tiny:1", env_vars={"NAME": "patient"})
    provider.wait_for_ready(url, 30)
    assert double.container_errors == []
    assert read(f"{url}/name").split()[0] == "patient"


def test_a_slow_node_is_named_when_the_time_is_over(
    make: Callable[..., KubernetesProvider], double: KubernetesDouble
) -> None:
    double.container_errors = NODE_IS_SLOW[:1] * 1000
    provider = make()
    url = provider.start_container("tiny:1")
    try:
        with pytest.raises(ServerNotReady, match="failed to sync secret cache"):
            provider.wait_for_ready(url, 1.5)
    finally:
        double.container_errors = []


@pytest.mark.parametrize("text", ['secret "token" not found', "couldn't find key a in Secret default/token"])
def test_a_container_that_can_never_be_configured_fails_at_once(
    make: Callable[..., KubernetesProvider], double: KubernetesDouble, text: str
) -> None:
    double.container_errors = [text] * 1000
    provider = make()
    url = provider.start_container("tiny:1")
    began = time.monotonic()
    try:
        with pytest.raises(ProviderError, match=re.escape(text)):
            provider.wait_for_ready(url, 300)
    finally:
        double.container_errors = []
    assert time.monotonic() - began < 60


def test_a_private_image_needs_its_secret(make: Callable[..., KubernetesProvider]) -> None:
    provider = make()
    url = provider.start_container("private/tiny")
    with pytest.raises(ImagePullFailed, match="authorization failed"):
        provider.wait_for_ready(url, 30)
    url = provider.start_container("private/tiny", image_pull_secrets=["registry"])
    provider.wait_for_ready(url, 30)


def test_a_server_for_which_there_is_no_node_is_unschedulable_when_the_time_is_over(
    make: Callable[..., KubernetesProvider],
) -> None:
    provider = make()
    url = provider.start_container("tiny:1", node_selector={"disk": "tape"})
    with pytest.raises(Unschedulable, match=r"2 node\(s\) didn't match Pod's node affinity/selector") as info:
        provider.wait_for_ready(url, 0.5)
    assert isinstance(info.value, TimeoutError)
    assert isinstance(info.value, ServerNotReady)


def test_a_server_that_ends_is_reported_at_once_with_its_log(make: Callable[..., KubernetesProvider]) -> None:
    provider = make()
    url = provider.start_container("crash:1")
    with pytest.raises(ServerDied, match="its container ended with exit code 3") as info:
        provider.wait_for_ready(url, 30)
    assert "no such map: maze.txt" in info.value.log
    assert "no such map: maze.txt" in str(info.value)


def test_a_server_that_never_gets_ready_is_not_waited_for_for_ever(make: Callable[..., KubernetesProvider]) -> None:
    provider = make()
    url = provider.start_container("tiny:1", env_vars={"READY": "no"})
    with pytest.raises(
        ServerNotReady, match=r"0 of 1 pods became ready within 1 s.*does it have /ready \(ready_path\)"
    ):
        provider.wait_for_ready(url, 1)
    url = provider.start_container("tiny:1", env_vars={"READY": "no"}, ready_path="/health")
    provider.wait_for_ready(url)


def test_pods_that_the_cluster_does_not_create_are_reported(
    make: Callable[..., KubernetesProvider], double: KubernetesDouble
) -> None:
    double.pod_quota = 1
    try:
        provider = make()
        url = provider.start_container("tiny:1", replicas=2)
        with pytest.raises(ProviderError, match="exceeded quota: pods, requested: pods=1, used: pods=1"):
            provider.wait_for_ready(url, 30)
    finally:
        double.pod_quota = None


@pytest.mark.parametrize(("verb", "resource"), [("create", "deployments"), ("create", "services")])
def test_what_the_user_may_not_do_is_said_in_the_clusters_words(
    make: Callable[..., KubernetesProvider], double: KubernetesDouble, verb: str, resource: str
) -> None:
    double.forbidden = {(verb, resource)}
    try:
        with pytest.raises(ProviderError, match=f'cannot {verb} resource "{resource}"'):
            make().start_container("tiny:1")
    finally:
        double.forbidden = set()


def test_a_user_who_may_not_list_pods_learns_it(
    make: Callable[..., KubernetesProvider], double: KubernetesDouble
) -> None:
    double.forbidden = {("list", "pods")}
    try:
        provider = make()
        url = provider.start_container("tiny:1")
        with pytest.raises(ProviderError, match='cannot list resource "pods"'):
            provider.wait_for_ready(url, 30)
    finally:
        double.forbidden = set()


def test_a_cluster_with_tls_and_a_token(tmp_path: Path) -> None:
    with KubernetesDouble(IMAGES, token="right", tls=True) as double:
        with KubernetesProvider(kubeconfig=double.kubeconfig(tmp_path / "config")) as provider:
            url = provider.start_container("tiny:1", env_vars={"NAME": "tls"})
            provider.wait_for_ready(url)
            assert read(f"{url}/name").startswith("tls ")
        with pytest.raises(ProviderError, match="Unauthorized"):
            KubernetesProvider(kubeconfig=double.kubeconfig(tmp_path / "wrong", token="wrong")).start_container(
                "tiny:1"
            )


def test_a_stream_is_read_while_it_is_written_and_closing_it_ends_the_read(tmp_path: Path) -> None:
    """With TLS 1.3 a server sends session tickets after the handshake, for which a reader begins to read."""
    with KubernetesDouble(tls=True) as double:
        cluster = Cluster(ClusterAddress(double.kubeconfig(tmp_path / "config")))
        context = cluster._tls
        assert context is not None
        for _ in range(20):
            raw = socket.create_connection(("127.0.0.1", double.port))
            stream = context.wrap_socket(raw, server_hostname="127.0.0.1")
            parts: list[bytes] = []

            def read(stream: Any = stream, parts: list[bytes] = parts) -> None:
                with contextlib.suppress(OSError):
                    while part := stream.recv(1 << 16):
                        parts.append(part)

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            stream.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            wait_until(lambda parts=parts: b"}" in b"".join(parts), 10)  # type: ignore[misc]
            stream.close()  # the reader waits for more
            reader.join(10)
            assert not reader.is_alive()


def test_without_a_cluster_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ProviderUnavailable, match=r"KUBECONFIG or ~/\.kube/config"):
        KubernetesProvider()
    (tmp_path / "odd").write_text("clusters: 3\n")
    with pytest.raises(ProviderUnavailable, match="no usable Kubernetes configuration"):
        KubernetesProvider(kubeconfig=tmp_path / "odd")
    double = KubernetesDouble()
    with double:
        path = double.kubeconfig(tmp_path / "gone")
        with pytest.raises(ProviderUnavailable, match="Context 'other' not found"):
            KubernetesProvider(kubeconfig=path, context="other")
    with pytest.raises(ProviderError, match=r"does not answer .*kubectl cluster-info"):
        KubernetesProvider(kubeconfig=path).start_container("tiny:1")


THREADS = """
import sys, threading
sys.setswitchinterval(1e-6)
from openenv.sandboxes.cluster import Cluster, ClusterAddress
from lightkube.core.decoders import decode_list, decode_object
from lightkube.resources.core_v1 import Pod
start = threading.Barrier(4)
def use(number):
    start.wait()
    Cluster(ClusterAddress(sys.argv[1]))
    decode_list(b'{"items": [{"metadata": {"name": "x"}}]}', Pod)
    decode_object(b'{"spec": {"containers": [{"name": "x"}]}}', Pod)
threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("done")
"""


def test_threads_that_open_the_cluster_at_once_do_not_crash(kubeconfig: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS, str(kubeconfig)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_without_lightkube_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightkube"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightkube", None)
    with pytest.raises(ProviderUnavailable, match=r"pip install 'lightkube>="):
        KubernetesProvider()


def test_in_a_pod_the_service_account_is_used_and_the_pod_is_the_owner(
    double: KubernetesDouble, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightkube.config.kubeconfig import KubeConfig

    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("x")
    (account / "namespace").write_text("default")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setattr(cluster_module, "SERVICE_ACCOUNT", str(account))
    monkeypatch.setattr("openenv.providers.kubernetes.SERVICE_ACCOUNT", str(account))
    monkeypatch.setattr(KubeConfig, "from_service_account", lambda: KubeConfig.from_file(kubeconfig))
    monkeypatch.setattr("socket.gethostname", lambda: "trainer-0")
    uid = Cluster(ClusterAddress(kubeconfig)).create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "trainer-0"},
            "spec": {"containers": [{"name": "server", "image": "tiny:1"}], "terminationGracePeriodSeconds": 0},
        }
    )
    with KubernetesProvider() as provider:
        url = provider.start_container("tiny:1")
        assert url == f"http://{provider.name}.default.svc:8000"
        (owner,) = double.objects("Service")[0]["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", "trainer-0", uid)
        wait_until(lambda: provider.urls(), 20)
        (direct,) = provider.urls()  # the pod's own address, which this machine can reach, too
        assert direct.split(":")[1].strip("/") in read(f"{direct}/name")
        double.kill_pod("trainer-0")  # the cluster deletes what it owns
        wait_until(lambda: not double.objects("Pod"), 20)


def test_a_forward_stays_with_its_pod_and_goes_to_its_successor_when_it_is_gone(
    make: Callable[..., KubernetesProvider], double: KubernetesDouble
) -> None:
    provider = make()
    url = provider.start_container("tiny:1", replicas=2)
    provider.wait_for_ready(url)
    first, second = provider.urls()
    where = {one: read(f"{one}/name") for one in (first, second)}
    assert len(set(where.values())) == 2
    double.expire_log()  # the watch has to begin again
    assert {one: read(f"{one}/name") for one in (first, second)} == where
    victim = next(pod for pod in double.objects("Pod") if pod["status"]["podIP"] in where[first])
    double.kill_pod(victim["metadata"]["name"])

    def is_another_pod() -> bool:
        with contextlib.suppress(OSError):
            return read(f"{first}/name") not in where.values()
        return False

    wait_until(is_another_pod, 20, "the forward did not find the new pod")
    assert read(f"{second}/name") == where[second]


def test_every_option_is_in_the_manifest(make: Callable[..., KubernetesProvider], double: KubernetesDouble) -> None:
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "run", "uid": "1"}
    provider = make(owner=owner)
    double.manifests.clear()
    provider.start_container(
        "tiny:2",
        replicas=3,
        container_port=9000,
        cpu_request=0.5,
        cpu_limit="2",
        memory_request="1Gi",
        memory_limit="2Gi",
        gpus=1,
        node_selector={"zone": "b"},
        tolerations=[{"key": "gpu-only", "operator": "Exists", "effect": "NoSchedule"}],
        image_pull_secrets=["registry"],
        image_pull_policy="Always",
        service_account="envs",
        security_context={"runAsNonRoot": True, "runAsUser": 1000},
        runtime_class="gvisor",
        labels={"team": "rl"},
        annotations={"note": "x"},
        stop_timeout_s=7,
        ttl_s=600,
        pod_spec={
            "priorityClassName": "high",
            "volumes": [{"name": "maps", "emptyDir": {}}],
            "containers": [{"name": "server", "volumeMounts": [{"name": "maps", "mountPath": "/maps"}]}],
        },
    )
    service, deployment = double.manifests
    assert [one["kind"] for one in double.manifests] == ["Service", "Deployment"]
    assert service["metadata"]["ownerReferences"] == [owner]
    assert deployment["metadata"]["ownerReferences"][0]["kind"] == "Service"
    assert set(service["metadata"]["annotations"]) == {OWNER_ANNOTATION, EXPIRES_ANNOTATION, IMAGE_ANNOTATION}
    assert service["metadata"]["labels"]["team"] == "rl"
    assert deployment["spec"]["replicas"] == 3
    template = deployment["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "rl"
    assert template["metadata"]["annotations"] == {"note": "x"}
    spec = template["spec"]
    (container,) = spec["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "0.5", "memory": "1Gi"},
        "limits": {"cpu": "2", "memory": "2Gi", "nvidia.com/gpu": "1"},
    }
    assert container["ports"] == [{"name": "http", "containerPort": 9000, "protocol": "TCP"}]
    assert container["imagePullPolicy"] == "Always"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsNonRoot": True,
        "runAsUser": 1000,
    }
    assert container["volumeMounts"] == [{"name": "maps", "mountPath": "/maps"}]
    assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert {
        key: spec[key]
        for key in ("nodeSelector", "imagePullSecrets", "serviceAccountName", "runtimeClassName", "priorityClassName")
    } == {
        "nodeSelector": {"zone": "b"},
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccountName": "envs",
        "runtimeClassName": "gvisor",
        "priorityClassName": "high",
    }
    assert spec["tolerations"] == [{"key": "gpu-only", "operator": "Exists", "effect": "NoSchedule"}]
    assert spec["automountServiceAccountToken"] is True
    assert spec["terminationGracePeriodSeconds"] == 7


def test_pods_have_names_of_their_own_in_dns_and_by_ingress(
    make: Callable[..., KubernetesProvider], double: KubernetesDouble
) -> None:
    inside = make(reach="dns")
    url = inside.start_container("tiny:1", replicas=2, workload="pods", ttl_s=600)
    name = inside.name
    assert url == f"http://{name}.default.svc:8000"
    assert inside.urls() == [f"http://{name}-{number}.{name}.default.svc:8000" for number in (0, 1)]
    pod = next(one for one in double.objects("Pod") if one["metadata"]["name"] == f"{name}-1")
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == (f"{name}-1", name)
    assert pod["spec"]["activeDeadlineSeconds"] == 600
    assert double.objects("Service")[0]["spec"]["clusterIP"] == "None"
    inside.stop_container()

    route = IngressRoute(host="maze-{replica}.example.org", class_name="nginx", tls_secret="cert")
    outside = make(reach="ingress", ingress=route)
    url = outside.start_container("tiny:1", replicas=2, workload="pods")
    assert outside.urls() == ["https://maze-0.example.org", "https://maze-1.example.org"]
    assert url == outside.urls()[0]
    (ingress,) = double.objects("Ingress")
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == ["maze-0.example.org", "maze-1.example.org"]
    backends = [rule["http"]["paths"][0]["backend"]["service"]["name"] for rule in ingress["spec"]["rules"]]
    assert set(backends) <= {service["metadata"]["name"] for service in double.objects("Service")}
    single = make(reach="ingress", ingress=IngressRoute(host="maze.example.org"))
    assert single.start_container("tiny:1") == "http://maze.example.org"


def test_a_pod_whose_time_is_over_has_ended(make: Callable[..., KubernetesProvider]) -> None:
    provider = make()
    url = provider.start_container("tiny:1", env_vars={"READY": "no"}, workload="pods", ttl_s=1)
    with pytest.raises(ServerDied, match="DeadlineExceeded: Pod was active on the node longer"):
        provider.wait_for_ready(url, 30)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replica": 2}, "Unsupported kwargs for KubernetesProvider: replica. It takes port, env_vars, replicas"),
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"workload": "job"}, "workload must be 'deployment' or 'pods'"),
        ({"ttl_s": 0}, "ttl_s must be greater than 0"),
        ({"image_pull_policy": "Sometimes"}, "image_pull_policy must be 'Always'"),
        ({"gpus": -1}, "gpus must not be negative"),
    ],
)
def test_a_wrong_option_is_refused(make: Callable[..., KubernetesProvider], options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make().start_container("tiny:1", **options)


def test_a_wrong_way_to_reach_it_is_refused(make: Callable[..., KubernetesProvider]) -> None:
    with pytest.raises(ValueError, match="reach must be 'auto'"):
        make(reach="proxy")
    with pytest.raises(ValueError, match="go together"):
        make(reach="ingress")
    one_host = make(reach="ingress", ingress=IngressRoute(host="maze.example.org"))
    with pytest.raises(ValueError, match="a session cannot be resumed on its own pod"):
        one_host.start_container("tiny:1", replicas=2)
    each = make(reach="ingress", ingress=IngressRoute(host="{replica}.example.org"))
    with pytest.raises(ValueError, match="requires workload='pods'"):
        each.start_container("tiny:1", replicas=2)


def test_one_server_at_a_time(make: Callable[..., KubernetesProvider]) -> None:
    provider = make()
    provider.start_container("tiny:1")
    with pytest.raises(ProviderError, match="already running"):
        provider.start_container("tiny:1")


def test_a_port_that_is_taken_leaves_nothing(make: Callable[..., KubernetesProvider]) -> None:
    first, second = make(), make()
    url = first.start_container("tiny:1")
    with pytest.raises(ProviderError, match="port of this machine cannot be used"):
        second.start_container("tiny:1", port=int(url.rpartition(":")[2]))


def test_an_interrupt_leaves_nothing(make: Callable[..., KubernetesProvider]) -> None:
    provider = make()
    url = provider.start_container("tiny:1", env_vars={"READY": "no"})
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            provider.wait_for_ready(url, 30)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, former)
    assert provider.name is None


ORPHAN = """
import os, sys
from openenv.providers import KubernetesProvider
provider = KubernetesProvider(kubeconfig=sys.argv[1])
provider.start_container("tiny:1")
print(provider.name, flush=True)
os._exit(0)
"""


def test_what_has_a_dead_owner_is_removed_by_the_next_start_and_what_belongs_to_others_stays(
    make: Callable[..., KubernetesProvider], double: KubernetesDouble
) -> None:
    mine, theirs = make(), make()
    mine.start_container("tiny:1")
    theirs.start_container("tiny:1")
    dead = str(ProcessOwner(ProcessOwner.current().place, 999_999_999, "1"))

    def orphan(service: Any) -> None:
        service["metadata"]["annotations"][OWNER_ANNOTATION] = dead

    double.update("Service", str(theirs.name), orphan)
    third = make()
    third.start_container("tiny:1")
    assert {one["metadata"]["name"] for one in double.objects("Service")} == {mine.name, third.name}


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_and_what_belongs_to_others_stays(
    make: Callable[..., KubernetesProvider], double: KubernetesDouble, kubeconfig: Path
) -> None:
    mine = make()
    mine.start_container("tiny:1", ttl_s=3600)
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN, str(kubeconfig)], capture_output=True, text=True, check=True, timeout=60
    )
    orphan = done.stdout.strip()
    here = Cluster(ClusterAddress(kubeconfig))
    listed = {server.name: server for server in servers_in(here)}
    assert listed.keys() == {orphan, mine.name}
    assert listed[orphan].is_leftover
    assert not listed[str(mine.name)].is_leftover
    assert sweep(here) == [orphan]

    def expire(service: Any) -> None:
        service["metadata"]["annotations"][EXPIRES_ANNOTATION] = "2020-01-01T00:00:00Z"

    double.update("Service", str(mine.name), expire)
    assert sweep(here) == [mine.name]


@pytest.mark.slow
def test_a_client_takes_the_provider(kubeconfig: Path) -> None:
    provider = KubernetesProvider(kubeconfig=kubeconfig)
    with GenericEnvClient.from_docker_image("gridworld", provider=provider).sync() as env:
        env.reset(seed=3)
        assert env.step({"move": "right"}).done is False


@pytest.mark.slow
def test_sessions_are_spread_over_pods_and_a_dead_pod_loses_only_its_own(
    make: Callable[..., KubernetesProvider], double: KubernetesDouble
) -> None:
    provider = make()
    url = provider.start_container("gridworld", replicas=3, env_vars={"OPENENV_MAX_SESSIONS": "32"})
    provider.wait_for_ready(url, 120)
    with VectorEnv(provider.urls(), n=24) as vector:
        vector.reset(seed=1)
        for _ in range(3):
            vector.step([{"move": "right"}] * 24)
        victim = double.objects("Pod")[1]["metadata"]["name"]
        double.kill_pod(victim)
        with pytest.raises(SlotsFailed) as info:
            for _ in range(50):
                vector.step([{"move": "left"}] * 24)
        assert len(info.value.errors) == 8
        provider.wait_for_ready(url, 120)
        vector.reset(seed=2)
        vector.step([{"move": "right"}] * 24)


@pytest.mark.slow
def test_the_snippet_of_the_documentation_prints_what_it_should(kubeconfig: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "docs_src" / "use_kubernetes.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
    )
    assert (done.stdout, done.returncode) == ("8\n", 0), done.stderr


# -- manifests ---------------------------------------------------------------------------------------------------------


def everything() -> list[dict[str, Any]]:
    """Every kind of object, with every field that an option can set."""
    pods = ServerPods(
        image="registry.example.org/team/maze@sha256:0123",
        command=("serve", "--port", "8000"),
        variables={"OPENENV_TOKEN": "x"},
        cpu_request=0.5,
        cpu_limit=2,
        memory_request="1Gi",
        memory_limit="2Gi",
        gpus=1,
        node_selector={"a": "b"},
        tolerations=[{"key": "k", "operator": "Exists"}],
        image_pull_secrets=["s"],
        image_pull_policy="IfNotPresent",
        service_account="sa",
        security_context={"runAsNonRoot": True},
        runtime_class="kata",
        labels={"x": "y"},
        annotations={"p": "q"},
        drain_s=600,
        pod_spec={"priorityClassName": "high"},
    )
    owner = {"apiVersion": "v1", "kind": "Service", "name": "n", "uid": "u"}
    made = ServerManifests(name="maze", pods=pods, replicas=2, annotations={"a": "b"}, owner=owner)
    route = IngressRoute(host="{replica}.x.org", class_name="c", tls_secret="t", annotations={"i": "j"})
    plain = ServerManifests(name="maze", pods=ServerPods(image="maze"))
    return [
        made.service(),
        made.service(port=80, headless=True),
        made.secret(owner),
        made.deployment(owner),
        plain.deployment(),
        made.pod(1, owner, deadline_s=60.5),
        made.replica_service(1, owner),
        made.ingress(route, owner),
        plain.ingress(IngressRoute(host="x.org")),
        made.autoscaler(most=9, metric="openenv_session_slots_used", per_pod=12.5),
        made.disruption_budget(),
        made.network_policy(clients=[{"podSelector": {}}], egress="dns"),
        made.network_policy(clients=[], egress="all"),
    ]


@pytest.mark.parametrize("version", versions())
def test_every_manifest_is_valid(version: str) -> None:
    wrong = {manifest["kind"]: found for manifest in everything() if (found := problems(manifest, version))}
    assert wrong == {}


def test_the_schemas_notice_a_mistake() -> None:
    manifest = ServerManifests(name="maze", pods=ServerPods(image="maze")).deployment()
    manifest["spec"]["template"]["spec"]["nodeSelektor"] = {}
    assert "nodeSelektor" in problems(manifest, versions()[-1])[0]


def test_a_pod_that_drains_has_the_time_for_it() -> None:
    spec = ServerPods(image="maze", drain_s=600, stop_timeout_s=10).spec(None)
    (container,) = spec["containers"]
    assert container["env"] == [{"name": "OPENENV_DRAIN_TIMEOUT", "value": "600"}]
    assert container["lifecycle"]["preStop"]["exec"]["command"][-1] == "sleep 5"
    assert spec["terminationGracePeriodSeconds"] > 5 + 600 + 10


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("registry:5000/team/Maze_Env:1.2", "maze-env-"),
        ("3d@sha256:00", "env-3d-"),
        ("_", "env-"),
        ("a" * 80, "a" * 40),
    ],
)
def test_names_are_names_in_dns(image: str, name: str) -> None:
    made = server_name(image)
    assert made.startswith(name)
    assert len(made) <= 53
    assert made.replace("-", "").isalnum()
    assert made[0].isalpha()
    assert made == made.lower()
    assert made != server_name(image)
