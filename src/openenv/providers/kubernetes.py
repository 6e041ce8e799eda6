"""Servers in a Kubernetes cluster: `KubernetesProvider` starts pods of an image, waits for them and removes them.

    Service NAME ── owns ──> Deployment NAME (or pods NAME-0, NAME-1, ...), Secret NAME (variables), Ingress NAME

Clients reach them by the cluster's DNS, by ports of this machine that the API server forwards, or by an ingress. All
objects name the process that started them. If that process has ended or their time is over, `openenv gc` removes them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from openenv.errors import (
    ImagePullFailed,
    ProviderError,
    ProviderUnavailable,
    ServerDied,
    ServerNotReady,
    Unschedulable,
)
from openenv.providers.health import quoted, wait_for_ready
from openenv.providers.kubernetes_objects import (
    IMAGE_ANNOTATION,
    PROVIDER_LABEL,
    IngressRoute,
    ServerManifests,
    ServerPods,
    owner_reference,
    server_name,
)
from openenv.providers.provider import ContainerProvider, announce_if_slow, refuse_unknown
from openenv.sandboxes.cluster import (
    EXPIRES_ANNOTATION,
    OWNER_ANNOTATION,
    SERVICE_ACCOUNT,
    Cluster,
    ClusterAddress,
    OwnedObject,
    PodState,
    PodWatch,
    in_cluster,
    time_after,
)
from openenv.sandboxes.host import ProcessOwner

if TYPE_CHECKING:
    from lightkube.resources.apps_v1 import Deployment

logger = logging.getLogger(__name__)

Reach = Literal["auto", "dns", "port-forward", "ingress"]
Workload = Literal["deployment", "pods"]
KIND = "kubernetes"
"""The value of `PROVIDER_LABEL`."""
_READY_S = 300.0
_LOOK_S = 2.0
_LOG_LINES = 40
_APPEAR_S = 3.0
_REMOVE_S = 60.0
_POD_OPTIONS = tuple(
    option.name for option in fields(ServerPods) if option.name not in ("image", "variables", "startup_s", "drain_s")
)
"""Options of `start_container` for its pods; the provider sets the other fields."""


class KubernetesProvider(ContainerProvider):
    """Starts servers in a cluster, of one image at a time.

    Args:
        kubeconfig: The file that describes the cluster; by default the service account of this pod, else what
            `kubectl` would use.
        context: The context in that file; by default its current one.
        namespace: The namespace of the servers; by default the context's.
        reach: The way from this machine to the servers: `dns` (names and addresses of the cluster, from inside),
            `port-forward` (ports of 127.0.0.1, through the API server) or `ingress`. `auto` is `dns` in a cluster, else
            `port-forward`.
        ingress: The host and the controller, for `reach="ingress"`.
        owner: An entry of `ownerReferences`: deleting that object deletes the servers. `auto` is this process's pod.
        ready_timeout_s: The longest time until they answer, including the image pull and the scheduling.

    Raises:
        ValueError: An option is invalid.
        ProviderUnavailable: lightkube is not installed, or no cluster is configured.
    """

    def __init__(
        self,
        *,
        kubeconfig: str | Path | None = None,
        context: str | None = None,
        namespace: str | None = None,
        reach: Reach = "auto",
        ingress: IngressRoute | None = None,
        owner: Mapping[str, Any] | Literal["auto"] | None = "auto",
        ready_timeout_s: float = _READY_S,
    ) -> None:
        if reach not in ("auto", "dns", "port-forward", "ingress"):
            raise ValueError(f"reach must be 'auto', 'dns', 'port-forward' or 'ingress', not {reach!r}")
        if (reach == "ingress") != (ingress is not None):
            raise ValueError("reach='ingress' and ingress=IngressRoute(host=...) go together")
        address = ClusterAddress(kubeconfig, context, namespace)
        self._cluster = Cluster(address, error=ProviderError, unavailable=ProviderUnavailable)
        if reach == "auto":
            reach = "dns" if in_cluster() else "port-forward"
        self._reach: Reach = reach
        self._route = ingress
        self._owner = owner
        self.ready_timeout_s = ready_timeout_s
        self._server: _RunningServer | None = None
        self._pid = os.getpid()

    @property
    def namespace(self) -> str:
        """The namespace of the servers."""
        return self._cluster.namespace

    @property
    def name(self) -> str | None:
        """The common name of the Service and its objects; None if nothing runs."""
        return None if self._server is None else self._server.manifests.name

    def start_container(
        self,
        image: str,
        port: int | None = None,
        env_vars: dict[str, str] | None = None,
        *,
        replicas: int = 1,
        workload: Workload = "deployment",
        ttl_s: float | None = None,
        **kwargs: Any,
    ) -> str:
        """Start the pods and return the address of the server; with several pods, `urls` has one for each.

        Args:
            image: The image, which the nodes pull.
            port: With port-forwards, the first port on this machine, by default any free ports; else the Service's.
            env_vars: Variables of the server; stored in a Secret.
            replicas: The number of pods.
            workload: `deployment` replaces pods that end; `pods` gives each pod its DNS name.
            ttl_s: After this time `openenv gc` removes everything, from any machine; `pods` end by themselves.
            kwargs: Fields of `ServerPods`, such as `cpu_request=2`, `gpus=1` or `command=[...]`.

        Raises:
            ValueError: An option is unknown or invalid.
            RuntimeError: The cluster refused it; the text quotes the cluster. Nothing is left of the start.
        """
        unknown = {name: value for name, value in kwargs.items() if name not in _POD_OPTIONS}
        refuse_unknown(self, unknown, KubernetesProvider.start_container, more=_POD_OPTIONS)
        if self._server is not None:
            raise ProviderError(f"{type(self).__name__} is already running {self.name}; stop_container() first")
        self._check(replicas, workload, ttl_s)
        pods = ServerPods(
            image=image,
            variables=dict(env_vars or {}),
            startup_s=self.ready_timeout_s,
            **{name: value for name, value in kwargs.items() if value is not None},
        )
        marks = {OWNER_ANNOTATION: str(ProcessOwner.current()), IMAGE_ANNOTATION: image}
        marks |= {} if ttl_s is None else {EXPIRES_ANNOTATION: time_after(ttl_s)}
        manifests = ServerManifests(
            name=server_name(image),
            pods=pods,
            replicas=replicas,
            labels={**pods.labels, PROVIDER_LABEL: KIND},
            annotations=marks,
            owner=self._own_pod() if self._owner == "auto" else self._owner,
        )
        with contextlib.suppress(ProviderError):  # sweeping is a courtesy: its failure must not stop this start
            sweep(self._cluster)
        return self._start(
            _RunningServer(manifests, workload, PodWatch(self._cluster, manifests.selector)), port, ttl_s
        )

    def urls(self) -> list[str]:
        """Return the address of each pod, for `VectorEnv(urls)`: a session is resumed by the address that opened it.

        Addresses of a Deployment's pods in the cluster change when a pod is replaced; the others stay.
        """
        server = self._server
        if server is None:
            return []
        name, replicas = server.manifests.name, range(server.manifests.replicas)
        if self._reach == "port-forward":
            return [f"http://127.0.0.1:{port}" for port in server.ports]
        if self._route is not None:
            each = "{replica}" in self._route.host
            return [self._route.url(replica) for replica in (replicas if each else range(1))]
        port = server.manifests.pods.container_port
        if server.workload == "pods":
            return [f"http://{name}-{replica}.{name}.{self.namespace}.svc:{port}" for replica in replicas]
        addresses = [pod.ip for pod in server.watch.pods if pod.is_ready and not pod.is_ending and pod.ip]
        return [f"http://[{ip}]:{port}" if ":" in ip else f"http://{ip}:{port}" for ip in addresses]

    def wait_for_ready(self, base_url: str, timeout_s: float | None = None) -> None:
        """Return as soon as every pod is ready and the server answers; if they fail, they are removed.

        Raises:
            ImagePullFailed: A node cannot pull the image.
            ServerDied: The server ended, and perhaps again; the text has the end of its log.
            Unschedulable: No node took a pod in time.
            ServerNotReady: They did not become ready in time, by default `ready_timeout_s`.
            ProviderError: The cluster cannot create the pods or their containers.
        """
        timeout_s = self.ready_timeout_s if timeout_s is None else timeout_s
        server = self._server
        if server is None:
            wait_for_ready(base_url, timeout_s, what="The server")
            return
        deadline = time.monotonic() + timeout_s
        try:
            with announce_if_slow(f"the cluster starts {server.manifests.name} ({server.manifests.pods.image})"):
                self._await_pods(server, deadline, timeout_s)
            left = max(1.0, deadline - time.monotonic())
            watch = _PodEnds(server, self.log)
            wait_for_ready(base_url, left, what=f"Service {self.name}", watch=watch, advice=self._advice_when_late)
        except BaseException:
            self._remove()
            raise

    def log(self) -> str:
        """Return the end of the servers' output; an empty text if nothing runs."""
        server = self._server
        if server is None:
            return ""
        parts = {pod.name: pod_log(self._cluster, pod) for pod in server.watch.pods}
        if len(parts) == 1:
            return next(iter(parts.values()))
        return "\n".join(f"== {name}\n{text}" for name, text in parts.items() if text)

    def stop_container(self) -> None:
        """Remove the pods and their objects, and return when they are gone; do nothing if there are none."""
        self._remove()

    def close(self) -> None:
        """Close the connections to the cluster."""
        if "_cluster" in self.__dict__:  # a subclass with its own methods may have no cluster
            self._cluster.close()

    # -- starting ------------------------------------------------------------------------------------------------

    def _check(self, replicas: int, workload: str, ttl_s: float | None) -> None:
        if replicas < 1:
            raise ValueError(f"replicas must be at least 1, not {replicas}")
        if workload not in ("deployment", "pods"):
            raise ValueError(f"workload must be 'deployment' or 'pods', not {workload!r}")
        if ttl_s is not None and ttl_s <= 0:
            raise ValueError(f"ttl_s must be greater than 0, not {ttl_s}")
        if self._route is None:
            return
        each = "{replica}" in self._route.host
        if each and workload != "pods":
            raise ValueError("an ingress host with {replica} requires workload='pods', because only those have numbers")
        if replicas > 1 and not each:
            raise ValueError(
                "Behind one host name a session cannot be resumed on its own pod: write {replica} into the ingress "
                "host, with workload='pods', or start one replica"
            )

    def _start(self, server: _RunningServer, port: int | None, ttl_s: float | None) -> str:
        """Create the objects; if that fails, remove all of them."""
        self._server, self._pid = server, os.getpid()
        atexit.register(self.stop_container)
        try:
            self._create(server, port, ttl_s)
            if self._reach == "port-forward":
                for replica in range(server.manifests.replicas):
                    local = 0 if port is None else port + replica
                    server.ports.append(server.watch.forward(server.manifests.pods.container_port, local_port=local))
        except Exception as error:
            self._remove()
            if isinstance(error, ProviderError):
                image = server.manifests.pods.image
                raise ProviderError(f"Failed to start '{image}' in Kubernetes: {error}") from error
            if isinstance(error, OSError):
                raise ProviderError(f"The port of this machine cannot be used: {error}. Choose another") from error
            raise
        except BaseException:  # Ctrl-C, while the cluster may go on with a request
            self._remove(may_appear=True)
            raise
        if self._reach == "dns":
            port = port or server.manifests.pods.container_port
            return f"http://{server.manifests.name}.{self.namespace}.svc:{port}"
        return self.urls()[0]

    def _create(self, server: _RunningServer, port: int | None, ttl_s: float | None) -> None:
        manifests = server.manifests
        is_headless = server.workload == "pods"
        service_port = port if self._reach != "port-forward" and not is_headless else None
        uid = self._cluster.create(manifests.service(port=service_port, headless=is_headless))
        owner = owner_reference("v1", "Service", manifests.name, uid)
        if manifests.secret_name is not None:
            self._cluster.create(manifests.secret(owner))
        if is_headless:
            for replica in range(manifests.replicas):
                self._cluster.create(manifests.pod(replica, owner, deadline_s=ttl_s))
        else:
            self._cluster.create(manifests.deployment(owner))
        if self._route is not None:
            if "{replica}" in self._route.host:
                for replica in range(manifests.replicas):
                    self._cluster.create(manifests.replica_service(replica, owner))
            self._cluster.create(manifests.ingress(self._route, owner))

    def _own_pod(self) -> Mapping[str, Any] | None:
        """Return this process's pod as an owner; None outside of a cluster, or without the right to read the pod."""
        if not in_cluster():
            return None
        name = socket.gethostname()
        with contextlib.suppress(ProviderError, OSError):
            if Path(SERVICE_ACCOUNT, "namespace").read_text().strip() == self.namespace:
                pod = self._cluster.pod(name)
                return None if pod is None else owner_reference("v1", "Pod", name, pod.uid)
        return None

    # -- waiting -------------------------------------------------------------------------------------------------

    def _await_pods(self, server: _RunningServer, deadline: float, timeout_s: float) -> None:
        while True:
            left = deadline - time.monotonic()
            answer = server.watch.wait(partial(_look, server.manifests.replicas), max(0.0, min(left, _LOOK_S)))
            if answer is True:
                return
            if isinstance(answer, PodState):
                raise pod_failure(self._cluster, answer)
            if left <= 0:
                raise self._late(server, timeout_s)
            if len(server.watch.pods) < server.manifests.replicas and server.workload == "deployment":
                raise_if_refused(read_deployment(self._cluster, server.manifests.name))

    def _late(self, server: _RunningServer, timeout_s: float) -> ServerNotReady:
        pods = server.watch.pods
        ready = sum(pod.is_ready and not pod.is_ending for pod in pods)
        waiting = [pod for pod in pods if not pod.is_ready]
        stuck = [pod for pod in waiting if pod.problem is not None]
        where = f"{ready} of {server.manifests.replicas} pods became ready within {timeout_s:g} s"
        if stuck and (problem := stuck[0].problem) is not None and problem.kind == "unschedulable":
            return Unschedulable(
                f"{where}: no node takes pod {stuck[0].name}: {problem.text} Ask for less, or allow it more time."
            )
        words = [f"{pod.name}: {self._words(pod) or 'no warning'}" for pod in waiting[:3]]
        log = pod_log(self._cluster, waiting[0]) if waiting else ""
        more = f" The cluster says of {'. Of '.join(words)}." if words else " The cluster has created none."
        advice = f"{self._advice_when_late()} Allow it more time: timeout_s here, ready_timeout_s of the provider."
        return ServerNotReady(f"{where}.{more} {advice}{quoted(log)}", log=log)

    def _words(self, pod: PodState) -> str:
        problem = [] if pod.problem is None else [pod.problem.text]
        return "; ".join([*problem, *self._cluster.warnings(pod.uid)])

    def _advice_when_late(self) -> str:
        path = "/ready" if self._server is None else self._server.manifests.pods.ready_path
        return f"Does the server listen on 0.0.0.0, on container_port, and does it have {path} (ready_path)?"

    # -- ending --------------------------------------------------------------------------------------------------

    def _remove(self, *, may_appear: bool = False) -> None:
        server, self._server = self._server, None
        atexit.unregister(self.stop_container)
        if server is None:
            return
        if self._pid != os.getpid():  # a forked process leaves it to its parent
            return
        from lightkube.resources.core_v1 import Service

        name = server.manifests.name
        try:
            appears = time.monotonic() + (_APPEAR_S if may_appear else 0.0)
            while not self._cluster.delete(Service, name) and time.monotonic() < appears:
                time.sleep(0.1)
            gone = server.watch.wait(lambda pods: not pods or None, server.manifests.pods.stop_timeout_s + _REMOVE_S)
            problem = None if gone else "its pods are still there"
        except RuntimeError as error:
            problem = str(error)
        finally:
            server.watch.close()
        if problem is not None:
            left = f"kubectl delete service --namespace {self.namespace} {name}"
            logger.warning("server %s may be left: %s. Remove it: %s", name, problem, left)


