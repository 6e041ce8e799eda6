"""Gymnasium, both ways: serve any of its environments, and use a served environment as one of its own.

Needs the extra `gymnasium`. Each name loads what it needs at its first use.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from openenv._lazy import lazy_exports

if find_spec("gymnasium") is None:
    raise ModuleNotFoundError(
        "openenv.adapters.gymnasium needs Gymnasium: pip install 'openenv[gymnasium]'", name="gymnasium"
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
