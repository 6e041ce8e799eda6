"""`openenv ps`: list the running servers and sandboxes, on this machine and in a cluster."""

from __future__ import annotations

import json
from dataclasses import field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated

import typer

from .command import check_choice, printable
from .options import ClusterFlags, flags_class, options_of

if TYPE_CHECKING:
    from openenv.providers.inventory import InventoryItem, ResourceInventory

# Columns for a command or an image; the other columns must fit beside it.
_WIDEST = 60


@flags_class
class InventoryFlags:
    """Options that choose the places to look at, for `ps` and `gc`."""

    only: Annotated[
        list[str],
        typer.Option(metavar="PLACE", help="docker, podman, swarm, process, local, kubernetes or a cloud; repeatable."),
    ] = field(default_factory=list)
    cluster: ClusterFlags
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", help="Include all namespaces.")] = False

    def inventory(self) -> ResourceInventory:
        """Return the resources in the chosen places."""
        from openenv.providers.inventory import PLACES, take_inventory

        # Exit code 2 for a mistyped place, instead of an empty table that looks as if nothing ran.
        for place in self.only:
            check_choice("--only", place, PLACES)
        places = tuple(place for place in PLACES if not self.only or place in self.only)
        # Without a configured cluster, plain `ps` leaves it out; if the user asked for one, that is an error.
        needs_cluster = self.cluster.is_set or self.all_namespaces or "kubernetes" in self.only
        return take_inventory(
            places, self.cluster.address(), everywhere=self.all_namespaces, needs_cluster=needs_cluster
        )


@flags_class
class PsFlags:
    """Options of `openenv ps`."""

    places: InventoryFlags
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@options_of(PsFlags)
def ps(flags: PsFlags) -> None:
    """List running servers and sandboxes of all providers and rollouts, of any process.

      openenv ps                       here, and in your cluster if there is one
      openenv ps --only docker --only local
      openenv ps --only kubernetes --all-namespaces

    The owner is the process that started the resource. If the owner is dead or the time limit is over, the resource is
    a leftover; `openenv gc` removes it. Processes of other users are not listed.
    """
    inventory = flags.places.inventory()
    # Notes are part of the JSON: an empty list with a note does not prove that nothing runs.
    if flags.as_json:
        items = [_as_json(one) for one in inventory.items]
        typer.echo(json.dumps({"items": items, "notes": inventory.notes}, indent=2))
        return
    show(inventory)
    if not inventory.items:
        typer.echo("Nothing runs.")


def show(inventory: ResourceInventory) -> None:
    """Print a table, and notes about places that did not answer."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Sample (leftovers are red):
    #
    #   place   use      name       what        address                age    owner
    #   docker  server   openenv-a  maze:1      http://127.0.0.1:4123  3 min  8123
    #   local   sandbox  638e11x27  bubblewrap                         2 h    7001, dead (leftover)
    console = Console(highlight=False)
    if inventory.items:
        table = Table("place", "use", "name", "what", "address", "age", "owner", box=None, pad_edge=False)
        for one in inventory.items:
            cells = (one.place, one.use, one.name, _short(one.what), one.address, age(one.created), owner_of(one))
            table.add_row(*(Text(printable(cell), style="red" if one.is_leftover else "") for cell in cells))
        console.print(table)
    # For example: a container engine or a cluster that does not answer.
    for note in inventory.notes:
        console.print(f"Note: {printable(note)}", style="yellow", markup=False)


def owner_of(item: InventoryItem) -> str:
    """Return the owner as text."""
    # Nothing names its owner, so only an expired time limit makes it a leftover.
    if item.owner is None:
        text = "unknown"
    elif item.owner.is_dead():
        text = f"{item.owner.pid}, dead"
    else:
        # A PID of another machine would be confused with a local one.
        text = str(item.owner.pid) if item.owner.is_here else "another machine"
    return f"{text} (leftover)" if item.is_leftover else text


def age(created: datetime | None) -> str:
    """Write an age in one unit; empty if the creation time is unknown."""
    if created is None:
        return ""
    # A cluster's clock may be ahead of ours; an age is never negative.
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
