"""Options of a command as one dataclass: each field declares an option, and the command receives one object.

A command with many options would otherwise repeat each name up to three times: as a parameter, as an argument of the
next function, and as a field of the object that travels on. Here the declaration, the type and the default stand once:

    @flags_class
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
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard, TypeVar, cast, get_args, get_origin, get_type_hints

import typer
from typing_extensions import dataclass_transform

from openenv.protocol.addresses import is_loopback

if TYPE_CHECKING:
    from openenv.sandboxes.cluster import ClusterAddress

_FlagsT = TypeVar("_FlagsT")
_ResultT = TypeVar("_ResultT")


# Type checkers treat a class below `@flags_class` as a frozen dataclass with keyword-only fields, although at run time
# nothing freezes it.
@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def flags_class(cls: type[_FlagsT]) -> type[_FlagsT]:
    """Make a class a dataclass of options: immutable, with keyword arguments only.

    Each generated method is compiled at import, and every start of the program waits for it. Nothing compares or prints
    options, and the type checker keeps them from being changed, so only `__init__` is generated.
    """
    return dataclass(kw_only=True, eq=False, repr=False)(cls)


@dataclass(frozen=True, slots=True)
class Panel:
    """The title in the help of a group of options."""

    title: str


@flags_class
class AccessFlags:
    """Options of authentication, for commands that serve."""

    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="Require this token. Prefer OPENENV_TOKEN: other users of this machine can read options.",
        ),
    ] = None
    agent_token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="A second token, for agents: it can only call tools.")
    ] = None
    observer_token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="A third token, for observers: it can only read.")
    ] = None
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Never create a token, not even for an address that others can reach.")
    ] = False

    # When a token is created, for `serve` and `gateway`:
    #
    #   host             token options          created
    #   127.0.0.1        none                   no: only this machine can connect
    #   127.0.0.1        agent or observer      yes: without it, strangers could do more than these roles
    #   0.0.0.0, others  none                   yes, and printed
    #   any              --token, --no-token    no
    def spare_token(self, host: str) -> str | None:
        """Create an orchestrator's token if the server needs one and the options have none.

        A server needs one if other machines reach it, or if another role has a token: without it, everybody could do
        more than that role may.
        """
        if self.no_token and (self.token or self.agent_token or self.observer_token):
            raise typer.BadParameter("it contradicts the other token options", param_hint="--no-token")
        has_roles = self.agent_token is not None or self.observer_token is not None
        needs_token = not self.no_token and (not is_loopback(host) or has_roles)
        return secrets.token_urlsafe(24) if needs_token and self.token is None else None


@flags_class
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
    # From fields to a command line and back:
    #
    #   class ServeFlags:           the signature             values              the function's object
    #       target: str       ──>   (target, token)   ──>     {"token": "x"} ──>  ServeFlags(
    #       access: AccessFlags     groups are flattened                              ".", AccessFlags("x"))
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
    for option, kind, declaration in _fields(flags):
        # A group without a title takes the panel of the group around it.
        if _is_group(kind):
            yield from _parameters(kind, declaration.title if isinstance(declaration, Panel) else panel)
            continue
        if panel is not None and declaration.rich_help_panel is None:
            declaration = copy.copy(declaration)  # another command may list the same group without a title
            declaration.rich_help_panel = panel
        # `inspect.Signature` refuses a name that two groups of a command declare.
        yield inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(option),
            annotation=Annotated[kind, declaration],
        )


def _instance(flags: type[_FlagsT], values: Mapping[str, Any]) -> _FlagsT:
    """Build the dataclass, with its groups, from the values of all options."""
    arguments: dict[str, Any] = {}
    for option, kind, _ in _fields(cast("Hashable", flags)):
        if _is_group(kind):
            arguments[option.name] = _instance(kind, values)
        # Python callers may leave options out; then the dataclass fills in the default.
        elif option.name in values:
            arguments[option.name] = values[option.name]
    return flags(**arguments)


@functools.cache
def _fields(flags: type) -> tuple[tuple[Field[Any], Any, Any], ...]:
    """Return each field with its type and the `typer.Option`, `typer.Argument` or `Panel` that annotates it.

    Cached, because commands share groups, and the start of the program waits for the evaluation of annotations.
    """
    # With `from __future__ import annotations`, `Field.type` is a text; the hints are the objects.
    hints = get_type_hints(flags, include_extras=True)
    result = []
    for option in fields(flags):
        hint = hints[option.name]
        kind, declaration = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
        result.append((option, kind, declaration))
    return tuple(result)


def _is_group(kind: object) -> TypeGuard[type]:
    return isinstance(kind, type) and is_dataclass(kind)


def _default(option: Field[Any]) -> Any:
    """Return the default as a signature has it; without one, Typer asks for the option."""
    if option.default is not MISSING:
        return option.default
    if option.default_factory is not MISSING:
        # A new list: two commands must not share a default.
        return option.default_factory()
    return inspect.Parameter.empty
