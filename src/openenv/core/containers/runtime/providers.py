"""Facade: providers that start containers, and their base classes. Re-exports only."""

from __future__ import annotations

from openenv.providers.local_docker import LocalDockerProvider
from openenv.providers.provider import ContainerProvider, KubernetesProvider, RuntimeProvider
from openenv.providers.swarm import DockerSwarmProvider

__all__ = [
    "ContainerProvider",
    "DockerSwarmProvider",
    "KubernetesProvider",
    "LocalDockerProvider",
    "RuntimeProvider",
]
