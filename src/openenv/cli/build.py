"""`openenv build`: an image of an environment package, made by Docker or Podman.

Knows options and the engine's command line; what it is given is staged elsewhere.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .command import tidy_on_sigterm

if TYPE_CHECKING:
    from ..sandboxes.container_cli import Engine

_EXAMPLES = """
Build an image of an environment package, with Docker or Podman.

  openenv build                           the package in this folder
  openenv build envs/maze_env -t maze:1   another one, under another name
  openenv build --build-arg BASE_IMAGE=python:3.13-slim

The image is called openenv-NAME, without _env, if not told otherwise. Then run it:

  docker run -p 8000:8000 openenv-maze

The engine is sent a copy of the folder, without .git, .venv and caches; the copy is removed in the end. The
Dockerfile is server/Dockerfile, or one beside openenv.yaml; it gets the build arguments BUILD_MODE and ENV_NAME.
"""

_INSTALL = "apt-get install -y docker.io"


def build(
    env_path: Path = typer.Argument(Path(), metavar="FOLDER", help="The package; by default the folder you are in."),
    tag: str | None = typer.Option(None, "--tag", "-t", metavar="TAG", help="The image's name; openenv-NAME."),
    context: Path | None = typer.Option(
        None, "--context", "-c", metavar="FOLDER", help="What the engine is sent; by default the package."
    ),
    dockerfile: Path | None = typer.Option(
        None,
        "--dockerfile",
        "-f",
        metavar="FILE",
        help="The Dockerfile; by default server/Dockerfile or Dockerfile.",
    ),
    no_cache: bool = typer.Option(False, "--no-cache", help="Do every step anew."),
    build_arg: list[str] = typer.Option(
        [], "--build-arg", metavar="NAME=VALUE", help="For the Dockerfile; may be repeated."
    ),
) -> None:
    from .staging import StagingError, staged

    name = _name(env_path)
    for pair in build_arg:
        if not pair.partition("=")[0] or "=" not in pair:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint="--build-arg")
    stem = name.removesuffix("_env").strip("_") or name
    tag = tag or f"openenv-{stem.lower()}"
    with tidy_on_sigterm():
        engine = _engine()
        try:
            with staged(env_path, context=context, dockerfile=dockerfile) as given:
                mine = [f"BUILD_MODE={given.mode}", f"ENV_NAME={stem}"]
                options = [word for pair in [*build_arg, *mine] for word in ("--build-arg", pair)]
                options += ["--no-cache"] if no_cache else []
                command = engine.argv("build", "-t", tag, "-f", str(given.dockerfile), *options, str(given.context))
                typer.echo(f"{engine.kind}: building {tag} from {env_path.resolve().name}", err=True)
                code = _run(command)
        except (StagingError, OSError) as error:
            raise _failure(str(error)) from error
    if code != 0:
        raise _failure(f"{engine.kind} ended with exit code {code}; its last lines say why")
    typer.secho(f"Built {tag}.", fg="green")
    typer.echo(f"Run it: {engine.kind} run -p 8000:8000 {shlex.quote(tag)}")


build.__doc__ = _EXAMPLES


def _name(folder: Path) -> str:
    """Return what the package calls itself."""
    import yaml

    manifest = folder / "openenv.yaml"
    if not manifest.is_file():
        raise _failure(f"{folder} is no environment package: it has no openenv.yaml")
    try:
        data: Any = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise _failure(f"{manifest} cannot be read: {error}") from error
    name = data.get("name") if isinstance(data, dict) else None
    return name if isinstance(name, str) and name else folder.resolve().name


def _engine() -> Engine:
    """Return the first engine that is installed and answers."""
    from ..errors import SandboxError
    from ..sandboxes.container_cli import find_engine

    reasons = []
    for kind in ("docker", "podman"):
        try:
            engine = find_engine(kind, None)
        except SandboxError:
            continue
        try:
            engine.check()
        except SandboxError as error:
            reasons.append(str(error))
            continue
        return engine
    raise _failure(" ".join(reasons) or f"images are built by docker or podman, and neither is installed: {_INSTALL}")


def _run(command: list[str]) -> int:
    """Run the engine with its output where ours goes; it ends when we do."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _failure(reason: str) -> typer.Exit:
    typer.secho(f"Error: {reason}", fg="red", err=True)
    return typer.Exit(1)
