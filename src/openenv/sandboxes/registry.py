"""Backends by name.

Knows where each backend lives and imports it when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from openenv.sandboxes.base import Sandboxes

_BACKENDS = {
    "local": ("openenv.sandboxes.local", "LocalSandboxes"),
    "docker": ("openenv.sandboxes.docker", "DockerSandboxes"),
    "e2b": ("openenv.sandboxes.e2b", "E2BSandboxBackend"),
    "process": ("openenv.sandboxes.process", "ProcessSandboxes"),
}
BACKENDS = tuple(_BACKENDS)
"""The names that `backend` knows."""


def backend(name: str, **options: Any) -> Sandboxes:
    """Return the backend of that name.

    Args:
        name: `local`, `docker`, `e2b` or `process`. The last isolates nothing, and has to be asked for with
            `i_know_there_is_no_isolation=True`.
        **options: What the backend's class takes.

    Raises:
        ValueError: There is no backend of that name.
        SandboxUnavailable: `process` was asked for without that option, or a package is missing.
    """
    try:
        module, attribute = _BACKENDS[name]
    except KeyError:
        raise ValueError(f"There is no sandbox backend {name!r}; there are {', '.join(BACKENDS)}.") from None
    return cast(Sandboxes, getattr(importlib.import_module(module), attribute)(**options))
