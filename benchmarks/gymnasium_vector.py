"""Steps per second of CartPole in our vectors, beside Gymnasium's own.

Four vectors: ours with worker processes and shared memory; ours through a socket to `openenv serve --workers`;
Gymnasium's `AsyncVectorEnv`, with a process for each environment; and its `SyncVectorEnv`, without other processes.
Windows of a fraction of a second take turns, so that whatever else runs on the machine slows all of them alike. The
figures are medians over the windows, and of the ratios of neighbouring ones to `AsyncVectorEnv`. Actions are random and
made beforehand.

python benchmarks/gymnasium_vector.py --out gymnasium.md
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from openenv.adapters.gymnasium import GymnasiumVectorEnv
from openenv.providers import wait_for_ready

ENV_ID = "CartPole-v1"
TARGET = f"gymnasium:{ENV_ID}"
REFERENCE = 2  # the index of the vector that the others are compared with
_HEAD = """# CartPole-v1: steps per second

`python benchmarks/gymnasium_vector.py{flag} --out {out}` on {cores} cores: {windows} windows of {seconds} s for
each vector, in turns; medians. "Served": a socket to `openenv serve --workers {workers}`. In brackets: the ratio of
neighbouring windows to {reference}, which has a process for each environment.

"""


@dataclass(slots=True)
class Contender:
    """A vector environment under way, and the steps per second of its windows."""

    name: str
    envs: Any
    rates: list[float] = field(default_factory=list)

    def window(self, actions: list[Any], seconds: float) -> None:
        """Step for a while, and note the rate."""
        step, steps, clock = self.envs.step, 0, time.perf_counter
        began = clock()
        while (now := clock()) - began < seconds:
            step(actions[steps % len(actions)])
            steps += 1
        self.rates.append(steps * self.envs.num_envs / (now - began))


@contextmanager
def server(python: str, workers: int) -> Iterator[str]:
    """Serve the environment from a process of this session, whose share of the processor it has (autogroups)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "openenv", "serve", TARGET, "--port", str(port), "--max-sessions", "1024"]
    command += ["--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_ready(url, timeout_s=60)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def vectors(url: str, size: int) -> list[Contender]:
    """Make ours in both ways, Gymnasium's with a process for each environment, and its plain one."""
    makers = [lambda: gymnasium.make(ENV_ID)] * size
    return [
        Contender("GymnasiumVectorEnv", GymnasiumVectorEnv(TARGET, size, workers="auto")),
        Contender("GymnasiumVectorEnv, served", GymnasiumVectorEnv(url, size)),
        Contender("AsyncVectorEnv", gymnasium.vector.AsyncVectorEnv(makers)),
        Contender("SyncVectorEnv", gymnasium.vector.SyncVectorEnv(makers)),
    ]


def sb3_vectors(url: str, size: int) -> list[Contender]:
    """Make the same four of Stable-Baselines3."""
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv  # an environment of its own has it

    from openenv.train.trainers.sb3 import ServedVecEnv

    makers = [lambda: gymnasium.make(ENV_ID)] * size
    return [
        Contender("ServedVecEnv", ServedVecEnv(TARGET, size, workers="auto")),
        Contender("ServedVecEnv, served", ServedVecEnv(url, size)),
        Contender("SubprocVecEnv", SubprocVecEnv(makers, start_method="fork")),
        Contender("DummyVecEnv", DummyVecEnv(makers)),
    ]


def compare(contenders: list[Contender], size: int, *, windows: int, seconds: float) -> None:
    """Step vectors of one size in turns, and close them."""
    chance = np.random.default_rng(0)
    actions = [chance.integers(0, 2, size) for _ in range(64)]
    try:
        for contender in contenders:
            contender.envs.reset()
            contender.window(actions, seconds)
            contender.rates.clear()
        for _ in range(windows):
            for contender in contenders:
                contender.window(actions, seconds)
    finally:
        for contender in contenders:
            contender.envs.close()


def row(size: int, contenders: list[Contender]) -> str:
    """Write the figures of one size as a row of a table."""
    reference = contenders[REFERENCE]
    cells = [str(size)]
    for contender in contenders:
        rate = f"{statistics.median(contender.rates):,.0f}"
        if contender is not reference:
            pairs = zip(contender.rates, reference.rates, strict=True)
            rate += f" ({statistics.median(mine / theirs for mine, theirs in pairs):.2f}x)"
        cells.append(rate)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, print the table, and write it where asked."""
    default_workers = max(1, len(os.sched_getaffinity(0)) // 2)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32, 128], help="numbers of environments")
    parser.add_argument("--windows", type=int, default=12, help="of each vector and size")
    parser.add_argument("--seconds", type=float, default=0.25, help="of a window")
    parser.add_argument("--sb3", action="store_true", help="vectors of Stable-Baselines3 instead of Gymnasium's")
    parser.add_argument("--workers", type=int, default=default_workers, help="processes of the server (%(default)s)")
    parser.add_argument("--out", type=Path, help="a Markdown file")
    options = parser.parse_args()
    make, lines, reference = sb3_vectors if options.sb3 else vectors, [], ""
    with server(sys.executable, options.workers) as url:
        for size in options.sizes:
            contenders = make(url, size)
            if not lines:
                reference = contenders[REFERENCE].name
                names = " | ".join(contender.name for contender in contenders)
                lines = [f"| environments | {names} |", "|" + "---:|" * (1 + len(contenders))]
                print("\n".join(lines))
            compare(contenders, size, windows=options.windows, seconds=options.seconds)
            lines.append(row(size, contenders))
            print(lines[-1], flush=True)
    if options.out is not None:
        flag = " --sb3" if options.sb3 else ""
        shown = {**vars(options), "out": options.out.name}
        head = _HEAD.format(cores=len(os.sched_getaffinity(0)), flag=flag, reference=reference, **shown)
        options.out.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
