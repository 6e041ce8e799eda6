"""Legacy name of `openenv.core`: adds the stateful HTTP server and the shared environment of `openenv-core` 0.1.

Models may be dataclasses, as in that release. The import warns; new code imports `openenv`.
"""

from __future__ import annotations

import importlib
import sys
import warnings

from openenv._lazy import by_module, lazy_exports, submodules
from openenv.core import __all__ as _core_names

warnings.warn(
    "openenv_core is the old name of openenv.core; import from openenv or openenv.core instead",
    DeprecationWarning,
    stacklevel=2,
)

_LEGACY = by_module(
    {
        "openenv_core.env_server": "Action Observation State HTTPEnvServer create_app create_fastapi_app",
        "openenv_core.http_env_client": "HTTPEnvClient StepResult",
    }
)
_CORE = {name: "openenv.core" for name in _core_names if name not in _LEGACY}
_SUBMODULES = submodules(__name__, "env_server http_env_client")

for _name in ("client_types", "containers", "env_client", "rubrics", "tools", "utils"):
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"openenv.core.{_name}")

__getattr__, __dir__, _names = lazy_exports(__name__, {**_CORE, **_LEGACY, **_SUBMODULES})
__all__ = [*_CORE, *_LEGACY]
