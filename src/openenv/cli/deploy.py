"""`openenv deploy k8s`: print or apply the Kubernetes manifests of a permanent server."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .command import HelpCommand, OldName, check_choice, command_group, failure, name_values, tidy_on_sigterm
from .options import ClusterFlags, Panel, flags_class, options_of

if TYPE_CHECKING:
    from openenv.providers.kubernetes_objects import Manifest, ServerPods
    from openenv.sandboxes.cluster import Cluster, PodState, PodWatch

deploy = command_group(
    """
Deploy an environment permanently, on a Kubernetes cluster.

  openenv deploy k8s registry/maze:2 --replicas 3 --apply
"""
)
# The gauge that servers report at /metrics; an adapter such as prometheus-adapter offers it to the autoscaler.
METRIC = "openenv_session_slots_used"
# The autoscaler adds pods when their slots are used to this share on average.
_FILL = 0.75
# The watch reports pods at once; the Deployment's counts and the deadline are read at least this often.
_LOOK_S = 1.0
# API versions for older clusters; they have the same fields as far as we use them.
_OLDER = {"policy/v1": "policy/v1beta1", "autoscaling/v2": "autoscaling/v2beta2"}


@flags_class
class PodFlags:
    """Options of the pods."""

    env: Annotated[
        list[str],
        typer.Option("--env-var", "-e", OldName("--env"), metavar="NAME=VALUE", help="Set a variable; repeatable."),
    ] = field(default_factory=list)
    secret: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="A Secret whose keys become variables (OPENENV_TOKEN); repeatable."),
    ] = field(default_factory=list)
    port: Annotated[int | None, typer.Option(metavar="PORT", help="The server's port; by default 8000.")] = None
    cpu: Annotated[str | None, typer.Option(metavar="N", help="Requested processors of a pod.")] = None
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Requested and maximum memory of a pod, such as 2Gi.")
    ] = None
    gpus: Annotated[int, typer.Option(metavar="N", min=0, help="GPUs of a pod.")] = 0
    node_selector: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="A required label of the node; repeatable.")
    ] = field(default_factory=list)
    image_pull_secret: Annotated[list[str], typer.Option(metavar="NAME", help="The registry's secret; repeatable.")] = (
        field(default_factory=list)
    )
    service_account: Annotated[str | None, typer.Option(metavar="NAME", help="The pods' account.")] = None
    runtime_class: Annotated[
        str | None, typer.Option(metavar="NAME", help="The pods' runtime, such as gVisor's or Kata's.")
    ] = None
    ready_path: Annotated[
        str, typer.Option(metavar="PATH", help="Path of the readiness probe; /health for the published package.")
    ] = "/ready"

    def pods(self, package: _Package, *, max_sessions: int | None, drain_s: float) -> ServerPods:
        """Return the pods of a package with these options.

        Raises:
            BadParameter: A value does not fit.
        """
        from openenv.providers.kubernetes_objects import ServerPods

        # --env-var wins over openenv.yaml, and --max-sessions over both.
        variables = {**package.variables, **name_values("--env-var", self.env)}
        if max_sessions is not None:
            variables["OPENENV_MAX_SESSIONS"] = str(max_sessions)
        port = self.port or package.port
        # Prometheus finds the pods by these annotations.
        scrape = {"scrape": "true", "port": str(port), "path": "/metrics"}
        try:
            return ServerPods(
                image=package.image,
                container_port=port,
                # Tokens belong in --secret: plain variables are readable in the printed manifests.
                plain_variables=variables,
                secrets=self.secret,
                cpu_request=self.cpu,
                # The limit equals the request: a pod above its request is the first that a full node evicts.
                memory_request=self.memory,
                memory_limit=self.memory,
                gpus=self.gpus,
                node_selector=name_values("--node-selector", self.node_selector),
                image_pull_secrets=self.image_pull_secret,
                service_account=self.service_account,
                runtime_class=self.runtime_class,
                annotations={f"prometheus.io/{name}": value for name, value in scrape.items()},
                ready_path=self.ready_path,
                drain_s=drain_s,
            )
        # `ServerPods` checks its fields; the text names the wrong one.
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error


@flags_class
class NetworkFlags:
    """Options of the network: who connects to the pods, and the pods' own connections."""

    allow_from: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE",
            help="Accept connections only from pods with this label, and from --allow-namespace; repeatable. By "
            "default all pods of the namespace may connect.",
        ),
    ] = field(default_factory=list)
    allow_namespace: Annotated[
        list[str], typer.Option(metavar="NAME", help="A namespace whose pods may connect; repeatable.")
    ] = field(default_factory=list)
    egress: Annotated[str, typer.Option(metavar="WHAT", help="Allowed connections of the pods: dns, or all.")] = "dns"
    ingress_host: Annotated[str | None, typer.Option(metavar="HOST", help="Add an Ingress for this host.")] = None
    ingress_class: Annotated[str | None, typer.Option(metavar="NAME", help="The Ingress's controller.")] = None
    tls_secret: Annotated[str | None, typer.Option(metavar="NAME", help="The host's certificate.")] = None

    def check(self) -> None:
        """Raise for options that do not fit together."""
        check_choice("--egress", self.egress, ("dns", "all"))
        if self.ingress_host is None and (self.ingress_class or self.tls_secret):
            raise typer.BadParameter("these need --ingress-host", param_hint="--ingress-class, --tls-secret")

    def clients(self) -> list[dict[str, Any]]:
        """Return the allowed clients, as in `ingress.from` of a NetworkPolicy."""
        # --allow-from app=trainer --allow-namespace rl becomes
        #
        #   - podSelector: {matchLabels: {app: trainer}}
        #   - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: rl}}
        labels = name_values("--allow-from", self.allow_from)
        pods: list[dict[str, Any]] = [{"podSelector": {"matchLabels": {name: value}}} for name, value in labels.items()]
        others = [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
            for name in self.allow_namespace
        ]
        return [*(pods or [{"podSelector": {}}]), *others]


