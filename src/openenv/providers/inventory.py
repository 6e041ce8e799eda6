"""What providers and sandboxes have started and still runs, here and in a cluster: for `openenv ps` and `openenv gc`.

Everything that is started names its owner, the process that started it:

    containers, services   the label `openenv.owner`          processes    the variable `OPENENV_OWNER`
    local sandboxes        the name of their control group    kubernetes   the annotation `openenv.owner`
    clouds                 the label `openenv-owner`

A leftover belongs to a process that has certainly ended, or its time (`ttl_s`) is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from openenv import settings
from openenv.errors import ProviderError, ProviderUnavailable, SandboxError, SandboxUnavailable
from openenv.providers import guardian
from openenv.providers.cloud import CloudProvider
from openenv.providers.kubernetes import servers_in
from openenv.providers.local_docker import PROVIDER_LABEL
from openenv.providers.provider import provider_class
from openenv.providers.server_process import GRACE_S, OWNER_VARIABLE
from openenv.sandboxes.cluster import Cluster, ClusterAddress, OwnedObject
from openenv.sandboxes.container_cli import OWNER_LABEL, ContainerCli, failure_of, installed_engines
from openenv.sandboxes.host import ProcessOwner
from openenv.sandboxes.kubernetes import delete_sandbox, sandboxes_in
from openenv.sandboxes.local import cgroups

Place = Literal[
    "docker", "podman", "swarm", "process", "local", "kubernetes", "daytona", "modal", "novita", "aca", "huggingface"
]
Cloud = Literal["daytona", "modal", "novita", "aca", "huggingface"]
CLOUDS: tuple[Cloud, ...] = ("daytona", "modal", "novita", "aca", "huggingface")
PLACES: tuple[Place, ...] = ("docker", "podman", "swarm", "process", "local", "kubernetes", *CLOUDS)
_REMOVE_S = 20.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class InventoryItem:
    """A running server or sandbox, or its remains."""

    place: Place
    use: Literal["server", "sandbox"]
    name: str
    what: str
    """The image or the command."""
    address: str
    created: datetime | None
    owner: ProcessOwner | None
    is_leftover: bool
    remove: Callable[[], None] = field(compare=False, repr=False)
    """Ends and removes it; raises RuntimeError with the reason on failure."""


@dataclass(frozen=True, slots=True)
class ResourceInventory:
    """The servers and sandboxes, and notes about places that did not answer."""

    items: list[InventoryItem]
    notes: list[str]


def take_inventory(
    places: tuple[Place, ...] = PLACES,
    address: ClusterAddress | None = None,
    *,
    everywhere: bool = False,
    needs_cluster: bool = False,
) -> ResourceInventory:
    """List running servers and sandboxes, and leftovers.

    Args:
        places: The places to search. By default, clouds are asked only if their account is in the environment.
        address: The cluster, and the namespace in it.
        everywhere: Whether to look into all namespaces.
        needs_cluster: Whether a cluster that is not configured is worth a note.
    """
    are_named = places != PLACES
    inventory = ResourceInventory([], [])
    sources: dict[tuple[Place, ...], Callable[[], Iterator[InventoryItem]]] = {
        ("docker", "podman", "swarm"): partial(_containers, places, inventory.notes),
        ("process",): _processes,
        ("local",): _local_sandboxes,
        ("kubernetes",): partial(_cluster_objects, address or ClusterAddress(), everywhere),
        **{(cloud,): partial(_cloud_sandboxes, cloud, are_named) for cloud in CLOUDS},
    }
    for kinds, source in sources.items():
        if not set(kinds) & set(places):
            continue
        try:
            inventory.items.extend(source())
        except (ProviderUnavailable, SandboxUnavailable) as error:
            if (kinds[0] == "kubernetes" and needs_cluster) or (kinds[0] in CLOUDS and are_named):
                inventory.notes.append(str(error))
        except (ProviderError, SandboxError) as error:
            inventory.notes.append(f"{kinds[0]}: {error}")
    return inventory


# -- containers and services -------------------------------------------------------------------------------------------


def _containers(places: tuple[Place, ...], notes: list[str]) -> Iterator[InventoryItem]:
    for engine in installed_engines("auto", None):
        if engine.kind not in places and not (engine.kind == "docker" and "swarm" in places):
            continue
        try:
            engine.check()
        except SandboxError as error:
            notes.append(str(error))
            continue
        if engine.kind in places:
            names = engine.output("ps", "-aq", "--no-trunc", "--filter", f"label={OWNER_LABEL}").split()
            for details in _inspected(engine, "container", names):
                yield _container(engine, details)
        if engine.kind == "docker" and "swarm" in places:
            yield from _services(engine)


def _inspected(engine: ContainerCli, kind: str, names: list[str]) -> list[dict[str, Any]]:
    if not names:
        return []
    done = engine.run("inspect", "--type", kind, *names)  # fails if one has ended meanwhile; the output has the others
    try:
        listed: list[dict[str, Any]] = json.loads(done.stdout or b"[]")
    except ValueError:
        return []
    return listed


def _container(engine: ContainerCli, details: dict[str, Any]) -> InventoryItem:
    labels = details["Config"].get("Labels") or {}
    owner = ProcessOwner.parse(labels.get(OWNER_LABEL, ""))
    published = (details.get("NetworkSettings") or {}).get("Ports") or {}
    ports = [
        f"{binding['HostIp']}:{binding['HostPort']}" for bindings in published.values() for binding in bindings or ()
    ]
    name = str(details["Name"]).lstrip("/")

    def remove() -> None:
        problem = engine.remove(name, within_s=_REMOVE_S)
        if problem is not None:
            raise ProviderError(problem)

    return InventoryItem(
        place=engine.kind,
        use="server" if PROVIDER_LABEL in labels else "sandbox",
        name=name,
        what=str(details["Config"].get("Image") or details.get("ImageName") or ""),
        address=", ".join(dict.fromkeys(ports)),
        created=_time(str(details.get("Created", ""))),
        owner=owner,
        is_leftover=owner is not None and owner.is_dead(),
        remove=remove,
    )


def _services(engine: ContainerCli) -> Iterator[InventoryItem]:
    listing = engine.run("service", "ls", "--quiet", "--filter", f"label={OWNER_LABEL}")
    if listing.returncode != 0:  # this engine is in no swarm
        return
    for details in _inspected(engine, "service", listing.stdout.decode().split()):
        spec = details["Spec"]
        owner = ProcessOwner.parse(spec.get("Labels", {}).get(OWNER_LABEL, ""))
        name = str(spec["Name"])

        def remove(name: str = name) -> None:
            done = engine.run("service", "rm", name)
            if done.returncode != 0 and "not found" not in failure_of(done):
                raise ProviderError(failure_of(done))

        yield InventoryItem(
            place="swarm",
            use="server",
            name=name,
            what=str(spec["TaskTemplate"]["ContainerSpec"]["Image"]),
            address="",
            created=_time(str(details.get("CreatedAt", ""))),
            owner=owner,
            is_leftover=owner is not None and owner.is_dead(),
            remove=remove,
        )


def _time(text: str) -> datetime | None:
    """Read a time as engines write it, with nanoseconds: `2026-11-16T13:39:05.123456789Z`."""
    match = re.match(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.\d+)?\s*(Z|[+-]\d\d:?\d\d)?", text)
    if match is None:
        return None
    zone = (match[3] or "Z").replace("Z", "+0000").replace(":", "")
    return datetime.strptime(f"{match[1]} {match[2]} {zone}", "%Y-%m-%d %H:%M:%S %z")


# -- processes ---------------------------------------------------------------------------------------------------------


def _processes() -> Iterator[InventoryItem]:
    """Yield the process groups of servers. A guardian leads each group; if it was killed, the server is a leftover."""
    if sys.platform != "linux":
        return
    groups: dict[int, list[_Process]] = {}
    for name in os.listdir("/proc"):
        process = _Process.read(int(name)) if name.isdigit() else None
        if process is not None:
            groups.setdefault(process.group, []).append(process)
    for group, members in sorted(groups.items()):
        leader = next((one for one in members if one.pid == group), None)
        if leader is not None and not leader.is_guardian:
            continue  # a server started it in a new group, and it inherited the variable
        server = min((one for one in members if not one.is_guardian), key=lambda one: one.pid, default=None)
        main_process = server or members[0]
        port = re.search(r"--port[ =](\d+)", main_process.command)
        yield InventoryItem(
            place="process",
            use="server",
            name=str(main_process.pid),
            what=main_process.command,
            address=f"127.0.0.1:{port[1]}" if port else "",
            created=main_process.created,
            owner=main_process.owner,
            is_leftover=main_process.owner.is_dead(),
            remove=partial(_end_group, group),
        )


@dataclass(frozen=True, slots=True)
class _Process:
    """A process with the variable of an owner."""

    pid: int
    group: int
    command: str
    owner: ProcessOwner
    created: datetime

    @property
    def is_guardian(self) -> bool:
        return Path(guardian.__file__).name in self.command and "openenv" in self.command

    @classmethod
    def read(cls, pid: int) -> _Process | None:
        """Return a process of this user that has the variable; None for ended and other processes."""
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            prefix = f"{OWNER_VARIABLE}=".encode()
            text = next((one for one in environ.split(b"\0") if one.startswith(prefix)), None)
            owner = None if text is None else ProcessOwner.parse(text.removeprefix(prefix).decode("utf-8", "replace"))
            if owner is None:
                return None
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            created = datetime.fromtimestamp(os.stat(f"/proc/{pid}").st_ctime, timezone.utc)
            return cls(pid, os.getpgid(pid), command, owner, created)
        except OSError:
            return None


def _end_group(group: int) -> None:
    """End a process group: gently, then by force."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        deadline = time.monotonic() + patience_s
        try:
            os.killpg(group, number)
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(_LOOK_S)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise ProviderError(f"the processes of group {group} belong to another user") from error
    raise ProviderError(f"the processes of group {group} do not end")


