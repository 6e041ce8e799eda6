"""Exports of modules: tables of names that are resolved on first use, and modules that only re-export.

Knows import machinery only. Keeps `import openenv` as cheap as its lightest part.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any


def lazy_exports(
    module_name: str, table: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build `__getattr__`, `__dir__` and `__all__` for a module.

    Args:
        module_name: The exporting module's `__name__`.
        table: Exported name to the module that defines it. A value that ends in `:` exports the module itself.
    """
    _keep_modules_out(module_name, {name for name, source in table.items() if source == f"{module_name}.{name}"})

    def __getattr__(name: str) -> Any:
        try:
            source = table[name]
        except KeyError:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}") from None
        if source.endswith(":"):
            value: Any = importlib.import_module(source[:-1])
        else:
            value = getattr(importlib.import_module(source), name)
        setattr(sys.modules[module_name], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module_name]), *table})

    return __getattr__, __dir__, list(table)


def by_module(names: Mapping[str, str]) -> dict[str, str]:
    """Build a table of exports from the names of each module, separated by blanks."""
    return {name: module for module, text in names.items() for name in text.split()}


def submodules(package: str, names: str) -> dict[str, str]:
    """Build a table that exports a package's modules themselves, from their names separated by blanks."""
    return {name: f"{package}.{name}:" for name in names.split()}


def _keep_modules_out(module_name: str, names: Collection[str]) -> None:
    """Keep a submodule from replacing the export of the same name when it is imported."""
    if not names:
        return

    class Package(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            if name not in names or not isinstance(value, ModuleType):
                super().__setattr__(name, value)

    sys.modules[module_name].__class__ = Package


def export_imports(module_name: str) -> None:
    """Set `__all__` of a module to the names that it imports.

    Type checkers recognise them by the form `from source import Name as Name`, so that no name is listed twice.
    """
    module = vars(sys.modules[module_name])
    helpers = {"annotations", export_imports.__name__}
    module["__all__"] = [name for name in module if not name.startswith("_") and name not in helpers]
