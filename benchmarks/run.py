#!/usr/bin/env python3
"""Measure ours beside the published openenv 0.10.0 in one interleaved run and write the report.

Every configuration serves the same files, apps/echo_app.py and apps/tool_app.py. In each round all servers are started
afresh and take turns; figures are medians over rounds, ratios are against the better published configuration of the
same run.

sections:
  cores     the same server of ours on 1, 2 and 8 cores: default and inline runner, 64, 256 and 1,000 sessions
  ws        WebSocket sessions at rising levels: steps/s, p50, p99, CPU, connect + reset/s, memory, threads, errors
  http      POST /step over 64 connections, with a session header (ours) and stateless (both)
  mcp       tool calls of 64 sessions: as steps and in mcp messages on /ws, and with POST /mcp on a session
            and without one
  vector    256 sessions over 4 connections with VectorEnv beside 256 sockets, and beside 256 async clients of each
            package; images as MessagePack and as JSON lists
  messages  10 KB and 1 MB messages, 8 sessions
  clients   async and sync client round trips against a stub, the published server and their own server
  import    what importing the client costs
  start     from start to the first healthy /health

examples:
  python benchmarks/run.py                          all of it, about 20 minutes; writes RESULTS.md beside this file
  python benchmarks/run.py --quick                  a few minutes, rough figures
  python benchmarks/run.py --only ws --levels 64,1000 --out ws.md --json ws.json --plot ws.png
  python benchmarks/run.py --before ../old          another checkout of this project too, and what changed since
  python benchmarks/run.py --server-cores 0-3 --generator-cores 8-15     other cores than the two halves
  python benchmarks/run.py --published PYTHON       an interpreter that already has openenv==0.10.0 uvloop httptools

Without --published, one is made in .bench/published (pip install; the only step that needs a network). Run with nothing
else on the machine: "other load" in the report says how far that was true.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from configurations import (
    BEFORE,
    BEFORE_CONFIGURATIONS,
    BENCHMARKS,
    CONFIGURATIONS,
    OURS,
    PUBLISHED,
    STUB_SERVER,
    Configuration,
    Runnable,
)
from interpreters import (
    SOURCE,
    Interpreter,
    InterpreterError,
    child_environment,
    create_published_venv,
    find_interpreter,
)
from measure_clients import measure_clients
from measure_load import measure_cores, measure_http, measure_mcp, measure_messages, measure_ws
from measure_start import measure_import, measure_start
from measure_vector import measure_vector
from plan import Plan
from procfs import core_list, cores_of, parse_cores, raise_file_limit, sharing_warning, split_cores
from report import render_report, write_json
from samples import without_directories

# the cheap sections first: what is missing shows early
SECTIONS = {
    "import": measure_import,
    "start": measure_start,
    "clients": measure_clients,
    "messages": measure_messages,
    "http": measure_http,
    "mcp": measure_mcp,
    "vector": measure_vector,
    "cores": measure_cores,
    "ws": measure_ws,
}
GENERATORS = 4
CLIENT_STEPS, QUICK_CLIENT_STEPS = 2000, 300
QUICK = {"rounds": 1, "seconds": 1.0, "levels": [1, 64, 256]}
FULL = {"rounds": 3, "seconds": 3.0, "levels": [1, 64, 256, 1000, 4000]}


def levels(text: str) -> list[int]:
    """Parse a comma-separated list of session counts into rising order."""
    return sorted({int(part) for part in text.split(",")})


def sections(text: str) -> list[str]:
    """Parse a comma-separated list of sections."""
    names = text.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown section {unknown[0]!r}; choose from {', '.join(SECTIONS)}")
    return names


def keys(text: str) -> list[str]:
    """Parse a comma-separated list of configurations."""
    names, known = text.split(","), [configuration.key for configuration in CONFIGURATIONS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown configuration {unknown[0]!r}; choose from {', '.join(known)}")
    return names


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--published",
        metavar="PYTHON",
        type=os.path.abspath,
        help="interpreter with the published package (default: make one)",
    )
    p.add_argument(
        "--ours",
        metavar="PYTHON",
        type=os.path.abspath,
        help="interpreter that runs the source tree (default: this one)",
    )
    p.add_argument(
        "--before",
        metavar="CHECKOUT",
        type=Path,
        help="another checkout of this project, such as a git worktree of an older commit, measured in the same run "
        "with the interpreter of --ours",
    )
    p.add_argument("--rounds", type=int, help="interleaved rounds (default 3)")
    p.add_argument("--seconds", type=float, help="load per measurement (default 3)")
    p.add_argument("--levels", type=levels, help="session counts of ws (default 1,64,256,1000,4000)")
    p.add_argument(
        "--server-cores",
        type=parse_cores,
        metavar="0-7",
        help="pin the servers to these cores (default: the first half, with four or more)",
    )
    p.add_argument(
        "--generator-cores", type=parse_cores, metavar="8-15", help="pin everything else to these (default: the rest)"
    )
    p.add_argument(
        "--generators",
        type=int,
        help="load each server from so many processes (default 4 where they have cores of their own, else 1)",
    )
    p.add_argument("--quick", action="store_true", help="1 round, 1 second, levels 1,64,256 where not given otherwise")
    p.add_argument("--only", type=sections, metavar="SECTION", help="only these sections, comma-separated")
    p.add_argument("--configurations", type=keys, metavar="KEY", help="only these servers, comma-separated")
    p.add_argument("--out", type=Path, default=BENCHMARKS / "RESULTS.md", help="report (default benchmarks/RESULTS.md)")
    p.add_argument("--plot", type=Path, default=BENCHMARKS / "results.png", help="default benchmarks/results.png")
    p.add_argument("--json", type=Path, default=BENCHMARKS / "results.json", help="default benchmarks/results.json")
    options = p.parse_args(arguments)
    if options.server_cores is None and options.generator_cores is None:
        options.server_cores, options.generator_cores = split_cores(cores_of(0))
    if options.generators is None:
        own = (options.generator_cores or cores_of(0)) - (options.server_cores or cores_of(0))
        options.generators = max(1, min(GENERATORS, len(own)))
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def make_plan(options: argparse.Namespace, environment: Mapping[str, str]) -> Plan:
    """Find both interpreters and lay out the run; ours may be missing, the published one may not."""
    try:
        published = find_interpreter(options.published or create_published_venv(environment), environment)
    except InterpreterError as error:
        raise SystemExit(f"the published package cannot be used: {error}") from error
    interpreters: dict[str, Interpreter | None] = {PUBLISHED: published, OURS: None}
    python, missing = options.ours or sys.executable, ""
    try:
        interpreters[OURS] = find_interpreter(python, environment, source=SOURCE)
        if options.before:
            interpreters[BEFORE] = find_interpreter(python, environment, source=options.before.resolve() / "src")
    except InterpreterError as error:
        missing = without_directories(str(error))
        print(f"ours is not available: {missing}", file=sys.stderr)
    driver = Interpreter(python=sys.executable, environment=child_environment(environment), versions={})
    return Plan(
        runnables=[
            Runnable(c, interpreters[c.side], missing, cores=frozenset(options.server_cores or ()))
            for c in _in_turn(bool(options.before), options.configurations)
        ],
        stub=Runnable(STUB_SERVER, driver),
        interpreters=interpreters,
        rounds=options.rounds,
        seconds=options.seconds,
        levels=options.levels,
        client_steps=QUICK_CLIENT_STEPS if options.quick else CLIENT_STEPS,
        missing=missing,
        generators=options.generators,
    )


def _in_turn(with_before: bool, only: Sequence[str] | None) -> list[Configuration]:
    """Return what is compared; a configuration and what it was before are measured one after the other."""
    chosen = [c for c in CONFIGURATIONS if only is None or c.key in only]
    if not with_before:
        return chosen
    older = {c.key: c for c in BEFORE_CONFIGURATIONS}
    pairs = ([c, older.get(c.before().key)] if c.side == OURS else [c] for c in chosen)
    return [c for pair in pairs for c in pair if c]


def command_line(arguments: list[str]) -> str:
    """Return the command without the places of interpreters and files on this machine."""
    shown = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        shown.append(
            "PYTHON"
            if before in ("--published", "--ours")
            else "CHECKOUT"
            if before == "--before"
            else without_directories(argument)
        )
    return " ".join(["python benchmarks/run.py", *shown])


def versions(interpreter: Interpreter | None, missing: str) -> str:
    """Describe an interpreter in a line."""
    if interpreter is None:
        return f"not available: {missing}"
    return ", ".join(f"{name} {version}" for name, version in interpreter.versions.items() if version)


def facts(plan: Plan, arguments: list[str]) -> dict[str, str]:
    """Say what the run was; warn if the load generators share cores with the servers."""
    generator = cores_of(0)
    server = set(plan.runnables[0].cores) or generator
    warning = sharing_warning(server, generator)
    if warning:
        print(warning, file=sys.stderr)
    return {
        "command": f"`{command_line(arguments)}`",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "CPUs": str(os.cpu_count()),
        "server cores": core_list(server),
        "generator cores": core_list(generator) + (" (shared with the servers)" if warning else ""),
        "load generators": str(plan.generators),
        "rounds, seconds each": f"{plan.rounds}, {plan.seconds:g}",
        "published": versions(plan.interpreters[PUBLISHED], ""),
        "ours": versions(plan.interpreters[OURS], plan.missing),
    }


def step_rates(plan: Plan) -> dict[str, list[tuple[int, float]]]:
    """Return the steps per second by sessions of each configuration, by its label."""
    rates = {}
    for configuration in CONFIGURATIONS:
        medians = {
            int(case): plan.samples.median("ws", configuration.key, case=case, metric="steps_per_s")
            for case in plan.samples.cases("ws")
        }
        rates[configuration.label] = [(sessions, rate) for sessions, rate in medians.items() if rate]
    return rates


def write_results(plan: Plan, options: argparse.Namespace, facts_: dict[str, str]) -> None:
    """Write report, plot and raw samples."""
    plot = None
    if "ws" in plan.samples.sections() and find_spec("matplotlib"):
        from plot import draw

        if draw(step_rates(plan), options.plot):
            plot = os.path.relpath(options.plot.resolve(), options.out.resolve().parent)
    elif not find_spec("matplotlib"):
        print("no plot: matplotlib is not installed", file=sys.stderr)
    options.out.write_text(render_report(plan.samples, facts_, plot=plot), encoding="utf-8")
    write_json(options.json, plan.samples, facts_)
    print(json.dumps({"report": str(options.out), "json": str(options.json), "plot": plot}))


def main(arguments: list[str] | None = None) -> None:
    """Run the chosen sections and write the results, those of an interrupted run included."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    raise_file_limit()
    if options.generator_cores:
        os.sched_setaffinity(0, options.generator_cores)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop the servers and write what there is, as for Ctrl-C
    plan = make_plan(options, os.environ)
    described = facts(plan, arguments)
    try:
        for name, measure in SECTIONS.items():
            if not options.only or name in options.only:
                measure(plan)
    except KeyboardInterrupt:
        print("interrupted: writing what there is", file=sys.stderr)
    write_results(plan, options, described)


if __name__ == "__main__":
    main()
