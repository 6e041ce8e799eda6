"""Entry point of the command line: finds the commands, turns failures into exit codes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import typer

from openenv import settings
from openenv._lazy import load_plugin, plugin_loaders
from openenv.protocol.redaction import redact_handlers
from openenv.sandboxes.host import raise_file_limit

from .command import HelpCommand, HelpGroup

# How a command is found, so that `openenv ps` loads one module of this package:
#
#   openenv ps ──> metadata of this package: openenv.commands / ps ──> import openenv.cli.ps
#                  │ no such name
#                  └──> metadata of all packages ──> a command of another package
#                       │ no such name
#                       └──> every command is imported, and Typer reports the mistake
GROUP = "openenv.commands"
"""The entry-point group of commands: each is a function, or a Typer group. Other packages may add theirs."""

# The titles in `openenv --help`, each with its commands in the order in which a user meets them.
_PANELS = {
    "Write": ("init", "validate", "client", "build", "import", "skills"),
    "Serve": ("serve", "mcp", "gateway", "push", "fork", "deploy"),
    "Run and train": ("play", "train", "rollouts", "collect", "harbor", "replay"),
    "Look": ("view", "discover", "catalog"),
    "Operate": ("doctor", "ps", "gc", "sandboxes"),
}
_PANEL_OF = {name: title for title, names in _PANELS.items() for name in names}
_ORDER = list(_PANEL_OF)
# Commands of other packages come last.
_OTHERS = "Other packages"

_EXAMPLES = """
Write an RL environment once, serve it, step it from fast typed clients.

  openenv init my_env              create an environment package
  openenv serve my_env             serve it, with a page to play it by hand
  openenv play URL --model NAME    let a model play it
  openenv rollouts run task.yaml   let a coding agent work on a task
  openenv view                     browse the rollouts

`openenv COMMAND --help` explains a command, with examples.
"""


class _Root(HelpGroup):
    """The program itself: its help lists the commands in the order of their panels."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(
            super().list_commands(ctx), key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)
        )


def build(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the command line; if the arguments name a command, load only that one.

    While a shell completes a command line, a variable contains the words so far.
    """
    # Completion: `openenv rollouts <TAB>` runs `openenv` without arguments, and the words are in variables.
    arguments = settings.completion_words() or arguments
    app = typer.Typer(
        name="openenv",
        cls=_Root,
        help=_EXAMPLES,
        no_args_is_help=True,
        rich_markup_mode=None,  # `command` writes the help; mistakes are plain lines
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},  # sub-commands inherit it
    )
    # Without a callback, an app with a single loaded command would run it without its name.
    app.callback(invoke_without_command=True)(_root)
    for name, command in _commands(arguments).items():
        panel = _PANEL_OF.get(name, _OTHERS)
        # `rollouts`, `harbor`, `deploy`, `skills`, `sandboxes` and `catalog` are groups.
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, cls=HelpCommand, rich_help_panel=panel)(command)
    return app


def _commands(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the command that the arguments name, or all commands if they name none.

    `openenv ps` imports `ps` only; `openenv --help` and a mistyped name import every command.
    """
    if list(arguments[:1]) == ["doctor"]:  # it must also run if the installation's metadata is damaged
        from .doctor import doctor

        return {"doctor": doctor}
    # LookupError: a mistyped name. With all commands loaded, Typer reports the mistake.
    with contextlib.suppress(LookupError):
        return {name: load_plugin(GROUP, name) for name in arguments[:1] if not name.startswith("-")} or _all_commands()
    return _all_commands()


def _all_commands() -> dict[str, Any]:
    """Import every registered command; a broken one of another package is reported and left out."""
    commands = {}
    for name, load in plugin_loaders(GROUP).items():
        try:
            commands[name] = load()
        except Exception as exc:  # another package's import: it must not take our commands away
            print(f"Note: the command {name!r} cannot be loaded: {exc}", file=sys.stderr)
    # A checkout on the path without an installation has no entry points.
    if not commands:
        raise RuntimeError("no commands are registered: install openenv again, from its checkout or wheel")
    return commands


def _root(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        import openenv

        typer.echo(f"openenv {openenv.__version__}")
        raise typer.Exit


def __getattr__(name: str) -> typer.Typer:
    """Build `app`, the whole command line, for code that imports it; the program itself loads one command only."""
    # A module attribute would be built at import, which would load every command for each call of the program.
    if name == "app":
        return build()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> int:
    """Run the command line; Ctrl-C exits with 130, any failure with 1 and one line on stderr."""
    # Exit codes, for scripts:
    #
    #   0    success          2    a wrong option or argument (Typer)
    #   1    a failure        130  Ctrl-C          143  SIGTERM, in commands with `tidy_on_sigterm`
    #
    # Single commands add more, such as `openenv validate`.
    if sys.argv[1:2] != ["doctor"]:  # `doctor` reports the limit that other programs get
        raise_file_limit()
    redact_handlers([], settings.secret_values())  # warnings of commands that configure no log
    try:
        build(sys.argv[1:])(standalone_mode=True)
    except SystemExit as stop:
        # As the interpreter does: None is success, and any object that is not a number is a failure.
        if stop.code is None:
            return 0
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 130
    # The boundary of the program: one line instead of a traceback.
    except Exception as exc:
        print(f"Error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
