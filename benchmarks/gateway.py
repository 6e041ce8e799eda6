#!/usr/bin/env python3
"""What a gateway costs: the same load on a server directly and through `openenv gateway`, in one run.

Each server, each gateway and each load generator has a core of its own, as far as there are so many. Latency is that of
one session that steps alone; rates are those of many sessions that step as fast as they can. Writes a table.

  python benchmarks/gateway.py --out gateway.md
  python benchmarks/gateway.py --servers 1 2 --generators 1 --seconds 1 --out /tmp/gateway.md        # two cores
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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from configurations import APPS, BENCHMARKS
from generators import ALL_CORES, LOADGEN, Row, parts, together
from interpreters import SOURCE, child_environment
from procfs import process_stats, raise_file_limit
from workers import generator_cores

from servers import free_port

START_S = 60.0


class PinnedProcess:
    """A server or a gateway on a core of its own."""

    def __init__(self, command: Sequence[str], port: int, core: int, *, path: str = "/health") -> None:
        self.url = f"http://127.0.0.1:{port}"
        environment = child_environment(os.environ, source=SOURCE) | {"MAX_CONCURRENT_ENVS": "100000"}
        self._process = subprocess.Popen(
            command,
            cwd=APPS,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(os.sched_setaffinity, 0, {ALL_CORES[core % len(ALL_CORES)]}),
        )
        deadline = time.monotonic() + START_S
        while not self._answers(path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"{' '.join(command)} did not start")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _answers(self, path: str) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url + path, timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def stop(self) -> None:
        """End it."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
                return


class Fleet:
    """Servers, and gateways in front of them; a context manager.

    Args:
        options: The command line.
        servers: How many servers.
        gateways: How many gateways; 0 for none, so that clients reach the servers themselves.
        app: What is served.
        arguments: More arguments of the servers.
    """

    def __init__(
        self, options: argparse.Namespace, servers: int, gateways: int, app: str, arguments: Sequence[str] = ()
    ) -> None:
        self._options = options
        self._arguments = arguments
        self._stack = contextlib.ExitStack()
        self.servers = [self._start_server(app, core) for core in range(servers)]
        urls = [server.url for server in self.servers]
        self.gateways = [self._start_gateway(urls, servers + number) for number in range(gateways)]
        self.cores = servers + gateways

    def _start(self, arguments: Sequence[str], core: int, **options: Any) -> PinnedProcess:
        port = free_port()
        command = [self._options.ours, "-m", "openenv.cli", *arguments, "--port", str(port), "--log-level", "error"]
        process = PinnedProcess(command, port, core, **options)
        self._stack.callback(process.stop)
        return process

    def _start_server(self, app: str, core: int) -> PinnedProcess:
        return self._start(["serve", f"{app}:app", "--no-web", *self._arguments], core)

    def _start_gateway(self, urls: Sequence[str], core: int) -> PinnedProcess:
        return self._start(["gateway", *urls], core, path="/ready")

    @property
    def entrances(self) -> list[PinnedProcess]:
        """What clients connect to."""
        return self.gateways or self.servers

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def commands_of(fleet: Fleet, options: argparse.Namespace, base: Sequence[str], sessions: int) -> list[list[str]]:
    """Return the command of each generator; the first ones also watch the CPU of a gateway each."""
    commands = []
    for number, part in enumerate(parts(sessions, options.generators)):
        entrance = fleet.entrances[number % len(fleet.entrances)]
        watched = ["--pid", str(fleet.gateways[number].pid)] if number < len(fleet.gateways) else []
        commands.append([*base, *watched, "--url", entrance.url, "--sessions", str(part)])
    return commands


def summed(fleet: Fleet, sessions: int, reports: Sequence[Row]) -> Row:
    """Return the sums of what generators report."""
    rate = sum(report["steps_per_s"] for report in reports)
    watched = [one["server_cpu_us_per_step"] * one["steps_per_s"] for one in reports[: len(fleet.gateways)]]
    opened, setup_s = sum(one.get("opened", 0) for one in reports), max(one.get("setup_s", 0) for one in reports)
    return {
        "sessions": sessions,
        "per_s": round(rate),
        "p50_ms": max(report["p50_ms"] for report in reports),
        "p99_ms": max(report["p99_ms"] for report in reports),
        "connects_per_s": round(opened / setup_s) if opened else None,
        "errors": sum(report["errors"] for report in reports),
        "gateway_us": round(sum(watched) / rate, 1) if watched and rate else None,
        "gateway_mb": round(sum(process_stats(one.pid).rss_kb for one in fleet.gateways) / 1024),
    }


def load(fleet: Fleet, options: argparse.Namespace, mode: str, sessions: int, *extra: str) -> Row:
    """Load a fleet from all generators; return the sums of what they report."""
    shared = ["--in-step", "--seconds", str(options.seconds), "--warmup", "0.3", "--mode", mode, "--ramp", "24"]
    commands = commands_of(fleet, options, [*LOADGEN, *shared, *extra], sessions)
    reports = together(commands, generator_cores(fleet.cores), words=2, environment=dict(os.environ))
    return summed(fleet, sessions, reports)


