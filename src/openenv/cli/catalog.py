"""`openenv catalog`: builds the catalogue of a repository's environments, and shows entries of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from .command import HelpCommand, command_group, failure, printable

catalog = command_group(
    """
Build and inspect catalogues of environments: metadata only, nothing is installed or run.

  openenv catalog build --repository . --publisher example.org \\
      --repository-uri https://github.com/me/envs.git --output catalog.json
  openenv discover "solve a maze" --catalog catalog.json
  openenv catalog inspect urn:air:example.org:openenv:... --catalog catalog.json
"""
)


@contextmanager
def catalog_failures() -> Iterator[None]:
    """End the command where a catalogue cannot be used."""
    from openenv.packaging.catalogue.models import CatalogError

    try:
        yield
    except CatalogError as error:
        raise failure(printable(error)) from None


@catalog.command("build", cls=HelpCommand)
def build(
    repository: Path = typer.Option(..., "--repository", metavar="FOLDER", help="A local Git repository."),
    repository_uri: str = typer.Option(
        ..., "--repository-uri", metavar="URL", help="Where others find it: https://github.com/OWNER/NAME.git."
    ),
    publisher: str = typer.Option(..., "--publisher", metavar="DOMAIN", help="Who publishes the catalogue."),
    output: Path = typer.Option(..., "--output", metavar="FILE", help="The JSON file to write."),
    revision: str = typer.Option("HEAD", "--revision", metavar="REVISION", help="A commit, branch or tag."),
    root: str = typer.Option("envs", "--root", metavar="FOLDER", help="The folder with the environments."),
    namespace: str = typer.Option("openenv", "--namespace", metavar="NAME", help="A part of each identifier."),
) -> None:
    """Write the catalogue of the environments in a Git repository.

      openenv catalog build --repository . --publisher example.org \\
          --repository-uri https://github.com/me/envs.git --output catalog.json

    Each folder in envs/ with an openenv.yaml is an environment. Its name, description, tags, license and requirement
    come from openenv.yaml, pyproject.toml, the front matter of README.md and discovery.json, as they are committed:
    changes that are not committed do not count. An environment with wrong metadata is named; the catalogue is then
    incomplete, cannot be searched, and the exit code is 1.
    """
    from openenv.packaging.catalogue.producer import build_catalog
    from openenv.packaging.catalogue.serialization import write_catalog

    with catalog_failures():
        snapshot = build_catalog(
            repository,
            repository_uri=repository_uri,
            publisher=publisher,
            namespace=namespace,
            revision=revision,
            root=root,
        )
        write_catalog(snapshot, output)
    is_complete = str(snapshot.complete).lower()
    typer.echo(f"{len(snapshot.entries)} records, snapshot {snapshot.digest}, complete={is_complete}", err=True)
    for issue in snapshot.issues:
        colour = "red" if issue.severity == "error" else "yellow"
        typer.secho(f"{issue.severity}: {printable(issue.path)}: {printable(issue.message)}", fg=colour, err=True)
    if not snapshot.complete:
        raise typer.Exit(1)


@catalog.command("inspect", cls=HelpCommand)
def inspect(
    identifier: str = typer.Argument(..., metavar="IDENTIFIER", help="The whole identifier of an entry."),
    catalog: Path = typer.Option(..., "--catalog", metavar="FILE", help="A complete catalogue."),
) -> None:
    """Print everything that a catalogue says of one environment, as JSON.

      openenv catalog inspect urn:air:example.org:openenv:... --catalog catalog.json

    `openenv discover` shows the identifiers.
    """
    from openenv.packaging.catalogue.search import resolve_entry
    from openenv.packaging.catalogue.serialization import load_catalog

    with catalog_failures():
        entry = resolve_entry(load_catalog(catalog), identifier)
    typer.echo(entry.model_dump_json(by_alias=True, exclude_none=True, indent=2))
