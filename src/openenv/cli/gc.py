"""`openenv gc`: remove servers and sandboxes without an owner."""

from __future__ import annotations

from typing import Annotated

import typer

from openenv.errors import message_of

from .command import failure, printable
from .options import flags_class, options_of
from .ps import InventoryFlags, age


@flags_class
class GcFlags:
    """Options of `openenv gc`."""

    places: InventoryFlags
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the leftovers and remove nothing.")] = False


@options_of(GcFlags)
def gc(flags: GcFlags) -> None:
    """Remove leftover servers and sandboxes: their process has ended, or their time limit is over.

      openenv gc --dry-run
      openenv gc
      openenv gc --only kubernetes --all-namespaces

    Resources of a living process stay. Resources of another machine stay until their `ttl_s` is over. Exits with 1 if
    some could not be removed.
    """
    inventory = flags.places.inventory()
    # A place that does not answer may have leftovers that this run cannot remove.
    for note in inventory.notes:
        typer.secho(f"Note: {printable(note)}", fg="yellow", err=True)
    leftovers = [one for one in inventory.items if one.is_leftover]
    failed = 0
    for one in leftovers:
        name = f"{one.place} {one.use} {printable(one.name)} ({age(one.created) or 'unknown age'})"
        # Sample: `would remove docker server openenv-a (2 h)`.
        if flags.dry_run:
            typer.echo(f"would remove {name}")
            continue
        try:
            one.remove()
        # The engine or the cluster refused. Continue with the other leftovers.
        except (RuntimeError, OSError) as error:
            failed += 1
            typer.secho(f"{name} is still there: {printable(message_of(error))}", fg="red", err=True)
        else:
            typer.echo(f"removed {name}")
    if not leftovers:
        typer.echo("No leftovers.")
    # Exit code 1, so that a cron job reports it.
    if failed:
        raise failure(f"{failed} of {len(leftovers)} could not be removed")
