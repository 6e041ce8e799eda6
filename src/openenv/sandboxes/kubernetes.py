"""The backend `kubernetes`: a pod per sandbox, through the API of a cluster. `ShellSandbox` does everything inside.

    this process ══ exec (WebSocket, through the API server) ══> /bin/sh ── a command     a user of its own, no rights
                                                                 PID 1                    that user's, unreadable: waits
    NetworkPolicy `openenv-sandboxes`: nothing in, nothing out; a port is opened over the exec stream (`expose`)

The root file system is read-only; home, /tmp and /dev/shm are in memory. If the cluster has the resources of SIG
agent-sandbox, `warm_pool` takes sandboxes from a running pool.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openenv import settings
from openenv.errors import SandboxError, SandboxUnavailable, SandboxUnsupported, message_of
from openenv.protocol.backoff import Backoff
from openenv.sandboxes.base import (
    FEATURES,
    IMAGES,
    Limits,
    Sandboxes,
    SandboxSpec,
    Stream,
    refuse_image,
    refuse_snapshot,
)
from openenv.sandboxes.cluster import (
    EXPIRES_ANNOTATION,
    OWNER_ANNOTATION,
    Cluster,
    ClusterAddress,
    OwnedObject,
    PodOptions,
    PodState,
    PodWatch,
    time_after,
)
from openenv.sandboxes.host import ConnectionQuota, ProcessOwner
from openenv.sandboxes.shell import ShellSandbox
from openenv.sandboxes.shell_command import READ_SCRIPT, Channel, framed
from openenv.sandboxes.streams import slices

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

log = logging.getLogger("openenv.sandboxes")

DEFAULT_IMAGE = "python:3.12-slim"
SANDBOX_LABEL = "openenv.sandbox"
BACKEND_LABEL = "openenv.backend"
NETWORK_LABEL = "openenv.network"
POLICY = "openenv-sandboxes"
NETWORK_POLICY = "openenv-sandboxes-network"
CONTAINER = "box"
_PASSWD = "openenv.passwd"
_CLAIMS = "extensions.agents.x-k8s.io"
_CLAIM_VERSION = "v1beta1"
_POD_NAME, _CLAIM_NAME = "openenv-sandbox-", "openenv-claim-"
_DOUBTS = 5
_DOUBT_PAUSES = Backoff(first_pause_s=0.3, longest_pause_s=5.0)
_OVERHEAD_MB = 16
_CPU_REQUEST, _MEMORY_REQUEST = "100m", "256Mi"
_FIRST_UID, _UIDS = 200_000, 1_000_000_000
_READY_S = 300.0
_FOREVER_S = 10 * 365 * 86_400
_FILLED = "/openenv-work"

# PID 1 is the commands' own user, which may neither signal it (the kernel protects the first process of a container)
# nor look into it: it runs a copy of the shell that it cannot read, so the kernel gives its /proc entries to root.
# `wait` reaps every orphan; if its `sleep` is killed, the loop continues for the remaining time.
_HOLD = """d=/tmp/.openenv; mkdir $d && cp -L /bin/sh $d/sh && chmod 111 $d/sh && exec $d/sh -c '
rm -rf /tmp/.openenv
end=$(($(date +%s)+$1))
while r=$((end-$(date +%s))); [ $r -gt 0 ]; do sleep $r & wait; done' sh "$1" """

_TRY_NETWORK = """
import os, socket
try:
    socket.create_connection((os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])), 3)
    print("REACHED")
except OSError:
    print("CLOSED")
"""