@flags_class
class DeployFlags:
    """Options of `openenv deploy k8s`."""

    target: Annotated[str, typer.Argument(metavar="IMAGE|FOLDER", help="The image, or a package with an openenv.yaml.")]
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of all objects; by default that of the image or package.")
    ] = None
    registry: Annotated[
        str | None, typer.Option(metavar="HOST/PATH", help="Prefix of the image's name, for a package.")
    ] = None
    replicas: Annotated[int, typer.Option(metavar="N", min=1, help="Minimum number of pods.")] = 1
    max_replicas: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Start more pods when sessions fill them, up to this number.")
    ] = None
    max_sessions: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Maximum sessions of each pod (OPENENV_MAX_SESSIONS).")
    ] = None
    drain_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long an update waits for a pod's sessions.")
    ] = 600.0
    pods: Annotated[PodFlags, Panel("Pods")]
    network: Annotated[NetworkFlags, Panel("Network")]
    apply: Annotated[
        bool, typer.Option("--apply", help="Apply the manifests and wait for the pods, instead of printing.")
    ] = False
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1.0, help="How long to wait for the pods.")] = 900.0
    cluster: Annotated[ClusterFlags, Panel("Cluster")]

    def check(self) -> None:
        """Raise for options that do not fit together."""
        self.network.check()
        # The remaining checks concern the autoscaler.
        if self.max_replicas is None:
            return
        if self.max_sessions is None:
            raise typer.BadParameter(
                "this needs --max-sessions, which decides when a pod is full", param_hint="--max-replicas"
            )
        if self.max_replicas < self.replicas:
            raise typer.BadParameter(f"must not be below --replicas, {self.replicas}", param_hint="--max-replicas")


