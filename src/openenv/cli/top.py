"""`openenv top`: fetches the metrics of a running server, reads them and draws them.

What `telemetry.prometheus` writes, `read_snapshot` reads back; rates and times are the difference of two snapshots.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import typer

from openenv import settings

from .command import failure

if TYPE_CHECKING:
    import httpx2
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table

_BAR = 30
_TIMEOUT_S = 10.0
_PHASES = ("wait", "run", "reply")


class NoMetrics(Exception):
    """There are no metrics to show."""


def top(
    url: str = typer.Argument("http://127.0.0.1:8000", metavar="URL", help="The address of the server."),
    every: float = typer.Option(1.0, metavar="SECONDS", min=0.1, help="Seconds between readings."),
    once: bool = typer.Option(False, "--once", help="Print one reading and exit."),
    token: str | None = typer.Option(None, metavar="TOKEN", help="The server's token; by default OPENENV_TOKEN."),
) -> None:
    """Watch a running server: sessions, queue, steps, times, errors.

      openenv top                                    the server on this machine
      openenv top http://gpu-7:8000 --every 5        another one, every 5 seconds
      openenv top --once                             one reading, as text

    The figures come from `GET /metrics`, which Prometheus can read as well. Rates and times are those of the last
    interval; the server times calls from the first reading on.

    Where the server asks for a token, an observer's is enough. Ctrl-C ends it.
    """
    from rich.console import Console  # other commands do not need it

    console = Console()
    try:
        source = MetricsSource(url, token or settings.client_token())
        if once:
            first, began = source.read(), time.monotonic()
            time.sleep(every)
            console.print(_view(source, source.read(), first, time.monotonic() - began), highlight=False)
        else:
            _show_live(source, every, console)
    except (NoMetrics, ValueError) as exc:
        raise failure(exc) from None
    except KeyboardInterrupt:
        return


class MetricsSource:
    """The address and token that metrics are read with.

    Args:
        url: The server's address.
        token: Sent with every request.

    Raises:
        ValueError: It is no address.
    """

    def __init__(self, url: str, token: str | None) -> None:
        import httpx2

        from openenv.client.network import parse_ws_url, socket_url

        socket = socket_url(url)
        self._has_token = token is not None
        self.url = "http" + socket.removeprefix("ws").removesuffix("/ws")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        is_local = parse_ws_url(socket).is_local
        self._http: httpx2.Client = httpx2.Client(headers=headers, timeout=_TIMEOUT_S, trust_env=not is_local)

    def read(self) -> Snapshot:
        """Fetch the metrics.

        Raises:
            NoMetrics: The server does not reply, or has no metrics.
        """
        import httpx2

        try:
            response = self._http.get(f"{self.url}/metrics")
        except httpx2.HTTPError as exc:
            why = f"{exc or type(exc).__name__}; is `openenv serve` running?"
            raise NoMetrics(f"nothing answers at {self.url} ({why})") from exc
        if response.status_code in (401, 403):
            unknown = "does not know this token" if self._has_token else "asks for a token"
            problem = unknown if response.status_code == 401 else "does not let this token look"
            raise NoMetrics(f"{self.url} {problem}: give one with --token or OPENENV_TOKEN")
        if response.status_code == 503:
            raise NoMetrics(f"{self.url} is there, but not ready ({_detail(response)})")
        if response.status_code != 200:
            raise NoMetrics(f"{self.url} has no metrics ({response.status_code}): is it an OpenEnv server?")
        try:
            return read_snapshot(response.text)
        except NotOurs as exc:
            raise NoMetrics(f"{self.url} is no OpenEnv server: {exc}") from exc


def _detail(response: httpx2.Response) -> str:
    """Return the reason in a server's refusal."""
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return str(response.status_code)


def _show_live(source: MetricsSource, every: float, console: Console) -> None:
    """Draw repeatedly: in place on a terminal, one below the other elsewhere."""
    from rich.live import Live

    last, taken_at = source.read(), time.monotonic()
    view = _view(source, last, None, every)
    live = Live(view, console=console, screen=True, auto_refresh=False) if console.is_terminal else None
    with live or nullcontext():
        lost_at: float | None = None
        while True:
            time.sleep(every)
            try:
                now = source.read()
            except NoMetrics as exc:
                lost_at = lost_at or time.monotonic()
                _show(live, console, _gone(exc, time.monotonic() - lost_at, view))
                continue
            moment, lost_at = time.monotonic(), None
            view = _view(source, now, last, moment - taken_at)
            _show(live, console, view)
            last, taken_at = now, moment


def _show(live: Live | None, console: Console, view: RenderableType) -> None:
    if live is not None:
        live.update(view, refresh=True)
    else:
        console.print(view, "", highlight=False)


def _gone(exc: NoMetrics, for_s: float, view: RenderableType) -> Group:
    """Draw that the server does not reply, above the last reading."""
    from rich.console import Group
    from rich.styled import Styled
    from rich.text import Text

    problem = Text(str(exc), style="bold red")
    return Group(problem, Text(f"Trying again, for {_age(for_s)} now. Last seen:"), "", Styled(view, "dim"))


def _view(source: MetricsSource, now: Snapshot, before: Snapshot | None, interval_s: float) -> Group:
    """Draw a reading; rates and times are those since the one before."""
    from rich.console import Group

    if before is not None and _is_another(now, before, interval_s):
        before = None  # its counters began at zero again
    parts: list[RenderableType] = [*_heading(source, now), "", _figures(now, before, interval_s), ""]
    parts.append(_times(now, before))
    if now.errors:
        parts += ["", _errors(now, before)]
    return Group(*parts)


