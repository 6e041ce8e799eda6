"""What copies cost: forks of a running episode, and rollouts that share their setup.

    python benchmarks/fork.py [--only forks|setups] [--forks N] [--runner thread] [--megabytes 64] [--into FILE.md]

Forks: 64 of a gridworld and of a MuJoCo episode, in mid-flight. `--megabytes` takes an environment with that much
memory instead, and as much in the measuring process for its `fork(2)`.

Each fork is measured from the call until the copy is attached and can be stepped: `env.fork(1)`, one after the other,
in turns with `fork(2)` of the measuring process; then `env.fork(N)` at once. Every copy then takes the same actions as
its parent, and must see exactly the same. The server is a process of its own. MuJoCo is left out where it is not
installed.

Setups: `run_many` of 16 rollouts of one task, with a setup of its own for each and with one that is shared. A setup
that waits uses no processor, so several at once take no longer than one; setups that compute share the cores. Each is
run with several values of `concurrency`, because that decides how many setups come one after the other: 16 divided by
the concurrency where they wait, by the smaller of concurrency and cores where they compute. Sharing cannot save more
than that. The agent does nothing, so all that is left is what a rollout costs anyway.

Run with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
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
from openenv.rollout import Task, run_many
from openenv.sandboxes import LocalSandboxes

ROOT = Path(__file__).resolve().parents[1]
TITLE = "## Forks of a running episode"
SETUPS_TITLE = "## Rollouts that share their setup"
ROLLOUTS = 16
SETUP_GOAL = 1 / 8
GOAL_MS = 20.0
GOAL_RATIO = 3.0  # to fork(2), measured in turns
Client = SyncEnvClient[Any, dict[str, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Subject:
    """An environment to fork, and actions for it."""

    name: str
    target: str
    actions: list[dict[str, Any]]


def subjects(megabytes: int | None) -> Iterator[Subject]:
    """Yield the environments that can be served here."""
    if megabytes is not None:
        os.environ["BALLAST_MB"] = str(megabytes)
        yield Subject(f"{megabytes} MB", str(ROOT / "benchmarks" / "apps" / "ballast_app.py"), [{}] * 60)
        return
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
        singles, bare, forks = [], [], []
        for _ in range(count):
            bare.append(bare_fork_s())
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
    ratio = p50 / (statistics.median(bare) * 1000)
    verdict = "yes" if same == len(forks) and (p50 < GOAL_MS or ratio <= GOAL_RATIO) else "NO"
    least, least_bare = min(singles) * 1000, min(bare) * 1000  # of a busy machine, these say most
    cells = [subject.name, runner, f"{least:.1f}", f"{p50:.1f}", f"{p99:.1f}", f"{least_bare:.1f}", f"{ratio:.1f}x"]
    cells.append(f"{together * 1000:.1f}")
    return f"| {' | '.join([*cells, f'{same} of {len(forks)}', verdict])} |"


def bare_fork_s() -> float:
    """Return the seconds that `fork(2)` of this process takes, which is about as large as the environment's."""
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    seconds = time.perf_counter() - began
    os.waitpid(pid, 0)
    return seconds


COMPUTE = (
    "python3 -c \"import hashlib, time; end = time.process_time() + {seconds}; data = b''\n"
    'while time.process_time() < end: data = hashlib.sha256(data + bytes(65536)).digest()" && echo ready > ready'
)
"""Takes that much processor time, however many others want the core."""


@dataclass(frozen=True, slots=True)
class SetupRun:
    """One `run_many`."""

    wall_s: float
    cpu_s: float
    setups: int


def rollouts_with(setup: str, *, concurrency: int, share: bool) -> SetupRun:
    """Run 16 rollouts of one task; all must earn their reward."""
    token = "cat /proc/sys/kernel/random/uuid > token"  # never the same twice: it shows how many setups ran
    task = Task(instruction="Do nothing.", setup=(setup, token), verify=("grep -q ready ready",), setup_timeout_s=900)
    began, cpu = time.monotonic(), os.times()
    outcomes = run_many(
        [task] * ROLLOUTS, agent="noop", sandbox=LocalSandboxes(), concurrency=concurrency, share_setup=share
    )
    wall, after = time.monotonic() - began, os.times()
    failed = [f"{one.status}: {one.reason}" for one in outcomes if one.reward != 1.0]
    if failed:
        raise RuntimeError(f"{len(failed)} rollouts failed, the first with {failed[0]}")
    used = sum(after[:4]) - sum(cpu[:4])  # this process and its children, which all have ended
    return SetupRun(wall, used, len({one.files["/home/user/workdir/token"] for one in outcomes}))


