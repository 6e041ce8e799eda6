"""`openenv import`: make a package from an environment of another interface, with the importers of `importers/`."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

from .command import OldName, printable
from .init import Names, ScaffoldError, corrected


def import_env(
    source: Path = typer.Argument(
        ..., metavar="SOURCE", help="Folder of the source code, or a Python file.", show_default=False
    ),
    name: str | None = typer.Option(
        None, "--name", "-n", metavar="NAME", help="The package's name; by default that of SOURCE."
    ),
    output_dir: Path = typer.Option(
        Path(),
        "--output",
        "-o",
        OldName("--output-dir"),
        metavar="FOLDER",
        help="Parent of the new folder; by default the current folder.",
    ),
    env_class: str | None = typer.Option(
        None, "--env-class", metavar="CLASS", help="The class, or module:class, if SOURCE has several environments."
    ),
    source_type: str | None = typer.Option(
        None, "--type", metavar="TYPE", help="Look for environments of this kind only: ors or verifiers."
    ),
) -> None:
    """Make a package from an environment for ORS or for verifiers.

        openenv import ../gsm8k --name gsm8k_env
        openenv serve gsm8k_env

    ORS: a class on Environment of ors (ors-sdk) or openreward. An action calls a tool; its reward comes with the reply.
    verifiers: a taskset of 0.4 or newer. An action is the model's answer.

    The command copies the source code into the package, without files that look like secrets. It never runs it.
    """
    from .importers import DEFAULT_IMPORTERS, ImporterRegistry, ImportProblem
    from .importers.base import secrets_in

    # Resolved, because the name of `.` or `..` is needed for the package.
    source = source.resolve()
    if not source.is_dir() and not (source.is_file() and source.suffix == ".py"):
        raise typer.BadParameter(f"not a folder or Python file: {source}", param_hint="SOURCE")
    try:
        package = _package_name(name, source)
        folder = output_dir / package
        importer, environment = ImporterRegistry(DEFAULT_IMPORTERS).choose(
            source, source_type=source_type, env_class=env_class
        )
        importer.generate(source=source, destination=folder, env_name=package, detected=environment)
    # No or several environments, an invalid name, a folder with files: all are corrected on the command line.
    except (ImportProblem, ScaffoldError) as error:
        raise typer.BadParameter(printable(error)) from None
    typer.echo(f"Made {folder} of {environment.qualified_name} ({environment.source_type}).")
    # The environment may need one of these files at run time.
    if left_out := secrets_in(source):
        typer.secho(
            f"Not copied, because they may hold secrets: {printable(', '.join(left_out))}", fg="yellow", err=True
        )
    place = shlex.quote(str(folder))
    typer.echo("\nInstall what it needs, serve it, check it:\n")
    typer.echo(f"  pip install -e {place}")
    typer.echo(f"  openenv serve {place}")
    typer.echo(f"  python -m pytest {place}")
    typer.echo(f"  openenv validate {place}")


def _package_name(name: str | None, source: Path) -> str:
    """Return the package's name: `--name`, or one derived from the source's name."""
    if name is not None:
        return Names.of(name).package
    # my-maze gives my_maze; 2048 gives nothing.
    better = corrected(source.stem if source.is_file() else source.name)
    if better is None:
        raise ScaffoldError(f"{source.name!r} is not a valid package name; set --name")
    return better
