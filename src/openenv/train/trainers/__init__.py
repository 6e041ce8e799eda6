"""Adapters for trainers: TRL, Stable-Baselines3, SkyRL, veRL, verifiers.

An adapter is a module that is registered in the entry-point group `openenv.trainers`, so that other packages can add
one. Import an adapter by its path, or find it by name: `load_trainer("trl").tool_environment(url)`.
"""

from __future__ import annotations

from types import ModuleType

from openenv._lazy import load_plugin, plugin_names

TRAINERS = "openenv.trainers"  # entry points: modules


def trainer_names() -> list[str]:
    """Return the names of the installed adapters, such as `trl`."""
    return plugin_names(TRAINERS)


def load_trainer(name: str) -> ModuleType:
    """Import the adapter for a trainer.

    Raises:
        LookupError: No installed package registers the name.
        PackageUnavailable: The trainer that the adapter needs is not installed, or too old.
    """
    module = load_plugin(TRAINERS, name, kind="trainer")
    if not isinstance(module, ModuleType):
        raise TypeError(f"the entry point {name!r} in {TRAINERS} must be a module, not {type(module).__name__}")
    return module
