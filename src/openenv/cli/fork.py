"""`openenv fork`: copy a Space to another namespace of the Hugging Face Hub."""

from __future__ import annotations

import typer

from .command import OldName, failure, name_values, printable, secret_values
from .commands import fork as published


def fork(
    source_space: str = typer.Argument(..., metavar="SOURCE", help="OWNER/NAME of a Space, or its address."),
    repo_id: str | None = typer.Option(
        None,
        "--repo-id",
        "-r",
        metavar="ID",
        help="NAME or OWNER/NAME of the copy; by default the same name, in your namespace.",
    ),
    private: bool = typer.Option(False, "--private", help="Make the copy private."),
    set_env: list[str] = typer.Option(
        [], "--env-var", "-e", OldName("--set-env"), metavar="NAME=VALUE", help="A variable of the copy; repeatable."
    ),
    set_secret: list[str] = typer.Option(
        [],
        "--secret",
        "-s",
        OldName("--set-secret"),
        metavar="NAME[=VALUE]",
        help="A secret of the copy; without a value, the environment variable's. Repeatable.",
    ),
    hardware: str | None = typer.Option(
        None, "--hardware", "-H", metavar="NAME", help="Such as t4-medium; by default cpu-basic."
    ),
) -> None:
    """Copy a Space of the Hugging Face Hub into your namespace.

      openenv fork openenv/echo_env
      openenv fork openenv/echo_env -r team/echo --private --secret API_KEY

    The copy has the files and the history of its source. The Hub copies no secrets, so set them here. Log in first
    with `hf auth login` or HF_TOKEN. Needs the package huggingface_hub. (To copy a running episode, use env.fork().)
    """
    from openenv.packaging.auto.hub import repo_of
    from openenv.packaging.hub.spaces import HubError, Spaces, SpaceSettings, check_repo_id

    # Accepts openenv/echo_env and https://huggingface.co/spaces/openenv/echo_env.
    try:
        source = repo_of(source_space)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="SOURCE") from error
    # A name without an owner, such as echo_env.
    if source is None:
        raise typer.BadParameter(f"{source_space!r} is not a Space; write OWNER/NAME", param_hint="SOURCE")
    try:
        if repo_id is not None:
            check_repo_id(repo_id)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--repo-id") from error
    settings = SpaceSettings(
        private, hardware, name_values("--env-var", set_env), secret_values("--secret", set_secret)
    )
    try:
        typer.echo(f"Copying {source}", err=True)
        page = Spaces(published).fork(source, repo_id, settings)
    # For example no login, or no permission in the namespace. The text may come from the Hub, so it is escaped.
    except HubError as error:
        raise failure(printable(error)) from error
    typer.secho(f"Space: {page}", fg="green")