@deploy.command("k8s", cls=HelpCommand)
@options_of(DeployFlags)
def k8s(flags: DeployFlags) -> None:
    """Print the manifests of a server, or apply them and wait until it runs.

      openenv deploy k8s registry/maze:1 > maze.yaml
      openenv deploy k8s registry/maze:2 --replicas 3 --apply
      openenv deploy k8s registry/maze:2 --max-sessions 64 --max-replicas 20
      openenv deploy k8s envs/maze_env --registry registry

    The manifests are a Deployment, a Service, a PodDisruptionBudget and a NetworkPolicy; --max-replicas adds a
    HorizontalPodAutoscaler, --ingress-host an Ingress. An update starts a new pod before it ends an old one. The old
    pod accepts no new sessions and ends after its last session, or after --drain-timeout. The autoscaler needs an
    adapter that offers openenv_session_slots_used as a custom metric. Build and push the image first: openenv build.
    """
    # What --apply does:
    #
    #   manifests ──apply──> cluster ──creates──> new pods ──ready──> old pods end after their last session
    #       │                                        │
    #       └── order: Service, NetworkPolicy,       └── `_await_rollout` follows them and fails early
    #           PodDisruptionBudget, Deployment
    #
    # Without --apply the same manifests are printed for `kubectl apply -f -` or a repository.
    flags.check()
    if flags.network.ingress_host is not None and max(flags.replicas, flags.max_replicas or 0) > 1:
        typer.secho(
            "Note: behind one host, a reconnecting client may reach another pod, and its session is lost.",
            fg="yellow",
            err=True,
        )
    package = _package(flags.target, flags.registry)
    name = flags.name or package.name
    manifests = _manifests(flags, name, package)
    if not flags.apply:
        _print(manifests, flags.cluster.namespace)
        return
    # Leaves the applied objects in place; only the watch is closed.
    with tidy_on_sigterm():
        _apply(manifests, name, flags.cluster, flags.timeout)


def _manifests(flags: DeployFlags, name: str, package: _Package) -> list[Manifest]:
    """Return the manifests, in the order in which to apply them; the Service is the first."""
    from openenv.providers.kubernetes_objects import IngressRoute, ServerManifests

    # The NetworkPolicy comes before the Deployment, so no pod runs without it.
    network = flags.network
    pods = flags.pods.pods(package, max_sessions=flags.max_sessions, drain_s=flags.drain_timeout)
    server = ServerManifests(name=name, pods=pods, replicas=flags.replicas)
    manifests = [
        server.service(),
        server.network_policy(clients=network.clients(), egress="all" if network.egress == "all" else "dns"),
        server.disruption_budget(),
        server.deployment(),
    ]
    if flags.max_sessions is not None and flags.max_replicas is not None:
        # The autoscaler sets the number of pods from now on; applying the manifest again must not reset it.
        del manifests[-1]["spec"]["replicas"]
        per_pod = max(1.0, _FILL * flags.max_sessions)
        manifests.append(server.autoscaler(most=flags.max_replicas, metric=METRIC, per_pod=per_pod))
    if network.ingress_host is not None:
        route = IngressRoute(host=network.ingress_host, class_name=network.ingress_class, tls_secret=network.tls_secret)
        manifests.append(server.ingress(route))
    return manifests


@dataclass(frozen=True, slots=True)
class _Package:
    """The image to deploy, with its name, port and variables."""

    name: str
    image: str
    port: int = 8000
    variables: dict[str, str] = field(default_factory=dict)


def _package(target: str, registry: str | None) -> _Package:
    """Read the package's `openenv.yaml`, or use the target as an image."""
    folder = Path(target)
    if not (folder / "openenv.yaml").is_file():
        if folder.is_dir():
            raise failure(f"{target} is a folder without an openenv.yaml; name a package or an image")
        if registry is not None:
            raise typer.BadParameter("this is for a package; put it into the image's name", param_hint="--registry")
        # registry.example.org:5000/team/Maze_env:2@sha256:... gives maze_env, and then maze-env.
        base = target.rpartition("/")[2].partition("@")[0].partition(":")[0].lower()
        # Names of Services are DNS labels: lower-case letters, digits and hyphens, beginning with a letter.
        name = re.sub(r"[^a-z0-9]+", "-", base).strip("-")[:50].strip("-")
        if not name[:1].isalpha():
            raise failure(f"the image {target!r} gives no valid name; set --name")
        return _Package(name, target)
    from openenv.env.manifest import ManifestError, read_manifest

    try:
        manifest = read_manifest(folder / "openenv.yaml")
    except (ManifestError, OSError) as error:
        raise failure(f"{folder / 'openenv.yaml'} cannot be read: {error}") from error
    # maze_env becomes maze, as in `openenv build`, so the default image names of both commands agree.
    stem = str(manifest.get("name") or folder.resolve().name)
    stem = (stem.removesuffix("_env").strip("_") or stem).lower()
    image = f"{registry.rstrip('/') + '/' if registry else ''}openenv-{stem}:{manifest.get('version') or 'latest'}"
    # On standard error, because the manifests on standard output are often piped.
    typer.echo(f"Image: {image}. Build and push it: openenv build {target} -t {image} && docker push {image}", err=True)
    variables = {str(key): str(value) for key, value in (manifest.get("variables") or {}).items()}
    return _Package(stem.replace("_", "-"), image, int(manifest.get("port") or 8000), variables)


