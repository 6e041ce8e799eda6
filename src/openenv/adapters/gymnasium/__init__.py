"""Gymnasium in both directions: serve an environment of Gymnasium, or use a served environment as one.

Needs the extra `gymnasium`. Each name loads its dependencies on first use.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from openenv._lazy import lazy_exports
from openenv.errors import install_command

if find_spec("gymnasium") is None:
    raise ModuleNotFoundError(
        f"openenv.adapters.gymnasium needs Gymnasium: {install_command('gymnasium')}", name="gymnasium"
    )

if TYPE_CHECKING:
    from .gymnasium_env import GymnasiumEnv as GymnasiumEnv
    from .gymnasium_env import GymnasiumVectorEnv as GymnasiumVectorEnv
    from .served_gymnasium import gymnasium_environment as gymnasium_environment

__getattr__: Any
__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "GymnasiumEnv": "openenv.adapters.gymnasium.gymnasium_env",
        "GymnasiumVectorEnv": "openenv.adapters.gymnasium.gymnasium_env",
        "gymnasium_environment": "openenv.adapters.gymnasium.served_gymnasium",
    },
)