def vector(fleet: Fleet, options: argparse.Namespace, sessions: int) -> Row:
    """Step with `VectorEnv` from all generators."""
    shared = [
        "--in-step",
        "--seconds",
        str(options.seconds),
        "--warmup",
        "0.3",
        "--connections",
        "0",
        "--codec",
        "json",
    ]
    base = [options.ours, str(BENCHMARKS / "clients" / "vector_steps.py"), *shared]
    commands = commands_of(fleet, options, base, sessions)
    environment = child_environment(os.environ, source=SOURCE)
    return summed(fleet, sessions, together(commands, generator_cores(fleet.cores), words=1, environment=environment))


def measure(options: argparse.Namespace) -> list[Row]:
    """Take all figures."""
    rows: list[Row] = []
    shapes = [(servers, gateways) for servers in options.servers for gateways in (0, *options.gateways)]
    for app in ("echo_app", "tool_app"):
        for servers, gateways in shapes:
            if gateways > servers:
                continue
            with Fleet(options, servers, gateways, app) as fleet:
                alone = argparse.Namespace(**{**vars(options), "generators": 1})
                figures: list[tuple[str, Row]] = []
                if app == "tool_app":
                    figures.append(("MCP calls", load(fleet, options, "mcp-http", 256, "--http-session")))
                else:
                    if servers == 1:
                        figures.append(("one session, WebSocket", load(fleet, alone, "ws", 1)))
                        figures.append(("one session, HTTP", load(fleet, alone, "http", 1, "--http-session")))
                    figures.append(("WebSocket steps", load(fleet, options, "ws", options.sessions)))
                    figures.append(("HTTP steps", load(fleet, options, "http", 256, "--http-session")))
                    figures.append(("VectorEnv steps", vector(fleet, options, options.sessions)))
            for what, row in figures:
                rows.append({"servers": servers, "gateways": gateways, "what": what, **row})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """Write the figures as Markdown; each beside the same load without a gateway."""
    direct = {(row["what"], row["servers"]): row for row in rows if not row["gateways"]}
    titles = ["", "sessions", "servers", "gateways", "per second", "of direct", "p50 ms", "p99 ms", "connects/s"]
    titles += ["gateway CPU per step, us", "errors"]
    lines = [f"| {' | '.join(titles)} |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    for row in sorted(rows, key=lambda row: (row["what"], row["servers"], row["gateways"])):
        beside = direct.get((row["what"], row["servers"]))
        share = f"{row['per_s'] / beside['per_s']:.2f}" if beside and row["gateways"] else ""
        connects = f"{row['connects_per_s']:,}" if row.get("connects_per_s") else ""
        cells = [row["what"], row["sessions"], row["servers"], row["gateways"] or "none", f"{row['per_s']:,}", share]
        cells += [row["p50_ms"], row["p99_ms"], connects, row.get("gateway_us") or "", row["errors"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def report(rows: Sequence[Row], arguments: Sequence[str]) -> str:
    """Write what was measured, and what follows from it."""

    def of(what: str, gateways: int, servers: int = 1) -> Row | None:
        wanted = (what, servers, gateways)
        return next((row for row in rows if (row["what"], row["servers"], row["gateways"]) == wanted), None)

    lines = [
        "# What a gateway costs",
        "",
        f"`python benchmarks/gateway.py {' '.join(arguments)}`, {len(ALL_CORES)} cores, Python "
        f"{platform.python_version()}. Echo environment, 100 characters per message; every server, gateway and load "
        "generator has a core of its own as far as there are so many. `direct` is the same load without a gateway, in "
        "the same run.",
        "",
        *table(rows),
        "",
    ]
    for what in ("one session, WebSocket", "one session, HTTP"):
        direct, relayed = of(what, 0), of(what, 1)
        if direct and relayed:
            more = 1000 * (relayed["p50_ms"] - direct["p50_ms"])
            lines.append(
                f"- {what}: {more:.0f} us more per step than the direct {1000 * direct['p50_ms']:.0f} us (p50)."
            )
    most = max((row for row in rows if row["gateways"] == 1), key=lambda row: row["per_s"], default=None)
    if most:
        lines.append(f"- One gateway, a process on one core, passed {most['per_s']:,} a second ({most['what']}).")
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--generators", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--ours", default=sys.executable, help="an interpreter with our dependencies")
    parser.add_argument("--out", required=True, help="the file to write; FILE.json has the figures as they are")
    options = parser.parse_args()
    raise_file_limit()
    rows = measure(options)
    Path(options.out).write_text(report(rows, sys.argv[1:]), encoding="utf-8")
    Path(options.out).with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