# -- local sandboxes ---------------------------------------------------------------------------------------------------


def _local_sandboxes() -> Iterator[InventoryItem]:
    """Yield the control groups of local sandboxes; their processes end with their owner."""
    hierarchy = cgroups.find()
    for name, owner in hierarchy.names():
        folder = hierarchy.parents[0] / name
        created = None
        with contextlib.suppress(OSError):
            created = datetime.fromtimestamp(folder.stat().st_ctime, timezone.utc)
        group = cgroups.Group(tuple(parent / name for parent in hierarchy.parents), hierarchy.version)
        yield InventoryItem(
            place="local",
            use="sandbox",
            name=name.rpartition("~")[2],
            what="bubblewrap",
            address="",
            created=created,
            owner=owner,
            is_leftover=owner.is_dead(),
            remove=partial(group.remove, within_s=_REMOVE_S),
        )


# -- clusters ----------------------------------------------------------------------------------------------------------


def _cluster_objects(address: ClusterAddress, everywhere: bool) -> Iterator[InventoryItem]:
    cluster = Cluster(address, error=ProviderError, unavailable=ProviderUnavailable)
    try:
        servers = servers_in(cluster, everywhere=everywhere)
        yield from (_cluster_object(address, resource, "server") for resource in servers)
        yield from (
            _cluster_object(address, resource, "sandbox") for resource in sandboxes_in(cluster, everywhere=everywhere)
        )
    finally:
        cluster.close()


