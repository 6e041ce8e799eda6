"""`openenv build`: let Docker or Podman build an image from a copy of an environment package.

Dockerfiles that start from the published `openenv-base` image start from our image instead. Every image has the running
version of this package.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from openenv.providers.own_wheel import BARE_REQUIREMENT, FOLDER, INSTRUCTIONS, add_wheels, write_wheels

from .command import failure, name_values, tidy_on_sigterm
from .options import flags_class, options_of

if TYPE_CHECKING:
    from openenv.sandboxes.container_cli import ContainerCli
    from openenv.server.folders import FolderApp

# The advice if no engine is installed.
_INSTALL = "apt-get install -y docker.io"
# Large or machine-dependent: a .venv of this machine would not run in the image.
_NOT_COPIED = frozenset({".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "node_modules"})
_DOCKERFILES = ("server/Dockerfile", "Dockerfile")
# Any registry's, with any tag: ghcr.io/huggingface/openenv-base:latest. In a FROM line, or an argument for one.
_BASE = re.compile(
    r"(?mi)^(?P<head>(?:FROM\s+(?:--platform=\S+\s+)?|ARG\s+\w+=)[\"']?)(?:[\w.:-]+/)*openenv-base(?:[:@][\w.:-]+)?"
    r"(?=[\"'\s]|$)"
)
_BASE_FROM = "python:3.12-slim"
# The stand-in for the published openenv-base: Python, curl, git, this package and uv.
_BASE_RECIPE = f"""\
FROM {_BASE_FROM}
RUN apt-get update && apt-get install -y --no-install-recommends curl git && rm -rf /var/lib/apt/lists/*
{INSTRUCTIONS}
RUN pip install --no-cache-dir openenv=={{version}} uv
WORKDIR /app
EXPOSE 8000
"""
# For a package without a Dockerfile. Without --no-token, a server on 0.0.0.0 would create a token at each start.
_RECIPE = """\
FROM openenv-base
WORKDIR {place}
COPY . {place}
RUN if [ -s {requirements} ]; then pip install --no-cache-dir -r {requirements}; fi
EXPOSE 8000
CMD ["python", "-m", "openenv", "serve", "{place}", "--host", "0.0.0.0", "--port", "8000", "--no-token"]
"""
_REQUIREMENTS = "openenv-requirements.txt"
# The first part of an import: `outer` of `from outer.inner import Env`.
_IMPORTED = re.compile(r"(?m)^\s*(?:from|import)\s+([A-Za-z_]\w*)\.")
# dependencies = [
#     "openenv>=0.2",
#     'numpy',
# ]
_ARRAY = re.compile(r"(?ms)^dependencies\s*=\s*\[(.*?)\]\s*$")
_STRING = re.compile(r"""(["'])([^\n]*?)\1""")


@flags_class
class BuildFlags:
    """Options of `openenv build`."""

    env_path: Annotated[Path, typer.Argument(metavar="FOLDER", help="The package; by default the current folder.")] = (
        Path()
    )
    tag: Annotated[
        str | None, typer.Option("--tag", "-t", metavar="TAG", help="The image's name; by default openenv-NAME.")
    ] = None
    context: Annotated[
        Path | None,
        typer.Option("--context", "-c", metavar="FOLDER", help="The build context; by default the package."),
    ] = None
    dockerfile: Annotated[
        Path | None,
        typer.Option(
            "--dockerfile", "-f", metavar="FILE", help="The Dockerfile; by default server/Dockerfile or Dockerfile."
        ),
    ] = None
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Build every step again.")] = False
    build_arg: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="A build argument of the Dockerfile; repeatable.")
    ] = field(default_factory=list)
    base_image: Annotated[
        str | None,
        typer.Option(
            "--base-image",
            "-b",
            metavar="IMAGE",
            help="Replaces openenv-base in the Dockerfile; by default an image that is built once.",
        ),
    ] = None


@options_of(BuildFlags)
def build(flags: BuildFlags) -> None:
    """Build an image of an environment package, with Docker or Podman.

      openenv build                           the package in this folder
      openenv build envs/maze_env -t maze:1   another one, under another name
      openenv build --build-arg BASE_IMAGE=python:3.13-slim

    The image is called openenv-NAME (without _env) unless --tag names it. Then run it:

      docker run -p 8000:8000 openenv-maze

    The engine gets a temporary copy of the folder, without .git, .venv and caches. The Dockerfile is server/Dockerfile,
    or one beside openenv.yaml; it gets the build arguments BUILD_MODE and ENV_NAME. A folder without a Dockerfile gets
    one that runs `openenv serve`.

    The image gets the running version of openenv, as a wheel in the copy; no index is asked for it.

    If the Dockerfile starts FROM openenv-base, of any registry, an image of this version replaces it. That image is
    built once, from python:3.12-slim; --base-image names another one.
    """
    # From a package to an image:
    #
    #   package ──copy──> temporary folder ──rewrite──> docker build ──> image openenv-NAME
    #                        │                │
    #                        │                ├─ FROM openenv-base becomes an image of this version (`_own_base`)
    #                        │                └─ requirements of openenv become this version, as a wheel (`own_wheel`)
    #                        └─ without .git, .venv, caches, sockets and pipes
    #
    # The user's files never change.
    app = _app(flags.env_path)
    name = _name(app)
    # Only checks the form; the words go to the engine unchanged.
    name_values("--build-arg", flags.build_arg)
    stem = name.removesuffix("_env").strip("_") or name
    # Image names have lower-case letters, digits and . _ - only: `My Maze_env` becomes openenv-my-maze.
    tag = flags.tag or f"openenv-{re.sub(r'[^a-z0-9._-]+', '-', stem.lower()).strip('._-') or 'env'}"
    # The temporary copy and the engine's process end with this command.
    with tidy_on_sigterm():
        engine = container_engine()
        try:
            with staged(app.folder, context=flags.context, dockerfile=flags.dockerfile) as package:
                build_image(
                    engine,
                    package,
                    tag,
                    build_args=[*flags.build_arg, f"ENV_NAME={stem}"],
                    no_cache=flags.no_cache,
                    base_image=flags.base_image,
                )
        # A missing Dockerfile or context; a full disk or an unreadable file while copying.
        except (StagingError, OSError) as error:
            raise failure(error) from error
    typer.secho(f"Built {tag}.", fg="green")
    typer.echo(f"Run it: {engine.kind} run -p 8000:8000 {shlex.quote(tag)}")


def build_image(
    engine: ContainerCli,
    package: Staged,
    tag: str,
    *,
    build_args: Sequence[str],
    no_cache: bool = False,
    base_image: str | None = None,
) -> None:
    """Build an image of a staged package, or end the command; `base_image` takes the place of `openenv-base`."""
    if package.needs_base:
        package.set_base(base_image or _own_base(engine))
    pairs = [*build_args, f"BUILD_MODE={package.mode}"]
    options = [word for pair in pairs for word in ("--build-arg", pair)]
    options += ["--no-cache"] if no_cache else []
    typer.echo(f"{engine.kind}: building {tag} from {package.context.name}", err=True)
    run_engine(engine, "build", "-t", tag, "-f", str(package.dockerfile), *options, str(package.context))


def _app(folder: Path) -> FolderApp:
    from openenv.env.manifest import MANIFEST, ManifestError  # pydantic models, which help does not need
    from openenv.server.folders import FolderError, find_app

    try:
        return find_app(folder)
    # The folder has no application that can be served.
    except FolderError as error:
        raise failure(f"{folder} is not an environment package: {error}") from error
    except (ManifestError, OSError) as error:
        raise failure(f"{folder / MANIFEST} cannot be read: {error}") from error


def _name(app: FolderApp) -> str:
    """Return the name in the package's manifest, or that of its folder."""
    name = app.manifest.get("name")
    return name if isinstance(name, str) and name else app.folder.name


def container_engine() -> ContainerCli:
    """Return the engine that builds images, or end the command."""
    from openenv.errors import SandboxError
    from openenv.sandboxes.container_cli import find_engine

    # Two different mistakes need different advice: not installed, and installed but not running.
    if shutil.which("docker") is None and shutil.which("podman") is None:
        raise failure(f"images are built by docker or podman, and neither is installed: {_INSTALL}")
    try:
        return find_engine("auto", None)
    except SandboxError as error:
        raise failure(error) from error


def _own_base(engine: ContainerCli) -> str:
    """Return an image with this package that may stand for `openenv-base`; builds it if the engine has none."""
    with tempfile.TemporaryDirectory(prefix="openenv-base-", ignore_cleanup_errors=True) as home:
        # The tag contains a digest of the wheels: after an upgrade or an edit the old image no longer matches.
        write_wheels(Path(home, FOLDER))
        tag = f"openenv-base:{_digest(Path(home, FOLDER))}"
        if not engine.has_image(tag):
            recipe = _BASE_RECIPE.format(version=metadata.version("openenv"))
            Path(home, "Dockerfile").write_text(recipe, encoding="utf-8", newline="\n")
            typer.echo(f"{engine.kind}: building {tag} from {_BASE_FROM}, once for this version of openenv", err=True)
            run_engine(engine, "build", "-t", tag, home)
        return tag


def _digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        # The zero bytes separate names and contents, so that moving bytes between files changes the digest.
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def run_engine(engine: ContainerCli, *arguments: str) -> None:
    """Run the engine with our standard output, or end the command; the engine ends when this command ends."""
    # `subprocess.run` kills its child on an exception; here the engine gets 10 s to end by itself.
    process = subprocess.Popen(engine.argv(*arguments), stdin=subprocess.DEVNULL)
    try:
        code = process.wait()
    finally:
        # Ctrl-C or SIGTERM arrived while the engine worked.
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
    """The package cannot be built; the text names the missing part."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy of a package, ready for a container engine."""

    context: Path
    dockerfile: Path
    mode: Literal["standalone", "in-repo"]

    @property
    def needs_base(self) -> bool:
        """Whether the Dockerfile starts from `openenv-base`."""
        return _BASE.search(self.dockerfile.read_text(encoding="utf-8")) is not None

    def set_base(self, image: str) -> None:
        """Let the Dockerfile start from an image instead of `openenv-base`."""
        text = _BASE.sub(rf"\g<head>{image}", self.dockerfile.read_text(encoding="utf-8"))
        self.dockerfile.write_text(text, encoding="utf-8", newline="\n")


@contextlib.contextmanager
def staged(folder: Path, *, context: Path | None = None, dockerfile: Path | None = None) -> Iterator[Staged]:
    """Copy a package, or another folder that is passed as context; the copy is removed afterwards.

    The copy has the wheel of the running version and requires it. A context that the user names gets no further files.

    Raises:
        StagingError: The Dockerfile or the context is not there.
    """
    source = (context or folder).resolve()
    if not source.is_dir():
        raise StagingError(f"folder not found: {context or folder}")
    recipe = _recipe(folder, dockerfile)
    with tempfile.TemporaryDirectory(prefix="openenv-build-", ignore_cleanup_errors=True) as home:
        # The folder's name, because `build_image` prints it.
        copy = Path(home, source.name or "context")
        shutil.copytree(source, copy, symlinks=True, ignore=_excluded)
        if recipe is None:
            target = _write_recipe(copy, source)
        # The Dockerfile lies in the context, so its copy can be rewritten in place.
        elif recipe.is_relative_to(source):
            target = copy / recipe.relative_to(source)
        else:
            target = Path(home, "Dockerfile")
            shutil.copyfile(recipe, target)
        if recipe is not None and context is None:  # the recipe that we write has openenv in its base
            add_wheels(copy, target)
        yield Staged(copy, target, "in-repo" if context is None and _is_ours(source) else "standalone")


def _recipe(folder: Path, chosen: Path | None) -> Path | None:
    """Find the Dockerfile; None for a folder that has none."""
    # A relative --dockerfile is first a path from the current folder, then one in the package.
    places = [folder / name for name in _DOCKERFILES] if chosen is None else [chosen, folder / chosen]
    for path in places:
        if path.is_file():
            return path.resolve()
    if chosen is not None:
        raise StagingError(f"Dockerfile not found: {chosen}")
    return None


def _write_recipe(copy: Path, source: Path) -> Path:
    """Write a Dockerfile that installs the package's requirements and serves it."""
    # Requirements of openenv are left out: openenv-base contains this version, and pip would replace it.
    texts = [copy / name for name in ("requirements.txt", "server/requirements.txt")]
    lines = [line for path in texts if path.is_file() for line in path.read_text(encoding="utf-8").splitlines()]
    lines += _dependencies(copy / "pyproject.toml")
    kept = [line for line in dict.fromkeys(lines) if not BARE_REQUIREMENT.match(line)]
    (copy / _REQUIREMENTS).write_text("".join(f"{line}\n" for line in kept), encoding="utf-8", newline="\n")
    target = copy / "Dockerfile"
    recipe = _RECIPE.format(requirements=_REQUIREMENTS, place=_place_in_image(source, copy))
    target.write_text(recipe, encoding="utf-8", newline="\n")
    return target


def _place_in_image(folder: Path, copy: Path) -> str:
    """Return the package's folder in the image.

    If its code imports itself as `outer.inner`, the folder of `outer` must be above it.
    """
    from openenv.server.folders import ABOVE

    # envs/outer/inner with `from outer.inner import Env` must lie at /app/outer/inner, so that /app is the import root.
    code = "\n".join(
        path.read_text(encoding="utf-8", errors="replace") for path in copy.rglob("*.py") if path.is_file()
    )
    imported = set(_IMPORTED.findall(code))
    named = [place for place in folder.parents[:ABOVE] if place.name in imported and not (copy / place.name).exists()]
    return f"/app/{folder.relative_to(named[-1].parent).as_posix()}" if named else "/app/env"


def _dependencies(project: Path) -> list[str]:
    """Return the requirements of a `pyproject.toml`, by a pattern: Python 3.10 has no TOML parser."""
    if not project.is_file():
        return []
    array = _ARRAY.search(project.read_text(encoding="utf-8"))
    return [] if array is None else [text for _, text in _STRING.findall(array.group(1))]


def _excluded(place: str, names: list[str]) -> set[str]:
    """Return the files to exclude: unnecessary ones, and sockets, pipes and devices, which cannot be copied."""
    return {
        name
        for name in names
        if name in _NOT_COPIED or name.endswith((".pyc", ".egg-info")) or _is_special(place, name)
    }


def _is_special(place: str, name: str) -> bool:
    mode = os.lstat(os.path.join(place, name)).st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def _is_ours(folder: Path) -> bool:
    """Return whether the package lies in the `envs/` of a checkout of this project."""
    for parent in folder.parents:
        # A file in worktrees and submodules, a folder in clones: `exists` covers both.
        if (parent / ".git").exists():
            has_sources = (parent / "src" / "openenv").is_dir() and (parent / "pyproject.toml").is_file()
            return has_sources and folder.is_relative_to(parent / "envs")
    return False
