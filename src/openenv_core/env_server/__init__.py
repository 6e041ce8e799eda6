"""Legacy server names: as `openenv.core.env_server`, except that the factories also take an instance.

An instance is served as the first release did: one shared environment, stateful over plain HTTP. Models may be
dataclasses, as they were then.
"""

from __future__ import annotations

import importlib
import sys

from openenv._lazy import lazy_exports
from openenv.core.env_server import __all__ as _current_names

_LEGACY = {
    **dict.fromkeys(("HTTPEnvServer", "create_app", "create_fastapi_app"), "openenv_core.env_server.http_server"),
    **dict.fromkeys(("Action", "Observation", "State"), "openenv_core.env_server.types"),
}
_CURRENT = {name: "openenv.core.env_server" for name in _current_names if name not in _LEGACY}
_SUBMODULES = {"types": f"{__name__}.types:"}

# What needs no web framework; `route_config` does and is a file of its own.
for _name in (
    "base_transforms",
    "exceptions",
    "interfaces",
    "mcp_environment",
    "mcp_types",
    "serialization",
    "web_interface",
):
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"openenv.core.env_server.{_name}")

__getattr__, __dir__, _names = lazy_exports(__name__, {**_CURRENT, **_LEGACY, **_SUBMODULES})
__all__ = [*_CURRENT, *_LEGACY]
