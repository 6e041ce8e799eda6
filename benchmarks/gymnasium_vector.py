"""Steps per second of CartPole in our vectors, beside Gymnasium's own.

Four vectors: ours with worker processes and shared memory; ours through a socket to `openenv serve --workers`;
Gymnasium's `AsyncVectorEnv`, with a process for each environment; and its `SyncVectorEnv`, without other processes.
Windows of a fraction of a second take turns, so that whatever else runs on the machine slows all of them alike. The
figures are medians over the windows, and of the ratios of neighbouring ones to `AsyncVectorEnv`. Actions are random and
made beforehand.

python benchmarks/gymnasium_vector.py --out gymnasium.md
python benchmarks/gymnasium_vector.py --sb3             # Stable-Baselines3's vectors, with stable-baselines3
python benchmarks/gymnasium_vector.py --pettingzoo      # parallel environments of four agents, with pettingzoo
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from openenv.adapters.gymnasium import GymnasiumVectorEnv
from openenv.client.vector.vector_env import VectorEnv
from openenv.providers import wait_for_ready

ENV_ID = "CartPole-v1"
TARGET = f"gymnasium:{ENV_ID}"
REFERENCE = 2  # the index of the vector that the others are compared with
_HEAD = """# {target}: steps per second

`python benchmarks/gymnasium_vector.py{flag} --out {out}` on {cores} cores: {windows} windows of {seconds} s for
each vector, in turns; medians. "Served": a socket to `openenv serve --workers {workers}`. In brackets: the ratio of
neighbouring windows to {reference}.

"""


@dataclass(slots=True)
class Contender:
    """A vector environment under way, and the steps per second of its windows."""

    name: str
    envs: Any
    form: Callable[[Any], Any] | None = None
    """Turns actions of all environments into the form of this vector, before the windows."""
    rates: list[float] = field(default_factory=list)

    def window(self, actions: list[Any], size: int, seconds: float) -> None:
        """Step for a while, and note the rate."""
        step, steps, clock = self.envs.step, 0, time.perf_counter
        began = clock()
        while (now := clock()) - began < seconds:
            step(actions[steps % len(actions)])
            steps += 1
        self.rates.append(steps * size / (now - began))


@contextmanager
def server(target: str, workers: int) -> Iterator[str]:
    """Serve the environment from a process of this session, whose share of the processor it has (autogroups)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "openenv", "serve", target, "--port", str(port), "--max-sessions", "1024"]
    command += ["--workers", str(workers)]
    folder = Path(__file__).parent  # of the module that `--pettingzoo` serves
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_ready(url, timeout_s=300)
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


class OneProcess:
    """PettingZoo's parallel environments in this process, one after the other; PettingZoo itself has no vector."""

    def __init__(self, make: Callable[[], Any], size: int) -> None:
        self._envs = [make() for _ in range(size)]

    def reset(self) -> None:
        """Begin all episodes."""
        for env in self._envs:
            env.reset()

    def step(self, actions: list[Any]) -> list[Any]:
        """Step all environments; an ended episode is followed by the next one."""
        results = []
        for env, action in zip(self._envs, actions, strict=True):
            results.append(env.step(action["actions"]))
            if not env.agents:
                env.reset()
        return results

    def close(self) -> None:
        """Close all environments."""
        for env in self._envs:
            env.close()


def pettingzoo_vectors(url: str, size: int) -> list[Contender]:
    """Make ours in both ways, environments in one process, and SuperSuit's processes if it is installed."""
    from chase import Chase  # needs pettingzoo

    from openenv.adapters.pettingzoo import pettingzoo_environment

    contenders = [
        Contender("VectorEnv", VectorEnv(pettingzoo_environment(Chase), size, workers="auto")),
        Contender("VectorEnv, served", VectorEnv(url, size)),
        Contender("one process", OneProcess(Chase, size)),
    ]
    if importlib.util.find_spec("supersuit") is not None:
        import supersuit

        processes = min(size, len(os.sched_getaffinity(0)))
        single = supersuit.pettingzoo_env_to_vec_env_v1(Chase())
        envs = supersuit.concat_vec_envs_v1(single, size, num_cpus=processes, base_class="gymnasium")
        contenders.append(
            Contender("SuperSuit", envs, lambda rows: np.array([list(row["actions"].values()) for row in rows]).ravel())
        )
    return contenders


def pushes(size: int) -> list[Any]:
    """Return random actions of CartPole."""
    chance = np.random.default_rng(0)
    return [chance.integers(0, 2, size) for _ in range(64)]


def moves(size: int) -> list[Any]:
    """Return random actions of `Chase`."""
    from chase import AGENTS

    chance = np.random.default_rng(0).integers(0, 5, (64, size, len(AGENTS))).tolist()
    return [[{"actions": dict(zip(AGENTS, row, strict=True))} for row in rows] for rows in chance]


def compare(contenders: list[Contender], actions: list[Any], size: int, *, windows: int, seconds: float) -> None:
    """Step vectors of one size in turns, and close them."""
    try:
        forms = [actions if one.form is None else [one.form(each) for each in actions] for one in contenders]
        for contender, own in zip(contenders, forms, strict=True):
            contender.envs.reset()
            contender.window(own, size, seconds)
            contender.rates.clear()
        for _ in range(windows):
            for contender, own in zip(contenders, forms, strict=True):
                contender.window(own, size, seconds)
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
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--sb3", action="store_true", help="vectors of Stable-Baselines3 instead of Gymnasium's")
    kind.add_argument("--pettingzoo", action="store_true", help="environments of four agents instead of CartPole")
    parser.add_argument("--workers", type=int, default=default_workers, help="processes of the server (%(default)s)")
    parser.add_argument("--out", type=Path, help="a Markdown file")
    options = parser.parse_args()
    make, act, target, flag = vectors, pushes, TARGET, ""
    if options.sb3:
        make, flag = sb3_vectors, " --sb3"
    elif options.pettingzoo:
        make, act, target, flag = pettingzoo_vectors, moves, "pettingzoo:chase", " --pettingzoo"
    lines: list[str] = []
    reference = ""
    with server(target, options.workers) as url:
        for size in options.sizes:
            contenders = make(url, size)
            if not lines:
                reference = contenders[REFERENCE].name
                names = " | ".join(contender.name for contender in contenders)
                lines = [f"| environments | {names} |", "|" + "---:|" * (1 + len(contenders))]
                print("\n".join(lines))
            compare(contenders, act(size), size, windows=options.windows, seconds=options.seconds)
            lines.append(row(size, contenders))
            print(lines[-1], flush=True)
    if options.out is not None:
        shown = {**vars(options), "out": options.out.name, "target": target.partition(":")[2]}
        head = _HEAD.format(cores=len(os.sched_getaffinity(0)), flag=flag, reference=reference, **shown)
        options.out.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
