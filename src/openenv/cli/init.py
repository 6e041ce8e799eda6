"""`openenv init`: a new environment package from `template/`: an environment that runs, a client, tests, an image."""

from __future__ import annotations

import keyword
import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import typer

import openenv

from .command import OldName

# Seconds for `uv lock`, which may download metadata from an index.
_LOCK_S = 60.0
_TEMPLATE = Path(__file__).parent / "template"
SUFFIX = ".tmpl"  # so that nothing takes a template for source code, and no packager drops a hidden file
# Names of ours, and of the modules inside every package: a package of that name would hide them.
_TAKEN = frozenset({"openenv", "openenv_core", "client", "models", "server", "tests"})
# Emoji and colours of a Space's card, chosen by the name, so that a repeated init gives the same files.
_LOOKS = (("🎲", "blue", "green"), ("🧭", "indigo", "purple"), ("🧩", "yellow", "red"), ("🛰️", "gray", "blue"))


def init(
    name: str = typer.Argument(..., metavar="NAME", help="The package's name, such as maze_env."),
    output_dir: Path = typer.Option(
        Path(),
        "--output",
        "-o",
        OldName("--output-dir"),
        metavar="FOLDER",
        help="Parent of the new folder; by default the current folder.",
    ),
) -> None:
    """Create an environment package: a small environment that runs, a typed client, tests, and a Dockerfile.

        openenv init maze_env
        openenv serve maze_env

    NAME is the name of the Python package; its folder is made in the current one, or in --output. Then edit
    models.py and server/NAME_environment.py. The command offers a correction for an invalid name.
    """
    #   NAME ──check──> names of parts ──> template/*.tmpl ──placeholders──> NAME/ ──uv lock──> next commands
    #
    # `openenv import` uses the same writer with more templates (`Variant`).
    try:
        name = _agreed_name(name)
        names = Names.of(name)
        folder = output_dir / name
        written = write_package(names, folder)
    except ScaffoldError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None
    typer.echo(f"Made {folder} with {len(written)} files.")
    # A package without a lock works, so this is never an error.
    warning = _lock(folder)
    if warning:
        typer.secho(f"No uv.lock: {warning}", fg="yellow", err=True)
    _show_next(names, folder)


def _agreed_name(name: str) -> str:
    """Return a name, or in a terminal the corrected one if the user agrees.

    Raises:
        ScaffoldError: It cannot be the name of a package; the text has one that can.
    """
    try:
        return Names.of(name).package
    except ScaffoldError as error:
        better = corrected(name)
        if better is None:
            raise
        # A script must not wait for an answer, so without a terminal the correction is only printed.
        if _is_terminal() and typer.confirm(f"{error}. Make {better} instead?", default=True):
            return better
        raise ScaffoldError(f"{error}. Try: openenv init {better}") from None


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def corrected(name: str) -> str | None:
    """Return a name like this one that a package can have: `My Maze` is `my_maze`; None if none is valid."""
    # MyMaze, my-maze and "My Maze" all become my_maze.
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())
    stem = "_".join(words).lstrip("0123456789_")
    # `json` is a module of Python, json_env is free.
    for better in (stem, f"{stem}_env") if stem else ():
        try:
            return Names.of(better).package
        except ScaffoldError:
            continue
    return None


