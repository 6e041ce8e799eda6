"""`openenv deploy k8s`: manifests that are printed, applied, updated; what the cluster says when it fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from openenv import GenericEnvClient
from openenv.cli.__main__ import build
from waiting import wait_until

pytest.importorskip("lightkube")
pytest.importorskip("kubernetes_validate")

from kubernetes_double import RESOURCES, Image, KubernetesDouble
from kubernetes_schemas import problems, versions

TINY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer((sys.argv[1], 8000), Handler).serve_forever()
"""
SERVE = ("-m", "openenv", "serve", "gridworld_env.server.app:app", "--host", "{ip}", "--no-token", "--no-web")
IMAGES = {
    "team/tiny:1": Image([sys.executable, "-S", "-c", TINY, "{ip}"]),
    "team/tiny:2": Image([sys.executable, "-S", "-c", TINY, "{ip}"]),
    "team/tiny:crash": Image([sys.executable, "-S", "-c", "print('no map'); raise SystemExit(4)"]),
    "gridworld:1": Image([sys.executable, *SERVE]),
    "gridworld:2": Image([sys.executable, *SERVE]),
}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(build(["deploy"]), ["deploy", "k8s", *arguments], env={"COLUMNS": "200"})


def printed(*arguments: str) -> dict[str, Any]:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(result.stdout)}


@pytest.fixture
def double(tmp_path: Path) -> Iterator[KubernetesDouble]:
    with KubernetesDouble(IMAGES) as double:
        yield double


EVERYTHING = (
    "registry.example.org/team/maze:3",
    *("--replicas", "2", "--max-replicas", "9", "--max-sessions", "64", "--drain-timeout", "120", "--name", "maze"),
    *("--env", "A=1", "--env", "B=x=y", "--secret", "tokens", "--port", "9000", "--cpu", "2", "--memory", "4Gi"),
    *("--gpus", "1", "--node-selector", "pool=rl", "--image-pull-secret", "registry", "--service-account", "envs"),
    *("--runtime-class", "gvisor", "--ready-path", "/health", "--allow-from", "app=trainer"),
    *("--allow-namespace", "monitoring", "--egress", "all", "--ingress-host", "maze.example.org"),
    *("--ingress-class", "nginx", "--tls-secret", "cert", "--namespace", "rl"),
)


