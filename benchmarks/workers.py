#!/usr/bin/env python3
"""How a server grows with `--workers`: steps, connects, HTTP and MCP calls per second, beside the published package.

Servers are pinned to the first cores, one for each worker, and several load generators to the others; they begin
together. One server at a time, so figures of one run compare. Writes workers.json and workers.md.

Why workers hand connections over: `behind a proxy` is one server process behind another one that copies bytes, the
least that a proxy costs; `2 workers` has as many processes. On few cores, compare the CPU and not the rates.

  python benchmarks/workers.py --out /tmp/figures
  python benchmarks/workers.py --workers 1 2 --generators 1 --seconds 1 --held 500 --out /tmp/figures   # two cores
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from configurations import APPS, BENCHMARKS
from generators import ALL_CORES, LOADGEN, Row, parts, together
from interpreters import SOURCE, child_environment
from procfs import process_stats, raise_file_limit

from servers import free_port

START_S = 120.0
clock = time.perf_counter


class PinnedServer:
    """A server with workers, pinned to cores.

    Args:
        options: Those of the command line.
        side: Whose server it is.
        workers: How many processes it has.
        app: What is served.
        runner: What runs the environments.
        behind_proxy: Whether clients reach it through another process that copies bytes.
        first_core: The first of its cores.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        side: str,
        workers: int,
        app: str,
        runner: str = "auto",
        *,
        behind_proxy: bool = False,
        first_core: int = 0,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.workers = workers
        count = str(workers)
        if side == "ours":
            command = [options.ours, "-m", "openenv.cli", "serve", f"{app}:app", "--port", str(self.port)]
            command += ["--log-level", "error", "--no-web", "--workers", count, "--runner", runner]
            if options.pin and workers > 1:
                command.append("--pin-workers")
        else:
            command = [options.published, "-m", "uvicorn", f"{app}:app", "--port", str(self.port)]
            command += ["--log-level", "error", "--loop", "uvloop", "--http", "httptools", "--workers", count]
        environment = child_environment(os.environ, source=SOURCE if side == "ours" else None)
        if side != "ours" and options.stubs:
            environment["PYTHONPATH"] = options.stubs
        environment |= {"MAX_CONCURRENT_ENVS": "100000", "BENCH_SESSIONS": "100000"}
        if behind_proxy:
            front = free_port()
            command = [options.ours, str(BENCHMARKS / "byte_proxy.py"), str(front), str(self.port), *command]
            self.port, self.url = front, f"http://127.0.0.1:{front}"
            self.workers = workers + 1
        cores = server_cores(self.workers, first_core)
        self.process = subprocess.Popen(
            command,
            cwd=APPS,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(os.sched_setaffinity, 0, cores),
        )
        deadline = time.monotonic() + START_S
        while not self._is_healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"{' '.join(command)} did not start")
            time.sleep(0.1)
        if side != "ours":
            time.sleep(2.0 + 0.5 * workers)  # /health is answered by the first worker that is up

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def stop(self) -> None:
        """End it."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            try:
                self.process.wait(20)
                return
            except subprocess.TimeoutExpired:
                continue

    @property
    def members(self) -> list[PinnedServer]:
        """The servers that load is spread over."""
        return [self]

    def __enter__(self) -> PinnedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class SeparateServers:
    """As many servers with one process each, on ports of their own: what the machine gives where nothing is shared."""

    def __init__(self, options: argparse.Namespace, count: int, app: str, runner: str = "auto") -> None:
        self.workers = count
        with contextlib.ExitStack() as stack:
            start = partial(PinnedServer, options, "ours", 1, app, runner)
            self.members = [stack.enter_context(start(first_core=core)) for core in range(count)]
            self._stack = stack.pop_all()

    def __enter__(self) -> SeparateServers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


Loaded = PinnedServer | SeparateServers


def server_cores(workers: int, first: int = 0) -> set[int]:
    """Return the cores of a server: one for each worker, as far as there are so many."""
    return set(ALL_CORES[first : first + workers]) or set(ALL_CORES)


def generator_cores(workers: int) -> list[int]:
    """Return the cores of the load generators: none of the server's, unless all are."""
    return ALL_CORES[workers:] or ALL_CORES


