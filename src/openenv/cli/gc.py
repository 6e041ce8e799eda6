"""`openenv gc`: remove the servers and sandboxes that nothing owns any more."""

from __future__ import annotations

from pathlib import Path

import typer

from openenv.errors import message_of

from .command import failure, printable
from .ps import ALL_NAMESPACES, CONTEXT, KUBECONFIG, NAMESPACE, ONLY, age, inventory_of


def gc(
    only: list[str] = ONLY,
    kubeconfig: Path | None = KUBECONFIG,
    context: str | None = CONTEXT,
    namespace: str | None = NAMESPACE,
    all_namespaces: bool = ALL_NAMESPACES,
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be removed, and remove nothing."),
) -> None:
    """Remove what servers and sandboxes left: the process that started them has ended, or their time is over.

      openenv gc --dry-run
      openenv gc
      openenv gc --only kubernetes --all-namespaces

    What belongs to a living process stays, and so does what another machine started, unless its `ttl_s` is over.
    Exits with 1 if something could not be removed.
    """
    found = inventory_of(only, kubeconfig, context, namespace, all_namespaces)
    for note in found.notes:
        typer.secho(f"Note: {printable(note)}", fg="yellow", err=True)
    leftovers = [one for one in found.items if one.is_leftover]
    failed = 0
    for one in leftovers:
        name = f"{one.place} {one.use} {printable(one.name)} ({age(one.created) or 'unknown age'})"
        if dry_run:
            typer.echo(f"would remove {name}")
            continue
        try:
            one.remove()
        except (RuntimeError, OSError) as error:
            failed += 1
            typer.secho(f"{name} is still there: {printable(message_of(error))}", fg="red", err=True)
        else:
            typer.echo(f"removed {name}")
    if not leftovers:
        typer.echo("Nothing is left over.")
    if failed:
        raise failure(f"{failed} of {len(leftovers)} could not be removed")
