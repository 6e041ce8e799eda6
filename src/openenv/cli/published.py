"""Commands on the module paths of the published package: `openenv.cli.commands.build.build`, and `app` that runs it.

Each module there has the command of its name, and `app`, a command line of that one command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import typer

from .command import HelpCommand


def command_exports(
    module_name: str, sources: Mapping[str, str], *, app: str | None = None, unlisted: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build `__getattr__`, `__dir__` and `__all__` for a module of `openenv.cli.commands`.

    The module of a command is imported on first use.

    Args:
        module_name: The `__name__` of the module.
        sources: Name of the command to the module that defines it.
        app: The command or group that `app` runs; None if the published module has no `app`.
        unlisted: Names of other packages that the command uses from here, where existing tests patch them.
    """
    # Each module ends with:
    #
    #   __getattr__, __dir__, __all__ = command_exports(__name__, {"build": "openenv.cli.build"}, app="build")
    names = [*sources, *(["app"] if app is not None else [])]
    modules = {**sources, **(unlisted or {})}

    def __getattr__(name: str) -> Any:
        definition = app if name == "app" and app is not None else name
        if definition not in modules:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        value = getattr(import_module(modules[definition]), definition)
        if name == "app" and not isinstance(value, typer.Typer):  # a group is a Typer already
            value = _command_line(value)
        # The next access finds the attribute itself and does not call `__getattr__` again.
        setattr(sys.modules[module_name], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module_name]), *names})

    return __getattr__, __dir__, names


def _command_line(command: Callable[..., Any]) -> typer.Typer:
    """Return a command line of one command, which users call without the command's name."""
    line = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    line.command(cls=HelpCommand)(command)
    return line
