"""Options of a command as one dataclass: each field declares an option, and the command receives one object.

A command with many options would otherwise repeat each name up to three times: as a parameter, as an argument of the
next function, and as a field of the object that travels on. Here the declaration, the type and the default stand once:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class HelloFlags:
        name: Annotated[str, typer.Argument(metavar="NAME", help="Whom to greet.")]
        loud: Annotated[bool, typer.Option("--loud", help="Use capital letters.")] = False

    @options_of(HelloFlags)
    def hello(flags: HelloFlags) -> None: ...

A field may itself be a dataclass with options, which become options of the command; several commands can share them.
`Annotated[GROUP, Panel("Title")]` lists them in the help below that title.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

import typer

if TYPE_CHECKING:
    from openenv.sandboxes.cluster import ClusterAddress

_FlagsT = TypeVar("_FlagsT")
_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True)
class Panel:
    """The title in the help of a group of options."""

    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags:
    """Options that choose a Kubernetes cluster, for every command that reads one."""

    kubeconfig: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The cluster's configuration; kubectl's by default.")
    ] = None
    context: Annotated[
        str | None, typer.Option(metavar="NAME", help="The context in that file; the current one by default.")
    ] = None
    namespace: Annotated[str | None, typer.Option(metavar="NAME", help="The namespace; the context's by default.")] = (
        None
    )

    @property
    def is_set(self) -> bool:
        """Whether the user named a cluster or a part of one."""
        return any(value is not None for value in (self.kubeconfig, self.context, self.namespace))

    def address(self) -> ClusterAddress:
        """Return the cluster's address."""
        from openenv.sandboxes.cluster import ClusterAddress

        return ClusterAddress(self.kubeconfig, self.context, self.namespace)


def options_of(flags: type[_FlagsT]) -> Callable[[Callable[[_FlagsT], _ResultT]], Callable[..., _ResultT]]:
    """Turn a function of one dataclass into a command with an option per field.

    The command takes keyword arguments, so Python code can call it as well; omitted ones get the field's default.

    Args:
        flags: A dataclass with fields `Annotated[TYPE, typer.Option(...)]`, or groups of them.
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


def _parameters(flags: type, panel: str | None = None) -> Iterator[inspect.Parameter]:
    """Yield a keyword-only parameter for each option, in the order of the fields, groups in their place."""
    for field, kind, declaration in _fields(flags):
        if _is_group(kind):
            yield from _parameters(kind, declaration.title if isinstance(declaration, Panel) else panel)
            continue
        if panel is not None and declaration.rich_help_panel is None:
            declaration = copy.copy(declaration)  # another command may list the same group without a title
            declaration.rich_help_panel = panel
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=Annotated[kind, declaration],
        )


def _instance(flags: type[_FlagsT], values: Mapping[str, Any]) -> _FlagsT:
    """Build the dataclass, with its groups, from the values of all options."""
    arguments: dict[str, Any] = {}
    for field, kind, _ in _fields(flags):
        if _is_group(kind):
            arguments[field.name] = _instance(kind, values)
        elif field.name in values:
            arguments[field.name] = values[field.name]
    return flags(**arguments)


def _fields(flags: type) -> Iterator[tuple[Field[Any], Any, Any]]:
    """Yield each field with its type and the `typer.Option`, `typer.Argument` or `Panel` that annotates it."""
    # With `from __future__ import annotations`, `Field.type` is a text; the hints are the objects.
    hints = get_type_hints(flags, include_extras=True)
    for field in fields(flags):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            kind, declaration = get_args(hint)[:2]
            yield field, kind, declaration
        else:
            yield field, hint, None


def _is_group(kind: object) -> TypeGuard[type]:
    return isinstance(kind, type) and is_dataclass(kind)


def _default(field: Field[Any]) -> Any:
    """Return the default as a signature has it; without one, Typer asks for the option."""
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty
