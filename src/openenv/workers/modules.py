"""Importing in a worker what its server has imported in ways of its own.

A server may have loaded a file under a name that nobody finds (`openenv serve my_env.py`), and the program itself is
`__main__` there. Knows the import system only.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from ..runners.process.messages import MAIN_MODULE


class GivenFiles:
    """Finds modules by a table of names and files, after all other finders; packages above them are made up."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files
        self._packages = {name.rsplit(".", depth)[0] for name in files for depth in range(1, name.count(".") + 1)}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module that is in the table."""
        file = self._files.get(name)
        if file is not None:
            return importlib.util.spec_from_file_location(name, file)
        if name in self._packages:
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
        return None


def install(files: Mapping[str, str], main: str | None) -> None:
    """Make modules importable, and load the program's file under the names by which pickles know it."""
    if files:
        sys.meta_path.append(GivenFiles(files))
    if main is not None:
        # The same names as in a process that multiprocessing has spawned: the program's `if __name__` guard holds.
        spec = importlib.util.spec_from_file_location(MAIN_MODULE, main)
        if spec is None or spec.loader is None:
            raise ImportError(f"{main} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules["__main__"] = sys.modules[MAIN_MODULE] = module
        spec.loader.exec_module(module)
