"""`openenv view`: show stored and running rollouts in the browser."""

from __future__ import annotations

import contextlib
import secrets
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from openenv import settings
from openenv.protocol.addresses import is_loopback

from .command import failure, tidy_on_sigterm

if TYPE_CHECKING:
    import socket

    from openenv.server.access import AccessPolicy


# This process only reads the stores; rollouts run in other processes:
#
#   openenv rollouts run ──writes──> store (folder) <──reads── openenv view ──HTTP──> browser
def view(
    stores: list[Path] = typer.Argument(
        None,
        metavar="STORE...",
        help="Folders of stored rollouts; by default OPENENV_ROLLOUTS, else one in your data folder.",
    ),
    host: str = typer.Option("127.0.0.1", metavar="ADDRESS", help="Address to listen on."),
    port: int = typer.Option(
        8600, "--port", "-p", metavar="PORT", min=0, max=65535, help="Port; 0 takes any free one."
    ),
    token: str | None = typer.Option(
        None,
        metavar="TOKEN",
        help="Require this token. Prefer OPENENV_TOKEN: other users of this machine can read options.",
    ),
    no_token: bool = typer.Option(
        False, "--no-token", help="Never create a token, not even for an address that others can reach."
    ),
    open_browser: bool = typer.Option(False, "--open", help="Open the page in your browser."),
) -> None:
    """Show rollouts, stored and running, in the browser, without changing them.

    The page has lists with filters and pass rates. A rollout's page has the transcript, tokens coloured by
    log-probability, changed files, every check with its output, and all verdicts. You can compare two rollouts.

    Examples:

      openenv view
      openenv view runs/monday runs/tuesday --port 0 --open

    For other machines, with a token that is created and printed:

      openenv view --host 0.0.0.0
    """
    import uvicorn

    from openenv.rollout.viewer.rollout_routes import viewer_app
    from openenv.server.loading import TargetError
    from openenv.server.run import bound_socket

    if no_token and token:
        raise typer.BadParameter("it contradicts --token", param_hint="--no-token")
    folders = _folders(stores)
    # Transcripts may contain secrets, so an address that others can reach gets a token by default.
    spare = secrets.token_urlsafe(24) if not is_loopback(host) and not no_token and not token else None
    access = _access(token, spare)
    try:
        # Bound here and not by uvicorn, because with --port 0 the printed address needs the actual port.
        listener = bound_socket(host, port)
    except TargetError as exc:
        raise failure(exc) from None
    listener.listen(128)  # before the address is shown
    place = _address(listener)
    # Browsers never send the part after # to a server, so the token stays out of access logs. If OPENENV_TOKEN is set,
    # the spare token is not in use.
    shown = f"#token={spare}" if spare is not None and not settings.orchestrator_tokens() else ""
    typer.echo(f"Rollouts of {', '.join(folders)}", err=True)
    typer.echo(f"http://{place}/web/{shown}", err=True)
    if not is_loopback(host) and access.is_open:
        typer.secho(f"{host}: open to others, without authentication", fg="yellow", err=True)
    if open_browser:
        webbrowser.open(f"http://{place}/web/{shown}")
    config = uvicorn.Config(viewer_app(folders, access), log_level="warning", timeout_graceful_shutdown=2)
    with listener, contextlib.suppress(KeyboardInterrupt), tidy_on_sigterm():
        uvicorn.Server(config).run(sockets=[listener])


def _folders(stores: list[Path]) -> dict[str, Path]:
    """Return the stores with their names on the page. One without rollouts is fine: they may start later."""
    from openenv.errors import StoreError
    from openenv.rollout.store.store import is_unused, require_store

    chosen = stores or [settings.rollout_store()]
    for folder in chosen:
        if is_unused(folder):
            typer.secho(f"{folder}: no rollouts yet; the page shows them when they start", fg="yellow", err=True)
            continue
        try:
            require_store(folder)
        except StoreError as exc:
            raise failure(exc) from None
    # A page title and link per store; the paths as the user wrote them.
    return {str(folder): folder for folder in chosen}


def _access(token: str | None, spare: str | None) -> AccessPolicy:
    from openenv.server.access import AccessPolicy

    try:
        # --token replaces the orchestrator's token; observers' tokens of the settings still work.
        if token:
            return AccessPolicy(orchestrator=token, observer=settings.observer_tokens())
        # Configured tokens win over the spare one.
        own = AccessPolicy.from_settings()
        return AccessPolicy(orchestrator=spare) if own.is_open and spare is not None else own
    # Two roles with the same token, or a token with characters that headers cannot carry.
    except ValueError as exc:
        raise failure(exc) from None


def _address(listener: socket.socket) -> str:
    """Return the page's address for a browser on this machine."""
    host, port = listener.getsockname()[:2]
    # Nobody can open 0.0.0.0 in a browser. IPv6 addresses need brackets: http://[::1]:8600.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