def read_deployment(cluster: Cluster, name: str) -> Deployment:
    """Return a Deployment of the namespace."""
    from lightkube.resources import apps_v1

    with cluster.asking(f"read Deployment {name}"):
        return cluster.client.get(apps_v1.Deployment, name, namespace=cluster.namespace)


def raise_if_refused(deployment: Deployment) -> None:
    """Raise if the cluster does not even create the pods: a quota, an admission rule, a missing account."""
    for condition in (deployment.status.conditions if deployment.status else None) or ():
        if condition.type == "ReplicaFailure" and condition.status == "True":
            raise ProviderError(f"The cluster does not create the pods: {condition.message}")


def pod_failure(cluster: Cluster, pod: PodState) -> ProviderError:
    """Return an error that quotes the cluster on why a server's pod does not run."""
    problem = pod.problem
    assert problem is not None
    words = [problem.text, *(warning for warning in cluster.warnings(pod.uid) if warning not in problem.text)]
    text = f"Pod {pod.name}: {'; '.join(words)}"
    if problem.kind == "image":
        return ImagePullFailed(f"{text}. Is the name right, and does the cluster have an image_pull_secret for it?")
    if problem.kind == "unschedulable":
        return Unschedulable(text)
    if problem.kind in ("crashed", "failed"):
        log = pod_log(cluster, pod)
        return ServerDied(f"{text}.{quoted(log)}", log=log)
    return ProviderError(text)


