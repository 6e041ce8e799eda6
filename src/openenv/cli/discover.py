"""`openenv discover`: searches a catalogue of environments for a task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .catalog import catalog_failures
from .command import failure, printable

if TYPE_CHECKING:
    from openenv.packaging.catalogue.models import DiscoveryEntry


def discover(
    query: str = typer.Argument("", metavar="QUERY", help="The environment's purpose; without it, all are listed."),
    catalog: Path = typer.Option(..., "--catalog", metavar="FILE", help="A complete catalogue."),
    limit: int = typer.Option(20, "--limit", metavar="N", min=1, max=1000, help="Maximum number of entries."),
    filter: list[str] = typer.Option(
        [],
        "--filter",
        metavar="NAME=VALUE",
        help="Only with this name, license, provider, artifact_availability, tags or type; may be repeated.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print whole entries, as JSON."),
) -> None:
    """Search a catalogue for environments that fit a task; nothing is installed, run or fetched.

      openenv discover "solve a maze" --catalog catalog.json
      openenv discover --catalog catalog.json --filter license=MIT --json

    `openenv catalog build` writes a catalogue.
    """
    from openenv.packaging.catalogue.search import search_catalog
    from openenv.packaging.catalogue.serialization import load_catalog

    filters: dict[str, str] = {}
    for word in filter:
        name, sign, value = word.partition("=")
        # The same name twice would silently replace the first filter.
        if not name or not sign or name in filters:
            raise failure(f"--filter {printable(word)}: filters are NAME=VALUE, each name once")
        filters[name] = value
    with catalog_failures():
        snapshot = load_catalog(catalog)
        matches = search_catalog(snapshot, query, filters=filters, limit=limit)
    if as_json:
        # Whole entries of the catalogue, each with its score for this query.
        results = [
            {**match.entry.model_dump(mode="json", by_alias=True, exclude_none=True), "score": match.score}
            for match in matches
        ]
        document = {"results": results, "snapshot": snapshot.digest, "metadataOnly": True}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    for match in matches:
        typer.echo("\n".join(_lines(match.entry)))
    if not matches:
        typer.echo(f"None of {len(snapshot.entries)} environments matches.")
    # On standard error: nothing here was verified, and the output may be piped.
    typer.echo("These are declarations. Read the code before you run it.", err=True)


def _lines(entry: DiscoveryEntry) -> list[str]:
    card = entry.data
    # Sample:
    #
    #   Maze: Find the way out.
    #     source: https://github.com/me/envs.git
    #     path: envs/maze_env
    #     ...
    lines = [
        f"{entry.display_name}: {card.description}",
        f"  source: {card.source.uri}",
        f"  path: {card.source.path}",
        f"  revision: {card.source.revision}",
        f"  license: {card.license}; artifact: {card.artifact_availability}",
        f"  identifier: {entry.identifier}",
    ]
    return [printable(line) for line in lines]
