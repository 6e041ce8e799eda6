"""FastMCP's knowledge of an environment's tools: shared between environments of one class, removed with each of them.

An environment defines its tools in its constructor, so each has new functions with the same code. To describe one takes
FastMCP a millisecond or more: a docstring parser, two JSON schemas. `share_descriptions` keeps the result per code
object, as long as everything that FastMCP reads from the function is the same.

FastMCP and its dependency injection keep signatures, validators and wrappers per function, for the whole process. A
tool is a bound method or a closure of its environment, so each entry keeps an environment alive with all its state: the
last 5,000 functions in `lru_cache`s, and every function that there ever was in plain dictionaries.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from pydantic_core import from_json, to_json

T = TypeVar("T")

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


# -- descriptions of tools --------------------------------------------------------------------------------------------

LOCAL: Final = "<locals>"  # in the name of an object that a function has made
_MAX_VARIANTS: Final = 8  # of one function: annotations that every constructor makes again must not pile up


SharedByCode = WeakKeyDictionary[CodeType, list[tuple[tuple[Any, ...], tuple[Any, ...], T]]]
"""Values derived from functions, each kept per code object for all functions that differ in nothing else.

With each value: what it was derived from beside the code, and the defaults, which are compared with care. Functions
whose annotations or defaults could hold an environment have no place here.
"""


def find_shared(table: SharedByCode[T], fn: Any, *source: Any) -> T | None:
    """Return the value of a function with the same code, annotations, defaults, and further source."""
    function = getattr(fn, "__func__", fn)
    if not _is_bare(function):
        return None
    for known, defaults, value in tuple(table.get(function.__code__, ())):
        if known == _source_of(fn, source) and same_values(defaults, _defaults_of(function)):
            return value
    return None


def keep_shared(table: SharedByCode[T], fn: Any, value: T, *source: Any) -> None:
    """Keep the value of a function that is not in the table yet."""
    function = getattr(fn, "__func__", fn)
    if _is_bare(function) and _is_plain(function):
        of_code = table.setdefault(function.__code__, [])
        of_code.append((_source_of(fn, source), _defaults_of(function), value))
        del of_code[:-_MAX_VARIANTS]


def _source_of(fn: Any, source: tuple[Any, ...]) -> tuple[Any, ...]:
    return (type(fn), tuple(fn.__annotations__.items()), *source)


def _defaults_of(function: FunctionType) -> tuple[Any, ...]:
    keywords = function.__kwdefaults__ or {}
    return (*(function.__defaults__ or ()), *keywords, *keywords.values())


_DESCRIBED: Final[SharedByCode[tuple[Any, bytes]]] = WeakKeyDictionary()


def share_descriptions() -> None:
    """Let FastMCP describe functions with the same code only once.

    FastMCP has no setting for this, so its `ParsedFunction.from_function` is replaced. In a version without it, nothing
    changes.
    """
    parsed = getattr(sys.modules.get("fastmcp.tools.function_parsing"), "ParsedFunction", None)
    method = getattr(parsed, "from_function", None)
    describe = getattr(method, "__func__", None)
    if parsed is not None and describe is not None and not hasattr(describe, "__wrapped__"):
        parsed.from_function = classmethod(_sharing(describe))


def _sharing(describe: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(describe)
    def shared(cls: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        source = (cls, getattr(fn, "__name__", ""), fn.__doc__, args, tuple(kwargs.items()))
        known = find_shared(_DESCRIBED, fn, *source)
        if known is not None:
            parsed, schemas = known
            input_schema, output_schema = from_json(schemas)  # FastMCP may change them; `deepcopy` takes much longer
            return dataclasses.replace(parsed, fn=fn, input_schema=input_schema, output_schema=output_schema)
        parsed = describe(cls, fn, *args, **kwargs)
        # A function with injected parameters stays alone: FastMCP changes it, and its dependencies may hold anything.
        if parsed.fn is fn and set(parsed.input_schema.get("properties", ())) == set(inspect.signature(fn).parameters):
            schemas = to_json([parsed.input_schema, parsed.output_schema], serialize_unknown=True)
            keep_shared(_DESCRIBED, fn, (dataclasses.replace(parsed, fn=None), schemas), *source)
        return parsed

    return shared


def _is_bare(function: Any) -> bool:
    """Whether the signature of a function is that of its own code."""
    return isinstance(function, FunctionType) and vars(function).keys().isdisjoint(("__wrapped__", "__signature__"))


def _is_plain(function: FunctionType) -> bool:
    """Whether neither a default nor an annotation of a function can hold an environment."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return all(default is None or isinstance(default, (str, int, float)) for default in defaults) and all(
        is_plain_annotation(annotation) for annotation in function.__annotations__.values()
    )


def is_plain_annotation(annotation: Any) -> bool:
    """Whether an annotation cannot hold an environment: a text, a class of a module, or a type made of such classes."""
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return LOCAL not in annotation.__qualname__
    # The text of an object that holds something else is <function ...> or <... object at 0x...>.
    return isinstance(annotation, str) or "<" not in repr(annotation).replace("<class '", "")


def same_values(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Compare defaults without calling foreign `__eq__`: the same objects, or plain values of equal type and value."""
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) and isinstance(a, (str, int, float)) and a == b)
        for a, b in zip(one, other, strict=True)
    )
