"""A Kubernetes cluster through lightkube: which one, requests, errors in the cluster's own words, pods and streams.

For the provider, the sandbox backend and `openenv deploy k8s`. lightkube is imported when a cluster is opened. This
module must not know the purpose of a pod.

    Cluster     requests of this thread               create, apply, list, delete, log
    PodWatch    a thread with an event loop           the pods of a selector as the cluster reports them (list, watch),
                                                      and ports of this machine that lead to them (`PortForward`)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlencode

from openenv import settings
from openenv.errors import SandboxError, SandboxUnavailable, install_command, message_of
from openenv.protocol.backoff import Backoff
from openenv.sandboxes.host import ProcessOwner

if TYPE_CHECKING:
    import httpx2
    from lightkube import Client
    from lightkube.config.kubeconfig import SingleConfig
    from lightkube.models.core_v1 import ContainerStatus
    from lightkube.models.meta_v1 import ObjectMeta
    from lightkube.resources.core_v1 import Pod
    from websockets.asyncio.client import ClientConnection as AsyncSocket
    from websockets.sync.client import ClientConnection as BlockingSocket

log = logging.getLogger("openenv.kubernetes")

FIELD_MANAGER = "openenv"
OWNER_ANNOTATION = "openenv.owner"
"""The process that started something; too long for a label."""
EXPIRES_ANNOTATION = "openenv.expires"
"""When anyone may remove it."""
_REQUEST_S = 30.0
_WATCH_S = 240
_RETRY = Backoff(first_pause_s=0.2, longest_pause_s=5.0)
_CHUNK = 1 << 15
_OPEN_S = 30.0
T = TypeVar("T")

ProblemKind = Literal["image", "unschedulable", "crashed", "config", "transient", "failed"]
_NO_IMAGE = frozenset({"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
_NO_CONTAINER = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"})
# The kubelet tries every container again. A node that is short of time recovers; a Secret that does not exist needs a
# person. Only these texts of the kubelet mean the former, such as `failed to sync secret cache: timed out waiting for
# the condition`; any other text ends the start at once.
_SHORT_OF_TIME = re.compile(
    r"failed to sync \w+ cache|timed out|timeout|deadline exceeded|connection refused|too many requests|try again",
    re.IGNORECASE,
)
# A Secret may be called "read-timeout", and a key of it TIMEOUT.
_MISSING = re.compile(r"not found|couldn't find|could not find|does not exist|no such", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """The cluster and the namespace, named as in `kubectl`'s options; None means the configuration's value.

    Without a file the service account of this pod is used, else `KUBECONFIG`, else `~/.kube/config`.
    """

    kubeconfig: str | Path | None = None
    context: str | None = None
    namespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """Placement and resources of a pod, for servers and sandboxes. The cluster decides about unset options.

    Args:
        cpu_request: Processors that a node must have free.
        memory_request: Memory that a node must have free, as Kubernetes writes it: `2Gi`.
        node_selector: Labels that the node must have.
        tolerations: Taints of nodes that the pod accepts, as in a manifest.
        image_pull_secrets: Names of the secrets for pulling the image.
        runtime_class: A stronger isolation that the cluster offers, such as gVisor or Kata.
        pod_spec: Any other field in the pod's `spec`.
    """

    cpu_request: float | str | None = None
    memory_request: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    image_pull_secrets: Sequence[str] = ()
    runtime_class: str | None = None
    pod_spec: Mapping[str, Any] = field(default_factory=dict)

    @property
    def placement(self) -> dict[str, Any]:
        """The fields of `spec` that decide where and how the pod runs."""
        fields = {
            "runtimeClassName": self.runtime_class,
            "nodeSelector": dict(self.node_selector),
            "tolerations": [dict(toleration) for toleration in self.tolerations],
            "imagePullSecrets": [{"name": name} for name in self.image_pull_secrets],
        }
        return {name: value for name, value in fields.items() if value}

    @property
    def requests(self) -> dict[str, str]:
        """The resources that a node must have free."""
        amounts = {"cpu": quantity(self.cpu_request), "memory": self.memory_request}
        return {name: amount for name, amount in amounts.items() if amount}


def quantity(value: float | str | None) -> str | None:
    """Return an amount of processors as Kubernetes writes it."""
    return value if isinstance(value, str) or value is None else f"{value:g}"


@dataclass(frozen=True, slots=True)
class PodProblem:
    """Why a pod does not run, in the cluster's words."""

    kind: ProblemKind
    text: str
    has_previous: bool = False
    """Whether to read the log of the container's previous run."""

    @property
    def may_pass(self) -> bool:
        """Whether to wait on: an autoscaler may add a node for the pod, and the kubelet tries the container again."""
        return self.kind in ("unschedulable", "transient")


