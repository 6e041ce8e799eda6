"""Facade: providers on the module path that existing code imports. The code lives in `openenv.providers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

_NAMES = "ContainerProvider DockerSwarmProvider KubernetesProvider LocalDockerProvider RuntimeProvider UVProvider"

if TYPE_CHECKING:  # the names above, for type checkers
    from openenv.providers import ContainerProvider as ContainerProvider
    from openenv.providers import DockerSwarmProvider as DockerSwarmProvider
    from openenv.providers import KubernetesProvider as KubernetesProvider
    from openenv.providers import LocalDockerProvider as LocalDockerProvider
    from openenv.providers import RuntimeProvider as RuntimeProvider
    from openenv.providers import UVProvider as UVProvider

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, by_module({"openenv.providers": _NAMES}))
