"""What classes say of themselves: their full names, and the arguments that they give to a generic base."""

from __future__ import annotations

import sys
import typing
from typing import Any


def generic_arguments(cls: type[Any], base: type[Any]) -> tuple[Any, ...]:
    """Resolve `Base[A, B]` through a class hierarchy; open arguments are `TypeVar`s, no arguments at all are `()`.

    Example: with `class Parent(Base[A, Text], Generic[A])` and `class Own(Parent[Move])`, the arguments of `Own` are
    `(Move, Text)`: the search passes `{A: Move}` down to the bases of `Parent`. Names in quotes are looked up in the
    module of the class that has them.
    """

    def search(cls: type[Any], known: dict[Any, Any]) -> tuple[Any, ...]:
        for parent in vars(cls).get("__orig_bases__", ()):
            origin = typing.get_origin(parent)
            if not isinstance(origin, type) or not issubclass(origin, base):
                continue
            arguments = tuple(known.get(one, _looked_up(one, cls)) for one in typing.get_args(parent))
            if origin is base:
                return arguments
            parameters = getattr(origin, "__parameters__", ())
            if result := search(origin, dict(zip(parameters, arguments, strict=False))):
                return result
        for parent in cls.__bases__:
            if parent is not object and (result := search(parent, {})):
                return result
        return ()

    return search(cls, {})


def _looked_up(argument: Any, cls: type[Any]) -> Any:
    if not isinstance(argument, typing.ForwardRef):
        return argument
    return getattr(sys.modules.get(cls.__module__), argument.__forward_arg__, argument)


def class_path(cls: Any) -> str:
    """Return the name of a class with its module, without importing that."""
    return f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', '')}"
