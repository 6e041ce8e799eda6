#!/usr/bin/env python3
"""What 1,000 to 1,000,000 sessions take: measures the cost of one session and one step, and works out the rest.

Measured: memory, descriptors and CPU of a session and a step by runner, of a connection through a gateway, and the
requests of `KubernetesProvider` and of sandboxes to the API server, counted on the tests' double of it. All with an
environment that does nothing, so it is the framework's part. Writes a report and scale.json.

  python benchmarks/scale.py --out /tmp/scale.md
  python benchmarks/scale.py --no-cluster --out /tmp/scale.md               # on another machine: scale.json, then here
  python benchmarks/scale.py --figures /tmp/scale.json --out /tmp/scale.md     # the rest, and the tables
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from configurations import BENCHMARKS
from connection import client_frame
from gateway import Fleet
from generators import ALL_CORES, LOADGEN, Row
from interpreters import ROOT, SOURCE, child_environment
from procfs import process_stats, process_tree, raise_file_limit
from workers import table as workers_table

SESSIONS: Final = (1_000, 10_000, 100_000, 1_000_000)
NODE_CORES, NODE_GB = 16, 64
USED: Final = 0.7  # of a node's cores and memory: the rest is for the system, peaks and a node that is lost
# What Kubernetes is designed for: https://kubernetes.io/docs/setup/best-practices/cluster-large/ (1.35)
PODS_PER_NODE, MOST_NODES, MOST_PODS = 110, 5_000, 150_000
PORTS: Final = 28_232  # ephemeral ports of Linux by default: connections of one address to one other and its port
RUNNERS: Final = {
    "thread": ["--runner", "thread"],
    "inline": ["--runner", "inline"],
    "process, 2 shared": ["--runner", "process", "--env-processes", "2"],
    "process, one each": ["--runner", "process", "--sessions-per-process", "1", "--env-processes", "1024"],
}
FEW: Final = 16  # sessions where each has a process of its own


# -- measuring ---------------------------------------------------------------------------------------------------------


def descriptors(pid: int) -> int:
    """Return the open files of a process and its descendants."""
    count = 0
    for member in process_tree(pid):
        try:
            count += len(os.listdir(f"/proc/{member}/fd"))
        except OSError:
            continue
    return count


def hold(command: Sequence[str], pid: int, sessions: int, *, words: int) -> Row:
    """Open sessions, see what each of them holds, step them, and return what the generator reports with it."""
    before, files = process_stats(pid), descriptors(pid)
    process = subprocess.Popen(
        [*command, "--in-step", "--pid", str(pid), "--sessions", str(sessions)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(os.environ, source=SOURCE),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for word in range(words):
            process.stdout.readline()
            if word == words - 1:
                time.sleep(0.5)
                now, more = process_stats(pid), descriptors(pid)
            process.stdin.write("\n")
            process.stdin.flush()
        output = process.communicate(timeout=300)[0]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    report: Row = json.loads(output.splitlines()[-1])
    return {
        **report,
        "sessions": sessions,
        "kb": round((now.rss_kb - before.rss_kb) / sessions, 1),
        "fds": round((more - files) / sessions, 3),
        "base_mb": round(before.rss_kb / 1024),
    }


def measure_runners(options: argparse.Namespace) -> dict[str, Row]:
    """Measure a session and a step under each runner: a WebSocket each, and all of them by `VectorEnv`."""
    rows: dict[str, Row] = {}
    for name, arguments in RUNNERS.items():
        sessions = FEW if "each" in name else options.sessions
        ways = {"WebSocket": ([*LOADGEN, "--mode", "ws"], 2)}
        if "process" not in name:
            script = str(BENCHMARKS / "clients" / "vector_steps.py")
            ways["VectorEnv"] = ([options.ours, script, "--connections", "0", "--codec", "json"], 1)
        for way, (command, words) in ways.items():
            with Fleet(options, 1, 0, "echo_app", arguments) as fleet:
                timed = [*command, "--seconds", str(options.seconds), "--url", fleet.servers[0].url]
                if "each" not in name:  # there the processes are what is measured
                    hold(timed, fleet.servers[0].pid, 64, words=words)  # loads what is loaded once
                rows[f"{name}, {way}"] = hold(timed, fleet.servers[0].pid, sessions, words=words)
                print(name, way, json.dumps(rows[f"{name}, {way}"]), flush=True)
    return rows


def measure_gateway(options: argparse.Namespace) -> Row:
    """Measure a connection and a step through a gateway."""
    with Fleet(options, 1, 1, "echo_app") as fleet:
        timed = [*LOADGEN, "--mode", "ws", "--seconds", str(options.seconds), "--url", fleet.gateways[0].url]
        hold(timed, fleet.gateways[0].pid, 64, words=2)
        row = hold(timed, fleet.gateways[0].pid, options.sessions, words=2)
        print("gateway", json.dumps(row), flush=True)
        return row


TINY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer((sys.argv[1], 8000), Handler).serve_forever()
"""