@dataclass(frozen=True, slots=True)
class PodState:
    """What matters of a pod."""

    name: str
    uid: str
    created: str
    ip: str | None
    labels: Mapping[str, str]
    is_running: bool
    is_ready: bool
    is_ending: bool
    problem: PodProblem | None


class Cluster:
    """A cluster and one of its namespaces.

    Args:
        address: Which one.
        error: The exception class for refused requests.
        unavailable: The exception class for a missing lightkube, a missing configuration, or a cluster that does not
            answer.
    """

    def __init__(
        self,
        address: ClusterAddress | None = None,
        *,
        error: type[RuntimeError] = SandboxError,
        unavailable: type[RuntimeError] = SandboxUnavailable,
    ) -> None:
        self.error = error
        self.unavailable = unavailable
        address = address or ClusterAddress()
        self.config = _find_config(address, unavailable)
        _compile_models()
        self.namespace = address.namespace or self.config.namespace

    @property
    def server(self) -> str:
        """The address of the API server."""
        return self.config.cluster.server

    @cached_property
    def client(self) -> Client:
        """lightkube's client of this cluster."""
        import httpx2
        from lightkube import Client

        timeout = httpx2.Timeout(_REQUEST_S)
        return Client(self.config, namespace=self.namespace, timeout=timeout, field_manager=FIELD_MANAGER)

    @cached_property
    def _raw(self) -> httpx2.Client:
        """For the few requests that lightkube has no method for."""
        import httpx2
        from lightkube.config import client_adapter

        return client_adapter.Client(self.config, client_adapter.ConnectionParams(timeout=httpx2.Timeout(_REQUEST_S)))

    def close(self) -> None:
        """Close the connections."""
        for name in ("client", "_raw"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Turn the failures of a block into `error` with the cluster's message, or `unavailable` without a message."""
        import httpx2
        from lightkube import ApiError
        from lightkube.core.exceptions import ConfigError

        try:
            yield
        except ApiError as error:
            raise self.error(f"The cluster refused to {what}: {error.status.message or error}") from error
        except httpx2.HTTPStatusError as error:  # a proxy in between, which does not speak Kubernetes
            answer = f"{error.response.status_code} {error.response.reason_phrase}"
            raise self.error(f"{self.server} refused to {what}: {answer}") from error
        except (httpx2.HTTPError, ConfigError, OSError) as error:
            raise self.unavailable(
                f"The cluster at {self.server} does not answer ({message_of(error)}). Try: kubectl cluster-info"
            ) from error

    # -- requests ------------------------------------------------------------------------------------------------

    def create(self, manifest: Mapping[str, Any]) -> str:
        """Create an object in the namespace and return its uid."""
        from lightkube.codecs import from_dict

        resource: Any = from_dict(dict(manifest))
        with self.asking(f"create {_named(manifest)}"):
            made: Any = self.client.create(resource, namespace=self.namespace)
        return str(made.metadata.uid)

    def apply(self, manifest: Mapping[str, Any]) -> None:
        """Create an object in the namespace, or change it to match the manifest (server-side apply)."""
        from lightkube.codecs import from_dict
        from lightkube.core.exceptions import LoadResourceError
        from lightkube.generic_resource import create_namespaced_resource

        resource: Any
        try:
            resource = from_dict(dict(manifest))
        except (LoadResourceError, ImportError):  # a version that only older clusters have
            group, _, version = manifest["apiVersion"].partition("/")
            kind = manifest["kind"]
            resource = create_namespaced_resource(group, version, kind, f"{kind.lower()}s")(**manifest)
        client: Any = self.client
        with self.asking(f"apply {_named(manifest)}"):
            client.apply(resource, namespace=self.namespace, force=True)

    def delete(self, kind: type[Any], name: str, *, grace_s: int | None = None, waits: bool = False) -> bool:
        """Delete an object with its dependents; return False if it does not exist.

        Args:
            kind: lightkube's class of it.
            name: Its name.
            grace_s: The time for its containers to end; by default the pod decides.
            waits: Whether it stays, marked, until its dependents are gone.
        """
        from lightkube import ApiError
        from lightkube.types import CascadeType

        cascade = CascadeType.FOREGROUND if waits else CascadeType.BACKGROUND
        with self.asking(f"delete {kind.__name__} {name}"):
            try:
                self.client.delete(kind, name, namespace=self.namespace, grace_period=grace_s, cascade=cascade)
            except ApiError as error:
                if error.status.code != 404:
                    raise
                return False
        return True

    def pod(self, name: str) -> PodState | None:
        """Return a pod; None if it does not exist."""
        from lightkube import ApiError
        from lightkube.resources.core_v1 import Pod

        with self.asking(f"read pod {name}"):
            try:
                return pod_state(self.client.get(Pod, name, namespace=self.namespace))
            except ApiError as error:
                if error.status.code != 404:
                    raise
                return None

    def log(self, pod: str, *, lines: int, previous: bool = False, container: str | None = None) -> str:
        """Return the end of a pod's output; an empty text if there is none, or no right to read it."""
        import httpx2

        options = {"tailLines": str(lines), "previous": str(previous).lower()}
        options |= {"container": container} if container else {}
        path = f"api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        try:
            answer = self._raw.get(path, params=options)
        except httpx2.HTTPError:
            return ""
        return answer.text.rstrip() if answer.status_code == 200 else ""

    def warnings(self, uid: str, *, most: int = 3) -> list[str]:
        """Return the last warnings that the cluster's events have about an object: `FailedScheduling: ...`."""
        from lightkube.resources.core_v1 import Event

        fields: dict[str, Any] = {"involvedObject.uid": uid, "type": "Warning"}
        try:
            events = list(self.client.list(Event, namespace=self.namespace, fields=fields))
        except Exception as error:  # the right to read events is often missing, and the main error is enough
            log.debug("events of %s: %s", uid, message_of(error))
            return []
        events.sort(key=lambda event: str(event.lastTimestamp or event.eventTime or event.firstTimestamp))
        texts = dict.fromkeys(f"{event.reason}: {event.message}" for event in events)
        return list(texts)[-most:]

    def serves(self, group_version: str) -> bool:
        """Return whether the cluster has a version of an API group: `policy/v1`."""
        with self.asking(f"list its APIs of {group_version}"):
            answer = self._raw.get(f"apis/{group_version}")
            if answer.status_code in (403, 404):
                return False
            answer.raise_for_status()
        return True

    # -- streams -------------------------------------------------------------------------------------------------

    @cached_property
    def _tls(self) -> ssl.SSLContext | None:
        from lightkube.config.client_adapter import verify_cluster

        if not self.server.startswith("https:"):
            return None
        assert self.config.user is not None
        context = verify_cluster(self.config.cluster, self.config.user, self.config.abs_file)
        context.sslsocket_class = StreamSocket
        return context

    def _stream_url(self, pod: str, action: str, parameters: list[tuple[str, str]]) -> str:
        base = self.server.rstrip("/").replace("http", "ws", 1)
        return f"{base}/api/v1/namespaces/{self.namespace}/pods/{pod}/{action}?{urlencode(parameters)}"

    def _credentials(self) -> Iterator[dict[str, str]]:
        """Yield the headers of a request; once more, with newer ones, after a refusal: tokens are rotated."""
        import httpx2
        from lightkube.config.client_adapter import user_auth

        auth = user_auth(self.config.user)
        if auth is None:
            yield {}
            return
        request = httpx2.Request("GET", self.server)
        flow = auth.sync_auth_flow(request)
        try:
            request = next(flow)
            while True:
                yield {"Authorization": request.headers["Authorization"]}
                request = flow.send(httpx2.Response(401, request=request))
        except StopIteration:
            return

    def exec_socket(self, pod: str, container: str, command: list[str]) -> BlockingSocket:
        """Start a command in a container; the socket carries messages of `v5.channel.k8s.io` or `v4`.

        Raises:
            RuntimeError: `error` or `unavailable`; the cluster refused it, or does not answer.
        """
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.sync.client import connect
        from websockets.typing import Subprotocol

        flags = [("container", container), *((name, "true") for name in ("stdin", "stdout", "stderr"))]
        url = self._stream_url(pod, "exec", [*(("command", word) for word in command), *flags])
        refusal = ""
        for headers in self._credentials():
            try:
                connection = connect(
                    url,
                    ssl=self._tls,
                    additional_headers=headers,
                    subprotocols=[Subprotocol("v5.channel.k8s.io"), Subprotocol("v4.channel.k8s.io")],
                    compression=None,
                    open_timeout=_OPEN_S,
                    close_timeout=1,
                    ping_timeout=None,  # a server also leaves pings unanswered while its command reads no input
                    max_size=None,
                )
                return connection.__enter__()  # the caller closes it; newer versions connect only here
            except InvalidStatus as error:
                refusal = _refusal(error)
                if error.response.status_code != 401:
                    break
            except (OSError, WebSocketException) as error:
                raise self.unavailable(
                    f"The cluster at {self.server} does not answer ({message_of(error)}). Try: kubectl cluster-info"
                ) from error
        raise self.error(f"The cluster refused to run a command in pod {pod}: {refusal}")

    async def forward_socket(self, pod: str, port: int) -> AsyncSocket:
        """Connect to a port of a pod, with messages of `v4.channel.k8s.io`: 0 has data, 1 has errors.

        Raises:
            OSError: The cluster refused it, or does not answer.
        """
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.typing import Subprotocol

        url = self._stream_url(pod, "portforward", [("ports", str(port))])
        credentials = self._credentials()
        refusal = ""
        while (headers := await asyncio.to_thread(next, credentials, None)) is not None:  # it may run a program
            try:
                return await connect(
                    url,
                    ssl=self._tls,
                    additional_headers=headers,
                    subprotocols=[Subprotocol("v4.channel.k8s.io")],
                    compression=None,
                    open_timeout=_OPEN_S,
                    close_timeout=1,
                    ping_timeout=None,
                    max_size=None,
                )
            except InvalidStatus as error:
                refusal = _refusal(error)
                if error.response.status_code != 401:
                    break
            except WebSocketException as error:
                raise ConnectionError(message_of(error)) from error
        raise ConnectionRefusedError(f"the cluster refused a port-forward to pod {pod}: {refusal}")


class StreamSocket(ssl.SSLSocket):
    """A TLS socket that one thread reads while another writes. `close` ends a blocked read.

    The blocking client of websockets does both. OpenSSL forbids it: with TLS 1.3 a server sends session tickets after
    the handshake, and a write while the other thread reads them waits for a handshake that never comes. So each call
    takes a turn and does not block; the waiting is between turns.
    """

    _turn: threading.Lock | None = None
    _limit: float | None = None

    def do_handshake(self, block: bool = False) -> None:
        """Finish the handshake; afterwards, calls take turns."""
        super().do_handshake(block)
        self._limit, self._turn = self.gettimeout(), threading.Lock()
        super().settimeout(0)

    def settimeout(self, value: float | None) -> None:
        """Set how long a call may take."""
        if self._turn is None:
            super().settimeout(value)
        self._limit = value

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Read some bytes; an empty result at the end."""
        return self._call(lambda: ssl.SSLSocket.recv(self, buflen, flags))

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Write all bytes."""
        view = memoryview(data).cast("B")
        while view:
            part = view[:_CHUNK]
            view = view[self._call(lambda part=part: ssl.SSLSocket.send(self, part, flags)) :]  # type: ignore[misc]

    def _call(self, call: Callable[[], T]) -> T:
        deadline = None if self._limit is None else time.monotonic() + self._limit
        while True:
            with self._turn or contextlib.nullcontext():
                try:
                    return call()
                except (ssl.SSLWantReadError, BlockingIOError):
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            left = None if deadline is None else deadline - time.monotonic()
            ready = select.poll()
            ready.register(self, event)
            if (left is not None and left <= 0) or not ready.poll(None if left is None else left * 1000):
                raise TimeoutError("the API server takes too long")

    def close(self) -> None:
        """Shut the connection down, which ends a read of another thread, and close it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self, socket.SHUT_RDWR)
        super().close()


def _refusal(error: Any) -> str:
    """Return the words of the `Status` in a refused upgrade, or its HTTP status."""
    import json

    try:
        return str(json.loads(error.response.body)["message"])
    except (TypeError, ValueError, KeyError):
        return message_of(error)


def _named(manifest: Mapping[str, Any]) -> str:
    return f"{manifest['kind']} {manifest['metadata'].get('name', '')}".strip()


def _find_config(address: ClusterAddress, unavailable: type[RuntimeError]) -> SingleConfig:
    """Read the configuration that an address names."""
    try:
        from lightkube.config.kubeconfig import DEFAULT_KUBECONFIG, KubeConfig
        from lightkube.config.models import User
        from lightkube.core.exceptions import ConfigError
    except ImportError as error:
        raise unavailable(
            f"Kubernetes needs the package `lightkube`. Install it: {install_command('kubernetes')}"
        ) from error
    path = address.kubeconfig
    try:
        if path is None and address.context is None and in_cluster():
            config_file = KubeConfig.from_service_account()
        else:
            config_file = KubeConfig.from_file(path or settings.kubeconfig() or DEFAULT_KUBECONFIG)
        config = config_file.get(address.context)
    except (ConfigError, KeyError, TypeError, ValueError, OSError) as error:
        # lightkube takes the file apart without looking whether it is one
        raise unavailable(
            f"no usable Kubernetes configuration ({message_of(error)}). Name a file: kubeconfig=, KUBECONFIG "
            "or ~/.kube/config, and a context in it: context="
        ) from error
    assert config is not None
    return config if config.user is not None else config._replace(user=User())


_COMPILING = threading.Lock()


def _compile_models() -> None:
    """Compile the models of all kinds that are used, before a second thread may do so.

    lightkube's objects are structs of msgspec, which compiles one when it is first used. Another thread that uses the
    same struct meanwhile finds a half-made one, and the interpreter crashes (msgspec 0.22).
    """
    from lightkube.core.decoders import decode_list, decode_status, decode_watch_event
    from lightkube.resources import apps_v1, autoscaling_v2, core_v1, networking_v1, policy_v1

    kinds: tuple[Any, ...] = (
        *(core_v1.Pod, core_v1.Service, core_v1.Secret, core_v1.Event, apps_v1.Deployment),
        *(networking_v1.Ingress, networking_v1.NetworkPolicy),
        *(policy_v1.PodDisruptionBudget, autoscaling_v2.HorizontalPodAutoscaler),
    )
    with _COMPILING:
        decode_status(b"{}")
        decode_watch_event(b'{"type": "ADDED", "object": {}}')
        for kind in kinds:
            decode_list(b'{"items": []}', kind)


def in_cluster() -> bool:
    """Return whether this process runs in a pod that has a service account."""
    return settings.kubernetes_service_host() is not None and Path(SERVICE_ACCOUNT, "token").exists()


SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


# -- owners ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnedObject:
    """An object of a cluster that names the process that made it, for `openenv ps` and `openenv gc`."""

    name: str
    namespace: str
    image: str
    created: datetime | None
    owner: ProcessOwner | None
    expires: datetime | None

    @classmethod
    def of(cls, metadata: ObjectMeta, image: str) -> OwnedObject:
        """Read the annotations of an object."""
        notes = metadata.annotations or {}
        owner, expires = ProcessOwner.parse(notes.get(OWNER_ANNOTATION, "")), _time(notes.get(EXPIRES_ANNOTATION))
        return cls(str(metadata.name), str(metadata.namespace), image, metadata.creationTimestamp, owner, expires)

    @property
    def is_leftover(self) -> bool:
        """Whether its owner is certainly dead, or its time is over."""
        is_over = self.expires is not None and datetime.now(timezone.utc) >= self.expires
        return is_over or (self.owner is not None and self.owner.is_dead())


def time_after(seconds: float) -> str:
    """Return the time after a number of seconds, in Kubernetes' format."""
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).strftime(_TIME)


