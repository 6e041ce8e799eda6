"""Entry point of the command line: builds the commands, turns failures into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

COMMANDS = ("serve", "mcp", "top", "rollouts", "sandboxes")
"""Each lies in a module of its name, under its name: a function, or a group of further commands."""


def build(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the command line; where the arguments name a command, with only that one loaded."""
    app = typer.Typer(
        name="openenv",
        help="Write an RL environment once, serve it, step it from fast typed clients.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},  # sub-commands take it over
    )
    app.callback(invoke_without_command=True)(_root)
    for name in [name for name in COMMANDS if name in arguments[:1]] or COMMANDS:
        command = getattr(import_module(f"openenv.cli.{name}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _root(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        import openenv

        typer.echo(f"openenv {openenv.__version__}")
        raise typer.Exit


def main() -> int:
    """Run the command line; Ctrl-C exits with 130, any failure with 1 and one line on stderr."""
    try:
        build(sys.argv[1:])(standalone_mode=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 130
    except Exception as exc:
        print(f"Error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