def _print(manifests: Sequence[Manifest], namespace: str | None) -> None:
    import yaml

    # Printed manifests carry --namespace; otherwise kubectl's current one applies.
    for manifest in manifests:
        if namespace is not None:
            manifest["metadata"]["namespace"] = namespace
    typer.echo(yaml.safe_dump_all(manifests, sort_keys=False), nl=False)


def _apply(manifests: Sequence[Manifest], name: str, chosen: ClusterFlags, timeout_s: float) -> None:
    """Apply the manifests and wait until every pod of this version is ready."""
    from openenv.errors import ProviderError, ProviderUnavailable
    from openenv.sandboxes.cluster import Cluster, PodWatch

    # The output of --apply:
    #
    #   applied Service maze
    #   applied NetworkPolicy maze
    #   applied PodDisruptionBudget maze
    #   applied Deployment maze
    #   0 of 3 pods have this version, 0 are ready
    #   3 of 3 pods have this version, 3 are ready
    #   maze runs in namespace default.
    try:
        cluster = Cluster(chosen.address(), error=ProviderError, unavailable=ProviderUnavailable)
        # The watch starts before the change, so that no early failure of a new pod is missed.
        with PodWatch(cluster, {"app.kubernetes.io/instance": name}) as watch:
            # Pods from before: an old pod that fails says nothing about the new version.
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
    """Wait until every pod has the new version and is ready; raise at once if a new one can never be."""
    from openenv.errors import ServerNotReady
    from openenv.providers.kubernetes import pod_failure, raise_if_refused, read_deployment

    deadline = time.monotonic() + timeout_s
    shown = ""
    while True:
        deployment: Any = read_deployment(cluster, name)
        # A quota or an admission rule creates no pod at all, so the watch would stay silent until the deadline.
        raise_if_refused(deployment)
        status, wanted = deployment.status, deployment.spec.replicas if deployment.spec.replicas is not None else 1
        updated, ready = (status and status.updatedReplicas) or 0, (status and status.availableReplicas) or 0
        # Until the controller has seen our change, the counts describe the version before.
        current = status is not None and (status.observedGeneration or 0) >= (deployment.metadata.generation or 0)
        # Done means: all pods are of this version, all are ready, and no pod of the old version remains.
        if current and updated >= wanted and ready >= wanted and (status.replicas or 0) <= updated:
            return
        line = f"{updated} of {wanted} pods have this version, {ready} are ready"
        # Print changes only; CI logs would otherwise get a line per second.
        if line != shown:
            typer.echo(line)
            shown = line
        new: list[PodState] = [pod for pod in watch.pods if pod.uid not in before and not pod.is_ending]
        for pod in new:
            if pod.problem is not None and not pod.problem.may_pass:
                raise pod_failure(cluster, pod)
        if time.monotonic() > deadline:
            # At the deadline, a problem that might have passed is the best explanation.
            stuck = next((pod for pod in new if pod.problem is not None), None)
            if stuck is not None:
                raise pod_failure(cluster, stuck)
            raise ServerNotReady(f"{line}, after {timeout_s:g} s. Look at it: kubectl describe deployment {name}")
        watch.wait_for_change(_LOOK_S)