def _time(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.strptime(text, _TIME).replace(tzinfo=timezone.utc)
    except ValueError:
        return None


_TIME = "%Y-%m-%dT%H:%M:%SZ"


# -- the state of a pod ----------------------------------------------------------------------------------------------


def pod_state(pod: Pod) -> PodState:
    """Return what matters of a pod."""
    metadata, status = pod.metadata, pod.status
    assert metadata is not None
    conditions = {one.type: one for one in (status.conditions if status else None) or ()}
    ready = conditions.get("Ready")
    phase = status.phase if status else None
    return PodState(
        name=str(metadata.name),
        uid=str(metadata.uid),
        created=str(metadata.creationTimestamp),
        ip=status.podIP if status else None,
        labels=dict(metadata.labels or {}),
        is_running=phase == "Running",
        is_ready=ready is not None and ready.status == "True",
        is_ending=metadata.deletionTimestamp is not None or phase in ("Failed", "Succeeded"),
        problem=_problem(pod),
    )


def _problem(pod: Pod) -> PodProblem | None:
    status = pod.status
    if status is None:
        return None
    for container in (*(status.initContainerStatuses or ()), *(status.containerStatuses or ())):
        if (problem := _container_problem(container)) is not None:
            return problem
    if status.phase == "Failed":
        return PodProblem("failed", f"{status.reason or 'it failed'}: {status.message or 'no message'}")
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return PodProblem("unschedulable", condition.message or condition.reason or "no node takes it")
    return None


def _container_problem(container: ContainerStatus) -> PodProblem | None:
    """Return why a container does not run; None if it has not been tried yet, or is being pulled."""
    state, last = container.state, container.lastState
    waiting = state.waiting if state else None
    reason = (waiting.reason if waiting else None) or ""
    text = f"{reason}: {waiting.message}" if waiting and waiting.message else reason
    if reason in _NO_IMAGE:
        return PodProblem("image", text)
    if reason in _NO_CONTAINER:
        message = (waiting.message or "") if waiting else ""
        is_transient = _SHORT_OF_TIME.search(message) is not None and _MISSING.search(message) is None
        return PodProblem("transient" if is_transient else "config", text)
    ended = state.terminated if state else None
    has_previous = ended is None
    if ended is None and not container.ready and last is not None:
        ended = last.terminated
    if ended is None or (ended.exitCode == 0 and ended.reason == "Completed" and container.ready):
        return None
    how = f"exit code {ended.exitCode}" if not ended.signal else f"signal {ended.signal}"
    name = ended.reason if ended.reason not in (None, "Error", "Completed") else None
    words = [f"its container ended with {how}", *([name] if name else []), *([ended.message] if ended.message else [])]
    if reason:
        words.append(text)
    return PodProblem("crashed", "; ".join(words), has_previous=has_previous)


# -- following pods --------------------------------------------------------------------------------------------------


class PodWatch:
    """Follows the pods of a selector in a separate thread, and forwards local ports to them. A context manager.

    Args:
        cluster: The cluster of the pods.
        labels: The labels that select them.
    """

    def __init__(self, cluster: Cluster, labels: Mapping[str, str]) -> None:
        self._cluster = cluster
        self._labels = dict(labels)
        self._changed = threading.Condition()
        self._pods: dict[str, PodState] = {}
        self._failure: Exception | None = None
        self._listed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openenv-kubernetes", daemon=True)
        self._thread.start()
        self._forwards: list[PortForward] = []
        asyncio.run_coroutine_threadsafe(self._follow(), self._loop)

    def __enter__(self) -> PodWatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and close every connection."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def pods(self) -> list[PodState]:
        """The pods as they were last reported, the oldest first."""
        with self._changed:
            return sorted(self._pods.values(), key=lambda pod: (pod.created, pod.name))

    def wait(self, look: Callable[[list[PodState]], T | None], timeout_s: float) -> T | None:
        """Wait until `look`, called with the pods after each change, returns something; None when the time is over.

        Raises:
            RuntimeError: The cluster refuses to list pods.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                listed, failure = self._listed, self._failure
                pods = sorted(self._pods.values(), key=lambda pod: (pod.created, pod.name))
                if failure is not None:
                    raise self._cluster.error(f"The cluster refused to list pods: {message_of(failure)}") from failure
                left = deadline - time.monotonic()
                if listed and (answer := look(pods)) is not None:
                    return answer
                if left <= 0:
                    return None
                self._changed.wait(left)

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait for the next change of any pod."""
        with self._changed:
            self._changed.wait(timeout_s)

    def forward(self, port: int, *, local_port: int = 0) -> int:
        """Listen on a port of 127.0.0.1 and return it. Its connections go to one pod; each call picks another pod.

        The pod stays the same while it exists, so that a session can be resumed; then another pod replaces it.
        """
        forward = PortForward(self._cluster, self, port)
        self._forwards.append(forward)
        return self._run(forward.listen(local_port))

    def forwarded(self, forward: PortForward) -> PodState | None:
        """Return the pod of a forward: its previous pod if that still exists, otherwise a pod without a forward."""
        with self._changed:
            if (held := self._pods.get(forward.uid or "")) is not None:
                return held
            taken = {other.uid for other in self._forwards if other is not forward}
            free = [pod for pod in self._pods.values() if pod.uid not in taken and pod.is_running and not pod.is_ending]
            return min(free, key=lambda pod: (not pod.is_ready, pod.created, pod.name), default=None)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _follow(self) -> None:
        """List, then watch from there; again after each interruption, for a watch may have missed the end of a pod."""
        import httpx2
        from lightkube import ApiError, AsyncClient

        async with contextlib.AsyncExitStack() as stack:
            client = AsyncClient(self._cluster.config, namespace=self._cluster.namespace)
            stack.push_async_callback(client.close)
            for attempt in itertools.count():
                try:
                    await self._list_and_watch(client)
                except ApiError as error:
                    if error.status.code in (401, 403):
                        self._fail(error)
                        return
                    log.debug("the watch of %s ended: %s", self._labels, message_of(error))
                except (httpx2.HTTPError, OSError) as error:
                    log.debug("the watch of %s broke: %s", self._labels, message_of(error))
                    await asyncio.sleep(_RETRY.pause_s(attempt))
                except Exception as error:
                    log.exception("the watch of %s failed", self._labels)
                    self._fail(error)
                    return

    async def _list_and_watch(self, client: Any) -> None:
        from lightkube.resources.core_v1 import Pod

        labels: Any = self._labels
        listing = client.list(Pod, labels=labels)
        pods = {state.uid: state async for state in _states(listing)}
        with self._changed:
            self._pods, self._listed = pods, True
            self._changed.notify_all()
        version = listing.resourceVersion
        async for event, pod in client.watch(Pod, labels=labels, server_timeout=_WATCH_S, resource_version=version):
            state = pod_state(pod)
            with self._changed:
                if event == "DELETED":
                    self._pods.pop(state.uid, None)
                else:
                    self._pods[state.uid] = state
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()


async def _states(listing: Any) -> Any:
    async for pod in listing:
        yield pod_state(pod)


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=5)


