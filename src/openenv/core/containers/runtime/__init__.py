"""Facade: providers. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.providers import ContainerProvider as ContainerProvider
    from openenv.providers import DockerSwarmProvider as DockerSwarmProvider
    from openenv.providers import KubernetesProvider as KubernetesProvider
    from openenv.providers import LocalDockerProvider as LocalDockerProvider
    from openenv.providers import RuntimeProvider as RuntimeProvider
    from openenv.providers import UVProvider as UVProvider

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.providers": """
                ContainerProvider DockerSwarmProvider KubernetesProvider LocalDockerProvider
                RuntimeProvider UVProvider
            """
            }
        ),
    )
