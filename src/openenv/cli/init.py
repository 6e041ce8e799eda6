"""`openenv init`: a new environment package that can be served at once.

Knows options and what to do next; the files are the scaffold's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import typer

_LOCK_S = 60.0
_HELP = """
Make a new environment package: a small environment that runs, a typed client, tests, and a Dockerfile.

    openenv init maze_env
    openenv serve maze_env

NAME is the name of the Python package; the folder of that name is made where you are, or in --output-dir. Then edit
models.py and server/NAME_environment.py.
"""


def init(
    name: str = typer.Argument(..., metavar="NAME", help="The package's name, such as maze_env."),
    output_dir: Path = typer.Option(
        Path(), "--output-dir", "-o", help="Where to make its folder; by default where you are."
    ),
) -> None:
    from .scaffold import Names, ScaffoldError, write_package

    try:
        names = Names.of(name)
        folder = output_dir / name
        written = write_package(names, folder)
    except ScaffoldError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None
    typer.echo(f"Made {folder} with {len(written)} files.")
    warning = _lock(folder)
    if warning:
        typer.secho(f"No uv.lock: {warning}", fg="yellow", err=True)
    _show_next(names.package, names.prefix, folder)


init.__doc__ = _HELP


def _lock(folder: Path) -> str | None:
    """Write `uv.lock` where uv is installed; return why there is none."""
    uv = shutil.which("uv")
    if uv is None:
        return "uv is not installed. That does no harm; `uv lock` makes one later."
    try:
        done = subprocess.run(
            [uv, "lock"],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOCK_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"`uv lock` took more than {_LOCK_S:g} s. That does no harm; run it later."
    except OSError as error:
        return f"`uv lock` cannot be run ({error}). That does no harm."
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        return f"`uv lock` failed ({words[-1].strip() if words else done.returncode}). That does no harm; run it later."
    return None


def _show_next(package: str, prefix: str, folder: Path) -> None:
    """Print three commands that can be copied as they are."""
    place = shlex.quote(str(folder))
    parent = os.path.relpath(folder.parent)
    inside = "" if parent == "." else f"cd {shlex.quote(str(folder.parent))} && "
    client = (
        f"from {package} import {prefix}Env, {prefix}Action; "
        f"env = {prefix}Env(base_url='http://localhost:8000').sync(); "
        f"env.reset(); print(env.step({prefix}Action(message='hello'))); env.close()"
    )
    typer.echo("\nServe it:\n")
    typer.echo(f"  openenv serve {place}")
    typer.echo("\nStep it, from another terminal:\n")
    typer.echo(f'  {inside}python -c "{client}"')
    typer.echo("\nRun its tests, and check it:\n")
    typer.echo(f"  python -m pytest {place}")
    typer.echo(f"  openenv validate {place}")
    typer.echo(f"\nThen change {folder}/models.py and {folder}/server/{package}_environment.py.")