def _lock(folder: Path) -> str | None:
    """Write `uv.lock` where uv is installed; return why there is none."""
    uv = shutil.which("uv")
    if uv is None:
        return "uv is not installed. That does no harm; `uv lock` makes one later."
    try:
        result = subprocess.run(
            [uv, "lock"],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOCK_S,
            check=False,
            # uv must not wait for input.
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"`uv lock` took more than {_LOCK_S:g} s. That does no harm; run it later."
    except OSError as error:
        return f"`uv lock` cannot be run ({error}). That does no harm."
    if result.returncode != 0:
        output = result.stderr or result.stdout
        if re.search(r"\bonly openenv\S+ (?:is|are) available", output):  # "only openenv<=0.10.0 is available"
            return f"the package index does not have openenv {openenv.__version__} yet. Run `uv lock` when it does."
        # uv's last line has the reason.
        lines = output.strip().splitlines()
        return (
            f"`uv lock` failed ({lines[-1].strip() if lines else result.returncode}). That does no harm; run it later."
        )
    return None


def _show_next(names: Names, folder: Path) -> None:
    """Print commands that can be copied as they are."""
    place = shlex.quote(str(folder))
    # The folder above the package is its import root.
    parent = os.path.relpath(folder.parent)
    inside = "" if parent == "." else f"cd {shlex.quote(str(folder.parent))} && "
    package, prefix = names.package, names.prefix
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
    typer.echo("\nBuild its image, and run it:\n")
    typer.echo(f"  openenv build {place}")
    typer.echo(f"  docker run -p 8000:8000 {names.placeholders()['__ENV_IMAGE_NAME__']}:latest")
    typer.echo(f"\nThen change {folder}/models.py and {folder}/server/{package}_environment.py.")


class ScaffoldError(Exception):
    """The package cannot be made; the text says why."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the parts of an environment package, derived from the name of the package."""

    package: str

    @classmethod
    def of(cls, name: str) -> Names:
        """Check a name and derive the others from it.

        Raises:
            ScaffoldError: It cannot be the name of a package.
        """
        # isascii, because the name also becomes part of an image's name; a name of underscores only has no words.
        if not name:
            raise ScaffoldError("the name cannot be empty; use letters, digits and _, such as maze_env")
        if not name.isidentifier() or not name.isascii() or not name.strip("_"):
            raise ScaffoldError(f"{name!r} is not a valid identifier; a name has letters, digits and _, as maze_env")
        if keyword.iskeyword(name) or name in sys.stdlib_module_names or name in _TAKEN:
            raise ScaffoldError(f"{name!r} is already a name of Python or openenv")
        return cls(name)

    @property
    def stem(self) -> str:
        """The name without `_env`."""
        # maze_env: stem maze, prefix Maze, title Maze. word_count_env: word_count, WordCount, Word Count.
        return self.package.removesuffix("_env").strip("_") or self.package.strip("_")

    @property
    def prefix(self) -> str:
        """The prefix of its classes."""
        return "".join(part[0].upper() + part[1:] for part in self.stem.split("_") if part)

    @property
    def title(self) -> str:
        """The name in texts."""
        return " ".join(part[0].upper() + part[1:] for part in self.stem.split("_") if part)

    def placeholders(self) -> dict[str, str]:
        """Return the placeholders of the template and their values."""
        # crc32, because `hash` of a text differs between processes.
        emoji, first, second = _LOOKS[zlib.crc32(self.package.encode()) % len(_LOOKS)]
        return {
            "__ENV_NAME__": self.package,
            "__ENV_CLASS_NAME__": self.prefix,
            "__ENV_TITLE_NAME__": self.title,
            "__ENV_DIST_NAME__": f"openenv-{self.package.strip('_')}",
            "__ENV_IMAGE_NAME__": f"openenv-{self.stem.lower()}",
            "__HF_EMOJI__": emoji,
            "__HF_COLOR_FROM__": first,
            "__HF_COLOR_TO__": second,
        }


@dataclass(frozen=True, slots=True)
class Variant:
    """A package that is not quite that of `openenv init`.

    Args:
        templates: Folders of templates; their files replace files of the template, and later folders win.
        without: Files that the package does not have.
        values: Placeholders of these templates, and their values.
        finish: Called with the package's folder when its files are written.
    """

    templates: Sequence[Path] = ()
    without: frozenset[str] = frozenset()
    values: Mapping[str, str] = field(default_factory=dict)
    finish: Callable[[Path], None] | None = None


def write_package(names: Names, folder: Path, variant: Variant = Variant()) -> list[Path]:
    """Write the files of a new package into a folder and return them; a failure leaves nothing behind.

    Raises:
        ScaffoldError: The folder is a file, or holds something already, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ScaffoldError(f"{folder} is a file; choose another name, or another place with --output")
    # Never merge with files that exist: their authors would lose changes.
    if folder.exists() and any(folder.iterdir()):
        raise ScaffoldError(f"{folder} already exists, not empty; choose another name or place (--output)")
    # Remembered before the first write, so that a failure also removes the parents that were made.
    new_folder = _missing_top(folder)
    values = {**names.placeholders(), **variant.values}
    try:
        written = [_write(values, template, folder / place) for place, template in _files(names, variant).items()]
        if variant.finish is not None:
            variant.finish(folder)
        return written
    except BaseException as error:  # Ctrl-C too: half a package would block the next attempt
        _undo(folder, new_folder)
        if isinstance(error, OSError):
            raise ScaffoldError(f"{folder} cannot be written: {error.strerror or error}") from error
        raise


def _files(names: Names, variant: Variant) -> dict[Path, Path]:
    """Return each path in the package and its template."""
    files: dict[Path, Path] = {}
    # Later folders replace files of earlier ones, because the path in the package is the key.
    for folder in (_TEMPLATE, *variant.templates):
        for template in sorted(folder.rglob(f"*{SUFFIX}")):
            # dot.gitignore.tmpl becomes .gitignore, NAME_environment.py.tmpl becomes maze_env_environment.py.
            name = template.name.removesuffix(SUFFIX).replace("dot.", ".").replace("NAME", names.package)
            place = template.relative_to(folder).with_name(name)
            if place.as_posix() not in variant.without:
                files[place] = template
    return files


def _write(values: Mapping[str, str], template: Path, path: Path) -> Path:
    # A checkout may have CRLF; packages always have LF.
    text = template.read_text(encoding="utf-8").replace("\r\n", "\n")
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


def _missing_top(folder: Path) -> Path | None:
    """Return the topmost folder that has to be made; None if the folder exists."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    return missing[-1] if missing else None


def _undo(folder: Path, new_folder: Path | None) -> None:
    """Remove the written files: new folders, or the content of a folder that was empty."""
    if new_folder is not None:
        shutil.rmtree(new_folder, ignore_errors=True)
        return
    # The folder was empty before, so everything in it is ours.
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
