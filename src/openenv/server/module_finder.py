"""An import finder with a table of names and places, for modules that other finders do not know by these names."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType


class ModuleTableFinder:
    """Finds modules by a table of names and their files or folders, after all other finders.

    Two cases need it. `openenv serve my_env.py` loads a file under a new name. A folder with an invalid module name is
    loaded under its package's name. Parent packages of the names in the table are synthetic.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = dict(places)
        self._packages = {name.rsplit(".", depth)[0] for name in places for depth in range(1, name.count(".") + 1)}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module in the table."""
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
    """Return the merged tables of all finders in this process, for another process to use."""
    tables = [finder.places for finder in sys.meta_path if isinstance(finder, ModuleTableFinder)]
    return {name: place for table in tables for name, place in table.items()}
