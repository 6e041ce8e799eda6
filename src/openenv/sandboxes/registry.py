"""Backends by name.

Knows where each backend of ours lives, and imports one when it is asked for; others are named by module and class.
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
        name: `local`, `docker`, `e2b` or `process`, or a backend of your own as `module:Class`. `process` isolates
            nothing, and has to be asked for with `i_know_there_is_no_isolation=True`. A name with a module imports
            it: pass on no name that came from others.
        **options: What the backend's class takes.

    Raises:
        ValueError: There is no backend of that name.
        SandboxUnavailable: `process` was asked for without that option, or a package is missing.
    """
    if ":" in name:
        return _foreign(name, **options)
    try:
        module, attribute = _BACKENDS[name]
    except KeyError:
        known = ", ".join(BACKENDS)
        raise ValueError(f"There is no sandbox backend {name!r}; there are {known}, and `module:Class`.") from None
    return cast(Sandboxes, getattr(importlib.import_module(module), attribute)(**options))


def _foreign(name: str, **options: Any) -> Sandboxes:
    """Return a backend that is not ours."""
    place, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another one
        raise ValueError(f"There is no module {place!r}, which the sandbox backend {name!r} is to be in.") from None
    made = getattr(module, attribute, None)
    if not (isinstance(made, type) and issubclass(made, Sandboxes)):
        raise ValueError(f"{name} is no sandbox backend: a class made from `openenv.sandboxes.Sandboxes`.")
    return made(**options)
