"""Modules found by a table of names and places, for code that no other finder knows by that name."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType


class ModuleTableFinder:
    """Finds modules by a table of names and their files or folders, after all other finders.

    A server may have loaded a file under a name that no finder knows, as `openenv serve my_env.py` does, or a folder
    whose name is no identifier under that of its package. Packages above the names in the table are synthetic.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = dict(places)
        self._packages = {name.rsplit(".", depth)[0] for name in places for depth in range(1, name.count(".") + 1)}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module that is in the table."""
        place = self.places.get(name)
        if place is None:
            return importlib.machinery.ModuleSpec(name, None, is_package=True) if name in self._packages else None
        if not Path(place).is_dir():
            return importlib.util.spec_from_file_location(name, place)
        init = Path(place, "__init__.py")
        if init.is_file():
            return importlib.util.spec_from_file_location(name, init, submodule_search_locations=[place])
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [place]
        return spec


def tabled_places() -> dict[str, str]:
    """Return the tables of all finders of this process, for another process that is to find the same."""
    tables = [finder.places for finder in sys.meta_path if isinstance(finder, ModuleTableFinder)]
    return {name: place for table in tables for name, place in table.items()}