def test_every_option_is_in_a_valid_manifest() -> None:
    made = printed(*EVERYTHING)
    assert list(made) == [
        *("Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment", "HorizontalPodAutoscaler", "Ingress")
    ]
    wrong = {(v, k): found for v in versions() for k, manifest in made.items() if (found := problems(manifest, v))}
    assert wrong == {}
    assert {manifest["metadata"]["namespace"] for manifest in made.values()} == {"rl"}
    assert {manifest["metadata"]["name"] for manifest in made.values()} == {"maze"}
    pod = made["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["env"] == [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "x=y"},
        {"name": "OPENENV_MAX_SESSIONS", "value": "64"},
        {"name": "OPENENV_DRAIN_TIMEOUT", "value": "120"},
    ]
    assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "limits": {"memory": "4Gi", "nvidia.com/gpu": "1"},
    }
    assert pod["terminationGracePeriodSeconds"] == 5 + 120 + 10 + 15
    assert "replicas" not in made["Deployment"]["spec"]  # the autoscaler has it
    scaler = made["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 9)
    assert scaler["metrics"][0]["pods"] == {
        "metric": {"name": "openenv_session_slots_used"},
        "target": {"type": "AverageValue", "averageValue": "48"},
    }
    policy = made["NetworkPolicy"]["spec"]
    assert policy["ingress"][0]["from"] == [
        {"podSelector": {"matchLabels": {"app": "trainer"}}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    ]
    assert policy["egress"] == [{}]
    assert made["Ingress"]["spec"]["tls"] == [{"hosts": ["maze.example.org"], "secretName": "cert"}]


def test_the_metric_of_the_autoscaler_is_one_that_servers_have() -> None:
    from openenv.server.telemetry import server_metrics

    assert '"openenv_session_slots_used"' in Path(server_metrics.__file__).read_text()


def test_a_package_names_its_image_port_and_variables(tmp_path: Path) -> None:
    (tmp_path / "openenv.yaml").write_text(
        "spec_version: 1\nname: big_maze_env\nversion: 1.2.0\nport: 9001\nvariables: {MAPS: small}\n"
    )
    result = call(str(tmp_path), "--registry", "registry.example.org/rl/")
    made = {one["kind"]: one for one in yaml.safe_load_all(result.stdout)}
    (container,) = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert made["Service"]["metadata"]["name"] == "big-maze"
    assert container["image"] == "registry.example.org/rl/openenv-big_maze:1.2.0"
    assert container["ports"][0]["containerPort"] == 9001
    assert {"name": "MAPS", "value": "small"} in container["env"]
    assert f"openenv build {tmp_path} -t registry.example.org/rl/openenv-big_maze:1.2.0" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("maze", "--max-replicas", "3"), "--max-sessions"),
        (("maze", "--replicas", "4", "--max-replicas", "3", "--max-sessions", "1"), "must not be below --replicas"),
        (("maze", "--tls-secret", "x"), "these need --ingress-host"),
        (("maze", "--env", "x"), "'x' is not NAME=VALUE"),
        (("maze", "--env", "a-b=1"), "'a-b' cannot be an environment variable"),
        (("maze", "--egress", "some"), "'some' is not one of dns, all"),
        (("maze", "--registry", "r"), "put it into the image's name"),
        (("42",), "the image '42' gives no valid name"),
        ((".",), "is a folder without an openenv.yaml"),
    ],
)
def test_a_wrong_option_is_refused(arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code != 0
    assert words in " ".join(result.output.split())


@pytest.mark.slow
def test_it_is_applied_updated_and_reported(double: KubernetesDouble, tmp_path: Path) -> None:
    options = ("--kubeconfig", str(double.kubeconfig(tmp_path / "config")), "--apply", "--timeout", "30")
    first = call("team/tiny:1", *options, "--replicas", "2", "--drain-timeout", "0")
    assert first.exit_code == 0, first.output
    assert "applied Deployment tiny" in first.stdout
    assert "tiny runs in namespace default." in first.stdout
    assert "http://tiny.default.svc:8000" in first.stdout
    before = {pod["metadata"]["name"] for pod in double.objects("Pod")}
    assert len(before) == 2
    second = call("team/tiny:2", *options, "--replicas", "2", "--drain-timeout", "0")
    assert second.exit_code == 0, second.output
    wait_until(lambda: not before & {pod["metadata"]["name"] for pod in double.objects("Pod")}, 20)
    images = {pod["spec"]["containers"][0]["image"] for pod in double.objects("Pod")}
    assert images == {"team/tiny:2"}
    broken = call("team/tiny:crash", *options, "--replicas", "2", "--drain-timeout", "0")
    assert broken.exit_code == 1
    assert "its container ended with exit code 4" in broken.stderr
    assert "no map" in broken.stderr
    ready = [pod for pod in double.objects("Pod") if pod["spec"]["containers"][0]["image"] == "team/tiny:2"]
    assert len(ready) == 2  # the old version goes on


def test_a_cluster_that_has_older_versions_gets_those(tmp_path: Path) -> None:
    resources = {("policy", "v1"): {}, ("autoscaling", "v2"): {}}
    resources |= {("policy", "v1beta1"): RESOURCES["policy", "v1"]}
    resources |= {("autoscaling", "v2beta2"): RESOURCES["autoscaling", "v2"]}
    with KubernetesDouble(IMAGES, resources=resources, version="1.20") as double:
        options = ("--kubeconfig", str(double.kubeconfig(tmp_path / "config")), "--apply", "--timeout", "30")
        done = call("team/tiny:1", *options, "--max-sessions", "4", "--max-replicas", "2", "--drain-timeout", "0")
        assert done.exit_code == 0, done.output
        assert double.objects("PodDisruptionBudget")[0]["apiVersion"] == "policy/v1beta1"
        assert double.objects("HorizontalPodAutoscaler")[0]["apiVersion"] == "autoscaling/v2beta2"


def test_what_the_cluster_refuses_is_said_in_its_words(double: KubernetesDouble, tmp_path: Path) -> None:
    double.forbidden = {("patch", "networkpolicies")}
    done = call("team/tiny:1", "--kubeconfig", str(double.kubeconfig(tmp_path / "config")), "--apply")
    assert done.exit_code == 1
    assert 'cannot patch resource "networkpolicies"' in done.stderr
    missing = call("team/tiny:1", "--kubeconfig", str(tmp_path / "none"), "--apply")
    assert missing.exit_code == 1
    assert "no usable Kubernetes configuration" in missing.stderr


@pytest.mark.slow
def test_an_update_loses_no_session_that_can_finish(double: KubernetesDouble, tmp_path: Path) -> None:
    options = ("--kubeconfig", str(double.kubeconfig(tmp_path / "config")), "--apply", "--timeout", "120")
    assert call("gridworld:1", *options, "--max-sessions", "4").exit_code == 0
    (old,) = double.objects("Pod")
    with GenericEnvClient(f"http://{old['status']['podIP']}:8000").sync() as client:
        client.reset(seed=1)
        client.step({"move": "right"})
        assert call("gridworld:2", *options, "--max-sessions", "4").exit_code == 0
        assert len(double.objects("Pod")) == 2  # the old one waits for its session
        client.step({"move": "right"})
        assert client.state()["step_count"] == 2
    wait_until(lambda: len(double.objects("Pod")) <= 1, 60)
    (new,) = double.objects("Pod")
    with GenericEnvClient(f"http://{new['status']['podIP']}:8000").sync() as client:
        client.reset(seed=1)
