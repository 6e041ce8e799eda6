"""Facade: providers that start containers, and their base classes. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.providers.kubernetes import KubernetesProvider as KubernetesProvider
from openenv.providers.local_docker import LocalDockerProvider as LocalDockerProvider
from openenv.providers.provider import ContainerProvider as ContainerProvider
from openenv.providers.provider import RuntimeProvider as RuntimeProvider
from openenv.providers.swarm import DockerSwarmProvider as DockerSwarmProvider

export_imports(__name__)