def pod_log(cluster: Cluster, pod: PodState) -> str:
    """Return the end of a server's output; after a crash and restart, that of the previous run."""
    if pod.problem is None or pod.problem.kind != "crashed":
        return cluster.log(pod.name, lines=_LOG_LINES, container="server")
    # It may have been started again since its state was reported, and have written nothing yet.
    runs = (pod.problem.has_previous, not pod.problem.has_previous)
    logs = (cluster.log(pod.name, lines=_LOG_LINES, previous=run, container="server") for run in runs)
    return next((log for log in logs if log), "")


class _RunningServer:
    """The running server of a provider: its manifests, its pods and the forwarded ports."""

    def __init__(self, manifests: ServerManifests, workload: Workload, watch: PodWatch) -> None:
        self.manifests = manifests
        self.workload: Workload = workload
        self.watch = watch
        self.ports: list[int] = []


@dataclass(frozen=True, slots=True)
class _PodEnds:
    """The end and the log of a server's pods, in the form that `wait_for_ready` requires."""

    server: _RunningServer
    log: Callable[[], str]

    def ended(self, within_s: float) -> str | None:
        """Wait at most that long for the end of a pod; return how it ended."""
        return self.server.watch.wait(_end, within_s)


def _end(pods: list[PodState]) -> str | None:
    return next((pod.problem.text for pod in pods if pod.problem is not None and not pod.is_ending), None)