def _is_another(now: Snapshot, before: Snapshot, interval_s: float) -> bool:
    """Return whether another process replies than last time: it is younger than it should be."""
    grown = now.value("openenv_uptime_seconds") - before.value("openenv_uptime_seconds")
    return grown < interval_s / 2


def _heading(source: MetricsSource, now: Snapshot) -> tuple[str, str]:
    from rich.markup import escape

    state = "[green]ready[/]" if now.value("openenv_ready") else "[yellow]shutting down[/]"
    name, runner = escape(now.info.get("environment", "?")), escape(now.info.get("runner", "?"))
    age = _age(now.value("openenv_uptime_seconds"))
    version = escape(now.info.get("version", "?"))
    return f"[bold]{name}[/]  {state}  up {age}  {runner} runner  openenv {version}", f"[dim]{escape(source.url)}[/]"


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
    colour = "yellow" if used >= slots else "cyan"
    table.add_row("slots", f"[{colour}]{'█' * filled}[/][dim]{'░' * (_BAR - filled)}[/] {used} of {slots}")
    table.add_row("sessions", states or "none")
    waiting = now.value("openenv_queue_length")
    table.add_row("queue", f"{'[yellow]' if waiting else ''}{waiting:.0f} waiting")
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
    table.add_column("median / 99 %", no_wrap=True)
    for phase in _PHASES:
        table.add_column(phase, justify="right", no_wrap=True)
    for operation in dict.fromkeys(operation for operation, _ in now.calls):
        cells = []
        for phase in _PHASES:
            half, most = (now.quantile(operation, phase, share, since=before) for share in (0.5, 0.99))
            cells.append("-" if half is None or most is None else _durations(half, most))
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


def _durations(first: float, second: float) -> str:
    """Write two durations, with one unit where it is the same."""
    (low, unit), (high, other) = _duration(first), _duration(second)
    return f"{low} / {high} {other}" if unit == other else f"{low} {unit} / {high} {other}"


def _duration(seconds: float) -> tuple[str, str]:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f}", "µs"
    return (f"{seconds * 1e3:.1f}", "ms") if seconds < 1 else (f"{seconds:.1f}", "s")


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days or hours:
        return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# -- reading metrics --------------------------------------------------------------------------------------------------

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: -?\d+)?")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"(?:,|$)')


class Sample(NamedTuple):
    """One line of the text format."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """Read the samples of a text.

    Raises:
        ValueError: A line is not a sample.
    """
    samples = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"not a metric: {line[:80]!r}")
        labels = {name: _unescape(value) for name, value in _LABEL.findall(match[2] or "")}
        samples.append(Sample(match[1], labels, float(match[3])))
    return samples


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), text)


CallKey = tuple[str, str]  # operation, phase
Buckets = Sequence[tuple[float, float]]  # bound, how many were at most that


class NotOurs(ValueError):
    """The text is not the metrics of an OpenEnv server."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The metrics of one moment."""

    info: Mapping[str, str]
    values: Mapping[str, float]
    sessions: Mapping[str, int]
    errors: Mapping[str, int]
    calls: Mapping[CallKey, Buckets]

    def value(self, name: str) -> float:
        """Return a metric without labels, 0 where there is none."""
        return self.values.get(name, 0.0)

    def quantile(self, operation: str, phase: str, share: float, *, since: Snapshot | None = None) -> float | None:
        """Estimate a quantile of a call's times, in seconds; None where there was no call.

        Args:
            operation: The kind of call.
            phase: Which part of it.
            share: 0.5 for the median.
            since: Count only what came after an earlier reading.
        """
        buckets = self.calls.get((operation, phase), ())
        earlier = dict(since.calls.get((operation, phase), ())) if since is not None else {}
        return quantile([(bound, count - earlier.get(bound, 0.0)) for bound, count in buckets], share)


def read_snapshot(text: str) -> Snapshot:
    """Read a response of `/metrics`.

    Raises:
        NotOurs: It is not an OpenEnv server's.
    """
    try:
        samples = parse(text)
    except ValueError as exc:
        raise NotOurs(str(exc)) from exc
    info = next((sample.labels for sample in samples if sample.name == "openenv_info"), None)
    if info is None:
        raise NotOurs("there is no openenv_info among the metrics")
    return Snapshot(
        info=info,
        values={sample.name: sample.value for sample in samples if not sample.labels},
        sessions=_by_label(samples, "openenv_sessions", "state"),
        errors=_by_label(samples, "openenv_errors_total", "code"),
        calls=_buckets(samples),
    )


def quantile(buckets: Buckets, share: float) -> float | None:
    """Estimate a quantile from cumulative counts, as if values were spread evenly inside a bucket."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    wanted, lower, below = share * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            if bound == float("inf") or count == below:
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return lower


def _by_label(samples: Sequence[Sample], name: str, label: str) -> dict[str, int]:
    return {sample.labels[label]: int(sample.value) for sample in samples if sample.name == name}


def _buckets(samples: Sequence[Sample]) -> dict[CallKey, Buckets]:
    buckets: defaultdict[CallKey, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        if sample.name == "openenv_call_seconds_bucket":
            key = (sample.labels["operation"], sample.labels["phase"])
            buckets[key].append((float(sample.labels["le"]), sample.value))
    return dict(buckets)
