"""`openenv top`: a running server, live in the terminal.

Knows how metrics are fetched and drawn; what they mean is in `telemetry.snapshot`.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import typer

from .. import settings

if TYPE_CHECKING:
    import httpx2
    from rich.console import Group, RenderableType
    from rich.table import Table

    from ..telemetry.snapshot import Snapshot

_EXAMPLES = """
Show how a running server does: sessions, queue, steps per second, times, errors.

* the server on this machine:      openenv top
* another one, every 5 seconds:    openenv top http://gpu-7:8000 --every 5
* one reading as text:             openenv top --once

The figures come from `GET /metrics`, which Prometheus can read as well. Rates and times are those of the last interval;
the server times calls from the first reading on.

Where a token is asked for, an observer's is enough. Ctrl-C leaves.
"""

_BAR = 30
_TIMEOUT_S = 10.0
_PHASES = ("wait", "run", "reply")


class Unreadable(Exception):
    """There are no metrics to show."""


def top(
    url: str = typer.Argument("http://127.0.0.1:8000", metavar="URL", help="The address of the server."),
    every: float = typer.Option(1.0, min=0.1, help="Seconds between readings."),
    once: bool = typer.Option(False, "--once", help="Print one reading and exit."),
    token: str | None = typer.Option(None, help="The server's token; by default OPENENV_TOKEN."),
) -> None:
    from rich.console import Console  # other commands do not need it

    console = Console()
    try:
        source = Source(url, token or settings.client_token())
        if once:
            first, began = source.read(), time.monotonic()
            time.sleep(every)
            console.print(_view(source.read(), first, time.monotonic() - began), highlight=False)
        else:
            _show_live(source, every, console)
    except (Unreadable, ValueError) as exc:
        typer.secho(f"Error: {exc}", fg="red", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        return


top.__doc__ = _EXAMPLES


class Source:
    """Where the metrics come from.

    Args:
        url: The server's address.
        token: Sent with every request.

    Raises:
        ValueError: It is no address.
    """

    def __init__(self, url: str, token: str | None) -> None:
        import httpx2

        from ..client.url import parse_ws_url, socket_url

        socket = socket_url(url)
        self.url = "http" + socket.removeprefix("ws").removesuffix("/ws")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        is_local = parse_ws_url(socket).is_local
        self._http: httpx2.Client = httpx2.Client(headers=headers, timeout=_TIMEOUT_S, trust_env=not is_local)

    def read(self) -> Snapshot:
        """Fetch the metrics.

        Raises:
            Unreadable: Nobody answers, or nobody with metrics.
        """
        import httpx2

        from ..telemetry.snapshot import NotOurs, read_snapshot

        try:
            response = self._http.get(f"{self.url}/metrics")
        except httpx2.HTTPError as exc:
            raise Unreadable(f"nothing answers at {self.url} ({exc or type(exc).__name__})") from exc
        if response.status_code in (401, 403):
            problem = "asks for a token" if response.status_code == 401 else "does not let this token look"
            raise Unreadable(f"{self.url} {problem}: give one with --token or OPENENV_TOKEN")
        if response.status_code != 200:
            raise Unreadable(f"{self.url} has no metrics ({response.status_code}): is it an OpenEnv server?")
        try:
            return read_snapshot(response.text)
        except NotOurs as exc:
            raise Unreadable(f"{self.url} is no OpenEnv server: {exc}") from exc


def _show_live(source: Source, every: float, console: object) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    assert isinstance(console, Console)
    last, taken_at = source.read(), time.monotonic()
    with Live(_view(last, None, every), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            try:
                now = source.read()
            except Unreadable as exc:
                live.update(Text(f"{exc}; trying again", style="red"), refresh=True)
                continue
            moment = time.monotonic()
            live.update(_view(now, last, moment - taken_at), refresh=True)
            last, taken_at = now, moment


def _view(now: Snapshot, before: Snapshot | None, interval_s: float) -> Group:
    """Draw a reading; rates and times are those since the one before."""
    from rich.console import Group

    if before is not None and now.value("openenv_uptime_seconds") < before.value("openenv_uptime_seconds"):
        before = None  # another process: its counters have begun anew
    parts: list[RenderableType] = [_heading(now), "", _figures(now, before, interval_s), "", _times(now, before)]
    if now.errors:
        parts += ["", _errors(now, before)]
    return Group(*parts)


def _heading(now: Snapshot) -> str:
    from rich.markup import escape

    state = "[green]ready[/]" if now.value("openenv_ready") else "[yellow]shutting down[/]"
    name, runner = escape(now.info.get("environment", "?")), escape(now.info.get("runner", "?"))
    age = _age(now.value("openenv_uptime_seconds"))
    return f"[bold]{name}[/]  {state}  up {age}  {runner} runner  openenv {escape(now.info.get('version', '?'))}"


def _figures(now: Snapshot, before: Snapshot | None, interval_s: float) -> Table:
    from rich.table import Table

    used, slots = int(now.value("openenv_session_slots_used")), int(now.value("openenv_session_slots"))
    filled = math.ceil(_BAR * min(1.0, used / slots)) if slots else 0
    states = "  ".join(f"{count} {state}" for state, count in now.sessions.items() if count)
    steps = now.value("openenv_steps_total")
    rate = "-" if before is None else f"{(steps - before.value('openenv_steps_total')) / interval_s:,.0f}"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("slots", f"[cyan]{'█' * filled}[/][dim]{'░' * (_BAR - filled)}[/] {used} of {slots}")
    table.add_row("sessions", states or "none")
    table.add_row("queue", f"{now.value('openenv_queue_length'):.0f} waiting")
    table.add_row("steps", f"[bold]{rate}[/] per second, {steps:,.0f} in all")
    resumes, repeats = now.value("openenv_resumes_total"), now.value("openenv_ledger_hits_total")
    table.add_row("rescued", f"{resumes:.0f} resumed sessions, {repeats:.0f} repeated requests")
    memory = now.value("process_resident_memory_bytes") / 2**20
    threads = int(now.value("process_threads"))
    table.add_row("process", f"{memory:,.0f} MiB, {threads} thread{'' if threads == 1 else 's'}")
    return table


def _times(now: Snapshot, before: Snapshot | None) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("median / 99 %")
    for phase in _PHASES:
        table.add_column(phase, justify="right")
    for operation in dict.fromkeys(operation for operation, _ in now.calls):
        cells = []
        for phase in _PHASES:
            half, most = (now.quantile(operation, phase, share, since=before) for share in (0.5, 0.99))
            cells.append("-" if half is None or most is None else f"{_duration(half)} / {_duration(most)}")
        table.add_row(operation, *cells)
    return table


def _errors(now: Snapshot, before: Snapshot | None) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("errors", "in all", "new"):
        table.add_column(title, justify="left" if title == "errors" else "right")
    for code, count in sorted(now.errors.items(), key=lambda item: -item[1]):
        new = 0 if before is None else count - before.errors.get(code, 0)
        table.add_row(escape(code), f"{count:,}", f"[red]{new:,}[/]" if new else "0")
    return table


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
