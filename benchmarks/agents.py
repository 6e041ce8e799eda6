"""What a rollout costs beside its model: rollouts a minute and processor seconds, for `oracle` and real coding agents.

    python benchmarks/agents.py [--before CHECKOUT] [--agent NAME ...] [--rollouts N] [--concurrency N] [--rounds N]
                                [--out FILE.md]

An agent writes one file in two turns (`oracle`: one command) against a scripted model on this machine, in a local
sandbox, and one verify line looks for the file. Each measurement is a process of its own; with `--before`, the same
script runs on the sources of another checkout in between, so that both see the same load:

    git worktree add ../before REVISION && python benchmarks/agents.py --before ../before

Two passes: rollouts one at a time, whose processor seconds are read whenever something happens, and `run_many`, whose
wall time gives rollouts a minute. On a shared machine only the processor seconds mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from procfs import TICKS_PER_S
from report import markdown

from openenv.rollout import Model, Outcome, Task, run_many, run_rollout
from openenv.testing.scripted import ScriptedModel, agent_scripts

ROOT = Path(__file__).resolve().parents[1]
AGENTS = ("oracle", "opencode", "mini-swe-agent")
PHASES = ("to first request", "between", "to exit", "sandboxes")
TITLE = "# Agents"
INTRODUCTION = """\
What a rollout of two turns costs beside its model: processor seconds of everything in its sandboxes, one rollout at a
time, and rollouts a minute, many at once. The phases: from the agent's start to its first request, from there to the
end of the last reply, from there to its exit, and everything else in sandboxes. `engine`: our own process, with the
scripted model."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One measurement of one agent."""

    phases: Mapping[str, float]
    """Processor seconds of a rollout by phase, of processes in sandboxes: medians."""
    engine_s: float
    """Processor seconds of this process for a rollout, the scripted model included."""
    per_minute: float
    cpu_s: float
    """Processor seconds of a rollout in `run_many`, all processes."""


def children_cpu_s() -> float:
    """Return the processor seconds of this process's descendants, the ended ones included."""
    parents: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(name))
        ticks[int(name)] = sum(map(int, fields[11:15]))  # its own, and of the children it has waited for
    total, queue = 0, list(parents.get(os.getpid(), ()))
    while queue:
        pid = queue.pop()
        total += ticks[pid]
        queue += parents.get(pid, ())
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return total / TICKS_PER_S + ended.ru_utime + ended.ru_stime


def own_cpu_s() -> float:
    """Return the processor seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class WatchedModel(ScriptedModel):
    """A scripted model that notes the processor seconds of the agent when a request comes and when its reply ends."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.marks: list[float] = []

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        self.marks.append(children_cpu_s())
        try:
            await super()._serve(scope, receive, send)
        finally:
            self.marks.append(children_cpu_s())


def task_for(agent: str) -> Task:
    """Return the task: a file, which the scripted model or the solution writes."""
    solution = ["printf 'def binary_search(): ...\\n' > binary_search.py"] if agent == "oracle" else []
    return Task(instruction="Write binary_search.py", solution=solution, verify=["test -s binary_search.py"])


def phases_of_one(agent: str, arguments: Mapping[str, Any], model: WatchedModel | None) -> dict[str, float]:
    """Run one rollout, and return the processor seconds of its phases."""
    began, seen = children_cpu_s(), {}

    def look(event: Any) -> None:
        if event.phase == "agent":
            seen.setdefault("start", children_cpu_s())
        if event.phase == "collect":
            seen.setdefault("exit", children_cpu_s())

    if model is not None:
        model.marks.clear()
    require_success(run_rollout(task_for(agent), on_progress=look, **arguments))
    ended = children_cpu_s()
    marks = [seen["start"], *(model.marks if model is not None else []), seen["exit"]]
    return {
        "to first request": marks[1] - marks[0],
        "between": marks[-2] - marks[1] if len(marks) > 2 else 0.0,
        "to exit": marks[-1] - marks[-2] if len(marks) > 2 else 0.0,
        "sandboxes": (ended - began) - (marks[-1] - marks[0]),
    }


def require_success(outcome: Outcome) -> None:
    """Stop where a rollout did not do what it was to do: its figures would mean nothing."""
    if outcome.reward != 1.0:
        raise SystemExit(f"{outcome.status}: {outcome.reason}\n{outcome.agent_log_tail}")


