"""Entry point of the command line: builds the commands, turns failures into exit codes."""

from __future__ import annotations

import sys

import typer

from .mcp import mcp
from .rollouts import rollouts
from .sandboxes import sandboxes
from .serve import serve
from .top import top

app = typer.Typer(
    name="openenv",
    help="Write an RL environment once, serve it, step it from fast typed clients.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("serve")(serve)
app.command("mcp")(mcp)
app.command("top")(top)
app.add_typer(rollouts, name="rollouts")
app.add_typer(sandboxes, name="sandboxes")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        import openenv

        typer.echo(f"openenv {openenv.__version__}")
        raise typer.Exit


def main() -> int:
    """Run the command line; Ctrl-C exits with 130, any failure with 1 and one line on stderr."""
    try:
        app(standalone_mode=True)
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