def _cluster_object(address: ClusterAddress, resource: OwnedObject, use: Literal["server", "sandbox"]) -> InventoryItem:
    return InventoryItem(
        place="kubernetes",
        use=use,
        name=resource.name,
        what=resource.image,
        address=f"{resource.name}.{resource.namespace}.svc" if use == "server" else resource.namespace,
        created=resource.created,
        owner=resource.owner,
        is_leftover=resource.is_leftover,
        remove=partial(_delete_from_cluster, address, resource, use),
    )


def _delete_from_cluster(address: ClusterAddress, resource: OwnedObject, use: Literal["server", "sandbox"]) -> None:
    from lightkube.resources.core_v1 import Service

    there = ClusterAddress(address.kubeconfig, address.context, resource.namespace)
    cluster = Cluster(there, error=ProviderError, unavailable=ProviderUnavailable)
    try:
        if use == "server":
            cluster.delete(Service, resource.name)
        else:
            delete_sandbox(cluster, resource.name)
    finally:
        cluster.close()


# -- clouds ------------------------------------------------------------------------------------------------------------


def _cloud_sandboxes(cloud: Cloud, is_named: bool) -> Iterator[InventoryItem]:
    accounts = {
        "daytona": settings.daytona_api_key(),
        "novita": settings.novita_api_key(),
        "aca": settings.azure_sandbox_group(),
    }
    if not is_named and not accounts.get(cloud):
        return
    cloud_class = cast("type[CloudProvider[Any]]", provider_class(cloud))
    provider = cloud_class.for_account()
    for sandbox in provider.labelled():
        yield InventoryItem(
            place=cloud,
            use=sandbox.use,
            name=sandbox.name,
            what=sandbox.what,
            address="",
            created=_time(sandbox.created or ""),
            owner=sandbox.owner,
            is_leftover=sandbox.owner is not None and sandbox.owner.is_dead(),
            remove=sandbox.delete,
        )
