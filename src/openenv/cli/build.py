"""`openenv build`: an image of an environment package, built by Docker or Podman from a copy of the package."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from .command import failure, tidy_on_sigterm

if TYPE_CHECKING:
    from ..sandboxes.container_cli import ContainerCli

_INSTALL = "apt-get install -y docker.io"
_NOT_COPIED = frozenset({".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "node_modules"})
_DOCKERFILES = ("server/Dockerfile", "Dockerfile")
_VENDORED = "openenv"
_IN_IMAGE = f"/app/env/{_VENDORED}"
_REQUIREMENT = r"openenv(?:[-_]core)?\s*(?:\[[^\]]*\])?\s*(?:[<>=!~@][^\"'\n]*)?"
_QUOTED = re.compile(rf"""(?P<quote>["']){_REQUIREMENT}(?P=quote)""")
_BARE = re.compile(rf"(?m)^{_REQUIREMENT}$")
_FROM = re.compile(r"(?mi)^FROM\s.*$")


def build(
    env_path: Path = typer.Argument(Path(), metavar="FOLDER", help="The package; by default the folder you are in."),
    tag: str | None = typer.Option(
        None, "--tag", "-t", metavar="TAG", help="Name of the image; by default openenv-NAME."
    ),
    context: Path | None = typer.Option(
        None, "--context", "-c", metavar="FOLDER", help="The folder that the engine gets; by default the package."
    ),
    dockerfile: Path | None = typer.Option(
        None, "--dockerfile", "-f", metavar="FILE", help="The Dockerfile; by default server/Dockerfile or Dockerfile."
    ),
    no_cache: bool = typer.Option(False, "--no-cache", help="Build every step again."),
    build_arg: list[str] = typer.Option(
        [], "--build-arg", metavar="NAME=VALUE", help="For the Dockerfile; may be repeated."
    ),
) -> None:
    """Build an image of an environment package, with Docker or Podman.

      openenv build                           the package in this folder
      openenv build envs/maze_env -t maze:1   another one, under another name
      openenv build --build-arg BASE_IMAGE=python:3.13-slim

    The image is called openenv-NAME (without _env) unless --tag names it. Then run it:

      docker run -p 8000:8000 openenv-maze

    The engine gets a copy of the folder, without .git, .venv and caches; the copy is removed afterwards. The
    Dockerfile is server/Dockerfile, or one beside openenv.yaml; it gets the build arguments BUILD_MODE and
    ENV_NAME.
    """
    name = _name(env_path)
    for pair in build_arg:
        if not pair.partition("=")[0] or "=" not in pair:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint="--build-arg")
    stem = name.removesuffix("_env").strip("_") or name
    tag = tag or f"openenv-{stem.lower()}"
    with tidy_on_sigterm():
        engine = container_engine()
        try:
            with staged(env_path, context=context, dockerfile=dockerfile) as package:
                build_image(engine, package, tag, build_args=[*build_arg, f"ENV_NAME={stem}"], no_cache=no_cache)
        except (StagingError, OSError) as error:
            raise failure(error) from error
    typer.secho(f"Built {tag}.", fg="green")
    typer.echo(f"Run it: {engine.kind} run -p 8000:8000 {shlex.quote(tag)}")


def build_image(
    engine: ContainerCli, package: Staged, tag: str, *, build_args: Sequence[str], no_cache: bool = False
) -> None:
    """Build an image of a staged package, or end the command."""
    pairs = [*build_args, f"BUILD_MODE={package.mode}"]
    options = [word for pair in pairs for word in ("--build-arg", pair)]
    options += ["--no-cache"] if no_cache else []
    typer.echo(f"{engine.kind}: building {tag} from {package.context.name}", err=True)
    run_engine(engine, "build", "-t", tag, "-f", str(package.dockerfile), *options, str(package.context))


def _name(folder: Path) -> str:
    """Return the name in the package's manifest, or that of its folder."""
    import yaml

    manifest = folder / "openenv.yaml"
    if not manifest.is_file():
        raise failure(f"{folder} is no environment package: it has no openenv.yaml")
    try:
        data: Any = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise failure(f"{manifest} cannot be read: {error}") from error
    name = data.get("name") if isinstance(data, dict) else None
    return name if isinstance(name, str) and name else folder.resolve().name


