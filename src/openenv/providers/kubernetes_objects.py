"""Kubernetes manifests of a server, as plain dictionaries: for `KubernetesProvider` and `openenv deploy k8s`.

Knows the API of Kubernetes (1.28 and newer); talks to no cluster.

    of a provider     Service ── owns ──> Secret (variables), Deployment or Pods, Ingress: deleting it deletes all
    of a deployment   Secret, Service, Deployment, HorizontalPodAutoscaler, PodDisruptionBudget, NetworkPolicy
"""

from __future__ import annotations

import base64
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openenv.sandboxes.cluster import PodOptions, quantity

PROVIDER_LABEL = "openenv.provider"
"""On every object of a provider, and on its pods."""
IMAGE_ANNOTATION = "openenv.image"
INSTANCE_LABEL = "app.kubernetes.io/instance"
REPLICA_LABEL = "openenv.replica"
PORT_NAME = "http"
DRAIN_VARIABLE = "OPENENV_DRAIN_TIMEOUT"
ENDPOINTS_S = 5
"""Time between the decision to end a pod and its SIGTERM, so that clients learn that it takes no more sessions."""
_MARGIN_S = 15
_PROBE_S = 5
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPods(PodOptions):
    """The pods of a server, with the options of `PodOptions`. `pod_spec` is merged: containers and volumes by name.

    `KubernetesProvider.start_container` and `openenv deploy k8s` take their options from here.

    Args:
        image: The image, which the nodes pull.
        container_port: The port that the server listens on, on 0.0.0.0.
        command: Replaces the image's command; its entry point stays.
        variables: Environment variables, stored in a Secret.
        plain_variables: Environment variables, written into the manifest.
        secrets: Names of existing Secrets; their keys become variables.
        cpu_limit: The processors that a pod may use.
        memory_limit: The memory that a pod may use.
        gpus: The number of GPUs of a pod.
        gpu_resource: The cluster's name for them.
        image_pull_policy: `Always`, `IfNotPresent` or `Never`.
        service_account: The account of the pods; if set, its token is mounted.
        security_context: The container's security context, as in a manifest; its fields replace ours.
        labels: More labels of all objects and pods.
        annotations: More annotations of the pods.
        ready_path: The path of the readiness probe; a server of the published package has only `/health`.
        startup_s: The longest time until the first answer.
        stop_timeout_s: The time to end before the server is killed.
        drain_s: The time for sessions to finish before the server ends.
    """

    image: str
    container_port: int = 8000
    command: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    plain_variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    cpu_limit: float | str | None = None
    memory_limit: str | None = None
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    image_pull_policy: str | None = None
    service_account: str | None = None
    security_context: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/ready"
    startup_s: float = 300.0
    stop_timeout_s: float = 10.0
    drain_s: float = 0.0

    def __post_init__(self) -> None:
        for name in (*self.variables, *self.plain_variables):
            if not _VARIABLE.fullmatch(name):  # older clusters drop such a variable silently
                raise ValueError(f"{name!r} cannot be an environment variable of a container")
        if self.image_pull_policy not in (None, "Always", "IfNotPresent", "Never"):
            raise ValueError(
                f"image_pull_policy must be 'Always', 'IfNotPresent' or 'Never', not {self.image_pull_policy!r}"
            )
        if self.gpus < 0:
            raise ValueError(f"gpus must not be negative, not {self.gpus}")

    def spec(self, secret: str | None) -> Manifest:
        """Return a pod's `spec`; `secret` names the Secret with the variables."""
        spec: Manifest = {
            "containers": [self._container(secret)],
            "terminationGracePeriodSeconds": self._grace_s(),
            "automountServiceAccountToken": self.service_account is not None,
            "enableServiceLinks": False,  # else every Service of the namespace becomes a handful of variables
        }
        spec |= _given(serviceAccountName=self.service_account)
        return merged({**spec, **self.placement}, self.pod_spec)

    def _grace_s(self) -> int:
        if not self.drain_s:
            return math.ceil(self.stop_timeout_s)
        return math.ceil(ENDPOINTS_S + self.drain_s + self.stop_timeout_s + _MARGIN_S)

    def _container(self, secret: str | None) -> Manifest:
        limits = _given(cpu=quantity(self.cpu_limit), memory=self.memory_limit)
        limits |= {self.gpu_resource: str(self.gpus)} if self.gpus else {}
        security: Manifest = {"allowPrivilegeEscalation": False, "seccompProfile": {"type": "RuntimeDefault"}}
        container: Manifest = {
            "name": "server",
            "image": self.image,
            # `protocol` is a key of these lists: older clusters cannot apply an entry without it.
            "ports": [{"name": PORT_NAME, "containerPort": self.container_port, "protocol": "TCP"}],
            "startupProbe": self._probe("/health", period_s=2, failures=max(1, math.ceil(self.startup_s / 2))),
            "livenessProbe": self._probe("/health", period_s=10, failures=6),
            "readinessProbe": self._probe(self.ready_path, period_s=5, failures=2),
            "securityContext": merged(security, self.security_context),
        }
        container |= _given(
            args=list(self.command),
            imagePullPolicy=self.image_pull_policy,
            resources=_given(requests=self.requests, limits=limits),
        )
        plain = dict(self.plain_variables)
        if self.drain_s:
            plain[DRAIN_VARIABLE] = f"{self.drain_s:g}"
            # The server refuses new sessions as soon as it gets SIGTERM; proxies and clients need a moment to learn
            # that this pod takes no more.
            pause = {"exec": {"command": ["/bin/sh", "-c", f"sleep {ENDPOINTS_S}"]}}
            container["lifecycle"] = {"preStop": pause}
        names = [*self.secrets, *([secret] if secret is not None else [])]
        return container | _given(
            env=[{"name": name, "value": value} for name, value in plain.items()],
            envFrom=[{"secretRef": {"name": name}} for name in names],
        )

    def _probe(self, path: str, *, period_s: int, failures: int) -> Manifest:
        return {
            "httpGet": {"path": path, "port": PORT_NAME},
            "periodSeconds": period_s,
            "timeoutSeconds": _PROBE_S,
            "failureThreshold": failures,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressRoute:
    """How an ingress controller leads to a server.

    Args:
        host: The host name; `{replica}` in it stands for the number of a pod.
        class_name: The controller; by default the cluster's own.
        tls_secret: The secret with the certificate of the host; without one the address is plain HTTP.
        annotations: Settings of the controller, such as its time limit for idle connections.
    """

    host: str
    class_name: str | None = None
    tls_secret: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)

    def url(self, replica: int) -> str:
        """Return the address of a pod."""
        return f"{'https' if self.tls_secret else 'http'}://{self.host_of(replica)}"

    def host_of(self, replica: int) -> str:
        """Return the host name of a pod."""
        return self.host.replace("{replica}", str(replica))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerManifests:
    """The objects of a server.

    Args:
        name: The name of all of them, and of the label that selects the pods.
        pods: The pods' options.
        replicas: The number of pods.
        labels: Labels of every object and pod besides `name`.
        annotations: Annotations of every object besides those of the pods.
        owner: An entry of `ownerReferences`: deleting that object deletes these.
    """

    name: str
    pods: ServerPods
    replicas: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    owner: Mapping[str, Any] | None = None

    @property
    def selector(self) -> dict[str, str]:
        """The label that selects the pods."""
        return {INSTANCE_LABEL: self.name}

    @property
    def secret_name(self) -> str | None:
        """The name of the Secret with the variables, if there are any."""
        return self.name if self.pods.variables else None

    def service(self, *, port: int | None = None, headless: bool = False, owner: bool = True) -> Manifest:
        """Return the Service in front of all pods.

        Args:
            port: Its port; by default the server's.
            headless: Whether its name resolves to the addresses of the pods, and each pod has a DNS name.
            owner: Whether the Service gets the `owner`.
        """
        port_spec = self._port(port or self.pods.container_port)
        spec: Manifest = {"selector": self.selector, "ports": [port_spec]}
        if headless:
            spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
        return self._object("v1", "Service", spec=spec, owner=self.owner if owner else None)

    def secret(self, owner: Mapping[str, Any] | None = None) -> Manifest:
        """Return the Secret with the variables."""
        data = {name: base64.b64encode(text.encode()).decode() for name, text in self.pods.variables.items()}
        return {**self._object("v1", "Secret", owner=owner), "type": "Opaque", "data": data}

    def deployment(self, owner: Mapping[str, Any] | None = None) -> Manifest:
        """Return the Deployment; an update starts a new pod before it ends an old one."""
        spec = {
            "replicas": self.replicas,
            "selector": {"matchLabels": self.selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {"metadata": self._pod_metadata(), "spec": self.pods.spec(self.secret_name)},
        }
        return self._object("apps/v1", "Deployment", spec=spec, owner=owner)

    def pod(self, replica: int, owner: Mapping[str, Any] | None = None, *, deadline_s: float | None = None) -> Manifest:
        """Return one pod; with a headless Service its name in DNS is `NAME-0.NAME`.

        Args:
            replica: Its number.
            owner: The object that the cluster deletes it with.
            deadline_s: When the cluster ends it.
        """
        name = f"{self.name}-{replica}"
        spec = {**self.pods.spec(self.secret_name), "hostname": name, "subdomain": self.name}
        if deadline_s is not None:
            spec["activeDeadlineSeconds"] = max(1, math.ceil(deadline_s))
        pod = self._object("v1", "Pod", name=name, spec=spec, owner=owner)
        pod["metadata"] |= {"labels": {**self._pod_metadata()["labels"], REPLICA_LABEL: str(replica)}}
        pod["metadata"]["annotations"] = {**pod["metadata"].get("annotations", {}), **self.pods.annotations}
        return pod

    def replica_service(self, replica: int, owner: Mapping[str, Any] | None = None) -> Manifest:
        """Return a Service in front of one pod, to which an ingress can lead."""
        ports = [self._port(self.pods.container_port)]
        spec = {"selector": {**self.selector, REPLICA_LABEL: str(replica)}, "ports": ports}
        return self._object("v1", "Service", name=f"{self.name}-{replica}", spec=spec, owner=owner)

    def ingress(self, route: IngressRoute, owner: Mapping[str, Any] | None = None) -> Manifest:
        """Return the Ingress to the Service; a host with `{replica}` leads to each pod by a separate host name."""
        each = "{replica}" in route.host
        rules = []
        for replica in range(self.replicas if each else 1):
            service = {"name": f"{self.name}-{replica}" if each else self.name, "port": {"name": PORT_NAME}}
            path = {"path": "/", "pathType": "Prefix", "backend": {"service": service}}
            rules.append({"host": route.host_of(replica), "http": {"paths": [path]}})
        spec: Manifest = {"rules": rules, **_given(ingressClassName=route.class_name)}
        if route.tls_secret is not None:
            spec["tls"] = [{"hosts": [rule["host"] for rule in rules], "secretName": route.tls_secret}]
        ingress = self._object("networking.k8s.io/v1", "Ingress", spec=spec, owner=owner)
        if route.annotations:
            ingress["metadata"]["annotations"] = {**ingress["metadata"].get("annotations", {}), **route.annotations}
        return ingress

    def autoscaler(self, *, most: int, metric: str, per_pod: float) -> Manifest:
        """Return the HorizontalPodAutoscaler, which keeps the average of a metric of the pods near a value.

        Args:
            most: The largest number of pods; the smallest is `replicas`.
            metric: A metric of `/metrics`, which an adapter offers as a custom metric of pods.
            per_pod: The value of the metric at which another pod is started.
        """
        target = {"type": "AverageValue", "averageValue": _quantity(per_pod)}
        spec = {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": self.name},
            "minReplicas": self.replicas,
            "maxReplicas": most,
            "metrics": [{"type": "Pods", "pods": {"metric": {"name": metric}, "target": target}}],
            "behavior": {  # a pod that is ended lets its sessions finish, which takes a while: one at a time
                "scaleUp": {"stabilizationWindowSeconds": 0},
                "scaleDown": {
                    "stabilizationWindowSeconds": 300,
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
                },
            },
        }
        return self._object("autoscaling/v2", "HorizontalPodAutoscaler", spec=spec)

    def disruption_budget(self) -> Manifest:
        """Return the PodDisruptionBudget: a drain of nodes ends one pod at a time."""
        spec = {"maxUnavailable": 1, "selector": {"matchLabels": self.selector}}
        return self._object("policy/v1", "PodDisruptionBudget", spec=spec)

    def network_policy(self, *, clients: Sequence[Mapping[str, Any]], egress: Literal["dns", "all"]) -> Manifest:
        """Return the NetworkPolicy: the allowed clients, and the allowed connections of the server.

        Args:
            clients: Peers as in `ingress.from`; an empty list lets no client in.
            egress: `dns` for nothing but names, `all` for anything.
        """
        ingress = [{"from": [dict(peer) for peer in clients], "ports": [{"protocol": "TCP", "port": PORT_NAME}]}]
        names = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
        spec = {
            "podSelector": {"matchLabels": self.selector},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress if clients else [],
            "egress": [{} if egress == "all" else names],
        }
        return self._object("networking.k8s.io/v1", "NetworkPolicy", spec=spec)

    def _port(self, port: int) -> Manifest:
        return {"name": PORT_NAME, "port": port, "targetPort": PORT_NAME, "protocol": "TCP"}

    def _pod_metadata(self) -> Manifest:
        metadata: Manifest = {"labels": {**self._labels(), **self.pods.labels}}
        return {**metadata, **_given(annotations=dict(self.pods.annotations))}

    def _labels(self) -> dict[str, str]:
        return {**self.selector, "app.kubernetes.io/managed-by": "openenv", **self.labels}

    def _object(
        self,
        version: str,
        kind: str,
        *,
        name: str | None = None,
        spec: Manifest | None = None,
        owner: Mapping[str, Any] | None = None,
    ) -> Manifest:
        metadata: Manifest = {"name": name or self.name, "labels": self._labels()}
        metadata |= _given(annotations=dict(self.annotations), ownerReferences=[dict(owner)] if owner else None)
        manifest: Manifest = {"apiVersion": version, "kind": kind, "metadata": metadata}
        return manifest if spec is None else {**manifest, "spec": spec}


def owner_reference(version: str, kind: str, name: str, uid: str) -> dict[str, str]:
    """Return an entry of `ownerReferences`: with its owner, the object is deleted, too."""
    return {"apiVersion": version, "kind": kind, "name": name, "uid": uid}


def server_name(image: str) -> str:
    """Return a unique name for the server of an image, as names in DNS are."""
    base = image.rpartition("/")[2].partition("@")[0].partition(":")[0].lower()
    base = re.sub(r"[^a-z0-9]+", "-", base).strip("-")[:40].strip("-")
    if not base[:1].isalpha():
        base = f"env-{base}".strip("-")
    return f"{base}-{secrets.token_hex(4)}"


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Manifest:
    """Return a manifest with changes; dictionaries are merged, and lists of named things by their names."""
    result = dict(base)
    for key, value in changes.items():
        before = result.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            result[key] = merged(before, value)
        elif isinstance(before, list) and _is_named(before) and _is_named(value):
            named = {item["name"]: item for item in before}
            named |= {item["name"]: merged(named.get(item["name"], {}), item) for item in value}
            result[key] = list(named.values())
        else:
            result[key] = value
    return result


def _is_named(value: object) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) and "name" in item for item in value)
    )


def _given(**fields: Any) -> Manifest:
    """Return the fields that hold something."""
    return {name: value for name, value in fields.items() if value not in (None, {}, [], "")}


def _quantity(value: float) -> str:
    """Return a number as Kubernetes writes it, which has no fractions but thousandths."""
    return f"{round(value)}" if value == round(value) else f"{round(value * 1000)}m"
