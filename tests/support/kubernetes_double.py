"""A double of a Kubernetes cluster on loopback: the API server's wire, and behind it controllers and a kubelet.

Answers have the shapes of the real server: objects with uids and resource versions, `Status` for errors, watches as
JSON lines with `ERROR` events, logs, exec and port-forward as WebSockets of `v4.channel.k8s.io` and `v5`. Manifests are
checked with the schemas of `kubernetes-validate`. Pods are real processes with an address of their own in 127.0.0.0/8,
so port-forwards and pod addresses reach real servers; pods of container images are containers of a real engine. Times
of the kubelet (back-off, probes) are shortened.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import json
import os
import random
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import anyio
import uvicorn
import yaml
from lightkube.utils.quantity import parse_quantity
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from kubernetes_schemas import problems, versions
from openenv.sandboxes import docker as docker_backend
from openenv.sandboxes.container_cli import ContainerCli
from waiting import wait_until_async

Object = dict[str, Any]
BACKOFF_S = 0.3
PROBE_S = 0.05

RESOURCES = {
    ("", "v1"): {
        "pods": "Pod",
        "services": "Service",
        "secrets": "Secret",
        "events": "Event",
        "configmaps": "ConfigMap",
        "nodes": "Node",
    },
    ("apps", "v1"): {"deployments": "Deployment", "replicasets": "ReplicaSet"},
    ("networking.k8s.io", "v1"): {"ingresses": "Ingress", "networkpolicies": "NetworkPolicy"},
    ("policy", "v1"): {"poddisruptionbudgets": "PodDisruptionBudget"},
    ("autoscaling", "v2"): {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
}


# Of SIG agent-sandbox, for clusters that have it; the double's controller keeps pools full and answers claims.
AGENT_SANDBOX = {
    ("extensions.agents.x-k8s.io", "v1beta1"): {
        "sandboxtemplates": "SandboxTemplate",
        "sandboxwarmpools": "SandboxWarmPool",
        "sandboxclaims": "SandboxClaim",
    }
}


@dataclass(frozen=True)
class Image:
    """An image that the double's nodes can pull.

    Args:
        command: What its container runs; `{ip}` is the pod's address and `{args}` in a word of its own the pod's args.
        pull_secret: The Secret without which it cannot be pulled.
        engine: Runs its containers for real, from the image of its name; `host` is this machine's own system.
    """

    command: Sequence[str] = ()
    pull_secret: str | None = None
    engine: ContainerCli | None = None


@dataclass(frozen=True)
class Node:
    """A machine of the double."""

    name: str = "node-1"
    labels: Mapping[str, str] = field(default_factory=dict)
    cpu: float = 64.0
    gpus: int = 0
    taint: str | None = None


class ApiFailure(Exception):
    """An answer that is a `Status`."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def status(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }


@dataclass(frozen=True)
class Kind:
    """A resource of the API."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


@dataclass
class Target:
    """What a path stands for."""

    kind: Kind
    namespace: str | None
    name: str | None = None
    action: str | None = None


@dataclass
class Change:
    """An entry of the log that watches read."""

    version: int
    type: str
    kind: Kind
    item: Object


class KubernetesDouble:
    """The cluster.

    Args:
        images: What its nodes can pull.
        nodes: Its machines.
        version: What it says it is; manifests are checked for it, from 1.28 on.
        token: The bearer token that it asks for.
        tls: Whether it is reached by HTTPS, with a certificate of its own.
        exec_protocols: The sub-protocols of exec; a server before 1.30 has `v4.channel.k8s.io` only.
        resources: More resources, such as those of custom resource definitions.
    """

    def __init__(
        self,
        images: Mapping[str, Image] | None = None,
        *,
        nodes: Sequence[Node] = (Node(),),
        version: str = "1.34",
        token: str | None = None,
        tls: bool = False,
        exec_protocols: Sequence[str] = ("v5.channel.k8s.io", "v4.channel.k8s.io"),
        resources: Mapping[tuple[str, str], Mapping[str, str]] | None = None,
    ) -> None:
        self.images = dict(images or {})
        self.nodes = list(nodes)
        self.version = version
        self._has_schemas = version in versions()
        self.token = token
        self.exec_protocols = list(exec_protocols)
        self.requests: list[tuple[str, str]] = []
        self.manifests: list[Object] = []
        self.forbidden: set[tuple[str, str]] = set()
        """Verbs and resources that the user may not use: `("list", "pods")`."""
        self.pod_quota: int | None = None
        self.container_errors: list[str] = []
        """Texts with which the next containers fail to be configured, one after the other; then they start."""
        self._tls = tls
        self._kinds = {
            (group, name, plural): Kind(group, name, plural, kind)
            for (group, name), plurals in {**RESOURCES, **(resources or {})}.items()
            for plural, kind in plurals.items()
        }
        self._objects: dict[tuple[Kind, str, str], Object] = {}
        self._versions = 1000
        self._log: list[Change] = []
        self._log_start = 1000
        self._changed: asyncio.Condition
        self._kubelets: dict[str, Kubelet] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="openenv-double-")
        self._addresses = random.SystemRandom().randrange(1 << 20)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._controllers: list[Callable[[], None]] = [self._deploy, self._collect_garbage]
        if any(kind.kind == "SandboxClaim" for kind in self._kinds.values()):
            self._controllers += [self._fill_pools, self._answer_claims]

    # -- running -------------------------------------------------------------------------------------------------

    def __enter__(self) -> KubernetesDouble:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        options: dict[str, Any] = {}
        if self._tls:
            certificate, key = self._make_certificate()
            options = {"ssl_certfile": certificate, "ssl_keyfile": key}
        routes: list[Any] = [
            WebSocketRoute("/{path:path}", self._socket),
            Route("/{path:path}", self._answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="error", lifespan="off", timeout_graceful_shutdown=1, **options
        )
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="kubernetes-double")
        self._thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._listener.close()
        self._folder.cleanup()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Condition()
        self._stopping = asyncio.Event()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        await wait_until_async(lambda: self._server.started)
        self._started.set()
        await wait_until_async(lambda: self._server.should_exit, float("inf"))
        self._stopping.set()
        async with self._changed:
            self._changed.notify_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(kubelet.kill() for kubelet in self._kubelets.values()))
        await serving

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something on the double's loop, from a test."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def kubeconfig(self, path: Path, *, namespace: str = "default", token: str | None = None) -> Path:
        """Write the file with which clients find the double."""
        cluster: Object = {"server": self.url}
        if self._tls:
            cluster["certificate-authority-data"] = base64.b64encode(self.certificate).decode()
        token = token or self.token
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "double", "cluster": cluster}],
            "users": [{"name": "tester", "user": {"token": token} if token else {}}],
            "contexts": [
                {"name": "double", "context": {"cluster": "double", "user": "tester", "namespace": namespace}}
            ],
            "current-context": "double",
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def _make_certificate(self) -> tuple[str, str]:
        import ipaddress

        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubernetes-double")])
        now = datetime.now(timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        self.certificate = certificate.public_bytes(serialization.Encoding.PEM)
        paths = Path(self._folder.name, "tls.crt"), Path(self._folder.name, "tls.key")
        paths[0].write_bytes(self.certificate)
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return str(paths[0]), str(paths[1])

    # -- what tests look at --------------------------------------------------------------------------------------

    def objects(self, kind: str, namespace: str = "default") -> list[Object]:
        """Return the objects of a kind."""
        items = [(key, item) for key, item in list(self._objects.items()) if key[0].kind == kind]
        return [copy.deepcopy(item) for key, item in items if key[1] in (namespace, "")]

    def names(self) -> list[str]:
        """Return everything that a user has made or caused to be made: `Pod/x`, but for events."""
        return sorted(f"{kind.kind}/{name}" for kind, _, name in list(self._objects) if kind.kind != "Event")

    def kill_pod(self, name: str) -> None:
        """Kill the processes of a pod and forget it at once, as when its node dies."""

        async def kill() -> None:
            kind = self._kinds["", "v1", "pods"]
            kubelet = self._kubelets.get(name)
            if kubelet is not None:
                await kubelet.kill()
            self._remove(kind, "default", name)

        self.call(kill())

    def kill_container(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the container of a pod."""
        os.killpg(self._kubelets[name].pid, number)

    def expire_log(self) -> None:
        """Forget the history, so that a watch from an older version fails with 410."""

        async def expire() -> None:
            self._versions += 1
            self._log_start, self._log = self._versions, []
            async with self._changed:
                self._changed.notify_all()

        self.call(expire())

    def update(self, kind: str, name: str, change: Callable[[Object], None], namespace: str = "default") -> None:
        """Change an object, as another client would."""

        async def apply() -> None:
            key = next(key for key in self._objects if (key[0].kind, key[1], key[2]) == (kind, namespace, name))
            item = copy.deepcopy(self._objects[key])
            change(item)
            self.put(key[0], item)

        self.call(apply())

    # -- the store -----------------------------------------------------------------------------------------------

    def kind(self, name: str) -> Kind:
        """Return a resource by its kind."""
        return next(one for one in self._kinds.values() if one.kind == name)

    def put(self, kind: Kind, item: Object) -> None:
        """Store an object and tell the watches."""
        metadata = item["metadata"]
        key = (kind, metadata.get("namespace", ""), metadata["name"])
        before = self._objects.get(key)
        if before is not None and before.get("spec") != item.get("spec"):
            metadata["generation"] = metadata.get("generation", 1) + 1
        self._versions += 1
        metadata["resourceVersion"] = str(self._versions)
        self._objects[key] = item
        self._record("MODIFIED" if before is not None else "ADDED", kind, item)

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        return self._objects.get((kind, namespace or "", name))

    def items(self, kind: Kind, namespace: str | None = None) -> list[Object]:
        return [
            item for key, item in self._objects.items() if key[0] is kind and (namespace is None or key[1] == namespace)
        ]

    def _remove(self, kind: Kind, namespace: str, name: str) -> None:
        item = self._objects.pop((kind, namespace, name), None)
        if item is not None:
            self._versions += 1
            item["metadata"]["resourceVersion"] = str(self._versions)
            self._record("DELETED", kind, item)

    def _record(self, type: str, kind: Kind, item: Object) -> None:
        self._log.append(Change(self._versions, type, kind, copy.deepcopy(item)))
        if not self._stopping.is_set():
            self.spawn(self._wake())

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
        for controller in self._controllers:
            controller()
        for pod in self.items(self._kinds["", "v1", "pods"]):
            name = pod["metadata"]["name"]
            if name not in self._kubelets:
                kubelet = Kubelet(self, pod)
                self._kubelets[name] = kubelet
                self.spawn(kubelet.run())

    def forget(self, name: str, namespace: str) -> None:
        """Remove a pod whose containers have ended."""
        self._kubelets.pop(name, None)
        self._remove(self._kinds["", "v1", "pods"], namespace, name)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def event(self, about: Object, reason: str, message: str, type: str = "Warning") -> None:
        """Record an event about an object."""
        metadata = about["metadata"]
        now = _now()
        item = {
            "metadata": {"name": f"{metadata['name']}.{secrets.token_hex(8)}", "namespace": metadata["namespace"]},
            "involvedObject": {
                "kind": about["kind"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "reason": reason,
            "message": message,
            "type": type,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": "double"},
        }
        kind = self._kinds["", "v1", "events"]
        self.put(kind, self._begun(kind, item, metadata["namespace"]))

    def _begun(self, kind: Kind, item: Object, namespace: str | None) -> Object:
        """Return a new object with what the server adds."""
        metadata = {**item.get("metadata", {})}
        if "name" not in metadata:
            metadata["name"] = f"{metadata.get('generateName', '')}{secrets.token_hex(3)[:5]}"
        metadata |= {"uid": _uid(), "creationTimestamp": _now(), "generation": 1}
        if namespace is not None:
            metadata["namespace"] = namespace
        made = {"apiVersion": kind.api_version, "kind": kind.kind, **copy.deepcopy(item), "metadata": metadata}
        if kind.kind == "Pod":
            made["spec"] = {
                "restartPolicy": "Always",
                "terminationGracePeriodSeconds": 30,
                "dnsPolicy": "ClusterFirst",
                "schedulerName": "default-scheduler",
                "serviceAccountName": "default",
                **made["spec"],
            }
            made["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        if kind.kind == "Deployment":
            made["spec"] = {"replicas": 1, **made["spec"]}
        if kind.kind == "Service" and made["spec"].get("clusterIP") is None:
            made["spec"] = {**made["spec"], "clusterIP": f"10.96.{random.randrange(256)}.{random.randrange(1, 255)}"}
        return made

    # -- requests ------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Response:
        self.requests.append((request.method, request.url.path))
        try:
            self._authorize(request.headers)
            special = self._discovery(request.url.path.strip("/"))
            if special is not None:
                return special
            target = self._target(request.url.path)
            return await self._serve(request, target)
        except ApiFailure as failure:
            return JSONResponse(failure.status(), failure.code)

    def _authorize(self, headers: Mapping[str, str]) -> None:
        if self.token is not None and headers.get("authorization") != f"Bearer {self.token}":
            raise ApiFailure(401, "Unauthorized", "Unauthorized")

    def _permit(self, verb: str, target: Target) -> None:
        resource = target.kind.plural + (f"/{target.action}" if target.action else "")
        if (verb, resource) in self.forbidden:
            where = f' in the namespace "{target.namespace}"' if target.namespace else " at the cluster scope"
            raise ApiFailure(
                403,
                "Forbidden",
                f'{target.kind.qualified} is forbidden: User "tester" cannot {verb} resource "{resource}" in API group '
                f'"{target.kind.group}"{where}',
            )

    def _discovery(self, path: str) -> Response | None:
        major, minor = self.version.split(".")[:2]
        if path == "version":
            return JSONResponse({"major": major, "minor": minor, "gitVersion": f"v{self.version}.0"})
        groups = {(kind.group, kind.version) for kind in self._kinds.values()}
        if path == "api":
            return JSONResponse({"kind": "APIVersions", "versions": ["v1"]})
        if path == "apis":
            listed = [
                {
                    "name": group,
                    "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
                    "preferredVersion": {"groupVersion": f"{group}/{version}", "version": version},
                }
                for group, version in sorted(groups)
                if group
            ]
            return JSONResponse({"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
        for group, version in groups:
            if path == (f"apis/{group}/{version}" if group else f"api/{version}"):
                resources = [
                    {
                        "name": kind.plural,
                        "singularName": "",
                        "namespaced": kind.plural != "nodes",
                        "kind": kind.kind,
                        "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
                    }
                    for kind in self._kinds.values()
                    if (kind.group, kind.version) == (group, version)
                ]
                name = f"{group}/{version}" if group else version
                return JSONResponse({"kind": "APIResourceList", "groupVersion": name, "resources": resources})
        return None

    def _target(self, path: str) -> Target:
        parts = path.strip("/").split("/")
        missing = ApiFailure(404, "NotFound", "the server could not find the requested resource")
        if parts[:1] == ["api"] and len(parts) > 2:
            group, version, rest = "", parts[1], parts[2:]
        elif parts[:1] == ["apis"] and len(parts) > 3:
            group, version, rest = parts[1], parts[2], parts[3:]
        else:
            raise missing
        namespace = None
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        kind = self._kinds.get((group, version, rest[0]))
        if kind is None:
            raise missing
        return Target(kind, namespace, rest[1] if len(rest) > 1 else None, rest[2] if len(rest) > 2 else None)

    async def _serve(self, request: Request, target: Target) -> Response:
        query = request.query_params
        if request.method == "GET":
            if target.action == "log":
                self._permit("get", target)
                return self._pod_log(target, query)
            if target.name is not None:
                self._permit("get", target)
                return JSONResponse(self._existing(target))
            if query.get("watch") in ("true", "1"):
                self._permit("watch", target)
                return StreamingResponse(self._watch(target, query), media_type="application/json")
            self._permit("list", target)
            return JSONResponse(self._list(target, query))
        body = await request.body()
        if request.method == "POST":
            self._permit("create", target)
            return JSONResponse(self._create(target, json.loads(body)), 201)
        if request.method == "DELETE":
            self._permit("delete", target)
            return JSONResponse(self._delete(target, query, json.loads(body) if body else {}))
        if request.method == "PATCH":
            self._permit("patch", target)
            return self._patch(target, request.headers.get("content-type", ""), yaml.safe_load(body), query)
        self._permit("update", target)
        item = json.loads(body)
        self._existing(target)
        self.put(target.kind, item)
        return JSONResponse(item)

    def _existing(self, target: Target) -> Object:
        item = self.get(target.kind, target.namespace, str(target.name))
        if item is None:
            raise ApiFailure(404, "NotFound", f'{target.kind.qualified} "{target.name}" not found')
        return item

    def _selected(self, target: Target, query: Mapping[str, str], item: Object) -> bool:
        metadata = item["metadata"]
        if target.namespace is not None and metadata.get("namespace") != target.namespace:
            return False
        labels = metadata.get("labels", {})
        for one in filter(None, query.get("labelSelector", "").split(",")):
            name, _, value = one.partition("=")
            if (labels.get(name) != value) if "=" in one else (name not in labels):
                return False
        for one in filter(None, query.get("fieldSelector", "").split(",")):
            path, _, value = one.partition("=")
            found: Any = item
            for part in path.split("."):
                found = (found or {}).get(part)
            if found != value.removeprefix("="):
                return False
        return True

    def _list(self, target: Target, query: Mapping[str, str]) -> Object:
        items = [item for item in self.items(target.kind) if self._selected(target, query, item)]
        return {
            "kind": f"{target.kind.kind}List",
            "apiVersion": target.kind.api_version,
            "metadata": {"resourceVersion": str(self._versions)},
            # the items of a list have neither apiVersion nor kind
            "items": [{key: item[key] for key in item if key not in ("apiVersion", "kind")} for item in items],
        }

    async def _watch(self, target: Target, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        since = int(query.get("resourceVersion") or 0)
        deadline = asyncio.get_running_loop().time() + float(query.get("timeoutSeconds") or 3600)
        if since == 0:
            since = self._versions
            for item in self.items(target.kind):
                if self._selected(target, query, item):
                    yield _line("ADDED", item)
        while not self._stopping.is_set():
            if since < self._log_start:
                text = f"too old resource version: {since} ({self._log_start})"
                yield _line("ERROR", ApiFailure(410, "Expired", text).status())
                return
            for change in [one for one in self._log if one.version > since]:
                since = change.version
                if change.kind is target.kind and self._selected(target, query, change.item):
                    yield _line(change.type, change.item)
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return
            async with self._changed:
                if self._versions <= since and not self._stopping.is_set():
                    # Not `wait_for`: it waits in a task of its own, which may begin after this one gave the lock up.
                    with anyio.move_on_after(min(left, 1.0)):
                        await self._changed.wait()

    def _create(self, target: Target, item: Object) -> Object:
        self._check(target, item)
        self.manifests.append(copy.deepcopy(item))
        made = self._begun(target.kind, item, target.namespace)
        if self.get(target.kind, target.namespace, made["metadata"]["name"]) is not None:
            name = made["metadata"]["name"]
            raise ApiFailure(409, "AlreadyExists", f'{target.kind.qualified} "{name}" already exists')
        if target.kind.kind == "Pod":
            self._check_requests(made)
            self._check_quota(made)
        self.put(target.kind, made)
        return made

    def _check(self, target: Target, item: Object) -> None:
        if (item.get("apiVersion"), item.get("kind")) != (target.kind.api_version, target.kind.kind):
            raise ApiFailure(400, "BadRequest", f"{item.get('kind')} in request is not a {target.kind.kind}")
        if self._has_schemas and (wrong := problems(item, self.version)):
            name = item["metadata"].get("name")
            raise ApiFailure(422, "Invalid", f'{target.kind.kind} "{name}" is invalid: {"; ".join(wrong)}')

    def _check_keys(self, item: Object) -> None:
        """Refuse what the schemas of older clusters, which have no defaults, cannot merge."""
        spec = item.get("spec", {})
        containers = spec.get("template", {}).get("spec", {}).get("containers", [])
        ports = [*(spec.get("ports") or []), *(port for one in containers for port in one.get("ports", []))]
        if not self._has_schemas and any("protocol" not in port for port in ports):
            raise ApiFailure(
                500,
                "InternalError",
                "failed to create typed patch object: .spec.ports: element 0: associative list with keys has an "
                'element that omits key field "protocol" (and doesn\'t have default value)',
            )

    def _check_requests(self, pod: Object) -> None:
        for number, container in enumerate(pod["spec"]["containers"]):
            resources = container.get("resources", {})
            for key, limit in resources.get("limits", {}).items():
                request = resources.get("requests", {}).get(key, limit)
                if parse_quantity(request) > parse_quantity(limit):
                    field = f'spec.containers[{number}].resources.requests: Invalid value: "{request}"'
                    words = f"{field}: must be less than or equal to {key} limit"
                    raise ApiFailure(422, "Invalid", f'Pod "{pod["metadata"]["name"]}" is invalid: {words}')

    def _check_quota(self, pod: Object) -> None:
        used = len(self.items(self._kinds["", "v1", "pods"], pod["metadata"]["namespace"]))
        if self.pod_quota is not None and used >= self.pod_quota:
            raise ApiFailure(
                403,
                "Forbidden",
                f'pods "{pod["metadata"]["name"]}" is forbidden: exceeded quota: pods, requested: pods=1, used: '
                f"pods={used}, limited: pods={self.pod_quota}",
            )

    def _patch(self, target: Target, how: str, changes: Object, query: Mapping[str, str]) -> Response:
        before = self.get(target.kind, target.namespace, str(target.name))
        if how.startswith("application/apply-patch"):
            if not query.get("fieldManager"):
                raise ApiFailure(400, "BadRequest", "fieldManager is required for apply patch")
            self._check(target, changes)
            self._check_keys(changes)
            self.manifests.append(copy.deepcopy(changes))
            if before is None:
                made = self._begun(target.kind, changes, target.namespace)
                self.put(target.kind, made)
                return JSONResponse(made, 201)
            item = {**copy.deepcopy(before), **{key: changes[key] for key in changes if key not in ("metadata",)}}
            if target.kind.kind == "Deployment" and "replicas" not in changes["spec"]:
                item["spec"] = {**item["spec"], "replicas": before["spec"]["replicas"]}  # another manager's field
            metadata = {key: changes["metadata"].get(key, {}) for key in ("labels", "annotations")}
            item["metadata"] = {**item["metadata"], **{key: value for key, value in metadata.items() if value}}
        else:
            item = _merge(copy.deepcopy(self._existing(target)), changes)
        if item != before:
            self.put(target.kind, item)
        return JSONResponse(item)

    def _delete(self, target: Target, query: Mapping[str, str], options: Object) -> Object:
        item = self._existing(target)
        if target.kind.kind == "Pod":
            grace = options.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
            self.end_pod(item, None if grace is None else int(grace))
        else:
            self._remove(target.kind, str(target.namespace), str(target.name))
        return item

    def end_pod(self, pod: Object, grace_s: int | None = None) -> None:
        """Mark a pod for deletion; its kubelet ends and removes it."""
        metadata = pod["metadata"]
        grace_s = pod["spec"]["terminationGracePeriodSeconds"] if grace_s is None else grace_s
        if "deletionTimestamp" not in metadata or grace_s < metadata["deletionGracePeriodSeconds"]:
            pod = copy.deepcopy(pod)
            pod["metadata"] |= {"deletionTimestamp": _now(), "deletionGracePeriodSeconds": grace_s}
            self.put(self._kinds["", "v1", "pods"], pod)

    def _pod_log(self, target: Target, query: Mapping[str, str]) -> Response:
        pod = self._existing(target)
        kubelet = self._kubelets.get(str(target.name))
        path = None if kubelet is None else kubelet.log_path(previous=query.get("previous") == "true")
        container = query.get("container") or pod["spec"]["containers"][0]["name"]
        if path is None or not path.exists():
            where = "previous terminated container" if query.get("previous") == "true" else "container"
            raise ApiFailure(400, "BadRequest", f'{where} "{container}" in pod "{target.name}" is not there')
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        tail = int(query["tailLines"]) if "tailLines" in query else len(lines)
        return PlainTextResponse("".join(lines[-tail:] if tail else []))

    # -- streams -------------------------------------------------------------------------------------------------

    async def _socket(self, socket: WebSocket) -> None:
        self.requests.append(("WS", socket.url.path))
        try:
            self._authorize(socket.headers)
            target = self._target(socket.url.path)
            self._permit("create" if target.action == "exec" else "get", target)
            pod = self._existing(target)
            kubelet = self._kubelets.get(str(target.name))
            if kubelet is None or pod["status"]["phase"] != "Running":
                name = pod["metadata"]["name"]
                raise ApiFailure(400, "BadRequest", f"pod {name} does not have a host assigned")
            if target.action == "portforward":
                await self._forward(socket, kubelet, int(socket.query_params["ports"]))
            elif target.action == "exec":
                await self._exec(socket, kubelet)
            else:
                raise ApiFailure(404, "NotFound", "the server could not find the requested resource")
        except ApiFailure as failure:
            with contextlib.suppress(RuntimeError):
                await socket.send_denial_response(JSONResponse(failure.status(), failure.code))

    async def _forward(self, ws: WebSocket, kubelet: Kubelet, port: int) -> None:
        if "v4.channel.k8s.io" not in ws.scope["subprotocols"]:
            raise ApiFailure(400, "BadRequest", "unable to upgrade: no supported protocol")
        await ws.accept("v4.channel.k8s.io")
        mark = port.to_bytes(2, "little")
        await ws.send_bytes(b"\0" + mark)
        await ws.send_bytes(b"\1" + mark)
        try:
            reader, writer = await asyncio.open_connection(kubelet.ip, port)
        except OSError as error:
            text = f"error forwarding port {port} to pod {kubelet.name}: connect: {error.strerror}"
            await ws.send_bytes(b"\1" + text.encode())
            await ws.close()
            return

        async def outwards() -> None:
            while data := await reader.read(1 << 15):
                await ws.send_bytes(b"\0" + data)

        async def inwards() -> None:
            with contextlib.suppress(WebSocketDisconnect):
                while True:
                    message = await ws.receive_bytes()
                    writer.write(message[1:])
                    await writer.drain()

        await _first_of(outwards(), inwards())
        writer.close()
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await ws.close()

    async def _exec(self, ws: WebSocket, kubelet: Kubelet) -> None:
        protocol = next((one for one in self.exec_protocols if one in ws.scope["subprotocols"]), None)
        if protocol is None:
            raise ApiFailure(400, "BadRequest", "unable to upgrade: no supported protocol")
        await ws.accept(protocol)
        command = kubelet.exec_command(ws.query_params.getlist("command"))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        stdin = process.stdin

        async def outwards(channel: bytes, stream: asyncio.StreamReader) -> None:
            while data := await stream.read(1 << 15):
                await ws.send_bytes(channel + data)

        async def inwards() -> None:
            with contextlib.suppress(WebSocketDisconnect, ConnectionError):
                while True:
                    message = await ws.receive_bytes()
                    if message[:2] == b"\xff\0" and protocol.startswith("v5"):
                        stdin.close()
                    elif message[:1] == b"\0":
                        stdin.write(message[1:])
                        await stdin.drain()

        async def run() -> None:
            await ws.send_bytes(b"\1")  # an empty message: the connection is there
            await asyncio.gather(outwards(b"\1", process.stdout), outwards(b"\2", process.stderr))  # type: ignore[arg-type]
            await ws.send_bytes(b"\3" + json.dumps(_exec_status(await process.wait())).encode())

        try:
            await _first_of(run(), inwards())
        finally:
            # The runtime closes the streams of a client that left; the command goes on, or ends by their end. With a
            # container, this ends the engine's command line only.
            stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await ws.close()

    # -- controllers ---------------------------------------------------------------------------------------------

    def _collect_garbage(self) -> None:
        uids = {item["metadata"]["uid"] for item in self._objects.values()}
        for key, item in list(self._objects.items()):
            owners = item["metadata"].get("ownerReferences", [])
            if owners and not any(owner["uid"] in uids for owner in owners):
                if key[0].kind == "Pod":
                    self.end_pod(item)
                else:
                    self._remove(*key)

    def _deploy(self) -> None:
        for deployment in self.items(self.kind("Deployment")):
            self._roll_out(deployment)

    def _roll_out(self, deployment: Object) -> None:
        """Bring the pods of a deployment nearer to what it asks for: one step, as the real controllers do."""
        metadata, spec = deployment["metadata"], deployment["spec"]
        pods_kind, sets = self.kind("Pod"), self.kind("ReplicaSet")
        hashed = f"{abs(hash(json.dumps(spec['template'], sort_keys=True))) % (1 << 40):x}"
        name = f"{metadata['name']}-{hashed}"
        current = self.get(sets, metadata["namespace"], name)
        if current is None:
            template = copy.deepcopy(spec["template"])
            template["metadata"]["labels"]["pod-template-hash"] = hashed
            item = {
                "metadata": {
                    "name": name,
                    "labels": dict(template["metadata"]["labels"]),
                    "ownerReferences": [_owned_by(deployment)],
                },
                "spec": {"replicas": 0, "selector": spec["selector"], "template": template},
            }
            current = self._begun(sets, item, metadata["namespace"])
            self.put(sets, current)
        owned = {
            one["metadata"]["uid"]: one
            for one in self.items(sets, metadata["namespace"])
            if any(owner["uid"] == metadata["uid"] for owner in one["metadata"].get("ownerReferences", []))
        }
        pods = [
            pod
            for pod in self.items(pods_kind, metadata["namespace"])
            if any(owner["uid"] in owned for owner in pod["metadata"].get("ownerReferences", []))
            and "deletionTimestamp" not in pod["metadata"]
        ]
        uid = current["metadata"]["uid"]
        new = [pod for pod in pods if pod["metadata"]["ownerReferences"][0]["uid"] == uid]
        old = [pod for pod in pods if pod not in new]
        wanted = spec["replicas"]
        failure = None
        ready = [pod for pod in pods if _is_ready(pod)]
        for _ in range(min(wanted - len(new), wanted + 1 - len(pods) if old else wanted)):  # maxSurge is 1
            try:
                self._create_pod(current)
            except ApiFailure as error:
                failure = str(error)
                break
        idle = [pod for pod in old if not _is_ready(pod)]
        if old and (idle or len(ready) > wanted):  # maxUnavailable is 0
            self.end_pod(idle[0] if idle else old[0])
        for pod in new[wanted:]:
            self.end_pod(pod)
        self._report(deployment, pods, new, failure)

    def _fill_pools(self) -> None:
        for pool in self.items(self.kind("SandboxWarmPool")):
            metadata = pool["metadata"]
            name = pool["spec"]["sandboxTemplateRef"]["name"]
            template = self.get(self.kind("SandboxTemplate"), metadata["namespace"], name)
            owned = [
                pod
                for pod in self.items(self.kind("Pod"), metadata["namespace"])
                if any(one["uid"] == metadata["uid"] for one in pod["metadata"].get("ownerReferences", []))
            ]
            if template is not None and len(owned) < pool["spec"]["replicas"]:
                self._create_pod({**pool, "spec": {"template": template["spec"]["podTemplate"]}})

    def _answer_claims(self) -> None:
        for claim in self.items(self.kind("SandboxClaim")):
            if claim.get("status", {}).get("sandbox"):
                continue
            metadata, wanted = claim["metadata"], claim["spec"]["warmPoolRef"]["name"]
            pool = self.get(self.kind("SandboxWarmPool"), metadata["namespace"], wanted)
            ready: Object = {
                "type": "Ready",
                "status": "False",
                "reason": "SandboxNotReady",
                "message": "none is ready",
            }
            changed = copy.deepcopy(claim)
            if pool is None:
                ready |= {"reason": "WarmPoolNotFound", "message": f'SandboxWarmPool "{wanted}" not found'}
            for pod in self.items(self.kind("Pod"), metadata["namespace"]) if pool is not None else []:
                owners = pod["metadata"].get("ownerReferences", [])
                if owners and owners[0]["uid"] == pool["metadata"]["uid"] and _is_ready(pod):
                    taken = copy.deepcopy(pod)
                    more = claim["spec"].get("additionalPodMetadata", {})
                    for key in ("labels", "annotations"):
                        taken["metadata"][key] = {**taken["metadata"].get(key, {}), **more.get(key, {})}
                    taken["metadata"]["ownerReferences"] = [_owned_by(claim)]
                    changed["status"] = {"sandbox": {"name": pod["metadata"]["name"]}}
                    ready |= {"status": "True", "reason": "SandboxReady", "message": ""}
                    self.put(self.kind("Pod"), taken)
                    break
            changed["status"] = {**changed.get("status", {}), "conditions": [ready]}
            if changed != claim:
                self.put(self.kind("SandboxClaim"), changed)

    def _create_pod(self, owner: Object) -> None:
        template = copy.deepcopy(owner["spec"]["template"])
        metadata = {
            **template["metadata"],
            "generateName": f"{owner['metadata']['name']}-",
            "ownerReferences": [_owned_by(owner)],
        }
        kind = self.kind("Pod")
        pod = self._begun(kind, {"metadata": metadata, "spec": template["spec"]}, owner["metadata"]["namespace"])
        self._check_quota(pod)
        self.put(kind, pod)

    def _report(self, deployment: Object, pods: list[Object], new: list[Object], failure: str | None) -> None:
        ready = sum(_is_ready(pod) for pod in pods)
        conditions = [{"type": "Available", "status": "True" if ready >= deployment["spec"]["replicas"] else "False"}]
        if failure is not None:
            conditions.append(
                {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": failure}
            )
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(pods),
            "updatedReplicas": len(new),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "conditions": conditions,
        }
        if deployment.get("status") != status:
            changed = copy.deepcopy(deployment)
            changed["status"] = status
            self.put(self.kind("Deployment"), changed)

    def new_address(self) -> str:
        """Return an address of this machine that no other pod has."""
        self._addresses += 1
        number = self._addresses % (1 << 20)
        return f"127.{100 + (number >> 16)}.{(number >> 8) & 255}.{(number & 255) or 255}"

    def folder(self) -> Path:
        """Return where pods keep their logs."""
        return Path(self._folder.name)


class Kubelet:
    """Runs one pod: finds a node, pulls, starts, probes, restarts and ends its container."""

    def __init__(self, double: KubernetesDouble, pod: Object) -> None:
        self._double = double
        self.name = pod["metadata"]["name"]
        self._namespace = pod["metadata"]["namespace"]
        self.ip = double.new_address()
        self._runs = 0
        self._process: asyncio.subprocess.Process | None = None
        self._restarts = 0
        self._last: Object | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log_path(self, *, previous: bool = False) -> Path | None:
        run = self._runs - 1 if previous else self._runs
        return self._double.folder() / f"{self.name}-{run}.log" if run > 0 else None

    def exec_command(self, command: list[str]) -> list[str]:
        """Return what runs a command in the container."""
        engine = self._image.engine
        return command if engine is None else engine.argv("exec", "-i", self.name, *command)

    async def kill(self) -> None:
        """Kill the container."""
        if self._process is not None and self._process.returncode is None:
            if self._image.engine is not None:
                removing = await asyncio.create_subprocess_exec(
                    *self._image.engine.argv("rm", "-f", self.name),
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                )
                await removing.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def run(self) -> None:
        try:
            await self._run()
        except PodRemoved:
            await self.kill()
            self._double.forget(self.name, self._namespace)

    async def _run(self) -> None:
        await self._schedule()
        while True:
            await self._pull()
            variables = await self._configure()
            await self._start(variables)
            code = await self._follow()
            ended = {
                "exitCode": code if code >= 0 else 128 - code,
                "reason": "Completed" if code == 0 else "Error",
                "startedAt": self._started,
                "finishedAt": _now(),
            }
            self._last = {"terminated": ended}
            self._status(state=self._last, ready=False)
            if self._item()["spec"]["restartPolicy"] == "Never":
                self._change(phase="Succeeded" if code == 0 else "Failed")
                while True:
                    await self._pause(1.0)
            await self._pause(0.05)
            self._restarts += 1
            if self._restarts > 1:
                name = self._item()["spec"]["containers"][0]["name"]
                message = f"back-off 10s restarting failed container={name} pod={self.name}_{self._namespace}"
                self._waiting("CrashLoopBackOff", message)
                self._double.event(self._item(), "BackOff", message)
                await self._pause(BACKOFF_S)

    # The pod as it is stored; its removal, or a wish to end it, ends whatever goes on.

    def _pod(self) -> Object | None:
        return self._double.get(self._double.kind("Pod"), self._namespace, self.name)

    def _item(self) -> Object:
        pod = self._pod()
        if pod is None:
            raise PodRemoved
        return pod

    async def _pause(self, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            await self._check_end()
            await asyncio.sleep(min(left, 0.02))
        await self._check_end()

    async def _check_end(self) -> None:
        pod = self._item()
        deadline_s = pod["spec"].get("activeDeadlineSeconds")
        if deadline_s is not None and _age_s(pod) > deadline_s and pod["status"]["phase"] != "Failed":
            await self.kill()
            message = "Pod was active on the node longer than the specified deadline"
            self._change(phase="Failed", reason="DeadlineExceeded", message=message)
            await wait_until_async(lambda: "deletionTimestamp" in self._item()["metadata"], float("inf"))
        if "deletionTimestamp" in self._item()["metadata"]:
            await self._end()
            raise PodRemoved

    async def _end(self) -> None:
        """Let the container end: its preStop hook, SIGTERM, and SIGKILL when its time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._item()["metadata"]["deletionGracePeriodSeconds"]
        if self._process is None or self._process.returncode is not None:
            return
        hook = self._item()["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec")
        if hook is not None:
            done = await asyncio.create_subprocess_exec(*self.exec_command(hook["command"]))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(done.wait(), max(0.0, deadline - loop.time()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        while self._process.returncode is None and loop.time() < deadline:
            pod = self._pod()
            if pod is None:
                break
            deadline = min(deadline, loop.time() + pod["metadata"]["deletionGracePeriodSeconds"])
            if _is_ready(pod) and not await self._probe("readinessProbe"):
                self._status(state={"running": {"startedAt": self._started}}, ready=False)
            await asyncio.sleep(0.02)
        await self.kill()

    def _change(self, **fields: Any) -> None:
        pod = copy.deepcopy(self._item())
        pod["status"] = {**pod["status"], **fields}
        if pod != self._item():
            self._double.put(self._double.kind("Pod"), pod)

    def _condition(self, name: str, holds: bool, reason: str | None = None, message: str | None = None) -> None:
        condition = {"type": name, "status": "True" if holds else "False", "reason": reason, "message": message}
        conditions = {one["type"]: one for one in self._item()["status"].get("conditions", [])}
        conditions[name] = {key: value for key, value in condition.items() if value is not None}
        self._change(conditions=list(conditions.values()))

    def _status(self, *, state: Object, ready: bool, started: bool = True) -> None:
        container = self._item()["spec"]["containers"][0]
        status: Object = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": ready,
            "started": started,
            "restartCount": self._restarts,
            "state": state,
            "lastState": self._last if self._last is not None and self._last is not state else {},
        }
        phase = "Running" if self._runs else "Pending"
        addresses = {"podIP": self.ip, "podIPs": [{"ip": self.ip}]} if self._runs else {}
        self._change(phase=phase, containerStatuses=[status], **addresses)
        self._condition("ContainersReady", ready)
        self._condition("Ready", ready)

    def _waiting(self, reason: str, message: str | None = None) -> None:
        state = {"reason": reason, **({"message": message} if message else {})}
        self._status(state={"waiting": state}, ready=False, started=False)

    async def _schedule(self) -> None:
        told = None
        while True:
            shortages = [(node, self._shortage(node)) for node in self._double.nodes]
            free = [node for node, shortage in shortages if shortage is None]
            if free:
                pod = copy.deepcopy(self._item())
                pod["spec"]["nodeName"] = free[0].name
                self._double.put(self._double.kind("Pod"), pod)
                self._condition("PodScheduled", True)
                self._waiting("ContainerCreating")
                return
            count = len(shortages)
            reasons = [
                f"{sum(shortage == one for _, shortage in shortages)} {one}"
                for one in dict.fromkeys(w for _, w in shortages)
            ]
            message = f"0/{count} nodes are available: {', '.join(reasons)}."
            if message != told:
                self._condition("PodScheduled", False, "Unschedulable", message)
                self._double.event(self._item(), "FailedScheduling", message)
                told = message
            await self._pause(0.05)

    def _shortage(self, node: Node) -> str | None:
        spec = self._item()["spec"]
        wanted = spec["containers"][0].get("resources", {})
        needs = {**wanted.get("limits", {}), **wanted.get("requests", {})}
        if any(node.labels.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
            return "node(s) didn't match Pod's node affinity/selector"
        if node.taint and not any(one.get("key") == node.taint for one in spec.get("tolerations", [])):
            return f"node(s) had untolerated taint {{{node.taint}: }}"
        if _processors(str(needs.get("cpu", 0))) > node.cpu:
            return "Insufficient cpu"
        if int(needs.get("nvidia.com/gpu", 0)) > node.gpus:
            return "Insufficient nvidia.com/gpu"
        return None

    async def _pull(self) -> None:
        spec = self._item()["spec"]
        name = spec["containers"][0]["image"]
        while True:
            image = self._double.images.get(name)
            secrets_ = [one["name"] for one in spec.get("imagePullSecrets", [])]
            if image is not None and (image.pull_secret is None or image.pull_secret in secrets_):
                self._image = image
                return
            reason = "not found" if image is None else "pull access denied, insufficient_scope: authorization failed"
            text = f'failed to pull and unpack image "{name}": {reason}'
            self._waiting("ErrImagePull", f"rpc error: code = NotFound desc = {text}")
            self._double.event(self._item(), "Failed", f'Failed to pull image "{name}": {text}')
            await self._pause(BACKOFF_S)
            self._waiting("ImagePullBackOff", f'Back-off pulling image "{name}"')
            await self._pause(BACKOFF_S)

    async def _configure(self) -> dict[str, str]:
        """Return the variables of the container; wait, as a kubelet does, for a Secret that is missing."""
        while self._double.container_errors:
            self._waiting("CreateContainerConfigError", self._double.container_errors.pop(0))
            await self._pause(0.3)
        container = self._item()["spec"]["containers"][0]
        variables = {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
        for source in container.get("envFrom", []):
            name = source["secretRef"]["name"]
            while (secret := self._double.get(self._double.kind("Secret"), self._namespace, name)) is None:
                self._waiting("CreateContainerConfigError", f'secret "{name}" not found')
                await self._pause(0.05)
            for key, value in secret.get("data", {}).items():
                variables[key] = base64.b64decode(value).decode()
        return variables

    async def _start(self, variables: Mapping[str, str]) -> None:
        self._runs += 1
        path = self.log_path()
        assert path is not None
        args = self._item()["spec"]["containers"][0].get("args", [])
        words: list[str] = []
        for word in self._image.command:
            words += args if word == "{args}" else [word.replace("{ip}", self.ip)]
        if self._image.engine is not None:
            words = await asyncio.to_thread(self._run_container, self._image.engine, variables)
        with path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
                start_new_session=True,
            )
        if self._image.engine is not None:
            await self._await_container(self._image.engine)
        self._started = _now()
        self._status(state={"running": {"startedAt": self._started}}, ready=False, started=False)

    async def _await_container(self, engine: ContainerCli) -> None:
        """Wait until the engine runs the container or gave up: a pod that is `Running` can be entered."""
        assert self._process is not None
        state = ["inspect", "--format", "{{.State.Running}}", self.name]
        while self._process.returncode is None:
            found = await asyncio.to_thread(engine.run, *state)
            if found.stdout.strip() == b"true":
                return
            await self._pause(0.02)

    def _run_container(self, engine: ContainerCli, variables: Mapping[str, str]) -> list[str]:
        """Return what runs the pod's container with the rights, limits, volumes and network that the pod says."""
        pod = self._item()
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        security = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        limits = container.get("resources", {}).get("limits", {})
        image, options = container["image"], ["--name", self.name, "--hostname", spec.get("hostname", self.name)]
        variables = {**variables, "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        variables["KUBERNETES_SERVICE_PORT"] = str(self._double.port)
        if image == docker_backend.HOST_IMAGE:
            image = docker_backend.ensure_host_image(engine)
            variables |= docker_backend.host_environment()
            for mount in docker_backend.host_mounts():
                options += ["--mount", docker_backend.bind_option(mount)]
        options += ["--user", f"{security['runAsUser']}:{security['runAsGroup']}", "--log-driver", "none"]
        options += ["--read-only"] if security.get("readOnlyRootFilesystem") else []
        options += [word for one in security["capabilities"]["drop"] for word in ("--cap-drop", one)]
        options += ["--security-opt", "no-new-privileges"] if not security["allowPrivilegeEscalation"] else []
        profile = security["seccompProfile"]
        if profile["type"] == "Localhost":
            path = self._double.folder() / profile["localhostProfile"]
            options += ["--security-opt", f"seccomp={path}"]
        memory = limits["memory"].removesuffix("Mi")
        options += ["--memory", f"{memory}m", "--memory-swap", f"{memory}m"]
        options += ["--cpus", str(min(float(limits["cpu"]), os.cpu_count() or 1))]
        options += ["--network", "none" if self._is_cut_off(pod) else "host"]
        volumes = {one["name"]: one for one in spec.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            options += self._volume(pod, volumes[mount["name"]], mount)
        options += [word for key, value in variables.items() for word in ("--env", f"{key}={value}")]
        entry, *rest = container["command"]
        return engine.argv("run", "--rm", "--init=false", *options, "--entrypoint", entry, image, *rest)

    def _volume(self, pod: Object, volume: Object, mount: Object) -> list[str]:
        if "emptyDir" in volume:
            size = volume["emptyDir"]["sizeLimit"].removesuffix("Mi")
            return ["--tmpfs", f"{mount['mountPath']}:rw,exec,nosuid,nodev,mode=0777,size={size}m"]
        path = self._double.folder() / f"{self.name}-{mount['name']}"
        reference = volume["downwardAPI"]["items"][0]["fieldRef"]["fieldPath"]
        path.write_text(pod["metadata"]["annotations"][reference.split("'")[1]])
        path.chmod(0o644)
        return ["--mount", f"type=bind,source={path},target={mount['mountPath']},readonly"]

    def _is_cut_off(self, pod: Object) -> bool:
        """Say whether a network policy lets nothing out of a pod; the double keeps no other."""
        labels = pod["metadata"].get("labels", {})
        for policy in self._double.items(self._double.kind("NetworkPolicy"), self._namespace):
            selector = policy["spec"]["podSelector"].get("matchLabels", {})
            if selector.items() <= labels.items() and not policy["spec"].get("egress"):
                return True
        return False

    async def _follow(self) -> int:
        """Probe the container until it ends; return its exit code, as `subprocess` has it."""
        assert self._process is not None
        started = False
        while self._process.returncode is None:
            await self._check_end()
            started = started or await self._probe("startupProbe")
            ready = started and await self._probe("readinessProbe")
            if self._process.returncode is None and ready != _is_ready(self._item()):
                self._status(state={"running": {"startedAt": self._started}}, ready=ready, started=started)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), PROBE_S if not ready else 4 * PROBE_S)
        await self._check_end()
        return self._process.returncode

    async def _probe(self, name: str) -> bool:
        container = self._item()["spec"]["containers"][0]
        probe = container.get(name)
        if probe is None:
            return True
        port = next(one["containerPort"] for one in container["ports"] if one["name"] == probe["httpGet"]["port"])
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(self.ip, port), 1)
        except (OSError, asyncio.TimeoutError):
            return False
        try:
            path = probe["httpGet"]["path"]
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {self.ip}\r\nConnection: close\r\n\r\n".encode())
            line = await asyncio.wait_for(reader.readline(), probe["timeoutSeconds"])
            return b" 200 " in line
        except (OSError, asyncio.TimeoutError):
            return False
        finally:
            writer.close()


class PodRemoved(Exception):
    """The pod is gone, or is to go."""


def _processors(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def _uid() -> str:
    digits = secrets.token_hex(16)
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _age_s(pod: Object) -> float:
    created = datetime.strptime(pod["metadata"]["creationTimestamp"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return (datetime.now(timezone.utc) - created).total_seconds()


def _line(type: str, item: Object) -> bytes:
    return json.dumps({"type": type, "object": item}).encode() + b"\n"


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _owned_by(owner: Object) -> Object:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _merge(item: Object, changes: Object) -> Object:
    for key, value in changes.items():
        if value is None:
            item.pop(key, None)
        elif isinstance(value, dict) and isinstance(item.get(key), dict):
            _merge(item[key], value)
        else:
            item[key] = value
    return item


def _exec_status(code: int) -> Object:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    code = code if code > 0 else 128 - code
    causes = [{"reason": "ExitCode", "message": str(code)}]
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": causes},
    }


async def _first_of(*work: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
