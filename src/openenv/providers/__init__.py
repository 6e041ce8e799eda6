"""Providers: start a server somewhere and return its address: as a process, under uv, in containers, in clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "ContainerProvider": "openenv.providers.provider",
    "RuntimeProvider": "openenv.providers.provider",
    "provider_named": "openenv.providers.provider",
    "KubernetesProvider": "openenv.providers.kubernetes",
    "IngressRoute": "openenv.providers.kubernetes_objects",
    "ProcessProvider": "openenv.providers.server_process",
    "UVProvider": "openenv.providers.uv",
    "LocalDockerProvider": "openenv.providers.local_docker",
    "DockerSwarmProvider": "openenv.providers.swarm",
    "DaytonaProvider": "openenv.providers.daytona",
    "ModalProvider": "openenv.providers.modal",
    "NovitaSandboxProvider": "openenv.providers.novita",
    "ACASandboxProvider": "openenv.providers.aca",
    "HFSandboxProvider": "openenv.providers.hf_sandbox",
    "RayCluster": "openenv.providers.ray_cluster",
    "RayProvider": "openenv.providers.ray",
    "wait_for_ready": "openenv.providers.health",
}

if TYPE_CHECKING:  # the table above, for type checkers
    from openenv.providers.aca import ACASandboxProvider as ACASandboxProvider
    from openenv.providers.daytona import DaytonaProvider as DaytonaProvider
    from openenv.providers.health import wait_for_ready as wait_for_ready
    from openenv.providers.hf_sandbox import HFSandboxProvider as HFSandboxProvider
    from openenv.providers.kubernetes import KubernetesProvider as KubernetesProvider
    from openenv.providers.kubernetes_objects import IngressRoute as IngressRoute
    from openenv.providers.local_docker import LocalDockerProvider as LocalDockerProvider
    from openenv.providers.modal import ModalProvider as ModalProvider
    from openenv.providers.novita import NovitaSandboxProvider as NovitaSandboxProvider
    from openenv.providers.provider import ContainerProvider as ContainerProvider
    from openenv.providers.provider import RuntimeProvider as RuntimeProvider
    from openenv.providers.provider import provider_named as provider_named
    from openenv.providers.ray import RayProvider as RayProvider
    from openenv.providers.server_process import ProcessProvider as ProcessProvider
    from openenv.providers.swarm import DockerSwarmProvider as DockerSwarmProvider
    from openenv.providers.uv import UVProvider as UVProvider

    from .ray_cluster import RayCluster as RayCluster

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
