"""Load on demand: exports at their first use, plugins from entry points, the installed version.

Knows import machinery only. Keeps `import openenv` as cheap as its lightest part.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import ModuleType
from typing import Any


def lazy_exports(
    module_name: str, table: Mapping[str, str], unlisted: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build `__getattr__`, `__dir__` and `__all__` for a module.

    Args:
        module_name: The exporting module's `__name__`.
        table: Exported name to the module that defines it. `module:name` is a name that differs there; `module:` is
            the module itself.
        unlisted: The same, for names outside `__all__`.
    """
    sources = {**table, **(unlisted or {})}
    _keep_modules_out(module_name, {name for name, source in sources.items() if not source.endswith(":")})

    def __getattr__(name: str) -> Any:
        try:
            source = sources[name]
        except KeyError:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}") from None
        module, colon, definition = source.partition(":")
        try:
            value: Any = importlib.import_module(module)
        except ModuleNotFoundError as exc:
            if (command := _install_command(exc.name or "")) is None:
                raise
            raise ModuleNotFoundError(f"{name} {command}", name=exc.name) from exc
        if definition or not colon:
            value = getattr(value, definition or name)
        setattr(sys.modules[module_name], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module_name]), *sources})

    return __getattr__, __dir__, list(table)


def _install_command(missing: str) -> str | None:
    """Say how to install a module that `openenv-client`, which has the clients only, leaves out."""
    if missing.startswith("openenv."):
        return f"is not part of openenv-client; run: pip install openenv=={load_package_version()}"
    if missing == "httpx2":
        return "needs an HTTP client; run: pip install 'openenv-client[http]'"
    return None


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


def plugin_loaders(group: str) -> dict[str, Callable[[], Any]]:
    """Return a loader for each name in an entry-point group, such as `openenv.commands`, in alphabetical order.

    Reads the metadata of all installed packages once. If several packages register the same name, the one of this
    package wins, so that installing a package cannot replace a built-in part.
    """
    from importlib.metadata import entry_points  # costs more than everything else here

    # Sorted by name, and within a name with ours last, because the last one stays in the dictionary.
    points = sorted(entry_points(group=group), key=lambda point: (point.name, point.value.startswith("openenv.")))
    return {point.name: point.load for point in points}


def plugin_names(group: str) -> list[str]:
    """Return the names registered in an entry-point group, such as `openenv.sandboxes`, in alphabetical order."""
    return list(plugin_loaders(group))


class UnknownPluginError(LookupError, ValueError):
    """No installed package registers the name; the message lists the registered names."""


@cache  # of the names that exist; an unknown one raises each time
def load_plugin(group: str, name: str, *, kind: str = "plugin") -> Any:
    """Import the object registered under a name in an entry-point group; a built-in part comes first.

    Args:
        group: The entry-point group, such as `openenv.sandboxes`.
        name: The registered name.
        kind: The noun for the part in the error message, such as `sandbox backend`.

    Raises:
        UnknownPluginError: No installed package registers the name.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # costs more than everything else here

    # Built-in parts win, so this package's metadata is read first: one file instead of one per installed package.
    for package in _DISTRIBUTIONS:
        try:
            points = distribution(package).entry_points.select(group=group, name=name)
        except PackageNotFoundError:
            continue
        for point in points:
            return point.load()
    loaders = plugin_loaders(group)
    if name not in loaders:
        from difflib import get_close_matches

        nearest = get_close_matches(name, loaders, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise UnknownPluginError(f"unknown {kind} {name!r}{hint}; choose from {', '.join(loaders) or 'none installed'}")
    return loaders[name]()


_DISTRIBUTIONS = ("openenv", "openenv-core")
"""This package's distribution, and its older name."""


def load_package_version() -> str:
    """Return the installed version of `openenv`, or of its older distribution name."""
    from importlib.metadata import PackageNotFoundError, version  # costs more than everything else here

    for name in (*_DISTRIBUTIONS, "openenv-client"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "0.0.0"