def measure_control_plane(replicas: Sequence[int]) -> Row:
    """Count the requests that a provider and a sandbox make of the API server, on the double of the tests."""
    sys.path[:0] = [str(SOURCE), str(ROOT / "tests" / "support")]
    from kubernetes_double import Image, KubernetesDouble
    from openenv.providers import KubernetesProvider
    from openenv.sandboxes.kubernetes import KubernetesSandboxes

    def is_ready(pod: Row) -> bool:
        conditions = pod.get("status", {}).get("conditions", [])
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    counts: Row = {"replicas": {}}
    sleep = Image([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
    images = {"tiny": Image([sys.executable, "-S", "-c", TINY, "{ip}"]), "sleep": sleep}
    with tempfile.TemporaryDirectory() as folder, KubernetesDouble(images) as double:
        path = double.kubeconfig(Path(folder) / "config")
        for count in replicas:
            before = len(double.requests)
            with KubernetesProvider(kubeconfig=path, reach="dns") as provider:
                provider.start_container("tiny", replicas=count)
                while sum(map(is_ready, double.objects("Pod"))) < count:
                    time.sleep(0.1)
                started = len(double.requests) - before
            counts["replicas"][str(count)] = {"start": started, "all": len(double.requests) - before}
        sandboxes = KubernetesSandboxes("sleep", kubeconfig=path, check_network=False)
        sandboxes.open().close()
        before = len(double.requests)
        for _ in range(4):
            sandboxes.open().close()
        counts["sandbox"] = (len(double.requests) - before) / 4
        sandboxes.close()
    print("control plane", json.dumps(counts), flush=True)
    return counts


def measure(options: argparse.Namespace, figures: Row) -> None:
    """Take the figures that are not there yet."""
    if "runners" not in figures:
        step = {"type": "step", "data": {"message": "x" * 100}}
        figures["machine"] = {"cores": len(ALL_CORES), "python": platform.python_version()}
        figures["request_bytes"] = len(client_frame(json.dumps(step, separators=(",", ":")).encode()))
        figures["runners"] = measure_runners(options)
        figures["gateway"] = measure_gateway(options)
    if "control_plane" not in figures and not options.no_cluster:
        figures["control_plane"] = measure_control_plane(options.replicas)


# -- working it out ----------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Write a number with two or three digits that count."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def plan(figures: Row, sessions: int, every_s: float, way: str) -> Row:
    """Work out what so many sessions take that step once in so many seconds.

    Args:
        figures: What was measured.
        sessions: How many sessions.
        every_s: The time between two steps of a session.
        way: The runner, and how clients connect.
    """
    cost, gateway = figures["runners"][way], figures["gateway"]
    rate = sessions / every_s
    cores = rate * cost["server_cpu_us_per_step"] / 1e6
    gigabytes = sessions * cost["kb"] / 1024 / 1024
    workers = max(1, math.ceil(cores / USED))
    by = {
        "CPU": cores / (NODE_CORES * USED),
        "memory": (gigabytes + workers * cost["base_mb"] / 1024) / (NODE_GB * USED),
        "descriptors": sessions * cost["fds"] / 1_000_000,
    }
    bottleneck = max(by, key=lambda name: by[name])
    nodes = max(1, math.ceil(by[bottleneck]))
    connections = sessions * cost["fds"]
    gateway_cores = rate * gateway["server_cpu_us_per_step"] / 1e6
    return {
        "sessions": sessions,
        "steps_per_s": rate,
        "cores": cores,
        "gb": gigabytes,
        "connections": connections,
        "mbit": 8 * rate * (figures["request_bytes"] + cost.get("reply_bytes", cost.get("bytes_per_step", 0))) / 1e6,
        "nodes": nodes,
        "open_s": sessions * cost.get("server_setup_cpu_us", 0) / 1e6 / (nodes * NODE_CORES * USED),
        "calls": provider_calls(figures, nodes),
        "clients": math.ceil(connections / (PORTS * nodes)),
        "gateways": max(1, math.ceil(gateway_cores / USED)),
        "gateway_gb": connections * gateway["kb"] / 1024 / 1024,
        "bottleneck": bottleneck,
    }


def provider_calls(figures: Row, nodes: int) -> int:
    """Return how many requests start a server on each node, as a line through what was counted."""
    counted = sorted((int(key), row["start"]) for key, row in figures["control_plane"]["replicas"].items())
    (low, first), (high, last) = counted[0], counted[-1]
    slope = (last - first) / (high - low) if high > low else 0.0
    return round(first + slope * (nodes - low))


def session_table(figures: Row, way: str, every_s: float) -> list[str]:
    """Write the plan of each number of sessions."""
    titles = ["sessions", "steps/s", "cores", "memory GB", "connections", "Mbit/s", f"nodes of {NODE_CORES} cores"]
    titles += ["all opened in", "API requests", "first limit", "gateways, if needed"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---:|" * len(titles)]
    for sessions in SESSIONS:
        row = plan(figures, sessions, every_s, way)
        cells = [f"{sessions:,}", number(row["steps_per_s"]), number(row["cores"]), number(row["gb"])]
        cells += [number(row["connections"]), number(row["mbit"]), str(row["nodes"])]
        cells += [f"{number(row['open_s'])} s" if row["open_s"] else "", str(row["calls"]), row["bottleneck"]]
        # A batch passes a gateway as one message; MORE_RESULTS.md has its cost.
        cells += ["" if "VectorEnv" in way else f"{row['gateways']} ({number(row['gateway_gb'])} GB)"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sandbox_table(figures: Row, options: argparse.Namespace) -> list[str]:
    """Write what a pod for each session takes of a cluster."""
    calls = figures["control_plane"]["sandbox"]
    titles = ["sandboxes at once", "nodes (110 pods each)", "memory requested, GB", "API writes/s", "first limit"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---:|" * len(titles)]
    for sessions in SESSIONS:
        nodes = math.ceil(sessions / PODS_PER_NODE)
        gigabytes = sessions * options.sandbox_mb / 1024
        by_memory = math.ceil(gigabytes / (NODE_GB * USED))
        writes = sessions * calls / options.sandbox_s
        limit = "memory of the nodes" if by_memory > nodes else "pods per node"
        if sessions > MOST_PODS or max(nodes, by_memory) > MOST_NODES:
            limit = f"the control plane: a cluster has at most {MOST_PODS:,} pods"
        cells = [f"{sessions:,}", f"{max(nodes, by_memory):,}", number(gigabytes), number(writes), limit]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def cost_table(figures: Row) -> list[str]:
    """Write what was measured."""
    titles = ["runner, client", "memory of a session, KB", "descriptors", "CPU of a step, us", "of an opening, us"]
    titles += ["reply, bytes", "sessions at a step a second, per core"]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    rows = {**figures["runners"], "gateway, beside its server": figures["gateway"]}
    for name, row in rows.items():
        step = row["server_cpu_us_per_step"]
        cells = [name, number(row["kb"]), f"{row['fds']:g}", number(step)]
        cells += [number(row["server_setup_cpu_us"]) if "server_setup_cpu_us" in row else ""]
        cells += [str(row.get("reply_bytes", round(row.get("bytes_per_step", 0)))), f"{1e6 / step:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def beside_the_incumbent(figures: Row, workers: Row, options: argparse.Namespace) -> list[str]:
    """Write our figures beside those that the published package gives for itself."""
    held = next(row for row in workers["rows"] if row["side"] == "ours" and "sessions held" in row["what"])
    cost = figures["runners"]["inline, WebSocket"]
    titles = ["", "sessions", "cores", "sessions per core", "requests/s", "p99", "per hour"]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    price = options.core_hour

    def line(name: str, sessions: int, cores: float, rate: str, p99: str) -> str:
        cells = [name, f"{sessions:,}", number(cores), number(sessions / cores), rate, p99, f"{price * cores:.2f} USD"]
        return f"| {' | '.join(cells)} |"

    lines.append(line("published, its own figures", 2_048, 8, "932", "1.97 s"))
    lines.append(line("published, its own figures", 16_384, 96, "", "29.8 s"))
    rate = f"{held['per_s']:,}"
    p99 = f"{held['p99_ms'] / 1000:.2f} s"
    lines.append(line("ours, measured (all cores, below)", held["sessions"], held["workers"], rate, p99))
    for sessions in (2_048, 16_384):
        busy = sessions / 10 * cost["server_cpu_us_per_step"] / 1e6
        name = f"ours, worked out, a step every 10 s: {busy:.1%} of one core"
        lines.append(line(name, sessions, max(1, math.ceil(busy / USED)), number(sessions / 10), ""))
    return lines


def report(figures: Row, workers: Row, options: argparse.Namespace, command: str) -> str:
    """Return the report."""
    machine, calls = figures["machine"], figures["control_plane"]
    counted = ", ".join(f"{row['start']} for {key}" for key, row in calls["replicas"].items())
    lines = [
        "# From a thousand sessions to a million",
        "",
        f"`{command}`, {machine['cores']} cores, Python {machine['python']}, then "
        "`python benchmarks/scale.py --figures FOLDER/scale.json --out FILE.md`. The environment does "
        "nothing (echo, 100 characters per message): this is what the framework takes. Add what your environment "
        "takes; where a step of it computes for a millisecond, the framework is a few percent of the whole.",
        "",
        "## What one session and one step cost",
        "",
        *cost_table(figures),
        "",
        "Memory is what the processes have resident; the kernel's part of a socket comes on top. With a process for "
        "each session, pages that processes share are counted in each.",
        "",
        f"Requests have {figures['request_bytes']} bytes. Requests to the API server until all pods of a "
        f"`KubernetesProvider` are ready, by replicas: {counted}; a sandbox of the backend `kubernetes` makes "
        f"{calls['sandbox']:g} in its life, and one WebSocket for each command.",
        "",
        "## Sessions on servers",
        "",
        f"Worked out from the table: nodes of {NODE_CORES} cores and {NODE_GB} GB, of which {USED:.0%} are used, one "
        "server with `--workers auto` on each. Descriptors: a million per node. `all opened in` is the CPU time of the "
        "openings on all those cores. A gateway is a process of one core, needed only where clients cannot reach the "
        "nodes.",
        "",
        "A WebSocket for each session, `inline`, a step each second:",
        "",
        *session_table(figures, "inline, WebSocket", 1.0),
        "",
        "The same with the thread runner:",
        "",
        *session_table(figures, "thread, WebSocket", 1.0),
        "",
        "`VectorEnv`, `inline`, a step each second:",
        "",
        *session_table(figures, "inline, VectorEnv", 1.0),
        "",
        "A WebSocket for each session, `inline`, a step every 10 s, as with language models:",
        "",
        *session_table(figures, "inline, WebSocket", 10.0),
        "",
        f"One client machine has {PORTS:,} ports to each address and port of a server: with a WebSocket for each "
        "session that is the first limit of a single trainer, before any of a server; `VectorEnv` has a few "
        "connections to each.",
        "",
        "## A pod for each session",
        "",
        f"Rollouts of coding agents: a sandbox of {options.sandbox_mb} MB for {options.sandbox_s / 60:g} minutes each. "
        f"Kubernetes is designed for {PODS_PER_NODE} pods per node, {MOST_NODES:,} nodes and {MOST_PODS:,} pods in a "
        "cluster (https://kubernetes.io/docs/setup/best-practices/cluster-large/).",
        "",
        *sandbox_table(figures, options),
        "",
        "Beyond one cluster: several, each with its own orchestrator, or many local sandboxes in each pod.",
        "",
        "## Beside the published package",
        "",
        f"At {options.core_hour} USD for a core and an hour. Its figures are its own, with steps that wait for 10 s.",
        "",
        *beside_the_incumbent(figures, workers, options),
        "",
        "## All cores of one machine",
        "",
        f"`python benchmarks/workers.py {options.workers_command}`:",
        "",
        workers_table(workers).strip(),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=4000, help="sessions held to measure one")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--sandbox-mb", type=int, default=512)
    parser.add_argument("--sandbox-s", type=float, default=600.0)
    parser.add_argument("--core-hour", type=float, default=0.04, help="price of a core for an hour, in USD")
    parser.add_argument(
        "--workers-figures", default=str(BENCHMARKS / "workers.json"), help="what workers.py has written"
    )
    parser.add_argument("--workers-command", default="--published PYTHON --out FOLDER")
    parser.add_argument("--ours", default=sys.executable, help="an interpreter with our dependencies")
    parser.add_argument("--figures", help="what was measured before, a scale.json: only the rest is measured")
    parser.add_argument("--no-cluster", action="store_true", help="write scale.json, without the API server's part")
    parser.add_argument("--out", required=True, help="the file to write; scale.json beside it has the figures")
    options = parser.parse_args()
    raise_file_limit()
    out = Path(options.out)
    figures: Row = {"command": " ".join(["python benchmarks/scale.py", *sys.argv[1:]])}
    if options.figures:
        figures = json.loads(Path(options.figures).read_text(encoding="utf-8"))
    measure(options, figures)
    out.with_name("scale.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if options.no_cluster:
        return
    workers = json.loads(Path(options.workers_figures).read_text(encoding="utf-8"))
    out.write_text(report(figures, workers, options, figures["command"]), encoding="utf-8")


if __name__ == "__main__":
    main()
