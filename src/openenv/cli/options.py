"""Options of a command as one dataclass: each field declares an option, and the command receives one object.

A command with many options would otherwise repeat each name up to three times: as a parameter, as an argument of the
next function, and as a field of the object that travels on. Here the declaration, the type and the default stand once:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class HelloFlags:
        name: Annotated[str, typer.Argument(metavar="NAME", help="Whom to greet.")]
        loud: Annotated[bool, typer.Option("--loud", help="Use capital letters.")] = False

    @options_of(HelloFlags)
    def hello(flags: HelloFlags) -> None: ...

A field may itself be such a dataclass: its options become options of the command, and several commands can share them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

_FlagsT = TypeVar("_FlagsT")
_ResultT = TypeVar("_ResultT")


def options_of(flags: type[_FlagsT]) -> Callable[[Callable[[_FlagsT], _ResultT]], Callable[..., _ResultT]]:
    """Turn a function of one dataclass into a command with an option per field.

    The command takes keyword arguments, so Python code can call it as well; omitted ones get the field's default.

    Args:
        flags: A dataclass whose fields are `Annotated[TYPE, typer.Option(...)]`, or dataclasses of that kind.
    """
    parameters = list(_parameters(flags))

    def decorate(function: Callable[[_FlagsT], _ResultT]) -> Callable[..., _ResultT]:
        @functools.wraps(function)
        def command(**values: Any) -> _ResultT:
            return function(_instance(flags, values))

        # Typer reads both: the signature for options and defaults, the annotations for types.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameters(flags: type) -> Iterator[inspect.Parameter]:
    """Yield a keyword-only parameter for each option, in the order of the fields, groups in their place."""
    for field, annotation in _fields(flags):
        if _is_group(annotation):
            yield from _parameters(annotation)
        else:
            yield inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=annotation
            )


def _instance(flags: type[_FlagsT], values: Mapping[str, Any]) -> _FlagsT:
    """Build the dataclass, with its groups, from the values of all options."""
    arguments: dict[str, Any] = {}
    for field, annotation in _fields(flags):
        if _is_group(annotation):
            arguments[field.name] = _instance(annotation, values)
        elif field.name in values:
            arguments[field.name] = values[field.name]
    return flags(**arguments)


def _fields(flags: type) -> Iterator[tuple[Field[Any], Any]]:
    # With `from __future__ import annotations`, `Field.type` is a text; the hints are the objects.
    hints = get_type_hints(flags, include_extras=True)
    for field in fields(flags):
        yield field, hints[field.name]


def _is_group(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return isinstance(annotation, type) and is_dataclass(annotation)


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty  # Typer asks for it
