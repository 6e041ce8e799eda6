"""What Ray costs: the same rollouts with `run_many` on this machine and on a Ray cluster of two nodes on it, in turn.

    .clients/ray/bin/python benchmarks/ray_rollouts.py [--rollouts 64] [--concurrency 4] [--rounds 3] [--out FILE]

The agent is `oracle` on a task that takes no time, so that all that is measured is what a rollout costs anyway: two
sandboxes, a check, and with a store the files. Both have the same cores, so nothing is gained by the second node. The
start of the workers is measured by itself; the table has rollouts on workers that run. `make test-ray` sets up the
environment. Run with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from openenv.rollout import Engine, EngineOptions, RayCluster, RayEngine, RolloutStore, Task  # noqa: E402
from ray_nodes import processes_with, ray_nodes  # noqa: E402  # sets Ray's variables


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of rollout."""

    name: str
    task: Task
    is_stored: bool


def cases() -> list[Case]:
    """Return what is run."""
    small = Task(instruction="x", verify=("grep -qx 42 answer.txt",), solution=("echo 42 > answer.txt",))
    line = "echo 42 > answer.txt; head -c 16000000 /dev/urandom > data.bin"
    large = small.model_copy(update={"solution": (line,)})
    return [
        Case("nothing stored", small, False),
        Case("stored, a small work tree", small, True),
        Case("stored, a work tree of 16 MB", large, True),
    ]


def seconds_of(engine: Engine | RayEngine, task: Task, count: int, concurrency: int) -> float:
    """Run a task so often; all must earn their reward."""
    began = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        outcomes = list(pool.map(lambda _: engine.run(task), range(count)))
    took = time.monotonic() - began
    failed = [f"{one.status}: {one.reason}" for one in outcomes if one.reward != 1.0]
    if failed:
        raise RuntimeError(f"{len(failed)} rollouts failed, the first with {failed[0]}")
    return took


def measure(case: Case, cluster: RayCluster, options: argparse.Namespace) -> tuple[str, float, float]:
    """Return a row of the table, the start of the workers in seconds, and their memory in MB."""
    here: list[float] = []
    there: list[float] = []
    with tempfile.TemporaryDirectory() as folder, RolloutStore(folder) as store:
        engine = EngineOptions(agent="oracle", store=store if case.is_stored else None)
        began = time.monotonic()
        with (
            RayEngine(engine, cluster=cluster, concurrency=options.concurrency) as remote,
            Engine(engine) as local,
        ):
            remote.run(case.task)
            start_s = time.monotonic() - began
            seconds_of(remote, case.task, options.concurrency, options.concurrency)
            for _ in range(options.rounds):
                here.append(seconds_of(local, case.task, options.rollouts, options.concurrency))
                there.append(seconds_of(remote, case.task, options.rollouts, options.concurrency))
            memory = statistics.mean(private_mb(pid) for pid in processes_with("ray::RolloutWorker"))
    ours, rays = statistics.median(here), statistics.median(there)
    added_ms = 1000 * (rays - ours) / options.rollouts * options.concurrency
    cells = [case.name, f"{ours:.2f}", f"{rays:.2f}", f"{rays / ours:.2f}", f"{added_ms:.0f}"]
    cells.append(f"{min(here):.2f}-{max(here):.2f}, {min(there):.2f}-{max(there):.2f}")
    return f"| {' | '.join(cells)} |", start_s, memory


def private_mb(pid: int) -> float:
    """Return the memory that a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="the page to write")
    options = parser.parse_args()
    import ray

    rows, starts, memory = [], [], []
    with ray_nodes(2) as nodes:
        for case in cases():
            row, start_s, worker_mb = measure(case, RayCluster(nodes.address), options)
            rows.append(row)
            starts.append(start_s)
            memory.append(worker_mb)
            print(row, flush=True)
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, Ray {ray.__version__}"
    command = f"--rollouts {options.rollouts} --concurrency {options.concurrency} --rounds {options.rounds}"
    page = f"""# Rollouts on Ray

`.clients/ray/bin/python benchmarks/ray_rollouts.py {command}`,
{machine}. {options.rollouts} rollouts of a task that takes no time, {options.concurrency} at once, on this machine
and on a Ray cluster of two nodes on the same machine, in turn; medians of {options.rounds} rounds.

| rollouts | here: s | Ray: s | Ray / here | more per rollout: ms | least to most |
|---|---:|---:|---:|---:|---|
{chr(10).join(rows)}

"More per rollout" is what a rollout takes longer, from its start to its outcome, while {options.concurrency} run at
once. From entering the engine to the end of the first rollout: {statistics.median(starts):.1f} s. A worker has
{statistics.median(memory):.0f} MB of memory of its own.
"""
    print(page)
    if options.out is not None:
        options.out.write_text(page)


if __name__ == "__main__":
    main()
