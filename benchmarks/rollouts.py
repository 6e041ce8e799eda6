"""Rollouts per second of `run_many` with the agent `noop`, and the CPU of one, by processes and rollouts at once.

    python benchmarks/rollouts.py [--rollouts 200] [--processes 0 4 8 16] [--concurrency 16 32] [--store] [--turns 3]

Zero processes are `run_many` without `processes`: then the CPU of the engine and that of sandboxes are separate. Both
sandboxes of every rollout and a check are included, but not the start of the workers: a rate counts from the first
outcome to the last. `--turns` replaces `noop` by an agent that makes so many model calls and commands. `--waits` also
shows the places in the kernel where processes of the machine wait.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from play import process
from procfs import machine_cpu_s, raise_file_limit
from tax import ActingAgent

from openenv.rollout import Model, Outcome, RolloutStore, Task, run_many

TASK = Task(task_id="noop", instruction="Do nothing.", verify=["true"])
_SAMPLE_S = 0.005
_MOST_WAITS = 12


def cpu_ms(who: int) -> float:
    """Return the CPU of this process, or of its ended children."""
    usage = resource.getrusage(who)
    return 1000 * (usage.ru_utime + usage.ru_stime)


@contextlib.contextmanager
def kernel_waits(counts: Counter[str]) -> Iterator[None]:
    """Count the places in the kernel where processes wait without being interruptible, while the block runs."""
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(_SAMPLE_S):
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, IndexError):
                    name, _, fields = (folder / "stat").read_text().rpartition(") ")
                    if fields[0] == "D":
                        stack = (folder / "stack").read_text().split()[1:8:2]
                        counts[f"{name.partition('(')[2]}: {' < '.join(part.split('+')[0] for part in stack)}"] += 1

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure(processes: int, concurrency: int, arguments: dict[str, object], options: argparse.Namespace) -> list[str]:
    """Run one batch; return a row of the table."""
    ends: list[float] = []

    def on_outcome(number: int, outcome: Outcome) -> None:
        ends.append(time.perf_counter())
        assert outcome.status == "ok", (outcome.status, outcome.reason)

    with contextlib.ExitStack() as stack:
        if options.store:
            arguments = {**arguments, "store": stack.enter_context(RolloutStore(stack.enter_context(scratch())))}
        engine, children, machine = cpu_ms(resource.RUSAGE_SELF), cpu_ms(resource.RUSAGE_CHILDREN), machine_cpu_s()
        began = time.perf_counter()
        run_many(
            [TASK] * options.rollouts,
            concurrency=concurrency,
            processes=processes or None,
            on_outcome=on_outcome,
            **arguments,  # type: ignore[arg-type]
        )
        wall = time.perf_counter() - began
    count = options.rollouts
    engine, children = cpu_ms(resource.RUSAGE_SELF) - engine, cpu_ms(resource.RUSAGE_CHILDREN) - children
    busy = (machine_cpu_s() - machine) / wall / (os.cpu_count() or 1)
    rate = (count - 1) / (ends[-1] - ends[0])
    cells = [f"{rate:.0f}", f"{count / wall:.0f}", f"{engine / count:.1f}", f"{children / count:.1f}", f"{busy:.0%}"]
    return [str(processes), str(concurrency), *cells]


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for a store."""
    return tempfile.TemporaryDirectory()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--processes", type=int, nargs="+", default=[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[os.cpu_count()])
    parser.add_argument("--store", action="store_true", help="keep the rollouts in a RolloutStore")
    parser.add_argument("--turns", type=int, default=0, help="model calls of each agent")
    parser.add_argument("--waits", action="store_true", help="show where processes wait in the kernel (needs root)")
    options = parser.parse_args()
    raise_file_limit()
    load, waits = os.getloadavg()[0], Counter[str]()
    print("| processes | at once | rollouts/s | with the start | CPU of this process: ms | of its children | busy |")
    print(f"|{'---:|' * 7}")
    with contextlib.ExitStack() as stack:
        arguments: dict[str, object] = {"agent": "noop"}
        if options.turns:
            port = stack.enter_context(process("endpoint"))
            model = Model(base_url=f"http://127.0.0.1:{port}/v1", name="m")
            arguments = {"agent": ActingAgent(options.turns), "model": model, "validate_checks": False}
        if options.waits:
            stack.enter_context(kernel_waits(waits))
        for processes, concurrency in itertools.product(options.processes, options.concurrency):
            print(f"| {' | '.join(measure(processes, concurrency, arguments, options))} |", flush=True)
    for place, count in waits.most_common(_MOST_WAITS):
        print(f"{count:6} {place}")
    print(f"\n{os.cpu_count()} cores, load {load:.1f} before the run, Python {platform.python_version()}.")


if __name__ == "__main__":
    main()
