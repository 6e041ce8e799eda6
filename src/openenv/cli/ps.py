"""`openenv ps`: the servers and sandboxes that run on this machine and in a cluster."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .command import check_choice, printable

if TYPE_CHECKING:
    from openenv.providers.inventory import InventoryItem, ResourceInventory

ONLY = typer.Option(
    [], "--only", metavar="PLACE", help="docker, podman, swarm, process, local, kubernetes or a cloud; may be repeated."
)
KUBECONFIG = typer.Option(None, "--kubeconfig", metavar="FILE", help="The cluster; by default what kubectl would use.")
CONTEXT = typer.Option(None, "--context", metavar="NAME", help="The context in that file; by default its current one.")
NAMESPACE = typer.Option(None, "--namespace", metavar="NAME", help="The namespace; by default the context's.")
ALL_NAMESPACES = typer.Option(False, "--all-namespaces", help="Look into all namespaces.")
_WIDEST = 60


def ps(
    only: list[str] = ONLY,
    kubeconfig: Path | None = KUBECONFIG,
    context: str | None = CONTEXT,
    namespace: str | None = NAMESPACE,
    all_namespaces: bool = ALL_NAMESPACES,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the servers and sandboxes that providers and rollouts run, whichever process started them.

      openenv ps                       here, and in your cluster if there is one
      openenv ps --only docker --only local
      openenv ps --only kubernetes --all-namespaces

    The owner is the process that started it. One whose owner is dead, or whose time is over, is a leftover, which
    `openenv gc` removes. Processes of other users are not seen.
    """
    found = inventory_of(only, kubeconfig, context, namespace, all_namespaces)
    if as_json:
        items = [_as_json(one) for one in found.items]
        typer.echo(json.dumps({"items": items, "notes": found.notes}, indent=2))
        return
    show(found)
    if not found.items:
        typer.echo("Nothing runs.")


def inventory_of(
    only: list[str], kubeconfig: Path | None, context: str | None, namespace: str | None, everywhere: bool
) -> ResourceInventory:
    """Take the inventory that the options ask for."""
    from openenv.providers.inventory import PLACES, take_inventory
    from openenv.sandboxes.cluster import ClusterAddress

    for place in only:
        check_choice("--only", place, PLACES)
    places = tuple(place for place in PLACES if not only or place in only)
    named = any(option is not None for option in (kubeconfig, context, namespace)) or everywhere
    address = ClusterAddress(kubeconfig, context, namespace)
    asked = named or "kubernetes" in only
    return take_inventory(places, address, everywhere=everywhere, needs_cluster=asked)


def show(found: ResourceInventory) -> None:
    """Print a table, and what could not be asked."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if found.items:
        table = Table("place", "use", "name", "what", "address", "age", "owner", box=None, pad_edge=False)
        for one in found.items:
            cells = (one.place, one.use, one.name, _short(one.what), one.address, age(one.created), owner_of(one))
            table.add_row(*(Text(printable(cell), style="red" if one.is_leftover else "") for cell in cells))
        console.print(table)
    for note in found.notes:
        console.print(f"Note: {printable(note)}", style="yellow", markup=False)


def owner_of(item: InventoryItem) -> str:
    """Say who owns it."""
    if item.owner is None:
        text = "unknown"
    elif item.owner.is_dead():
        text = f"{item.owner.pid}, dead"
    else:
        text = str(item.owner.pid) if item.owner.is_here else "another machine"
    return f"{text} (leftover)" if item.is_leftover else text


def age(created: datetime | None) -> str:
    """Return how long ago that was, in one unit."""
    if created is None:
        return ""
    seconds = max(0.0, (datetime.now(timezone.utc) - created).total_seconds())
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _as_json(item: InventoryItem) -> dict[str, object]:
    return {
        "place": item.place,
        "use": item.use,
        "name": item.name,
        "what": item.what,
        "address": item.address,
        "created": None if item.created is None else item.created.isoformat(),
        "owner": None if item.owner is None else str(item.owner),
        "leftover": item.is_leftover,
    }
