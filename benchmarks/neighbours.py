#!/usr/bin/env python3
"""What slow and blocking steps cost the sessions next to them, under the default runner.

    python benchmarks/neighbours.py [--before CHECKOUT] [--fast 200] [--neighbours 4] [--rate 400] [--into FILE.md]

A server has 200 sessions with fast steps, beside a few sessions that do one of these in each step:

    nothing    there are no neighbours
    random     one step in a hundred takes 200 ms
    forever    the step never returns
    python     50 ms of pure Python, which holds the interpreter lock
    sqlite     a database that may be used in its own thread only
    asyncio    `asyncio.run`, which fails where an event loop runs

Each measurement has a fresh server. `fresh`: the sessions are the first of the server, so their durations are unknown
when they are placed. `warm`: a session has stepped before, so the fast ones share a thread. Neighbours start first.
They make at most 400 steps per second together, so that both checkouts do the same work: a server that answers slow
sessions sooner would get more of their steps, which take the processor from the fast ones (see it with --rate 0).

With --before, another checkout takes turns with this one. The table has steps per second and p99 of the fast sessions,
steps per second of the neighbours, and the ratio of p99 to the other checkout.

Run with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from configurations import BEFORE, BENCHMARKS, OURS, SERVE, Configuration, Runnable
from fork import replace_section
from interpreters import SOURCE, child_environment, find_interpreter
from procfs import core_list, cores_of, raise_file_limit, sharing_warning, split_cores

from servers import Server

TITLE = "## Slow and blocking neighbours"
KINDS = ("nothing", "random", "forever", "python", "sqlite", "asyncio")
GOAL = 1.2
RATE = 400.0
MESSAGE = "x" * 100
HEAD_START_S = 0.5
STALL_S = 10.0
END_S = 2.0
Figures = dict[str, float]


def load(server: Server, kind: str, sessions: int, seconds: float) -> list[str]:
    """Return the command that steps sessions with one kind of work."""
    action = json.dumps({"message": MESSAGE, "kind": kind})
    command = [sys.executable, str(BENCHMARKS / "loadgen.py"), "--url", server.url, "--pid", str(server.pid)]
    command += ["--sessions", str(sessions), "--seconds", str(seconds), "--action", action]
    return [*command, "--warmup", "0.3", "--stall", str(STALL_S)]


@contextlib.contextmanager
def neighbours(server: Server, kind: str, options: argparse.Namespace) -> Iterator[Callable[[], float]]:
    """Step the neighbours in another process; yield what ends them and returns their steps per second."""
    if kind == "nothing":
        yield lambda: 0.0
        return
    command = [*load(server, kind, options.neighbours, options.seconds + 60), "--rate", str(options.rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:

        def end() -> float:
            process.terminate()
            try:
                output, error = process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:  # a step never returns
                return 0.0
            if process.returncode:
                raise SystemExit(f"the neighbours ({kind}) failed: {error[-300:]}")
            return float(json.loads(output)["steps_per_s"])

        assert process.stderr is not None
        try:
            time.sleep(HEAD_START_S)
            if process.poll() is not None:
                raise SystemExit(f"the neighbours ({kind}) did not start: {process.stderr.read()[-300:]}")
            yield end
        finally:
            process.kill()


def measure(runnable: Runnable, kind: str, options: argparse.Namespace, *, warm: bool) -> Figures:
    """Measure the fast sessions on a fresh server."""

    def run(server: Server, sessions: int, seconds: float) -> Figures:
        command = load(server, "fast", sessions, seconds)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the load failed: {done.stderr[-300:]}")
        figures: Figures = json.loads(done.stdout)
        return figures

    with Server(runnable) as server:
        if warm:
            run(server, 1, 0.2)
        with neighbours(server, kind, options) as end:
            figures = run(server, options.fast, options.seconds)
            figures |= {"neighbours_per_s": end()}
        server.kill()
        return figures


def row(kind: str, state: str, samples: dict[str, list[Figures]]) -> str:
    """Return a row of the table."""

    def median(side: str, key: str) -> float:
        return statistics.median(figures[key] for figures in samples[side])

    cells = [kind, state, f"{median(OURS, 'steps_per_s'):,.0f}", f"{median(OURS, 'p99_ms'):.1f}"]
    cells += [f"{sum(figures['errors'] for figures in samples[OURS]):.0f}", f"{median(OURS, 'neighbours_per_s'):,.0f}"]
    if BEFORE in samples:
        ratio = median(OURS, "p99_ms") / median(BEFORE, "p99_ms")
        cells += [f"{median(BEFORE, 'steps_per_s'):,.0f}", f"{median(BEFORE, 'p99_ms'):.1f}"]
        cells.append(f"{sum(figures['errors'] for figures in samples[BEFORE]):.0f}")
        cells.append(f"{median(BEFORE, 'neighbours_per_s'):,.0f}")
        cells += [f"{ratio:.2f}", "yes" if ratio <= GOAL else "NO"]
    return f"| {' | '.join(cells)} |"


def section(options: argparse.Namespace) -> str:
    """Measure everything and return the section of the report."""
    sources = {OURS: SOURCE} | ({BEFORE: options.before.resolve() / "src"} if options.before else {})
    environment = child_environment(os.environ)
    servers, generators = split_cores(cores_of(0))
    os.sched_setaffinity(0, generators)
    if warning := sharing_warning(servers, generators):
        print(warning, file=sys.stderr)
    runnables = {
        side: Runnable(
            Configuration(key=f"{side}-thread", label=f"{side}, default runner", side=side, command=SERVE),
            find_interpreter(sys.executable, environment, source=source),
            app="neighbour_app",
            cores=frozenset(servers),
        )
        for side, source in sources.items()
    }
    rows = []
    for state in options.states:
        for kind in options.kinds:
            samples: dict[str, list[Figures]] = {side: [] for side in runnables}
            for _ in range(options.rounds):
                for side, runnable in runnables.items():
                    samples[side].append(measure(runnable, kind, options, warm=state == "warm"))
            rows.append(row(kind, state, samples))
            print(rows[-1], flush=True)
    columns = ["neighbours", "server", "steps/s", "p99 ms", "errors", "neighbours/s"]
    if options.before:
        columns += ["before: steps/s", "before: p99 ms", "before: errors", "before: neighbours/s", "p99 / before"]
        columns.append(f"<= {GOAL:g}")
    about = (
        f"{options.fast} fast sessions, {options.neighbours} neighbours with at most {options.rate:g} steps/s, "
        f"{options.rounds} rounds, server cores {core_list(servers)}, generator cores {core_list(generators)}; "
        f"{platform.python_version()}, {platform.machine()}; "
        "`python benchmarks/neighbours.py`."
    )
    rule = "|---|---|" + "---:|" * (len(columns) - 2)
    return "\n".join([TITLE, "", about, "", f"| {' | '.join(columns)} |", rule, *rows, ""])


def main() -> None:
    """Measure, print, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout to take turns with")
    parser.add_argument("--fast", type=int, default=200, help="sessions with fast steps")
    parser.add_argument("--neighbours", type=int, default=4, help="sessions with the work of a kind")
    parser.add_argument("--rate", type=float, default=RATE, help="steps per second of all neighbours; 0: no limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--states", nargs="+", choices=("fresh", "warm"), default=("fresh", "warm"))
    parser.add_argument("--into", type=Path, help="a Markdown file whose section is replaced")
    options = parser.parse_args()
    raise_file_limit()
    text = section(options)
    print(text)
    if options.into is not None:
        replace_section(options.into, text)


if __name__ == "__main__":
    main()