class PortForward:
    """A port of 127.0.0.1 that leads to a port of one pod, through the API server; one WebSocket per connection."""

    def __init__(self, cluster: Cluster, watch: PodWatch, port: int) -> None:
        self._cluster = cluster
        self._watch = watch
        self._port = port
        self.uid: str | None = None
        """The pod that it leads to."""

    async def listen(self, local_port: int) -> int:
        """Begin to listen, on any free port if it is 0."""
        server = await asyncio.start_server(self._carry, "127.0.0.1", local_port, limit=_CHUNK)
        return int(server.sockets[0].getsockname()[1])

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pod = self._watch.forwarded(self)
        try:
            if pod is None:
                return  # no pod yet: the client sees its connection close, and tries again
            self.uid = pod.uid
            socket = await self._cluster.forward_socket(pod.name, self._port)
            async with socket:
                sending = asyncio.ensure_future(_send(reader, socket))
                receiving = asyncio.ensure_future(self._receive(socket, writer, pod.name))
                try:
                    await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in (sending, receiving):
                        task.cancel()
                    await asyncio.gather(sending, receiving, return_exceptions=True)
        except OSError as error:
            log.debug("port-forward: %s", message_of(error))
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                writer.transport.abort() if writer.transport.is_closing() else writer.close()

    async def _receive(self, socket: AsyncSocket, writer: asyncio.StreamWriter, pod: str) -> None:
        """Pass on the pod's data. The first message of either channel repeats the port, in two bytes."""
        begun: set[int] = set()
        async for message in socket:
            if not isinstance(message, bytes) or not message:
                continue
            channel, data = message[0], message[1:]
            if channel not in begun:
                begun.add(channel)
                data = data[2:]
            if channel == 0 and data:
                writer.write(data)
                await writer.drain()
            elif channel == 1 and data:
                log.debug("port-forward to pod %s: %s", pod, data.decode("utf-8", "replace").strip())
                return


async def _send(reader: asyncio.StreamReader, socket: AsyncSocket) -> None:
    from websockets.exceptions import ConnectionClosed

    with contextlib.suppress(ConnectionClosed, OSError):
        while data := await reader.read(_CHUNK):
            await socket.send(b"\0" + data)
