"""What a fork of a running episode costs: 64 forks of a gridworld and of a MuJoCo episode, in mid-flight.

    python benchmarks/fork.py [--forks N] [--runner thread] [--into FILE.md]

Each fork is measured from the call until the copy is attached and can be stepped: `env.fork(1)`, one after the other;
then `env.fork(N)` at once. Every copy then takes the same actions as its parent, and must see exactly the same. The
server is a process of its own. MuJoCo is left out where it is not installed. Run with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv import GenericEnvClient
from openenv.client.env_client import SyncEnvClient
from openenv.errors import NotForkable
from openenv.providers import ProcessProvider

ROOT = Path(__file__).resolve().parents[1]
TITLE = "## Forks of a running episode"
GOAL_MS = 20.0
Client = SyncEnvClient[Any, dict[str, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Subject:
    """An environment to fork, and actions for it."""

    name: str
    target: str
    actions: list[dict[str, Any]]


def subjects() -> Iterator[Subject]:
    """Yield the environments that can be served here."""
    draw = random.Random(0)
    moves = [{"move": draw.choice(["up", "down", "left", "right"])} for _ in range(60)]
    yield Subject("gridworld", str(ROOT / "envs" / "gridworld_env"), moves)
    if importlib.util.find_spec("mujoco") is not None:
        torques = [{"action": [draw.uniform(-1, 1) for _ in range(6)]} for _ in range(60)]
        yield Subject("HalfCheetah-v5", str(ROOT / "benchmarks" / "apps" / "cheetah_app.py"), torques)


@contextmanager
def served(subject: Subject, runner: str, sessions: int) -> Iterator[str]:
    """Serve an environment in another process."""
    options = ["--runner", runner, "--max-sessions", str(sessions)]
    options += ["--sessions-per-process", "1"] if runner == "process" else []
    command = [sys.executable, "-m", "openenv.cli", "serve", subject.target, *options, "--port", "{port}"]
    with ProcessProvider(command=command) as provider:
        assert provider.base_url is not None
        yield provider.base_url


def play(env: Client, actions: list[dict[str, Any]]) -> list[Any]:
    """Take actions, and return what was seen."""
    seen = []
    for action in actions:
        result = env.step(action)
        seen.append((result.observation, result.reward, result.done))
        if result.done:
            break
    return seen


def measure(subject: Subject, runner: str, count: int) -> str:
    """Fork an episode in mid-flight; return a row of the table."""
    before, after = subject.actions[:10], subject.actions[10:]
    with served(subject, runner, 2 * count + 8) as url, GenericEnvClient(url).sync() as env:
        env.reset(seed=1)
        play(env, before)
        singles, forks = [], []
        for _ in range(count):
            began = time.perf_counter()
            forks += env.fork(1)
            singles.append(time.perf_counter() - began)
        began = time.perf_counter()
        forks += env.fork(count)
        together = (time.perf_counter() - began) / count
        own = play(env, after)
        same = sum(play(one, after) == own for one in forks)
        for one in forks:
            one.close()
    p50, p99 = statistics.median(singles) * 1000, sorted(singles)[int(len(singles) * 0.99)] * 1000
    verdict = "yes" if same == len(forks) and p50 < GOAL_MS else "NO"
    cells = [subject.name, runner, f"{p50:.1f}", f"{p99:.1f}", f"{together * 1000:.1f}", f"{same} of {len(forks)}"]
    return f"| {' | '.join([*cells, verdict])} |"


def main() -> int:
    """Measure, print, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forks", type=int, default=64)
    parser.add_argument("--runner", choices=("process", "thread", "inline"), action="append")
    parser.add_argument("--into", type=Path, help="a Markdown file whose section is replaced")
    options = parser.parse_args()
    rows = []
    for subject in subjects():
        for runner in options.runner or ("process", "thread"):
            try:
                rows.append(measure(subject, runner, options.forks))
            except NotForkable as error:
                rows.append(f"| {subject.name} | {runner} | | | | refused: {error} | |")
            print(rows[-1], flush=True)
    columns = ["environment", "runner", "p50 ms", "p99 ms", f"ms each of {options.forks}", "same trajectory"]
    head = f"| {' | '.join(columns)} | under {GOAL_MS:g} ms |"
    machine = f"{platform.python_version()}, {platform.machine()}; `python benchmarks/fork.py --forks {options.forks}`."
    section = "\n".join([TITLE, "", machine, "", head, "|---|---|---:|---:|---:|---|---|", *rows, ""])
    print(section)
    if options.into is not None:
        text = options.into.read_text() if options.into.exists() else ""
        begin, _, rest = text.partition(TITLE)
        _, mark, following = rest.partition("\n## ")
        options.into.write_text(f"{begin}{section}{mark}{following}")
    return 0 if all(row.endswith("| yes |") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