@contextlib.contextmanager
def profiled(server: Loaded, options: argparse.Namespace, name: str) -> Iterator[None]:
    """Write where the server's processes spend their time, if `--profile` says where to."""
    if not options.profile or not isinstance(server, PinnedServer):
        yield
        return
    path = Path(options.profile) / f"{name}-{server.workers}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["py-spy", "record", "--pid", str(server.process.pid), "--subprocesses", "--rate", "200", "--gil"]
    command += ["--format", "raw", "--output", str(path), "--duration", "60"]
    profiler = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        profiler.send_signal(signal.SIGINT)  # it writes what it has
        profiler.wait(30)


def load(server: Loaded, options: argparse.Namespace, mode: str, sessions: int, *extra: str) -> Row:
    """Load a server from all generators; return the sums of what they report."""
    shared = ["--in-step", "--seconds", str(options.seconds), "--warmup", "0.3", "--mode", mode, "--ramp", "24", *extra]
    members = server.members
    commands = []
    for number, part in enumerate(parts(sessions, generator_count(options, server.workers))):
        member = members[number % len(members)]
        # With several servers, each generator has sessions on all of them, as it has with workers.
        others = [str(other.port) for other in members if other is not member]
        own = ["--url", member.url, "--pid", str(member.process.pid), "--sessions", str(part), "--also-port", *others]
        commands.append([*LOADGEN, *shared, *own])
    before = sum(process_stats(member.process.pid).rss_kb for member in members)
    with profiled(server, options, f"{mode}-{sessions}"):
        reports = together(commands, generator_cores(server.workers), words=2, environment=dict(os.environ))
    opened = sum(report["opened"] for report in reports)
    # Each generator has read the CPU of its whole server, and divided it by what it did itself: one of each server.
    one_each = reports[: len(members)]
    steps = max(1, sum(report["steps"] for report in reports))
    step_cpu = sum(report["server_cpu_us_per_step"] * report["steps"] for report in one_each)
    opening_cpu = sum(report["server_setup_cpu_us"] * report["opened"] for report in one_each)
    return {
        "sessions": sessions,
        "per_s": round(sum(report["steps_per_s"] for report in reports)),
        "p50_ms": max(report["p50_ms"] for report in reports),
        "p99_ms": max(report["p99_ms"] for report in reports),
        "errors": sum(report["errors"] for report in reports),
        "first_error": next((report["first_error"] for report in reports if report["first_error"]), ""),
        "connects_per_s": round(opened / max(report["setup_s"] for report in reports)),
        "cpu_us": round(step_cpu / steps, 1),
        "connect_cpu_us": round(opening_cpu / opened),
        "generators_busy": max(report["loadgen_busy"] for report in reports),
        "rss_mb": round(sum(process_stats(member.process.pid).rss_kb for member in members) / 1024),
        "rss_before_mb": round(before / 1024),
    }


