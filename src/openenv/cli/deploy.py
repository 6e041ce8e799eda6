"""`openenv deploy k8s`: the manifests of a server that stays, printed or applied."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .command import HelpCommand, check_choice, command_group, failure, name_values, tidy_on_sigterm

if TYPE_CHECKING:
    from openenv.providers.kubernetes_objects import Manifest
    from openenv.sandboxes.cluster import Cluster, PodState, PodWatch

deploy = command_group(
    """
Deploy an environment where it stays: on a Kubernetes cluster.

  openenv deploy k8s registry/maze:2 --replicas 3 --apply
"""
)
METRIC = "openenv_session_slots_used"
_FILL = 0.75
_LOOK_S = 1.0
# What older clusters have instead; the fields that are used are the same.
_OLDER = {"policy/v1": "policy/v1beta1", "autoscaling/v2": "autoscaling/v2beta2"}

_of_pods = partial(typer.Option, rich_help_panel="Pods")
_of_network = partial(typer.Option, rich_help_panel="Network")
_of_cluster = partial(typer.Option, None, rich_help_panel="Cluster")


@deploy.command("k8s", cls=HelpCommand)
def k8s(
    target: str = typer.Argument(..., metavar="IMAGE|FOLDER", help="The image, or a package with an openenv.yaml."),
    name: str | None = typer.Option(
        None, "--name", metavar="NAME", help="Name of all objects; by default that of the image or package."
    ),
    registry: str | None = typer.Option(
        None, "--registry", metavar="HOST/PATH", help="Put before the image's name, for a package."
    ),
    replicas: int = typer.Option(1, "--replicas", metavar="N", min=1, help="How many pods run, at least."),
    max_replicas: int | None = typer.Option(
        None, "--max-replicas", metavar="N", min=1, help="Start more pods when sessions fill them, up to so many."
    ),
    max_sessions: int | None = typer.Option(
        None, "--max-sessions", metavar="N", min=1, help="Sessions that each pod may hold (OPENENV_MAX_SESSIONS)."
    ),
    drain_timeout: float = typer.Option(
        600.0, "--drain-timeout", metavar="SECONDS", min=0.0, help="How long an update waits for a pod's sessions."
    ),
    env: list[str] = _of_pods([], "--env", "-e", metavar="NAME=VALUE", help="A variable; may be repeated."),
    secret: list[str] = _of_pods(
        [], "--secret", metavar="NAME", help="A Secret whose keys become variables (OPENENV_TOKEN); may be repeated."
    ),
    port: int | None = _of_pods(None, "--port", metavar="PORT", help="Where the server listens; by default 8000."),
    cpu: str | None = _of_pods(None, "--cpu", metavar="N", help="Processors that a pod asks for."),
    memory: str | None = _of_pods(
        None, "--memory", metavar="SIZE", help="Memory that a pod asks for and may use: 2Gi."
    ),
    gpus: int = _of_pods(0, "--gpus", metavar="N", min=0, help="Graphics processors of a pod."),
    node_selector: list[str] = _of_pods(
        [], "--node-selector", metavar="NAME=VALUE", help="A label that nodes must have; may be repeated."
    ),
    image_pull_secret: list[str] = _of_pods(
        [], "--image-pull-secret", metavar="NAME", help="The secret of the registry; may be repeated."
    ),
    service_account: str | None = _of_pods(None, "--service-account", metavar="NAME", help="The pods' account."),
    runtime_class: str | None = _of_pods(None, "--runtime-class", metavar="NAME", help="Such as gVisor's or Kata's."),
    ready_path: str = _of_pods(
        "/ready", "--ready-path", metavar="PATH", help="The readiness probe; /health for the published package."
    ),
    allow_from: list[str] = _of_network(
        [],
        "--allow-from",
        metavar="NAME=VALUE",
        help="Only pods with this label may connect, and namespaces that are named; may be repeated. By default all "
        "pods of the namespace may.",
    ),
    allow_namespace: list[str] = _of_network(
        [], "--allow-namespace", metavar="NAME", help="A namespace whose pods may connect; may be repeated."
    ),
    egress: str = _of_network("dns", "--egress", metavar="WHAT", help="What pods may connect to: dns, or all."),
    ingress_host: str | None = _of_network(
        None, "--ingress-host", metavar="HOST", help="Add an Ingress for this host."
    ),
    ingress_class: str | None = _of_network(None, "--ingress-class", metavar="NAME", help="Its controller."),
    tls_secret: str | None = _of_network(None, "--tls-secret", metavar="NAME", help="The certificate of that host."),
    apply: bool = typer.Option(
        False, "--apply", help="Apply the manifests and wait for the pods, instead of printing."
    ),
    timeout: float = typer.Option(
        900.0, "--timeout", metavar="SECONDS", min=1.0, help="How long to wait for the pods."
    ),
    kubeconfig: Path | None = _of_cluster("--kubeconfig", metavar="FILE", help="By default what kubectl would use."),
    context: str | None = _of_cluster("--context", metavar="NAME", help="The context in that file."),
    namespace: str | None = _of_cluster("--namespace", metavar="NAME", help="By default the context's."),
) -> None:
    """Print the manifests of a server, or apply them and wait until it runs.

      openenv deploy k8s registry/maze:1 > maze.yaml
      openenv deploy k8s registry/maze:2 --replicas 3 --apply
      openenv deploy k8s registry/maze:2 --max-sessions 64 --max-replicas 20
      openenv deploy k8s envs/maze_env --registry registry

    There are a Deployment, a Service, a PodDisruptionBudget, a NetworkPolicy, with --max-replicas a
    HorizontalPodAutoscaler and with --ingress-host an Ingress. An update starts a new pod before it ends an old one,
    which takes no new sessions and ends when its last session has, or when --drain-timeout is over. The autoscaler
    needs an adapter that offers the pods' openenv_session_slots_used as a custom metric. The image is built and
    pushed before: openenv build.
    """
    from openenv.providers.kubernetes_objects import IngressRoute, ServerManifests, ServerPods

    check_choice("--egress", egress, ("dns", "all"))
    if max_replicas is not None and max_sessions is None:
        raise typer.BadParameter(
            "this needs --max-sessions: pods are full when their sessions are", param_hint="--max-replicas"
        )
    if max_replicas is not None and max_replicas < replicas:
        raise typer.BadParameter(f"must not be below --replicas, {replicas}", param_hint="--max-replicas")
    if ingress_host is None and (ingress_class or tls_secret):
        raise typer.BadParameter("these need --ingress-host", param_hint="--ingress-class, --tls-secret")
    if ingress_host is not None and max(replicas, max_replicas or 0) > 1:
        typer.secho(
            "Note: behind one host, a client that lost its connection may reach another pod, and its session is lost.",
            fg="yellow",
            err=True,
        )
    package = _package(target, registry)
    variables = {**package.variables, **name_values("--env", env)}
    if max_sessions is not None:
        variables["OPENENV_MAX_SESSIONS"] = str(max_sessions)
    port = port or package.port
    try:
        pods = ServerPods(
            image=package.image,
            container_port=port,
            plain_variables=variables,
            secrets=secret,
            cpu_request=cpu,
            memory_request=memory,
            memory_limit=memory,
            gpus=gpus,
            node_selector=name_values("--node-selector", node_selector),
            image_pull_secrets=image_pull_secret,
            service_account=service_account,
            runtime_class=runtime_class,
            annotations={
                "prometheus.io/scrape": "true",
                "prometheus.io/port": str(port),
                "prometheus.io/path": "/metrics",
            },
            ready_path=ready_path,
            drain_s=drain_timeout,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    made = ServerManifests(name=name or package.name, pods=pods, replicas=replicas)
    manifests = [
        made.service(),
        made.network_policy(clients=_clients(allow_from, allow_namespace), egress="all" if egress == "all" else "dns"),
        made.disruption_budget(),
        made.deployment(),
    ]
    if max_sessions is not None and max_replicas is not None:
        # The autoscaler sets the number from now on: applied once more, the manifest must not take it back.
        del manifests[-1]["spec"]["replicas"]
        manifests.append(made.autoscaler(most=max_replicas, metric=METRIC, per_pod=max(1.0, _FILL * max_sessions)))
    if ingress_host is not None:
        route = IngressRoute(host=ingress_host, class_name=ingress_class, tls_secret=tls_secret)
        manifests.append(made.ingress(route))
    if not apply:
        _print(manifests, namespace)
        return
    with tidy_on_sigterm():
        _apply(manifests, made.name, timeout, kubeconfig, context, namespace)


@dataclass(frozen=True, slots=True)
class _Package:
    """What is deployed."""

    name: str
    image: str
    port: int = 8000
    variables: dict[str, str] = field(default_factory=dict)


def _package(target: str, registry: str | None) -> _Package:
    """Read the manifest of a package, or take the target for an image."""
    folder = Path(target)
    if not (folder / "openenv.yaml").is_file():
        if folder.is_dir():
            raise failure(f"{target} is a folder without an openenv.yaml; name a package or an image")
        if registry is not None:
            raise typer.BadParameter("this is for a package; write it into the image's name", param_hint="--registry")
        base = target.rpartition("/")[2].partition("@")[0].partition(":")[0].lower()
        name = re.sub(r"[^a-z0-9]+", "-", base).strip("-")[:50].strip("-")
        if not name[:1].isalpha():
            raise failure(f"no name can be made of the image {target!r}; give --name")
        return _Package(name, target)
    import yaml

    try:
        manifest: Any = yaml.safe_load((folder / "openenv.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise failure(f"{folder / 'openenv.yaml'} cannot be read: {error}") from error
    manifest = manifest if isinstance(manifest, dict) else {}
    stem = str(manifest.get("name") or folder.resolve().name)
    stem = (stem.removesuffix("_env").strip("_") or stem).lower()
    image = f"{registry.rstrip('/') + '/' if registry else ''}openenv-{stem}:{manifest.get('version') or 'latest'}"
    typer.echo(f"Image: {image}. Build and push it: openenv build {target} -t {image} && docker push {image}", err=True)
    variables = {str(key): str(value) for key, value in (manifest.get("variables") or {}).items()}
    return _Package(stem.replace("_", "-"), image, int(manifest.get("port") or 8000), variables)


def _clients(labels: Sequence[str], namespaces: Sequence[str]) -> list[dict[str, Any]]:
    """Return who may connect, as in `ingress.from`."""
    pods: list[dict[str, Any]] = [
        {"podSelector": {"matchLabels": {name: value}}} for name, value in name_values("--allow-from", labels).items()
    ]
    others = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}} for name in namespaces]
    return [*(pods or [{"podSelector": {}}]), *others]


def _print(manifests: Sequence[Manifest], namespace: str | None) -> None:
    import yaml

    for manifest in manifests:
        if namespace is not None:
            manifest["metadata"]["namespace"] = namespace
    typer.echo(yaml.safe_dump_all(manifests, sort_keys=False), nl=False)


def _apply(
    manifests: Sequence[Manifest],
    name: str,
    timeout_s: float,
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None,
) -> None:
    from openenv.errors import ProviderError, ProviderUnavailable
    from openenv.sandboxes.cluster import Cluster, ClusterAddress, PodWatch

    try:
        address = ClusterAddress(kubeconfig, context, namespace)
        cluster = Cluster(address, error=ProviderError, unavailable=ProviderUnavailable)
        with PodWatch(cluster, {"app.kubernetes.io/instance": name}) as watch:
            watch.wait(lambda pods: True, 30.0)
            before = {pod.uid for pod in watch.pods}
            for manifest in manifests:
                version = manifest["apiVersion"]
                if version in _OLDER and not cluster.serves(version):
                    manifest["apiVersion"] = _OLDER[version]
                cluster.apply(manifest)
                typer.echo(f"applied {manifest['kind']} {manifest['metadata']['name']}")
            _await_rollout(cluster, watch, name, before, timeout_s)
    except ProviderError as error:
        raise failure(error) from error
    typer.secho(f"{name} runs in namespace {cluster.namespace}.", fg="green")
    typer.echo(f"Inside the cluster: http://{name}.{cluster.namespace}.svc:{manifests[0]['spec']['ports'][0]['port']}")


def _await_rollout(cluster: Cluster, watch: PodWatch, name: str, before: set[str], timeout_s: float) -> None:
    """Return when every pod is of the new version and ready; raise at once when a new one cannot become it."""
    from openenv.errors import ServerNotReady
    from openenv.providers.kubernetes import pod_failure, raise_if_refused, read_deployment

    deadline = time.monotonic() + timeout_s
    shown = ""
    while True:
        deployment: Any = read_deployment(cluster, name)
        raise_if_refused(deployment)
        status, wanted = deployment.status, deployment.spec.replicas if deployment.spec.replicas is not None else 1
        updated, ready = (status and status.updatedReplicas) or 0, (status and status.availableReplicas) or 0
        current = status is not None and (status.observedGeneration or 0) >= (deployment.metadata.generation or 0)
        if current and updated >= wanted and ready >= wanted and (status.replicas or 0) <= updated:
            return
        line = f"{updated} of {wanted} pods are of this version, {ready} are ready"
        if line != shown:
            typer.echo(line)
            shown = line
        new: list[PodState] = [pod for pod in watch.pods if pod.uid not in before and not pod.is_ending]
        for pod in new:
            if pod.problem is not None and pod.problem.kind != "unschedulable":
                raise pod_failure(cluster, pod)
        if time.monotonic() > deadline:
            stuck = next((pod for pod in new if pod.problem is not None), None)
            if stuck is not None:
                raise pod_failure(cluster, stuck)
            raise ServerNotReady(f"{line}, after {timeout_s:g} s. Look at it: kubectl describe deployment {name}")
        watch.wait_for_change(_LOOK_S)
