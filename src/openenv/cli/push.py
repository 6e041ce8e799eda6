"""`openenv push`: push a package as a Docker Space of the Hugging Face Hub, or as an image to a registry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .build import StagingError, build_image, container_engine, run_engine, staged
from .command import failure, name_values, printable, secret_values, tidy_on_sigterm
from .commands import push as published
from .options import Panel, flags_class, options_of

if TYPE_CHECKING:
    from openenv.packaging.hub.spaces import Spaces, SpaceSettings, Upload
    from openenv.packaging.hub.staging import SpacePackage


@flags_class
class SpaceFlags:
    """Options of the Space; none of them applies to an image for a registry."""

    repo_id: Annotated[
        str | None,
        typer.Option(
            "--repo-id",
            "-r",
            metavar="ID",
            help="NAME or OWNER/NAME; by default the name in openenv.yaml, in your namespace.",
        ),
    ] = None
    private: Annotated[bool, typer.Option("--private", help="Make the Space private, even an existing one.")] = False
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request to the Space; its settings do not change.")
    ] = False
    exclude: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Exclude the patterns in this file, in .gitignore syntax.")
    ] = None
    delete: Annotated[
        list[str],
        typer.Option(metavar="GLOB", help="Remove matching files that this push does not contain; repeatable."),
    ] = field(default_factory=list)
    hardware: Annotated[
        str | None, typer.Option("--hardware", "-H", metavar="NAME", help="Such as cpu-basic or t4-medium.")
    ] = None
    count: Annotated[
        int, typer.Option("--count", "-n", metavar="N", min=1, help="Deploy N Spaces: ID-1, ID-2, and so on.")
    ] = 1
    env_var: Annotated[
        list[str],
        typer.Option("--env-var", "-e", metavar="NAME=VALUE", help="A variable; wins over openenv.yaml; repeatable."),
    ] = field(default_factory=list)
    secret: Annotated[
        list[str],
        typer.Option(metavar="NAME[=VALUE]", help="A secret; without a value, the environment variable's. Repeatable."),
    ] = field(default_factory=list)

    def check(self, registry: str | None) -> None:
        """Raise for options that have no effect with `--registry` or `--create-pr`."""
        # Options of the Space itself, which a pull request cannot change.
        settings = {
            "--private": self.private,
            "--hardware": self.hardware,
            "--count": self.count > 1,
            "--env-var": self.env_var,
            "--secret": self.secret,
        }
        # Options of the uploaded files, which an image has no use for.
        files = {
            "--repo-id": self.repo_id,
            "--create-pr": self.create_pr,
            "--exclude": self.exclude,
            "--delete": self.delete,
        }
        if registry is not None:
            _refuse({**files, **settings}, "--registry", "which makes an image and no Space")
        elif self.create_pr:
            _refuse(settings, "--create-pr", "which changes no settings of the Space")
        if self.repo_id is not None:
            _check_repo_id(self.repo_id)


@flags_class
class PushFlags:
    """Options of `openenv push`."""

    directory: Annotated[Path, typer.Argument(metavar="FOLDER", help="The package; by default the current folder.")] = (
        Path()
    )
    base_image: Annotated[
        str | None,
        typer.Option("--base-image", "-b", metavar="IMAGE", help="Start from this image instead of the Dockerfile's."),
    ] = None
    interface: Annotated[
        bool, typer.Option("--interface", help="With the web page; the default, except with --registry.")
    ] = False
    no_interface: Annotated[bool, typer.Option("--no-interface", help="Without the web page.")] = False
    registry: Annotated[
        str | None, typer.Option(metavar="HOST/PATH", help="Push an image to this registry instead of a Space.")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and push nothing.")] = False
    space: Annotated[SpaceFlags, Panel("Spaces")]

    @property
    def page(self) -> bool | None:
        """Whether to serve the web page; None leaves it to the kind of push."""
        if self.interface and self.no_interface:
            raise failure("--interface and --no-interface exclude each other")
        return self.interface if self.interface or self.no_interface else None


@options_of(PushFlags)
def push(flags: PushFlags) -> None:
    """Push an environment package to the Hugging Face Hub as a Space, or as an image to a registry.

      openenv push                                  the package in this folder
      openenv push envs/maze_env -r team/maze --private
      openenv push -e MAZE_SIZE=9 --secret API_KEY  $API_KEY becomes a secret
      openenv push --delete '*'                     remove stale files
      openenv push --create-pr -r team/maze         open a pull request
      openenv push --registry registry.example.org/team
      openenv push --dry-run                        print what would be pushed

    The package is checked and copied. The copy has no hidden files, caches, build/ and *.egg-info; its Dockerfile is in
    the root, and its README has the front matter of a Space. The variables of openenv.yaml become variables of the
    Space. Log in first, with `hf auth login` or HF_TOKEN. Needs the package huggingface_hub; a registry needs
    Docker or Podman instead.
    """
    # Three targets:
    #
    #   package ──copy──> Space             the Hub builds the Dockerfile and runs it
    #              │
    #              ├────> pull request      with --create-pr: files only, no settings
    #              │
    #              └────> docker build ──> docker push    with --registry: this machine builds
    page = flags.page
    flags.space.check(flags.registry)
    package = _package(flags.directory)
    # Neither an image nor a pull request can carry variables, so the user has to set them at the target.
    if package.variables and (flags.registry is not None or flags.space.create_pr):
        _note("only a push to a Space sets the variables of openenv.yaml; set them where the image runs")
    if flags.dry_run:
        _print_plan(package, flags, page)
    elif flags.registry is not None:
        _push_image(package, flags.registry, flags.base_image, page)
    else:
        with tidy_on_sigterm():
            _push_space(package, flags, page)


def _push_space(package: SpacePackage, flags: PushFlags, page: bool | None) -> None:
    """Copy the package in the form of a Space, then deploy it or open a pull request."""
    from openenv.packaging.hub.spaces import HubError, Spaces, SpaceSettings, Upload
    from openenv.packaging.hub.staging import PackageStructureError, staged_space

    options = flags.space
    variables = {**package.variables, **name_values("--env-var", options.env_var)}
    settings = SpaceSettings(options.private, options.hardware, variables, secret_values("--secret", options.secret))
    # Order: read the patterns, log in, copy, upload. A mistake on this machine is reported before the Hub is asked.
    try:
        ignore = _ignore_lines(package.folder, options.exclude)
        spaces = Spaces(published)
        target = spaces.full_id(options.repo_id or _name_on_hub(package.name))
        typer.echo(f"Logged in as {spaces.username}; copying {package.name}", err=True)
        with staged_space(package, ignore=ignore, base_image=flags.base_image, interface=page) as folder:
            upload = Upload(folder, options.delete)
            if options.create_pr:
                request = spaces.open_pull_request(target, upload)
                typer.secho(f"Pull request: {request or 'none, because no file differs'}", fg="green")
            else:
                _deploy(spaces, target, upload, settings, options.count)
    # Exit code 2: the package itself has a mistake.
    except PackageStructureError as error:
        raise typer.BadParameter(printable(error)) from error
    # Exit code 1: the Hub refused or did not answer.
    except HubError as error:
        raise failure(printable(error)) from error


def _print_plan(package: SpacePackage, flags: PushFlags, page: bool | None) -> None:
    """Print what a push would do; log in nowhere and send nothing."""
    from openenv.packaging.hub.staging import PackageStructureError, staged_space

    options = flags.space
    variables = {**package.variables, **name_values("--env-var", options.env_var)}
    name = options.repo_id or _name_on_hub(package.name)
    names = [name] if options.count == 1 else [f"{name}-{number}" for number in range(1, options.count + 1)]
    # Sample:
    #
    #   target     Space team/maze, private
    #   variables  MAZE_SIZE
    #   secrets    API_KEY
    #   files      7, 12.3 kB
    #     Dockerfile  0.4 kB
    #     ...
    if flags.registry is not None:
        target = f"image {_image_tag(package, flags.registry)}"
    else:
        # Without an owner, the Hub takes the namespace of whoever is logged in.
        spaces = ", ".join(one if "/" in one else f"YOUR-NAMESPACE/{one}" for one in names)
        target = f"{'pull request to ' if options.create_pr else ''}Space {spaces}"
        target += ", private" if options.private else ""
        target += f", {options.hardware}" if options.hardware else ""
    _plan_line("target", target)
    if flags.registry is None and not options.create_pr:
        _plan_line("variables", ", ".join(variables))
        # Names only: a plan is pasted into tickets.
        _plan_line("secrets", ", ".join(secret_values("--secret", options.secret)))
        _plan_line("deletes", ", ".join(options.delete))
    try:
        ignore = _ignore_lines(package.folder, options.exclude)
        with staged_space(package, ignore=ignore, base_image=flags.base_image, interface=page) as folder:
            sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    except PackageStructureError as error:
        raise typer.BadParameter(printable(error)) from error
    _plan_line("files", f"{len(sizes)}, {sum(sizes.values()) / 1000:.1f} kB")
    for path, size in sorted(sizes.items()):
        typer.echo(f"  {printable(path)}  {size / 1000:.1f} kB")
    typer.echo("Nothing was pushed.", err=True)


def _plan_line(what: str, text: str) -> None:
    if text:
        typer.echo(f"{what:<10} {printable(text)}")


def _deploy(spaces: Spaces, target: str, upload: Upload, settings: SpaceSettings, count: int) -> None:
    """Deploy one Space, or several with numbered names; print their addresses."""
    from openenv.packaging.hub.spaces import HubError

    # Several instances share a load: OWNER/NAME-1, OWNER/NAME-2, ...
    names = [target] if count == 1 else [f"{target}-{number}" for number in range(1, count + 1)]
    pages = []
    for number, name in enumerate(names, 1):
        typer.echo(f"{f'[{number}/{count}] ' if count > 1 else ''}Deploying {name}", err=True)
        try:
            pages.append(spaces.deploy(name, upload, settings))
        except HubError as error:
            # Instances that were deployed stay; the user must know them to delete or to complete them.
            if count > 1:
                typer.echo(f"{len(pages)} of {count} instances deployed: {', '.join(pages) or 'none'}", err=True)
            raise failure(printable(error)) from error
        # Names only: values of secrets never appear in logs.
        for kind, values in (("variable", settings.variables), ("secret", settings.secrets)):
            for key in values:
                typer.echo(f"Set {kind} {key} on {name}", err=True)
    if count > 1:
        typer.secho(f"All {count} instances deployed", fg="green")
    for page in pages:
        typer.secho(f"Space: {page}", fg="green")
    typer.echo("The Hub builds it now; its page shows the build log.", err=True)


def _push_image(package: SpacePackage, registry: str, base_image: str | None, page: bool | None) -> None:
    """Build an image of a package and push it; the engine must be logged in."""
    from openenv.packaging.hub.staging import docker_file, edit_file

    tag = _image_tag(package, registry)
    with tidy_on_sigterm():
        engine = container_engine()
        try:
            with staged(package.folder) as copy:
                # The copy is edited, so the package's own Dockerfile stays as it is.
                edit_file(copy.dockerfile, lambda text: docker_file(text, base_image=base_image, interface=page))
                build_image(engine, copy, tag, build_args=[f"ENV_NAME={package.name.removesuffix('_env')}"])
        except (StagingError, OSError, ValueError) as error:
            raise failure(error) from error
        run_engine(engine, "push", tag)
    typer.secho(f"Image: {tag}", fg="green")


def _image_tag(package: SpacePackage, registry: str) -> str:
    return f"{registry.rstrip('/')}/{package.name.lower()}"


def _package(folder: Path) -> SpacePackage:
    from openenv.env.manifest import MANIFEST
    from openenv.packaging.hub.staging import PackageStructureError, read_package

    if not folder.is_dir():
        hint = ""
        # `openenv push me/maze`: the argument is a folder, but this one looks like a Space.
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
            hint = f". Did you mean the Space: openenv push --repo-id {folder}?"
        raise typer.BadParameter(f"folder {folder} does not exist{hint}", param_hint="FOLDER")
    if not (folder / MANIFEST).is_file():
        raise failure(f"{folder.resolve()} is not an environment package: {MANIFEST} is missing")
    try:
        package = read_package(folder)
    except PackageStructureError as error:
        raise typer.BadParameter(printable(error), param_hint="FOLDER") from error
    return package


def _check_repo_id(repo_id: str) -> None:
    from openenv.packaging.hub.spaces import check_repo_id

    try:
        check_repo_id(repo_id)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--repo-id") from error


def _name_on_hub(name: str) -> str:
    """Return a package's name in characters that the Hub allows."""
    # "my maze!" becomes my-maze.
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.")


def _ignore_lines(folder: Path, exclude: Path | None) -> list[str]:
    """Read a file of patterns; a relative path starts at the package, or else at the current folder."""
    from openenv.packaging.hub.staging import read_ignore_file

    if exclude is None:
        return []
    path = folder / exclude
    # If both exist, the file in the package wins.
    return read_ignore_file(path if path.is_file() else exclude)


def _refuse(options: Mapping[str, object], beside: str, reason: str) -> None:
    for option, value in options.items():
        if value:
            raise typer.BadParameter(f"cannot be used with {beside}, {reason}", param_hint=option)


def _note(text: str) -> None:
    typer.secho(f"Note: {text}", fg="yellow", err=True)
