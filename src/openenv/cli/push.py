"""`openenv push`: a package becomes a Docker Space of the Hugging Face Hub, or an image in a registry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .build import StagingError, build_image, container_engine, run_engine, staged
from .command import failure, name_values, printable, secret_values, tidy_on_sigterm

if TYPE_CHECKING:
    from openenv.packaging.hub.spaces import Spaces, SpaceSettings, Upload
    from openenv.packaging.hub.staging import SpacePackage

_of_space = partial(typer.Option, rich_help_panel="Spaces")


def push(
    directory: Path = typer.Argument(Path(), metavar="FOLDER", help="The package; by default the folder you are in."),
    repo_id: str | None = _of_space(
        None, "--repo-id", "-r", metavar="ID", help="NAME or OWNER/NAME; by default the name in openenv.yaml, yours."
    ),
    base_image: str | None = typer.Option(
        None, "--base-image", "-b", metavar="IMAGE", help="Start from this image instead of the Dockerfile's."
    ),
    interface: bool = typer.Option(False, "--interface", help="With the web page; the default but for --registry."),
    no_interface: bool = typer.Option(False, "--no-interface", help="Without the web page."),
    registry: str | None = typer.Option(
        None, "--registry", metavar="HOST/PATH", help="Push an image to this registry instead of a Space."
    ),
    private: bool = _of_space(False, "--private", help="Make the Space private, also one that exists."),
    create_pr: bool = _of_space(False, "--create-pr", help="Open a pull request to the Space; settings stay."),
    exclude: Path | None = _of_space(
        None, "--exclude", metavar="FILE", help="Leave out what this file lists, in the syntax of .gitignore."
    ),
    delete: list[str] = _of_space(
        [], "--delete", metavar="GLOB", help="Remove such files from the Space, unless they are pushed; repeatable."
    ),
    hardware: str | None = _of_space(None, "--hardware", "-H", metavar="NAME", help="Such as cpu-basic or t4-medium."),
    count: int = _of_space(1, "--count", "-n", metavar="N", min=1, help="Deploy N Spaces: ID-1, ID-2, and so on."),
    env_var: list[str] = _of_space(
        [], "--env-var", "-e", metavar="NAME=VALUE", help="A variable, before those in openenv.yaml; repeatable."
    ),
    secret: list[str] = _of_space(
        [], "--secret", metavar="NAME[=VALUE]", help="A secret; without a value that of the variable. Repeatable."
    ),
) -> None:
    """Push an environment package to the Hugging Face Hub as a Space, or as an image to a registry.

      openenv push                                  the package in this folder
      openenv push envs/maze_env -r team/maze --private
      openenv push -e MAZE_SIZE=9 --secret API_KEY  $API_KEY becomes a secret
      openenv push --delete '*'                     keep no files of before
      openenv push --create-pr -r team/maze         propose it to others
      openenv push --registry registry.example.org/team

    The package is checked and copied. The copy has no hidden files, caches, build/ and *.egg-info, its Dockerfile is in
    the root, and its README has the front matter of a Space. The variables of openenv.yaml become variables of the
    Space. Log in before, with `hf auth login` or HF_TOKEN. Needs pip install 'openenv[hub]'; a registry needs Docker
    or Podman instead.
    """
    if interface and no_interface:
        raise failure("--interface and --no-interface exclude each other")
    page = True if interface else False if no_interface else None
    variables, secrets = name_values("--env-var", env_var), secret_values("--secret", secret)
    changes = {
        "--private": private,
        "--hardware": hardware,
        "--count": count > 1,
        "--env-var": variables,
        "--secret": secrets,
    }
    files = {"--repo-id": repo_id, "--create-pr": create_pr, "--exclude": exclude, "--delete": delete}
    if registry is not None:
        _refuse({**files, **changes}, "--registry", "which makes an image and no Space")
    elif create_pr:
        _refuse(changes, "--create-pr", "which changes no settings of the Space")
    if repo_id is not None:
        _check_repo_id(repo_id)
    package = _package(directory)
    if package.variables and (registry is not None or create_pr):
        _note("the variables of openenv.yaml are set when a Space is pushed: set them yourself, where it runs")
    if registry is not None:
        _push_image(package, registry, base_image, page)
        return
    from openenv.packaging.hub.spaces import HubError, Spaces, SpaceSettings, Upload
    from openenv.packaging.hub.staging import PackageStructureError, staged_space

    settings = SpaceSettings(private, hardware, {**package.variables, **variables}, secrets)
    with tidy_on_sigterm():
        try:
            ignore = _ignore_lines(package.folder, exclude)
            spaces = Spaces()
            target = spaces.full_id(repo_id or _name_on_hub(package.name))
            typer.echo(f"Logged in as {spaces.username}; copying {package.name}", err=True)
            with staged_space(package, ignore=ignore, base_image=base_image, interface=page) as folder:
                upload = Upload(folder, delete)
                if create_pr:
                    request = spaces.open_pull_request(target, upload)
                    typer.secho(f"Pull request: {request or 'none, no file differs'}", fg="green")
                else:
                    _deploy(spaces, target, upload, settings, count)
        except PackageStructureError as error:
            raise typer.BadParameter(printable(error)) from error
        except HubError as error:
            raise failure(printable(error)) from error


def _deploy(spaces: Spaces, target: str, upload: Upload, settings: SpaceSettings, count: int) -> None:
    """Deploy one Space, or several with a number each; print where they are."""
    from openenv.packaging.hub.spaces import HubError

    names = [target] if count == 1 else [f"{target}-{number}" for number in range(1, count + 1)]
    pages = []
    for number, name in enumerate(names, 1):
        typer.echo(f"{f'[{number}/{count}] ' if count > 1 else ''}Deploying {name}", err=True)
        try:
            pages.append(spaces.deploy(name, upload, settings))
        except HubError as error:
            if count > 1:
                typer.echo(f"{len(pages)} of {count} instances deployed: {', '.join(pages) or 'none'}", err=True)
            raise failure(printable(error)) from error
        for kind, values in (("variable", settings.variables), ("secret", settings.secrets)):
            for key in values:
                typer.echo(f"Set {kind} {key} on {name}", err=True)
    if count > 1:
        typer.secho(f"All {count} instances deployed", fg="green")
    for page in pages:
        typer.secho(f"Space: {page}", fg="green")
    typer.echo("It starts when the Hub has built it. Its page shows the build.", err=True)


def _push_image(package: SpacePackage, registry: str, base_image: str | None, page: bool | None) -> None:
    """Build an image of a package and push it; the engine has to be logged in."""
    from openenv.packaging.hub.staging import docker_file, edit_file

    tag = f"{registry.rstrip('/')}/{package.name.lower()}"
    with tidy_on_sigterm():
        engine = container_engine()
        try:
            with staged(package.folder) as copy:
                edit_file(copy.dockerfile, lambda text: docker_file(text, base_image=base_image, interface=page))
                build_image(engine, copy, tag, build_args=[f"ENV_NAME={package.name.removesuffix('_env')}"])
        except (StagingError, OSError, ValueError) as error:
            raise failure(error) from error
        run_engine(engine, "push", tag)
    typer.secho(f"Image: {tag}", fg="green")


def _package(folder: Path) -> SpacePackage:
    from openenv.env.manifest import MANIFEST
    from openenv.packaging.hub.staging import PackageStructureError, read_package

    if not folder.is_dir():
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
            hint = f". Did you mean the Space: openenv push --repo-id {folder}?"
        raise typer.BadParameter(f"there is no folder {folder}{hint}", param_hint="FOLDER")
    if not (folder / MANIFEST).is_file():
        raise failure(f"{folder.resolve()} is no environment package: it has no {MANIFEST}")
    try:
        package = read_package(folder)
    except PackageStructureError as error:
        raise typer.BadParameter(printable(error), param_hint="FOLDER") from error
    for warning in package.warnings:
        _note(warning)
    return package


def _check_repo_id(repo_id: str) -> None:
    from openenv.packaging.hub.spaces import check_repo_id

    try:
        check_repo_id(repo_id)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--repo-id") from error


def _name_on_hub(name: str) -> str:
    """Return the name of a package as a repository may have it."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.")


def _ignore_lines(folder: Path, exclude: Path | None) -> list[str]:
    """Read a file of patterns: a relative path is meant from the package, or else from the folder you are in."""
    from openenv.packaging.hub.staging import read_ignore_file

    if exclude is None:
        return []
    path = folder / exclude
    return read_ignore_file(path if path.is_file() else exclude)


def _refuse(options: Mapping[str, object], beside: str, reason: str) -> None:
    for option, value in options.items():
        if value:
            raise typer.BadParameter(f"it cannot be used with {beside}, {reason}", param_hint=option)


def _note(text: str) -> None:
    typer.secho(f"Note: {text}", fg="yellow", err=True)
