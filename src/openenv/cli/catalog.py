"""`openenv catalog`: build the catalogue of a repository's environments, and print its entries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .command import HelpCommand, command_group, failure, printable
from .options import flags_class, options_of

catalog = command_group(
    """
Build and inspect catalogues of environments: metadata only, without installing or running anything.

  openenv catalog build --repository . --publisher example.org \\
      --repository-uri https://github.com/me/envs.git --output catalog.json
  openenv discover "solve a maze" --catalog catalog.json
  openenv catalog inspect urn:air:example.org:openenv:... --catalog catalog.json
"""
)


@contextmanager
def catalog_failures() -> Iterator[None]:
    """End the command with one line if a catalogue is unusable."""
    from openenv.packaging.catalogue.models import CatalogError

    try:
        yield
    # A file that is not a catalogue, an incomplete one, an unknown identifier.
    except CatalogError as error:
        raise failure(printable(error)) from None


@flags_class
class CatalogFlags:
    """Options of `openenv catalog build`."""

    repository: Annotated[Path, typer.Option(metavar="FOLDER", help="A local Git repository.")]
    repository_uri: Annotated[
        str, typer.Option(metavar="URL", help="Its public address: https://github.com/OWNER/NAME.git.")
    ]
    publisher: Annotated[str, typer.Option(metavar="DOMAIN", help="The publisher of the catalogue.")]
    output: Annotated[Path, typer.Option(metavar="FILE", help="The JSON file to write.")]
    revision: Annotated[str, typer.Option(metavar="REVISION", help="A commit, branch or tag.")] = "HEAD"
    root: Annotated[str, typer.Option(metavar="FOLDER", help="The folder with the environments.")] = "envs"
    namespace: Annotated[str, typer.Option(metavar="NAME", help="A part of each identifier.")] = "openenv"


@catalog.command("build", cls=HelpCommand)
@options_of(CatalogFlags)
def build(flags: CatalogFlags) -> None:
    """Write the catalogue of the environments in a Git repository.

      openenv catalog build --repository . --publisher example.org \\
          --repository-uri https://github.com/me/envs.git --output catalog.json

    Each folder in envs/ with an openenv.yaml is an environment. Name, description, tags, license and requirement come
    from the committed versions of openenv.yaml, pyproject.toml, the front matter of README.md and discovery.json. If
    an environment has wrong metadata, the catalogue is incomplete and cannot be searched, and the exit code is 1.
    """
    from openenv.packaging.catalogue.producer import build_catalog
    from openenv.packaging.catalogue.serialization import write_catalog

    with catalog_failures():
        snapshot = build_catalog(
            flags.repository,
            repository_uri=flags.repository_uri,
            publisher=flags.publisher,
            namespace=flags.namespace,
            revision=flags.revision,
            root=flags.root,
        )
        # Also written if it is incomplete, so that its issues can be read by a program.
        write_catalog(snapshot, flags.output)
    # Sample: `12 records, snapshot ..., complete=true`.
    is_complete = str(snapshot.complete).lower()
    typer.echo(f"{len(snapshot.entries)} records, snapshot {snapshot.digest}, complete={is_complete}", err=True)
    for issue in snapshot.issues:
        colour = "red" if issue.severity == "error" else "yellow"
        typer.secho(f"{issue.severity}: {printable(issue.path)}: {printable(issue.message)}", fg=colour, err=True)
    # Exit code 1 stops a publishing job before it uploads the file.
    if not snapshot.complete:
        raise typer.Exit(1)


@catalog.command("inspect", cls=HelpCommand)
def inspect(
    identifier: str = typer.Argument(..., metavar="IDENTIFIER", help="The complete identifier of an entry."),
    catalog: Path = typer.Option(..., "--catalog", metavar="FILE", help="A complete catalogue."),
) -> None:
    """Print the catalogue's entry of one environment, as JSON.

      openenv catalog inspect urn:air:example.org:openenv:... --catalog catalog.json

    `openenv discover` shows the identifiers.
    """
    from openenv.packaging.catalogue.search import resolve_entry
    from openenv.packaging.catalogue.serialization import load_catalog

    with catalog_failures():
        entry = resolve_entry(load_catalog(catalog), identifier)
    typer.echo(entry.model_dump_json(by_alias=True, exclude_none=True, indent=2))
