"""Entry point of the command line: builds the commands, turns failures into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from openenv import settings
from openenv.sandboxes.descriptors import raise_file_limit

from .command import HelpCommand, HelpGroup

COMMANDS = (
    *("init", "serve", "client", "gateway", "validate", "build", "deploy", "mcp", "top", "ps", "gc"),
    *("push", "fork", "catalog", "discover"),
    *("play", "replay", "rollouts", "harbor", "view", "collect", "skills", "sandboxes", "doctor"),
    "import",
)
"""Each is a function, or a Typer group, in the module of its name."""
_MODULES = {"import": "import_env"}
"""Of a command whose name cannot be that of a module."""

_EXAMPLES = """
Write an RL environment once, serve it, step it from fast typed clients.

  openenv init my_env              make a new environment package
  openenv serve my_env.py          serve the environment in a file
  openenv client URL               write a typed client of a server
  openenv top                      watch the server on this machine
  openenv ps                       list the servers and sandboxes that run
  openenv play URL --model NAME    let a model play a served environment
  openenv replay FILE URL          play a recorded episode again, and compare
  openenv rollouts run task.yaml   let a coding agent work on a task
  openenv view                     look at what it did, in the browser
  openenv collect URL -o FOLDER    keep a teacher's episodes as a dataset
  openenv skills add --claude      teach this command line to a coding agent
  openenv push                     put a package on the Hugging Face Hub
  openenv doctor                   show what is missing on this machine

`openenv COMMAND --help` explains each one, with examples.
"""


def build(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the command line; if the arguments name a command, only that one is loaded.

    A shell that completes a command line says in a variable what is on it so far.
    """
    arguments = settings.completion_words() or arguments
    app = typer.Typer(
        name="openenv",
        cls=HelpGroup,
        help=_EXAMPLES,
        no_args_is_help=True,
        rich_markup_mode=None,  # `command` writes the help; mistakes are plain lines
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},  # sub-commands take it over
    )
    app.callback(invoke_without_command=True)(_root)
    for name in [name for name in COMMANDS if name in arguments[:1]] or COMMANDS:
        module = _MODULES.get(name, name)
        command = getattr(import_module(f"openenv.cli.{module}"), module)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, cls=HelpCommand)(command)
    return app


def _root(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        import openenv

        typer.echo(f"openenv {openenv.__version__}")
        raise typer.Exit


def __getattr__(name: str) -> typer.Typer:
    """Build `app`, the whole command line, for those who import it; the program itself loads one command only."""
    if name == "app":
        return build()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> int:
    """Run the command line; Ctrl-C exits with 130, any failure with 1 and one line on stderr."""
    if sys.argv[1:2] != ["doctor"]:  # which reports the limit as other programs get it
        raise_file_limit()
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
