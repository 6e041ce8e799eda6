"""`openenv discover`: searches a catalogue of environments for a task."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .catalog import catalog_failures
from .command import failure, printable

if TYPE_CHECKING:
    from openenv.packaging.catalogue.models import DiscoveryEntry


def discover(
    query: str = typer.Argument("", metavar="QUERY", help="The environment's purpose; without it, all are listed."),
    catalog: Path | None = typer.Option(
        None, "--catalog", metavar="FILE", help="A complete catalogue; by default the installed environments."
    ),
    limit: int = typer.Option(20, "--limit", metavar="N", min=1, max=1000, help="Maximum number of entries."),
    filter: list[str] = typer.Option(
        [],
        "--filter",
        metavar="NAME=VALUE",
        help="Only with this name, license, provider, artifact_availability, tags or type; may be repeated.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print whole entries, as JSON."),
) -> None:
    """Search for environments that fit a task; nothing is installed, run or fetched.

      openenv discover                              what is installed here
      openenv discover "solve a maze"
      openenv discover "solve a maze" --catalog catalog.json
      openenv discover --catalog catalog.json --filter license=MIT --json

    `openenv catalog build` writes a catalogue.
    """
    if catalog is None:
        if filter:
            raise typer.BadParameter("needs --catalog: installed packages declare none of these", param_hint="--filter")
        _search_installed(query, limit, as_json=as_json)
        return
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


def _search_installed(query: str, limit: int, *, as_json: bool) -> None:
    """Print the environments of this Python installation that match, best matches first."""
    from openenv.packaging.auto.installed import get_discovery
    from openenv.packaging.catalogue.search import match_score

    known = get_discovery().discover().values()
    scored = [(match_score(query, one.name, one.description), one) for one in known]
    found = sorted(((score, one) for score, one in scored if score is not None), key=lambda pair: -pair[0])[:limit]
    if as_json:
        results = [
            {
                "name": one.name,
                "description": one.description,
                "package": one.package_name,
                "version": one.version,
                "folder": None if one.folder is None else str(one.folder),
                "score": score,
            }
            for score, one in found
        ]
        typer.echo(json.dumps({"results": results, "metadataOnly": True}, indent=2, ensure_ascii=False))
        return
    # Sample:
    #
    #   maze_env: Find the way out.
    #     package: openenv-maze-env 0.1.0
    #     serve: openenv serve /home/me/maze_env
    for _, one in found:
        typer.echo(printable(f"{one.name}: {one.description}"))
        typer.echo(printable(f"  package: {one.package_name} {one.version}"))
        if one.folder is not None:
            typer.echo(printable(f"  serve: openenv serve {shlex.quote(str(one.folder))}"))
    if not found:
        typer.echo(f"None of {len(known)} installed environments matches. With --catalog, search a catalogue.")


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