def measure_setups(seconds: float, concurrencies: list[int]) -> list[str]:
    """Return the rows of the table about setups."""
    rows = []
    kinds = {"waits": f"sleep {seconds:g}; echo ready > ready", "computes": COMPUTE.format(seconds=seconds)}
    for kind, line in kinds.items():
        for concurrency in concurrencies:
            own = rollouts_with(line, concurrency=concurrency, share=False)
            shared = rollouts_with(line, concurrency=concurrency, share=True)
            ratio = shared.wall_s / own.wall_s
            in_a_row = ROLLOUTS / (concurrency if kind == "waits" else min(concurrency, os.cpu_count() or 1))
            cells = [kind, str(concurrency), f"{own.wall_s:.1f}", f"{shared.wall_s:.1f}", f"{ratio:.3f}"]
            cells += [
                f"{1 / in_a_row:.3f}",
                f"{own.cpu_s:.0f}",
                f"{shared.cpu_s:.0f}",
                f"{own.setups}, {shared.setups}",
            ]
            rows.append(f"| {' | '.join([*cells, 'yes' if ratio <= SETUP_GOAL else 'NO'])} |")
            print(rows[-1], flush=True)
    return rows


def setups_section(seconds: float, concurrencies: list[int]) -> tuple[str, bool]:
    """Measure shared setups; return the section, and whether each was run once."""
    rows = measure_setups(seconds, concurrencies)
    columns = [
        "setup",
        "concurrency",
        "own: s",
        "shared: s",
        "shared / own",
        "setups alone",
        "own: CPU s",
        "shared: CPU s",
    ]
    head = f"| {' | '.join(columns)} | setups run | <= 1/{1 / SETUP_GOAL:g} |"
    about = (
        f"{ROLLOUTS} rollouts of one task with a setup of {seconds:g} s, local sandboxes, {os.cpu_count()} cores; "
        f"{platform.python_version()}, {platform.machine()}; `python benchmarks/fork.py --only setups`. `setups alone` "
        "is the ratio if a rollout were nothing but its setup, the best that sharing can reach: several setups that "
        "wait take no longer than one. Where they compute, sharing also saves processor time."
    )
    rule = "|---|---:|---:|---:|---:|---:|---:|---:|---|---|"
    section = "\n".join([SETUPS_TITLE, "", about, "", head, rule, *rows, ""])
    return section, all(f"| {ROLLOUTS}, 1 |" in row for row in rows)


def forks_section(runners: list[str], forks: int, megabytes: int | None) -> tuple[str, bool]:
    """Measure forks; return the section, and whether all are as they should be."""
    rows = []
    ballast = bytearray(b"x" * ((megabytes or 0) << 20))  # for `bare_fork_s`
    for subject in subjects(megabytes):
        for runner in runners:
            try:
                rows.append(measure(subject, runner, forks))
            except NotForkable as error:
                rows.append(f"| {subject.name} | {runner} | | | | | | | refused: {error} | |")
            print(rows[-1], flush=True)
    del ballast
    columns = ["environment", "runner", "least ms", "p50 ms", "p99 ms", "least fork(2) ms", "p50 to fork(2)"]
    columns += [f"ms each of {forks}", "same trajectory"]
    head = f"| {' | '.join(columns)} | under {GOAL_MS:g} ms or {GOAL_RATIO:g}x |"
    command = f"`python benchmarks/fork.py --forks {forks}`"
    machine = f"{os.cpu_count()} cores, {platform.python_version()}, {platform.machine()}; {command}."
    section = "\n".join([TITLE, "", machine, "", head, f"|---|---|{'---:|' * 6}---|---|", *rows, ""])
    return section, all(row.endswith("| yes |") for row in rows)


def replace_section(file: Path, section: str) -> None:
    """Write a section of a Markdown file, in place of the one with its title."""
    title = section.partition("\n")[0]
    text = file.read_text() if file.exists() else ""
    begin, _, rest = text.partition(title)
    _, mark, following = rest.partition("\n## ")
    file.write_text(f"{begin}{section}{mark}{following}")


def main() -> int:
    """Measure, print, and write the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("forks", "setups"))
    parser.add_argument("--forks", type=int, default=64)
    parser.add_argument("--megabytes", type=int, help="memory of the environment to fork")
    parser.add_argument("--runner", choices=("process", "thread", "inline"), action="append")
    parser.add_argument("--setup-seconds", type=float, default=10.0)
    parser.add_argument("--concurrency", type=int, action="append", help="of rollouts; by default 1, 2, 4 and 16")
    parser.add_argument("--into", type=Path, help="a Markdown file whose sections are replaced")
    options = parser.parse_args()
    sections, is_well = [], True
    if options.only != "setups":
        section, is_well = forks_section(options.runner or ["process", "thread"], options.forks, options.megabytes)
        sections.append(section)
    if options.only != "forks":
        section, has_run_once = setups_section(options.setup_seconds, options.concurrency or [1, 2, 4, ROLLOUTS])
        sections.append(section)
        is_well = is_well and has_run_once
    for section in sections:
        print(section)
        if options.into is not None:
            replace_section(options.into, section)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
