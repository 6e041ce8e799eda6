"""What FastMCP's caches keep of an environment's tools, and how a closed environment gets out of them.

FastMCP and its dependency injection keep signatures, validators and wrappers per function, for the whole process. A
tool is a bound method or a closure of its environment, so each entry keeps an environment alive with all its state: the
last 5,000 functions in `lru_cache`s, and every function that there ever was in plain dictionaries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

# Not every release has all of them. They can be cleared at any time: FastMCP fills them again.
_LRU_CACHES: Final = (
    ("fastmcp.utilities.types", "get_cached_typeadapter"),
    ("fastmcp.server.dependencies", "without_injected_parameters"),
    ("fastmcp.server.sessions", "session_id_parameter_names"),
    ("fastmcp.tools.function_tool", "_wrap_body_errors"),
)
# Only entries of closed environments may be removed: other threads look whether a key is there, and then take it.
_TABLES: Final = (
    ("uncalled_for.introspection", "_signature_cache"),
    ("uncalled_for.introspection", "_parameter_cache"),
    ("uncalled_for.annotations", "_metadata_cache"),
    ("uncalled_for.annotations", "_annotation_cache"),
)


def forget_functions(functions: Iterable[Callable[..., Any]], *, with_wrappers: bool) -> None:
    """Remove functions from FastMCP's caches.

    Args:
        functions: The functions of an environment that is closed.
        with_wrappers: Whether FastMCP may have wrapped them, as it does when it calls them.
    """
    tables = list(_found(_TABLES))
    forgotten = _with_referred(functions)
    while forgotten:
        wrappers = _wrappers_of(forgotten, tables) if with_wrappers else []
        for function in forgotten:
            for table in tables:
                table.pop(function, None)
        forgotten = wrappers
    for cached in _found(_LRU_CACHES):
        cached.cache_clear()


def _found(names: Iterable[tuple[str, str]]) -> Iterator[Any]:
    for module, name in names:
        cache = getattr(sys.modules.get(module), name, None)
        if cache is not None:
            yield cache


def _with_referred(functions: Iterable[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Return functions, the functions that they wrap or close over, and their dependencies' functions."""
    result: dict[int, Callable[..., Any]] = {}
    waiting: list[Any] = list(functions)
    while waiting:
        function = waiting.pop()
        if id(function) not in result and isinstance(function, (FunctionType, MethodType, partial)):
            result[id(function)] = function
            waiting += _referred(function)
    return list(result.values())


def _referred(function: Callable[..., Any]) -> Iterator[Any]:
    yield getattr(function, "__wrapped__", None)
    yield getattr(function, "func", None)  # of a partial
    yield from _closed_over(function)
    # `Depends(factory)` is a parameter's default, or stands in its annotation.
    annotations = getattr(function, "__annotations__", {}).values()
    dependencies = [metadata for annotation in annotations for metadata in getattr(annotation, "__metadata__", ())]
    dependencies += getattr(function, "__defaults__", None) or ()
    dependencies += (getattr(function, "__kwdefaults__", None) or {}).values()
    for dependency in dependencies:
        yield from getattr(dependency, "__dict__", {}).values()


def _wrappers_of(functions: list[Callable[..., Any]], tables: list[dict[Any, Any]]) -> list[Callable[..., Any]]:
    """Find the functions in the tables that close over one of these."""
    wrapped = {id(function) for function in functions}
    keys = {id(key): key for table in tables for key in list(table)}
    return [
        key
        for identity, key in keys.items()
        if identity not in wrapped and any(id(value) in wrapped for value in _closed_over(key))
    ]


def _closed_over(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue
