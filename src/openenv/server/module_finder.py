"""An import finder with a table of names and places, for modules that other finders do not know by these names."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType


class ModuleTableFinder(importlib.abc.Loader):
    """Finds modules by a table of names and their files or folders.

    Three cases need it. `openenv serve my_env.py` loads a file under a new name. A folder with an invalid module name
    is loaded under its package's name. Code loaded as `server.app` imports its own package later, in a method. Parent
    packages of the names in the table are synthetic.

    A file below a folder of the table that is already loaded under another name is not loaded again: its second name
    gets the same module, hence the same classes.

    Args:
        places: Names, and their files or folders.
        yields: Whether all other finders are asked first for the names in the table.
    """

    def __init__(self, places: Mapping[str, str], *, yields: bool = False) -> None:
        self.places = dict(places)
        self._yields = yields
        self._packages = {name.rsplit(".", depth)[0] for name in places for depth in range(1, name.count(".") + 1)}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module in the table."""
        if path is not None and name.partition(".")[0] in self.places and (loaded := _loaded_already(name, path)):
            return importlib.machinery.ModuleSpec(name, self, loader_state=(loaded, loaded.__spec__))
        place = self.places.get(name)
        if place is None and name not in self._packages:
            return None
        if self._yields and self._is_known_elsewhere(name, path, target):
            return None
        if place is None:
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
        if not Path(place).is_dir():
            return importlib.util.spec_from_file_location(name, place)
        init = Path(place, "__init__.py")
        if init.is_file():
            return importlib.util.spec_from_file_location(name, init, submodule_search_locations=[place])
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [place]
        return spec

    def _is_known_elsewhere(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> bool:
        others = [finder for finder in sys.meta_path if not isinstance(finder, ModuleTableFinder)]
        return any(finder.find_spec(name, path, target) is not None for finder in others)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module that has this file already."""
        module: ModuleType = spec.loader_state[0]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the module, which keeps its first name; its code has run."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state[1]


def _loaded_already(name: str, path: Sequence[str]) -> ModuleType | None:
    """Return the module whose file this name would load."""
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None or not spec.has_location:
        return None
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == spec.origin and getattr(module, "__spec__", None) is not None:
            return module
    return None


def tabled_places() -> dict[str, str]:
    """Return the merged tables of all finders in this process, for another process to use."""
    tables = [finder.places for finder in sys.meta_path if isinstance(finder, ModuleTableFinder)]
    return {name: place for table in tables for name, place in table.items()}
