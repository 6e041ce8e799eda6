"""Legacy server names: as `openenv.core.env_server`, except that the factories also take an instance.

An instance is served as the first release did: one shared environment, stateful over plain HTTP.
"""

from __future__ import annotations

import importlib
import sys

from openenv._lazy import lazy_exports
from openenv.core.env_server import __all__ as _current

_LEGACY = dict.fromkeys(("HTTPEnvServer", "create_app", "create_fastapi_app"), "openenv_core.env_server.http_server")

for _name in ("base_transforms", "exceptions", "interfaces", "serialization", "types"):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"openenv.core.env_server.{_name}")

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {**{name: "openenv.core.env_server" for name in _current if name not in _LEGACY}, **_LEGACY}
)