def _look(replicas: int, pods: list[PodState]) -> bool | PodState | None:
    """Return True if enough pods are ready, or the first that never will be; None to go on waiting.

    Problems that may pass end no start before its deadline.
    """
    if sum(pod.is_ready and not pod.is_ending for pod in pods) >= replicas:
        return True
    for pod in pods:
        if pod.problem is not None and not pod.problem.may_pass:
            return pod
    return None


# -- leftovers -------------------------------------------------------------------------------------------------------


def servers_in(cluster: Cluster, *, everywhere: bool = False) -> list[OwnedObject]:
    """List the servers that providers have started in the namespace, or in all of them."""
    from lightkube.resources.core_v1 import Service

    namespace = "*" if everywhere else cluster.namespace
    with cluster.asking("list services"):
        services = list(cluster.client.list(Service, namespace=namespace, labels={PROVIDER_LABEL: KIND}))
    servers = []
    for service in services:
        metadata = service.metadata
        if metadata is None or metadata.deletionTimestamp is not None:
            continue
        if any(owner.kind == "Service" for owner in metadata.ownerReferences or ()):
            continue  # it belongs to another one
        servers.append(OwnedObject.of(metadata, (metadata.annotations or {}).get(IMAGE_ANNOTATION, "")))
    return servers


def sweep(cluster: Cluster) -> list[str]:
    """Remove the namespace's servers with a dead owner or an expired time; return their names."""
    from lightkube.resources.core_v1 import Service

    names = [server.name for server in servers_in(cluster) if server.is_leftover]
    return [name for name in names if cluster.delete(Service, name)]
