"""`openenv discover`: searches a catalogue of environments for a task."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .catalog import catalog_failures
from .command import failure, printable

if TYPE_CHECKING:
    from openenv.packaging.catalogue.models import DiscoveryEntry


REFERENCE = {
    "browser_env": "A real Chromium on a small site: buy, find, fill in forms",
    "chess_env": "Play chess against an engine, or find the move that mates",
    "coding_env": "Run Python in a sandbox, or write functions that hidden calls score",
    "echo_env": "Two tools that return their input, to test connections and clients",
    "gridworld_env": "Find the goal of a maze with walls and pits, made from a seed",
    "gymnasium_env": "Any environment of Gymnasium: control, games, robots",
    "notes_env": "Read and write notes with tools until a task is done",
    "opencode_env": "OpenCode environment for OpenEnv: a real coding agent in a sandbox, exact tokens, a reward it "
    "cannot fake",
    "reasoning_gym_env": "Puzzles, arithmetic, logic and graph questions from Reasoning Gym",
    "textarena_env": "Text games of TextArena: puzzles, board, card and word games",
}
"""The reference environments of our repository, with the descriptions of their packages; a test compares both."""
_REPOSITORY = "https://github.com/openenv/openenv"


def discover(
    query: str = typer.Argument("", metavar="QUERY", help="The environment's purpose; without it, all are listed."),
    catalog: Path | None = typer.Option(
        None,
        "--catalog",
        metavar="FILE",
        help="A complete catalogue; by default installed and reference environments.",
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

      openenv discover                          installed and reference environments
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
    """Print the installed and the reference environments that match, best matches first."""
    from openenv.packaging.auto.installed import get_discovery
    from openenv.packaging.catalogue.search import match_score

    known = get_discovery().discover().values()
    scored = [(match_score(query, one.name, one.description), one) for one in known]
    found = sorted(((score, one) for score, one in scored if score is not None), key=lambda pair: -pair[0])[:limit]
    names = {one.name for one in known}
    others = reference_environments(query, names)[: limit - len(found)]
    if as_json:
        results: list[dict[str, object]] = [
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
        for score, name in others:
            entry = {"name": name, "description": REFERENCE[name], "source": _source(name), "score": score}
            results.append(entry)
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
    for _, name in others:
        typer.echo(f"{name}: {REFERENCE[name]}")
        typer.echo(f"  install: pip install {shlex.quote(_source(name))}")
    if not found and not others:
        count = len(names | set(REFERENCE))
        typer.echo(f"None of {count} installed and reference environments matches. With --catalog, search a catalogue.")


def reference_environments(query: str, installed: Collection[str]) -> list[tuple[float, str]]:
    """Return the score and the name of each matching reference environment that is not installed, best first."""
    from openenv.packaging.catalogue.search import match_score

    names = [name for name in REFERENCE if name not in installed]
    scored = [(match_score(query, name, REFERENCE[name]), name) for name in names]
    return sorted(((score, name) for score, name in scored if score is not None), key=lambda pair: -pair[0])


def _source(name: str) -> str:
    """Return the place of a reference environment, as pip takes it."""
    return f"git+{_REPOSITORY}#subdirectory=envs/{name}"


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
