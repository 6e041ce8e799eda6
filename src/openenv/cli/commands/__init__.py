"""Facade: the commands on the module paths of the published package. No logic of a command is here.

Each module has the command of its name, and `app`, a command line of that one command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import typer

from openenv._lazy import lazy_exports, submodules
from openenv.cli.command import HelpCommand

_COMMANDS = "build catalog collect fork harbor import_env init push serve skills validate"
__getattr__, __dir__, __all__ = lazy_exports(__name__, submodules(__name__, _COMMANDS))


def published_names(
    module_name: str, sources: Mapping[str, str], *, app: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build `__getattr__`, `__dir__` and `__all__` for a module of this package; commands are imported on first use.

    Args:
        module_name: The module's `__name__`.
        sources: Name to `module:attribute`.
        app: Which of `sources` is a command or a group that `app` runs; None where the published module has no `app`.
    """
    names = [*sources, *(["app"] if app is not None else [])]

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        module, _, attribute = sources[app if name == "app" and app is not None else name].partition(":")
        value = getattr(import_module(module), attribute)
        if name == "app" and not isinstance(value, typer.Typer):
            value = _command_line(value)
        setattr(sys.modules[module_name], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module_name]), *names})

    return __getattr__, __dir__, names


def _command_line(command: Callable[..., Any]) -> typer.Typer:
    """Return a command line of one command, whose name is not written."""
    line = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    line.command(cls=HelpCommand)(command)
    return line