# Before v5 the input of a command cannot be ended, so it comes in parts: a line with the length, then the bytes.
_PARTS = """while IFS= read -r n && [ "$n" -gt 0 ]; do
dd bs="$n" count=1 iflag=fullblock 2>/dev/null || break
done | {
%s
}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPods(PodOptions):
    """The pods of sandboxes, with the options of `PodOptions`. Fields in `pod_spec` replace ours.

    By default, a node must have 0.1 processors and `256Mi` of memory free, or the sandbox's limit if that is less.

    Args:
        seccomp_profile: A profile on the nodes, relative to the kubelet's folder; by default the runtime's own.
        warm_pool: The `SandboxWarmPool` of SIG agent-sandbox that provides the pods; see `pool_manifests`.
        start_timeout_s: The longest time that a pod may take to start, including the image pull and the scheduling.
    """

    seccomp_profile: str | None = None
    warm_pool: str | None = None
    start_timeout_s: float = _READY_S


class KubernetesSandboxes(Sandboxes):
    """Starts sandboxes as pods.

    Args:
        image: The image. It must contain `/bin/sh` and `tar`, and `python3` for exposed ports. By default
            `OPENENV_SANDBOX_IMAGE` or `python:3.12-slim`.
        kubeconfig: The file that describes the cluster; by default the service account of this pod, else the
            configuration of `kubectl`.
        context: The context in that file.
        namespace: The namespace of the pods; by default the context's.
        check_network: Whether the first sandbox tries to reach the API server. This detects clusters that ignore
            network policies and leave the network open.
        options: Fields of `SandboxPods`, such as `warm_pool="agents"` or `runtime_class="gvisor"`.

    Raises:
        SandboxUnavailable: lightkube is not installed, or no cluster is configured.
        TypeError: An option is unknown.
    """

    name = "kubernetes"
    features = FEATURES - {"mounts", "snapshots"} | IMAGES

    def __init__(
        self,
        image: str | None = None,
        *,
        kubeconfig: str | Path | None = None,
        context: str | None = None,
        namespace: str | None = None,
        check_network: bool = True,
        **options: Any,
    ) -> None:
        self.image = image or settings.sandbox_image() or DEFAULT_IMAGE
        self._cluster = Cluster(ClusterAddress(kubeconfig, context, namespace))
        self._pods = SandboxPods(**{name: value for name, value in options.items() if value is not None})
        self._check_network = check_network
        self._id = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._watch: PodWatch | None = None
        self._open: set[str] = set()
        self._quota = ConnectionQuota()

    def check(self) -> None:
        """Return if the cluster answers and lets this user run pods; raise `SandboxUnavailable` if not."""
        try:
            self._prepare()
            if self._pods.warm_pool is not None and not self._cluster.serves(f"{_CLAIMS}/{_CLAIM_VERSION}"):
                raise SandboxUnavailable(
                    f"The cluster has no {_CLAIMS}/{_CLAIM_VERSION}, which warm_pool needs: install SIG agent-sandbox "
                    "with its extensions, or leave warm_pool out."
                )
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            raise SandboxUnavailable(str(error)) from error

    def require(self, spec: SandboxSpec) -> None:
        """Return if pods can be like that: a cluster builds no images, and a pod of a warm pool has its template's."""
        if spec.build is not None:
            raise SandboxUnsupported(
                f"A cluster cannot build {spec.build}. Build the image, push it to a registry that the cluster pulls "
                "from, and name it; for a Harbor task, as `docker_image` in its task.toml."
            )
        if self._pods.warm_pool is not None:
            refuse_image(spec, f"{self.name} with a warm pool")

    def open(self, spec: SandboxSpec | None = None) -> KubernetesSandbox:
        """Start a pod, or take one from the warm pool."""
        spec = spec or SandboxSpec()
        refuse_snapshot(spec, self.name)
        self.require(spec)
        if spec.mounts:
            raise SandboxUnsupported("Pods cannot mount folders of this machine: bake them into the image.")
        watch = self._prepare()
        if spec.network:
            self._cluster.apply(self._network_policy())
        if self._pods.warm_pool is not None:
            return self._claim(watch, spec, self._pods.warm_pool)
        name = f"{_POD_NAME}{secrets.token_hex(8)}"
        self._open.add(name)
        try:
            self._cluster.create(self._pod(name, spec))
            self._await(watch, name, spec.image or self.image)
            return self._opened(name, spec, lambda: self._delete(name))
        except BaseException:
            self._delete(name)
            raise

    def leftovers(self) -> list[str]:
        """List the pods that this backend started and that should be gone."""
        if self._watch is None:
            return []
        return sorted({pod.name for pod in self._list() if not pod.is_ending} - self._open)

    def close(self) -> None:
        """End the connections to the cluster; open sandboxes stay until their time is over."""
        with self._lock:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        self._cluster.close()

    def pool_manifests(self, name: str, replicas: int, limits: Limits | None = None) -> list[dict[str, Any]]:
        """Return the `SandboxTemplate` and the `SandboxWarmPool` of SIG agent-sandbox for these sandboxes.

        Apply them, then open sandboxes with `warm_pool=name`; all have the limits of the template.
        """
        spec = SandboxSpec(limits=limits or Limits(), timeout_s=_FOREVER_S)
        pod = self._pod(name, spec)
        del pod["spec"]["activeDeadlineSeconds"]  # it would count while the pod waits in the pool
        labels = {"openenv.sandbox": "yes", "app.kubernetes.io/managed-by": "openenv"}
        notes = {_PASSWD: pod["metadata"]["annotations"][_PASSWD]}
        version = f"{_CLAIMS}/{_CLAIM_VERSION}"
        template = {
            "podTemplate": {"metadata": {"labels": labels, "annotations": notes}, "spec": pod["spec"]},
            "networkPolicyManagement": "Unmanaged",  # ours lets nothing in or out
        }
        return [
            self._policy(),
            {"apiVersion": version, "kind": "SandboxTemplate", "metadata": {"name": name}, "spec": template},
            {
                "apiVersion": version,
                "kind": "SandboxWarmPool",
                "metadata": {"name": name},
                "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": name}},
            },
        ]

    # -- pods ----------------------------------------------------------------------------------------------------

    def _prepare(self) -> PodWatch:
        """Make the network policy, which must be there before any pod, and begin to follow our pods."""
        with self._lock:
            if self._watch is None:
                self._cluster.apply(self._policy())
                with contextlib.suppress(SandboxError):  # a courtesy: its failure must not stop this start
                    sweep(self._cluster)
                watch = PodWatch(self._cluster, {BACKEND_LABEL: self._id})
                try:
                    watch.wait(lambda pods: True, self._pods.start_timeout_s)
                except BaseException:
                    watch.close()
                    raise
                self._watch = watch
            return self._watch

    def _policy(self) -> dict[str, Any]:
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": POLICY, "labels": {"app.kubernetes.io/managed-by": "openenv"}},
            "spec": {
                "podSelector": {"matchLabels": {SANDBOX_LABEL: "yes"}},
                "policyTypes": ["Ingress", "Egress"],
            },
        }

    def _network_policy(self) -> dict[str, Any]:
        """Return the policy that lets sandboxes with a network out; policies add up, so the others stay closed."""
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": NETWORK_POLICY, "labels": {"app.kubernetes.io/managed-by": "openenv"}},
            "spec": {
                "podSelector": {"matchLabels": {NETWORK_LABEL: "yes"}},
                "policyTypes": ["Egress"],
                "egress": [{}],
            },
        }

    def _pod(self, name: str, spec: SandboxSpec) -> dict[str, Any]:
        limits = spec.limits
        uid = _FIRST_UID + secrets.randbelow(_UIDS)  # unique, because the kernel limits processes per user
        home, rest = max(1, limits.disk_mb * 3 // 4), max(1, limits.disk_mb // 8)
        memory = f"{limits.memory_mb + limits.disk_mb + _OVERHEAD_MB}Mi"  # files lie in memory, too
        most = {"cpu": f"{limits.cpus:g}", "memory": memory}
        sizes = {"home": (spec.home, home), "tmp": ("/tmp", rest), "shm": ("/dev/shm", rest)}
        sizes |= {} if spec.workdir is None else {"work": (spec.workdir, home)}
        sizes |= {f"folder-{number}": (folder, rest) for number, folder in enumerate(spec.folders)}
        mounts: list[dict[str, Any]] = [{"name": volume, "mountPath": path} for volume, (path, _) in sizes.items()]
        mounts.append({"name": "passwd", "mountPath": "/etc/passwd", "subPath": "passwd", "readOnly": True})
        volumes: list[dict[str, Any]] = [
            {"name": volume, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Mi"}}
            for volume, (_, size) in sizes.items()
        ]
        passwd = {"path": "passwd", "fieldRef": {"fieldPath": f"metadata.annotations['{_PASSWD}']"}}
        volumes.append({"name": "passwd", "downwardAPI": {"items": [passwd]}})
        seconds = max(1, math.ceil(spec.timeout_s))
        usual = {"cpu": _smaller(_CPU_REQUEST, most["cpu"]), "memory": _smaller(_MEMORY_REQUEST, most["memory"])}
        requests = {**usual, **self._pods.requests}
        container = {
            "name": CONTAINER,
            "image": spec.image or self.image,
            "command": ["/bin/sh", "-c", _HOLD, "sh", str(seconds)],
            "workingDir": "/",
            "env": [{"name": key, "value": "user"} for key in ("USER", "LOGNAME")],
            "resources": {"limits": most, "requests": requests},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": mounts,
        }
        profile = {"type": "RuntimeDefault"}
        if self._pods.seccomp_profile is not None:
            profile = {"type": "Localhost", "localhostProfile": self._pods.seccomp_profile}
        pod_spec: dict[str, Any] = {
            "containers": [container],
            "volumes": volumes,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": seconds + 30,  # PID 1 ends in time; this is for a node that lost it
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostname": "sandbox",
            **({} if spec.network else {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}),
            "securityContext": {
                "runAsUser": uid,
                "runAsGroup": uid,
                "fsGroup": uid,
                "runAsNonRoot": True,
                "seccompProfile": profile,
            },
        }
        if spec.fills_workdir and spec.workdir is not None:
            pod_spec["initContainers"] = [_filling(container, spec.workdir)]
        pod_spec |= self._pods.placement
        users = f"root:x:0:0:root:/root:/bin/sh\nuser:x:{uid}:{uid}:user:{spec.home}:/bin/sh\n"
        notes = {f"openenv.metadata.{key}": str(value) for key, value in spec.metadata.items()}
        notes |= {
            OWNER_ANNOTATION: str(ProcessOwner.current()),
            EXPIRES_ANNOTATION: time_after(spec.timeout_s),
            _PASSWD: users,
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {**self._labels(), **({NETWORK_LABEL: "yes"} if spec.network else {})},
                "annotations": notes,
            },
            "spec": {**pod_spec, **self._pods.pod_spec},
        }

    def _labels(self) -> dict[str, str]:
        return {SANDBOX_LABEL: "yes", BACKEND_LABEL: self._id, "app.kubernetes.io/managed-by": "openenv"}

    def _await(self, watch: PodWatch, name: str, image: str) -> None:
        """Wait until a pod runs; raise with the cluster's words if it cannot."""

        def look(pods: list[PodState]) -> PodState | None:
            pod = next((one for one in pods if one.name == name), None)
            if pod is None:
                return None
            is_stuck = pod.problem is not None and not pod.problem.may_pass
            return pod if pod.is_running or pod.is_ending or is_stuck else None

        pod = watch.wait(look, self._pods.start_timeout_s)
        if pod is not None and pod.is_running and pod.problem is None:
            return
        is_late = pod is None
        pod = pod or next((one for one in watch.pods if one.name == name), None)
        words: list[str] = []
        if pod is not None:
            words += [pod.problem.text] if pod.problem else []
            words += self._cluster.warnings(pod.uid)
        reason = "; ".join(dict.fromkeys(words)) or "no pod appeared"
        within = f" within {self._pods.start_timeout_s:g} s" if is_late else ""
        raise SandboxUnavailable(f"The cluster started no sandbox of '{image}'{within}: {reason}")

    def _opened(self, pod: str, spec: SandboxSpec, delete: Callable[[], None]) -> KubernetesSandbox:
        sandbox = KubernetesSandbox(self._cluster, pod, spec, delete=delete, quota=self._quota)
        if self._check_network and not spec.network:
            result = sandbox.exec(["python3", "-c", _TRY_NETWORK], timeout=30)
            if "REACHED" in result.stdout:
                raise SandboxUnavailable(
                    "The network of a sandbox is open: this cluster does not keep network policies. Use a network "
                    "plugin that does (Calico, Cilium), or accept it: check_network=False."
                )
            self._check_network = False  # one is enough: they are all alike
            if "CLOSED" not in result.stdout:
                log.warning("whether the cluster keeps network policies is unknown: there is no python3 in the image")
        return sandbox

    def _delete(self, name: str) -> None:
        delete_sandbox(self._cluster, name)
        self._open.discard(name)

    def _list(self) -> list[PodState]:
        from lightkube.resources.core_v1 import Pod

        from openenv.sandboxes.cluster import pod_state

        with self._cluster.asking("list pods"):
            pods = self._cluster.client.list(Pod, namespace=self._cluster.namespace, labels={BACKEND_LABEL: self._id})
            return [pod_state(pod) for pod in pods]

    # -- SIG agent-sandbox ---------------------------------------------------------------------------------------

    def _claim(self, watch: PodWatch, spec: SandboxSpec, pool: str) -> KubernetesSandbox:
        """Take a sandbox from a pool. The pool answers a claim with a running sandbox, which the claim then owns."""
        if spec.limits != Limits():
            raise SandboxUnsupported("A sandbox of a warm pool has the limits of its template; leave limits out.")
        name = f"{_CLAIM_NAME}{secrets.token_hex(8)}"
        labels, expires = self._labels(), time_after(spec.timeout_s)
        notes = {OWNER_ANNOTATION: str(ProcessOwner.current()), EXPIRES_ANNOTATION: expires}
        claim = {
            "apiVersion": f"{_CLAIMS}/{_CLAIM_VERSION}",
            "kind": "SandboxClaim",
            "metadata": {"name": name, "labels": labels, "annotations": notes},
            "spec": {
                "warmPoolRef": {"name": pool},
                "lifecycle": {"shutdownTime": expires, "shutdownPolicy": "Delete"},
                "additionalPodMetadata": {"labels": labels, "annotations": notes},
            },
        }
        claims = _claim_class()
        self._open.add(name)
        try:
            with self._cluster.asking(f"create SandboxClaim {name}"):
                self._cluster.client.create(claims(claim), namespace=self._cluster.namespace)
            pod = self._await_claim(claims, name)
            return self._opened(pod, spec, lambda: self._delete(name))
        except BaseException:
            self._delete(name)
            raise

    def _await_claim(self, claims: Any, name: str) -> str:
        """Return the pod of a claim; it has the same name as the claim's Sandbox."""
        deadline = time.monotonic() + self._pods.start_timeout_s
        words = "the claim has no status"
        while time.monotonic() < deadline:
            with self._cluster.asking(f"read SandboxClaim {name}"):
                claim: Any = self._cluster.client.get(claims, name, namespace=self._cluster.namespace)
            status = claim.get("status") or {}
            for condition in status.get("conditions", []):
                if condition.get("type") == "Ready":
                    words = f"{condition.get('reason')}: {condition.get('message')}"
                    if condition.get("status") == "True" and status.get("sandbox", {}).get("name"):
                        return str(status["sandbox"]["name"])
                    if condition.get("reason") in _LOST_CLAIM:
                        raise SandboxUnavailable(f"The warm pool gave no sandbox: {words}")
            time.sleep(0.1)
        raise SandboxUnavailable(f"The warm pool gave no sandbox within {self._pods.start_timeout_s:g} s: {words}")


_LOST_CLAIM = frozenset(
    {
        *("TemplateNotFound", "WarmPoolNotFound", "InvalidMetadata", "EnvVarsInjectionRejected", "ClaimExpired"),
        *("VolumeClaimTemplatesError", "SandboxExpired", "InvalidConfiguration", "PodFailed", "PodSucceeded"),
    }
)
"""Reasons that the claim's controller does not recover from."""


def _smaller(first: str, second: str) -> str:
    """Return the smaller of two quantities, such as `500m` and `1`, or `256Mi` and `1Gi`."""
    from lightkube.utils.quantity import parse_quantity

    return min(first, second, key=lambda quantity: parse_quantity(quantity) or 0)


def _claim_class() -> Any:
    from lightkube.generic_resource import create_namespaced_resource

    return create_namespaced_resource(_CLAIMS, _CLAIM_VERSION, "SandboxClaim", "sandboxclaims")


# -- leftovers -------------------------------------------------------------------------------------------------------


def sandboxes_in(cluster: Cluster, *, everywhere: bool = False) -> list[OwnedObject]:
    """List the sandboxes that backends have started in the namespace, or in all: pods, and claims of warm pools."""
    from lightkube.operators import exists
    from lightkube.resources.core_v1 import Pod

    namespace = "*" if everywhere else cluster.namespace
    labels: dict[str, Any] = {BACKEND_LABEL: exists()}
    sandboxes = []
    with cluster.asking("list pods"):
        for pod in cluster.client.list(Pod, namespace=namespace, labels=labels):
            # One that belongs to a claim ends with it.
            if (metadata := pod.metadata) is not None and str(metadata.name).startswith(_POD_NAME):
                containers = pod.spec.containers if pod.spec else ()
                sandboxes.append(OwnedObject.of(metadata, str(containers[0].image) if containers else ""))
    if cluster.serves(f"{_CLAIMS}/{_CLAIM_VERSION}"):
        with cluster.asking("list sandboxclaims"):
            for claim in cluster.client.list(_claim_class(), namespace=namespace, labels=labels):
                pool = (claim.get("spec") or {}).get("warmPoolRef", {}).get("name", "")
                sandboxes.append(OwnedObject.of(claim.metadata, f"pool {pool}"))
    return sandboxes


def delete_sandbox(cluster: Cluster, name: str) -> None:
    """Delete a sandbox of the namespace, if it is there."""
    from lightkube.resources.core_v1 import Pod

    if name.startswith(_CLAIM_NAME):
        cluster.delete(_claim_class(), name)
    else:
        cluster.delete(Pod, name, grace_s=0)


def sweep(cluster: Cluster) -> None:
    """Remove the namespace's sandboxes with a dead owner or an expired time."""
    for sandbox in sandboxes_in(cluster):
        if sandbox.is_leftover:
            delete_sandbox(cluster, sandbox.name)


def _filling(container: Mapping[str, Any], workdir: str) -> dict[str, Any]:
    """Return the container that copies the image's files at the work folder into the volume for it.

    It mounts the volume at another path, because a mount hides the image's files.
    """
    script = f'[ ! -d "$1" ] || exec cp -R "$1/." {_FILLED}/'
    return {
        "name": "fill",
        "image": container["image"],
        "command": ["/bin/sh", "-c", script, "sh", workdir],
        "workingDir": "/",
        "resources": container["resources"],
        "securityContext": container["securityContext"],
        "volumeMounts": [{"name": "work", "mountPath": _FILLED}],
    }


class KubernetesSandbox(ShellSandbox):
    """One pod."""

    oom_counters = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")

    def __init__(
        self,
        cluster: Cluster,
        pod: str,
        spec: SandboxSpec,
        *,
        delete: Callable[[], None],
        quota: ConnectionQuota,
    ) -> None:
        super().__init__(pod, spec, quota=quota)
        self._cluster = cluster
        self._delete = delete
        self._expires = time.monotonic() + spec.timeout_s

    def _channel(self, script: str, *, has_input: bool) -> Channel:
        pids = self.spec.limits.pids
        # Kubernetes cannot limit the processes of a pod. This limit counts all processes of the user, who has only
        # this sandbox. bash calls it -u, other shells -p.
        limited = f"ulimit -u {pids} 2>/dev/null || ulimit -p {pids} 2>/dev/null\n{script}"
        try:
            socket = self._cluster.exec_socket(self.sandbox_id, CONTAINER, ["/bin/sh", "-c", READ_SCRIPT])
        except SandboxError:
            self._raise_if_gone()
            raise
        channel = ExecChannel(socket)
        in_parts = has_input and not channel.can_end_input
        channel.send(framed(_PARTS % limited if in_parts else limited))
        channel.in_parts = in_parts
        return channel

    def _why_gone(self) -> str | None:
        for doubt in range(_DOUBTS):
            pod = self._cluster.pod(self.sandbox_id)
            if pod is None or pod.is_ending or not pod.is_running:
                if time.monotonic() > self._expires - 2:
                    return "expired"
                return "its pod was deleted" if pod is None or pod.problem is None else pod.problem.text
            if pod.problem is not None and not pod.problem.may_pass:
                return pod.problem.text
            with contextlib.suppress(SandboxError):
                if self._answers():
                    return None
            if time.monotonic() > self._expires:
                return "expired"
            # It is too full for another command, or the cluster has not noticed for seconds that it is dead.
            time.sleep(_DOUBT_PAUSES.pause_s(doubt))
        return None

    def _answers(self) -> bool:
        socket = self._cluster.exec_socket(self.sandbox_id, CONTAINER, ["/bin/sh", "-c", "printf done"])
        channel = ExecChannel(socket)
        try:
            while True:
                got = channel.receive(5.0)
                if got is None or got == ("stdout", b"done"):
                    return got is not None
        except EOFError:
            return False
        finally:
            channel.close()

    def _destroy(self) -> None:
        self._delete()


class ExecChannel(Channel):
    """A command in a container. The first byte of a message is its channel.

    0 input, 1 output, 2 errors, 3 the end as a `Status`; with `v5.channel.k8s.io` also 255, which ends a channel.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._exit_code: int | None = None
        self._over = threading.Event()
        self.can_end_input = socket.subprotocol == "v5.channel.k8s.io"
        self.in_parts = False
        """Whether input is sent with the length of each part, as `_PARTS` reads it."""

    @property
    def exit_code(self) -> int | None:
        """The exit code of the shell."""
        return self._exit_code

    def send(self, data: bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        for part in slices(data):
            message = bytes(part)
            head = f"{len(message)}\n".encode() if self.in_parts else b""
            try:
                self._socket.send(b"\0" + head + message)
            except (ConnectionClosed, OSError):  # the reader finds out why
                return

    def end_input(self) -> None:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed, OSError):
            if self.can_end_input:
                self._socket.send(b"\xff\0")
            elif self.in_parts:
                self._socket.send(b"\0" + b"0\n")

    def receive(self, timeout: float | None) -> tuple[Stream, bytes] | None:
        from websockets.exceptions import ConnectionClosed

        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._over.is_set():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                message = self._socket.recv(left)
            except TimeoutError:
                return None
            except (ConnectionClosed, OSError):
                break
            if not isinstance(message, bytes) or not message:
                continue
            channel, data = message[0], message[1:]
            if channel in (1, 2) and data:
                return ("stdout" if channel == 1 else "stderr"), data
            if channel == 3:
                self._exit_code = _exit_code(data)
                break
        self._over.set()
        raise EOFError

    def close(self) -> None:
        self._over.set()
        self._socket.close()


def _exit_code(data: bytes) -> int | None:
    """Read the `Status` that ends a command."""
    try:
        status = json.loads(data)
        if status.get("status") == "Success":
            return 0
        causes = (status.get("details") or {}).get("causes") or []
        return next(int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode")
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        log.debug("the end of a command: %s", message_of(error))
        return None
