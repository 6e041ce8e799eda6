"""Legacy server names: those of `openenv.core.env_server`, whose factories here also accept an instance.

An instance is one shared environment, stateful over plain HTTP, as in `openenv-core` 0.1. Models may be dataclasses.
"""

from __future__ import annotations

import importlib
import sys

from openenv._lazy import by_module, lazy_exports, submodules
from openenv.core.env_server import __all__ as _current_names

_LEGACY = by_module(
    {
        "openenv_core.env_server.http_server": "HTTPEnvServer create_app create_fastapi_app",
        "openenv_core.env_server.types": "Action Observation State",
    }
)
_CURRENT = {name: "openenv.core.env_server" for name in _current_names if name not in _LEGACY}
# Modules that import no web framework. `route_config` imports one and is a separate file.
_ALIASES = "base_transforms exceptions interfaces mcp_environment mcp_types serialization web_interface"

for _name in _ALIASES.split():
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"openenv.core.env_server.{_name}")

__getattr__, __dir__, _names = lazy_exports(__name__, {**_CURRENT, **_LEGACY, **submodules(__name__, "types")})
__all__ = [*_CURRENT, *_LEGACY]