def generator_count(options: argparse.Namespace, workers: int) -> int:
    """Return how many load generators there are: as many for each worker, so that all have the same to do."""
    return max(1, options.generators // workers) * workers


def connects(server: Loaded, options: argparse.Namespace) -> Row:
    """Open sessions on a server that has served before: the first ones of each worker are slower than all others."""
    brief = argparse.Namespace(**{**vars(options), "seconds": 0.2})
    row = load(server, brief, "ws", 4 * options.sessions)
    return {**row, "per_s": row["connects_per_s"], "cpu_us": "", "p50_ms": "", "p99_ms": ""}


def vector(server: PinnedServer, options: argparse.Namespace, sessions: int) -> Row:
    """Step with `VectorEnv` from all generators."""
    shared = ["--url", server.url, "--in-step", "--seconds", str(options.seconds), "--warmup", "0.3"]
    script = str(BENCHMARKS / "clients" / "vector_steps.py")
    commands = [
        [options.ours, script, *shared, "--connections", "0", "--codec", "json", "--sessions", str(part)]
        for part in parts(sessions, options.generators)
    ]
    environment = child_environment(os.environ, source=SOURCE)
    reports = together(commands, generator_cores(server.workers), words=1, environment=environment)
    return {
        "sessions": sessions,
        "per_s": round(sum(report["steps_per_s"] for report in reports)),
        "p50_ms": max(report["p50_ms"] for report in reports),
        "p99_ms": max(report["p99_ms"] for report in reports),
        "errors": sum(report["errors"] for report in reports),
    }


class Figures:
    """What was measured so far; written after each figure, since a run may be cut short."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._out = Path(options.out)
        self._out.mkdir(parents=True, exist_ok=True)
        self._deadline = clock() + options.budget
        self.rows: list[Row] = []
        self.skipped: list[str] = []

    def measure(self, side: str, workers: int, what: str, work: Callable[..., Row], *arguments: Any) -> None:
        """Take one figure, if there is time."""
        name = f"{side}, {workers} workers, {what}"
        if self.is_over:
            self.skipped.append(name)
            return
        try:
            row = work(*arguments)
        except Exception as exc:  # one figure that cannot be had must not cost the others
            row = {"failed": f"{type(exc).__name__}: {exc}"[:300]}
        self.rows.append({"side": side, "workers": workers, "what": what, **row})
        print(f"{name}: {json.dumps(row)}", flush=True)
        self.write()

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return bool(clock() > self._deadline)

    def write(self) -> None:
        """Write all of it."""
        machine = {"cores": len(ALL_CORES), "python": platform.python_version(), "system": platform.platform()}
        content = {"machine": machine, "rows": self.rows, "skipped": self.skipped}
        (self._out / "workers.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        (self._out / "workers.md").write_text(table(content), encoding="utf-8")


def measure_ours(options: argparse.Namespace, figures: Figures, workers: int) -> None:
    """Take our figures for a number of workers."""
    only = options.only
    for runner, note in (("auto", ""), ("inline", " (inline)")):
        if figures.is_over:
            return
        with PinnedServer(options, "ours", workers, "echo_app", runner) as server:
            take = partial(figures.measure, "ours", workers)
            take(f"WebSocket steps{note}", load, server, options, "ws", options.sessions)
            if "connects" in only:
                take(f"connects, warm{note}", connects, server, options)
            if "vector" in only:
                take(f"VectorEnv steps{note}", vector, server, options, options.sessions)
            if runner == "auto" and "http" in only:
                take("HTTP steps", load, server, options, "http", 256, "--http-session")
    if figures.is_over or "mcp" not in only:
        return
    with PinnedServer(options, "ours", workers, "tool_app") as server:
        figures.measure("ours", workers, "MCP calls", load, server, options, "mcp-http", 256, "--http-session")


def measure_separate(options: argparse.Namespace, figures: Figures, workers: int) -> None:
    """Take the same figures of as many servers that share nothing: no way to share a port can be faster."""
    take = partial(figures.measure, "separate servers", workers)
    for runner, note in (("auto", ""), ("inline", " (inline)")):
        if figures.is_over:
            return
        with SeparateServers(options, workers, "echo_app", runner) as servers:
            take(f"WebSocket steps{note}", load, servers, options, "ws", options.sessions)
            take(f"connects, warm{note}", connects, servers, options)
            if runner == "auto":
                take("HTTP steps", load, servers, options, "http", 256, "--http-session")
    if not figures.is_over:
        with SeparateServers(options, workers, "tool_app") as servers:
            take("MCP calls", load, servers, options, "mcp-http", 256, "--http-session")


def measure_proxy(options: argparse.Namespace, figures: Figures) -> None:
    """Compare what workers do, hand connections over, with a proxy in front of a server."""
    ways: tuple[tuple[str, int, bool], ...] = (
        ("1 worker", 1, False),
        ("behind a proxy", 1, True),
        ("2 workers", 2, False),
    )
    for name, workers, behind_proxy in ways:
        if figures.is_over:
            return
        with PinnedServer(options, "ours", workers, "echo_app", "inline", behind_proxy=behind_proxy) as server:
            for sessions in (1, 64):
                take = partial(figures.measure, f"ours, {name}", workers)
                take(f"steps of {sessions} sessions (inline)", load, server, options, "ws", sessions)


def measure_published(options: argparse.Namespace, figures: Figures, workers: int) -> None:
    """Take the published package's figures; it has no sessions over HTTP, and with workers none over MCP."""
    if figures.is_over:
        return
    take = partial(figures.measure, "published", workers)
    with PinnedServer(options, "published", workers, "echo_app") as server:
        take("WebSocket steps", load, server, options, "ws", options.sessions)
        if "http" in options.only:
            take("HTTP steps", load, server, options, "http", 256)
    if figures.is_over or "mcp" not in options.only:
        return
    with PinnedServer(options, "published", workers, "tool_app") as server:
        take("MCP calls", load, server, options, "mcp-http", 256)


def measure_uvicorn(options: argparse.Namespace, figures: Figures) -> None:
    """Take our figures under plain uvicorn, as most Dockerfiles start it, beside `openenv serve`."""
    plain = argparse.Namespace(**{**vars(options), "published": options.ours, "stubs": str(SOURCE)})
    for workers in (1, 2):
        if figures.is_over:
            return
        with PinnedServer(plain, "plain", workers, "echo_app") as server:
            figures.measure("ours under uvicorn", workers, "WebSocket steps", load, server, options, "ws", 512)


def hold(options: argparse.Namespace, figures: Figures) -> None:
    """Hold many sessions at once and step them all."""
    workers = max(options.workers)
    if figures.is_over:
        return
    with PinnedServer(options, "ours", workers, "echo_app", "inline") as server:
        what = f"{options.held} sessions held"
        figures.measure("ours", workers, what, load, server, options, "ws", options.held)


def table(content: Row) -> str:
    """Write the figures as Markdown."""
    rows = [row for row in content["rows"] if "per_s" in row]
    ones = {(row["side"], row["what"]): row for row in rows if row["workers"] == 1}
    lines = [
        f"{content['machine']['cores']} cores, Python {content['machine']['python']}.",
        "",
        "| | workers | per second | of one worker x N | CPU us | p50 ms | p99 ms | connects/s | its CPU us | errors "
        "| memory MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: (row["side"] != "ours", row["side"], row["what"], row["workers"])):
        side = "ours" if row["side"] == "separate servers" else row["side"]
        one = ones.get((side, row["what"]))
        share = "" if one is None or row["workers"] == 1 else f"{row['per_s'] / (one['per_s'] * row['workers']):.2f}"
        cells = [
            f"{row['side']}: {row['what']}",
            row["workers"],
            f"{row['per_s']:,}",
            share,
            row.get("cpu_us", ""),
            row["p50_ms"],
            row["p99_ms"],
        ]
        cells += [f"{row['connects_per_s']:,}" if "connects_per_s" in row else "", row.get("connect_cpu_us", "")]
        cells += [row["errors"], row.get("rss_mb", "")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    failed = [row for row in content["rows"] if "failed" in row]
    lines += [
        "",
        *(f"- failed: {row['side']}, {row['workers']} workers, {row['what']}: {row['failed']}" for row in failed),
    ]
    lines += [f"- no time for: {name}" for name in content["skipped"]]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 6, 8])
    parser.add_argument("--published-workers", type=int, nargs="+", default=[1, 4, 8])
    kinds = ["connects", "vector", "http", "mcp", "separate", "proxy", "uvicorn"]
    parser.add_argument("--only", nargs="*", choices=kinds, default=kinds, help="these beside WebSocket steps")
    parser.add_argument("--pin", action="store_true", help="start workers with --pin-workers")
    parser.add_argument("--profile", default="", help="a folder for profiles of the servers (needs py-spy)")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--held", type=int, default=20_000, help="sessions held at once in the last figure; 0: none")
    parser.add_argument("--generators", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--budget", type=float, default=480.0, help="begin no further figure after so many seconds")
    parser.add_argument("--ours", default=sys.executable, help="an interpreter with our dependencies")
    parser.add_argument("--published", default="", help="an interpreter with the published package; none: left out")
    parser.add_argument("--stubs", default="", help="a folder for the published package's path")
    parser.add_argument("--out", required=True, help="the folder for workers.json and workers.md")
    options = parser.parse_args()
    raise_file_limit()
    figures = Figures(options)
    if "proxy" in options.only:
        measure_proxy(options, figures)
    if options.only == ["proxy"]:
        return
    for workers in sorted({*options.workers, *(options.published_workers if options.published else ())}):
        if workers in options.workers:
            measure_ours(options, figures, workers)
            if "separate" in options.only and workers > 1:
                measure_separate(options, figures, workers)
        if options.published and workers in options.published_workers:
            measure_published(options, figures, workers)
        if workers == max(options.workers) and options.held:
            hold(options, figures)
    if "uvicorn" in options.only:
        measure_uvicorn(options, figures)
    figures.write()


if __name__ == "__main__":
    main()