def measure(agent: str, rollouts: int, concurrency: int) -> Figures:
    """Measure one agent in this process."""
    if agent == "oracle":
        return _measure(agent, {"agent": agent}, None, rollouts, concurrency)
    with WatchedModel([agent_scripts.binary_search(agent)]) as model:
        arguments = {"agent": agent, "model": Model.model_validate(model.model())}
        return _measure(agent, arguments, model, rollouts, concurrency)


def _measure(
    agent: str, arguments: Mapping[str, Any], model: WatchedModel | None, rollouts: int, concurrency: int
) -> Figures:
    phases_of_one(agent, arguments, model)  # installs the agent, and fills the page cache
    alone, own = [], own_cpu_s()
    for _ in range(3):
        alone.append(phases_of_one(agent, arguments, model))
    engine = (own_cpu_s() - own) / len(alone)
    tasks = [task_for(agent)] * (rollouts * 8 if agent == "oracle" else rollouts)
    began, own, inside = time.monotonic(), own_cpu_s(), children_cpu_s()
    for outcome in run_many(tasks, concurrency=concurrency, **arguments):
        require_success(outcome)
    seconds = time.monotonic() - began
    cpu = own_cpu_s() - own + children_cpu_s() - inside
    medians = {phase: statistics.median(one[phase] for one in alone) for phase in PHASES}
    return Figures(medians, engine, 60 * len(tasks) / seconds, cpu / len(tasks))


def measure_in(checkout: Path, agent: str, options: argparse.Namespace) -> Figures:
    """Measure one agent in a process of its own, with the sources of a checkout."""
    command = [sys.executable, __file__, "--one", agent]
    command += ["--rollouts", str(options.rollouts), "--concurrency", str(options.concurrency)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(checkout / "src")}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{agent} in {checkout}: exit code {done.returncode}")
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def median_of(figures: Sequence[Figures]) -> Figures:
    """Return the medians of several rounds."""
    return Figures(
        {phase: statistics.median(one.phases[phase] for one in figures) for phase in PHASES},
        statistics.median(one.engine_s for one in figures),
        statistics.median(one.per_minute for one in figures),
        statistics.median(one.cpu_s for one in figures),
    )


def row(agent: str, which: str, one: Figures, before: Figures | None) -> list[str]:
    """Return a row of the table."""
    alone = sum(one.phases.values())
    ratio = "" if before is None else f"{sum(before.phases.values()) / alone:.1f}"
    faster = "" if before is None else f"{one.per_minute / before.per_minute:.1f}"
    phases = [f"{one.phases[phase]:.2f}" for phase in PHASES]
    return [
        *(agent, which, *phases, f"{one.engine_s:.2f}", f"{alone:.2f}", ratio),
        *(f"{one.cpu_s:.2f}", f"{one.per_minute:.0f}", faster),
    ]


def report(results: Mapping[tuple[str, str], Sequence[Figures]], options: argparse.Namespace) -> str:
    """Return the page."""
    columns = [
        "agent",
        "",
        *PHASES,
        "engine",
        "CPU s in sandboxes",
        "ratio",
        "CPU s, many at once",
        "a minute",
        "ratio",
    ]
    rows = []
    for (agent, which), figures in results.items():
        before = results.get((agent, "before")) if which == "now" else None
        rows.append(row(agent, which, median_of(figures), None if before is None else median_of(before)))
    command = f"python benchmarks/agents.py --rollouts {options.rollouts} --concurrency {options.concurrency}"
    command += f" --rounds {options.rounds}" + (" --before CHECKOUT" if options.before else "")
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.machine()}; `{command}`."
    return "\n\n".join([TITLE, INTRODUCTION, machine, markdown(columns, rows)]) + "\n"


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, measured in between")
    parser.add_argument("--agent", action="append", choices=AGENTS, help="by default all")
    parser.add_argument("--rollouts", type=int, default=8, help="of an agent at once; eight times as many oracles")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=AGENTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(measure(options.one, options.rollouts, options.concurrency))))
        return
    checkouts = {"before": options.before.resolve()} if options.before else {}
    checkouts["now"] = ROOT
    results: dict[tuple[str, str], list[Figures]] = {}
    for _ in range(options.rounds):
        for agent in options.agent or AGENTS:
            for which, checkout in checkouts.items():
                results.setdefault((agent, which), []).append(measure_in(checkout, agent, options))
    page = report(results, options)
    print(page)
    if options.out:
        notes = options.out.read_text().partition("\n## ")  # what is written by hand below the table stays
        options.out.write_text(page + "".join(notes[1:]))


if __name__ == "__main__":
    main()