def container_engine() -> ContainerCli:
    """Return the engine that builds images, or end the command."""
    from ..errors import SandboxError
    from ..sandboxes.container_cli import find_engine

    if shutil.which("docker") is None and shutil.which("podman") is None:
        raise failure(f"images are built by docker or podman, and neither is installed: {_INSTALL}")
    try:
        return find_engine("auto", None)
    except SandboxError as error:
        raise failure(error) from error


def run_engine(engine: ContainerCli, *arguments: str) -> None:
    """Run the engine with our standard output, or end the command; the engine ends when this command ends."""
    process = subprocess.Popen(engine.argv(*arguments), stdin=subprocess.DEVNULL)
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if code != 0:
        raise failure(f"{engine.kind} ended with exit code {code}; its last lines say why")


class StagingError(Exception):
    """There is nothing to build; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What an engine builds from."""

    context: Path
    dockerfile: Path
    mode: Literal["standalone", "in-repo"]


@contextlib.contextmanager
def staged(folder: Path, *, context: Path | None = None, dockerfile: Path | None = None) -> Iterator[Staged]:
    """Copy a package, or another folder that is passed as context; the copy is removed afterwards.

    In a checkout of this project, under `envs/`, the copy holds the checkout's own `openenv`, and requires that.

    Raises:
        StagingError: The Dockerfile or the context is not there.
    """
    source = (context or folder).resolve()
    if not source.is_dir():
        raise StagingError(f"there is no folder {context or folder}")
    recipe = _recipe(folder, dockerfile)
    with tempfile.TemporaryDirectory(prefix="openenv-build-", ignore_cleanup_errors=True) as home:
        copy = Path(home, source.name or "context")
        shutil.copytree(source, copy, symlinks=True, ignore=_excluded)
        if recipe.is_relative_to(source):
            target = copy / recipe.relative_to(source)
        else:
            target = Path(home, "Dockerfile")
            shutil.copyfile(recipe, target)
        repository = None if context is not None else _repository(source)
        if repository is not None:
            _vendor(repository, copy, target)
        yield Staged(copy, target, "standalone" if repository is None else "in-repo")


def _recipe(folder: Path, chosen: Path | None) -> Path:
    places = [folder / name for name in _DOCKERFILES] if chosen is None else [chosen, folder / chosen]
    for path in places:
        if path.is_file():
            return path.resolve()
    if chosen is not None:
        raise StagingError(f"there is no Dockerfile {chosen}")
    raise StagingError(f"{folder} has no {' and no '.join(_DOCKERFILES)}")


def _excluded(place: str, names: list[str]) -> set[str]:
    """Name what to leave out: what no image needs, and what cannot be copied (sockets, pipes, devices)."""
    return {
        name
        for name in names
        if name in _NOT_COPIED or name.endswith((".pyc", ".egg-info")) or _is_special(place, name)
    }


def _is_special(place: str, name: str) -> bool:
    mode = os.lstat(os.path.join(place, name)).st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def _repository(folder: Path) -> Path | None:
    """Return the checkout of this project in whose `envs/` a package lies."""
    for parent in folder.parents:
        if (parent / ".git").exists():
            is_ours = (parent / "src" / "openenv").is_dir() and (parent / "pyproject.toml").is_file()
            return parent if is_ours and folder.is_relative_to(parent / "envs") else None
    return None


def _vendor(repository: Path, copy: Path, dockerfile: Path) -> None:
    """Put the checkout's `openenv` beside the package, and require it instead of a released one."""
    vendored = copy / _VENDORED
    shutil.copytree(repository / "src", vendored / "src", symlinks=True, ignore=_excluded)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (repository / name).is_file():
            shutil.copyfile(repository / name, vendored / name)
    requirement = f"openenv @ file://{_IN_IMAGE}"
    _rewrite(copy / "pyproject.toml", _QUOTED, rf"\g<quote>{requirement}\g<quote>")
    _rewrite(copy / "server" / "requirements.txt", _BARE, requirement)
    _rewrite(
        dockerfile, _FROM, rf"\g<0>\nCOPY {_VENDORED} {_IN_IMAGE}"
    )  # before the package itself is copied, so that it can be installed first
    (copy / "uv.lock").unlink(missing_ok=True)


def _rewrite(path: Path, pattern: re.Pattern[str], replacement: str) -> None:
    if path.is_file():
        path.write_text(pattern.sub(replacement, path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
