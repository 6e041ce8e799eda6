"""The rollout tax: the CPU and wall time that our infrastructure adds to a rollout of 150 actions.

    python benchmarks/tax.py [--rounds 3] [--actions 150] [--out tax.md]
    python scripts/k8s_up.py python benchmarks/tax.py       # with Kubernetes, on the cluster of `make test-k8s`

The agent is a program of the standard library: for each action it asks the model and runs `true`. The endpoint answers
at once, with the IDs and log-probabilities of ten tokens. The same program also runs without any of our code, straight
against the endpoint: that time and CPU are subtracted, so the figures are what sandboxes, capture, records, checks and
the store add. Real models and tools take their time on top of both.

CPU is that of the engine's process and of the processes that it started. The daemons of Docker and Kubernetes are not
counted. One rollout runs at a time; the medians of all rounds count.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from docker_engine import EngineUnavailable, docker_engine
from play import process

from openenv.errors import SandboxError
from openenv.rollout import Agent, AgentRun, Launch, Model, Progress, RolloutStore, Task
from openenv.rollout.run.engine import Engine, EngineOptions
from openenv.sandboxes import DockerSandboxes, LocalSandboxes, Sandbox, Sandboxes

PHASES = ("sandbox", "setup", "agent", "collect", "verify", "store")
CLUSTER_IMAGE = "sandbox:1"
PROGRAM = """
import http.client, json, os, subprocess, sys, urllib.parse
url = urllib.parse.urlsplit(sys.argv[1])
link = http.client.HTTPConnection(url.hostname, url.port)
head = {"Authorization": "Bearer " + sys.argv[2], "Content-Type": "application/json"}
messages = [{"role": "user", "content": "Work."}]
for number in range(int(sys.argv[3])):
    link.request("POST", url.path + "/chat/completions", json.dumps({"model": "m", "messages": messages}), head)
    answer = json.load(link.getresponse())["choices"][0]["message"]
    done = subprocess.run(["/bin/sh", "-c", "true"], capture_output=True)
    messages += [answer, {"role": "user", "content": "exit code %d" % done.returncode}]
open("answer.txt", "w").write("done")
"""


class ActingAgent(Agent):
    """Makes model calls, and runs a command after each.

    Args:
        actions: How many.
    """

    name = "acting"

    def __init__(self, actions: int) -> None:
        self.actions = actions

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Write the program, and return the command that starts it."""
        sandbox.write_text(f"{run.home}/agent.py", PROGRAM)
        return Launch(argv=("python3", f"{run.home}/agent.py", run.base_url, run.api_key, str(self.actions)))


@dataclass
class Taxes:
    """What one rollout took, in milliseconds by phase."""

    wall: Counter[str] = field(default_factory=Counter)
    engine: Counter[str] = field(default_factory=Counter)
    """CPU of the engine's process."""
    children: float = 0.0
    """CPU of the processes that it started and that have ended."""


def children_ms() -> float:
    """Return the CPU of ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (usage.ru_utime + usage.ru_stime)


def bare(url: str, actions: int) -> tuple[float, float]:
    """Run the agent's program without our code; return its wall time and its CPU."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "agent.py")
        program.write_text(PROGRAM)
        cpu, began = children_ms(), time.perf_counter()
        subprocess.run([sys.executable, str(program), url, "key", str(actions)], check=True, cwd=folder)
        return 1000 * (time.perf_counter() - began), children_ms() - cpu


def rollout(engine: Engine, task: Task) -> Taxes:
    """Run one rollout, and return what it took."""
    taxes = Taxes()
    phase, cpu, wall = "sandbox", time.process_time(), time.perf_counter()
    children = children_ms()

    def enter(following: str) -> None:
        nonlocal phase, cpu, wall
        cpu_now, wall_now = time.process_time(), time.perf_counter()
        taxes.engine[phase] += 1000 * (cpu_now - cpu)
        taxes.wall[phase] += 1000 * (wall_now - wall)
        phase, cpu, wall = following, cpu_now, wall_now

    def on_progress(event: Progress) -> None:
        enter("store" if event.phase == "done" else event.phase)

    outcome = engine.run(task, on_progress=on_progress)
    assert (outcome.status, outcome.reward) == ("ok", 1.0), (outcome.status, outcome.reason, outcome.agent_log_tail)
    enter("end")
    taxes.children = children_ms() - children
    return taxes


@contextlib.contextmanager
def backends() -> Iterator[dict[str, Sandboxes | str]]:
    """Yield the backends by their names; a text says why one is missing."""
    found: dict[str, Sandboxes | str] = {"local": LocalSandboxes()}
    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(docker_engine())
            found["docker"] = DockerSandboxes("host", engine="docker", host=host)
        except EngineUnavailable as exc:
            found["docker"] = str(exc)
        cluster = os.environ.get("OPENENV_TEST_CLUSTER")
        if cluster is None:
            found["kubernetes"] = "there is no cluster: run this under scripts/k8s_up.py"
        else:
            from openenv.sandboxes.kubernetes import KubernetesSandboxes

            found["kubernetes"] = KubernetesSandboxes(CLUSTER_IMAGE, kubeconfig=Path(cluster, "kubeconfig"))
        yield found


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def table(rounds: Mapping[str, list[Taxes] | str], bare_ms: tuple[float, float], actions: int) -> str:
    """Return the report."""
    wall_ms, cpu_ms = bare_ms
    lines = [
        f"Added to a rollout of {actions} actions, in ms: wall time / CPU of the engine. The agent's program alone "
        f"takes {wall_ms:,.0f} ms, and {cpu_ms:,.0f} ms of CPU.",
        "",
        f"| backend | {' | '.join(PHASES)} | all wall | all CPU, with started processes | worker-hours per million "
        "rollouts: CPU / wall |",
        f"|---|{'---:|' * (len(PHASES) + 3)}",
    ]
    for name, taxes in rounds.items():
        if isinstance(taxes, str):
            lines.append(f"| {name} | not measured: {taxes} |{' |' * (len(PHASES) + 2)}")
            continue
        wall = {phase: median([one.wall[phase] for one in taxes]) for phase in PHASES}
        wall["agent"] -= wall_ms
        engine = {phase: median([one.engine[phase] for one in taxes]) for phase in PHASES}
        # The program's own CPU is in the children of the engine only if the backend starts it as one.
        children = median([one.children for one in taxes])
        own = cpu_ms if name == "local" else 0.0
        cpu = sum(engine.values()) + max(0.0, children - own)
        cells = " | ".join(f"{wall[phase]:,.0f} / {engine[phase]:.1f}" for phase in PHASES)
        total = sum(wall.values())
        hours = f"{cpu / 3.6:,.0f} / {total / 3.6:,.0f}"
        lines.append(f"| {name} | {cells} | {total:,.0f} | {cpu:,.0f} | {hours} |")
    return "\n".join(lines)


def measure(backend: Sandboxes, url: str, options: argparse.Namespace) -> list[Taxes]:
    """Run the rollouts of one backend, after one that is not counted."""
    task = Task(task_id="tax", instruction="Work.", verify=["grep -q done answer.txt"])
    with tempfile.TemporaryDirectory() as folder, RolloutStore(folder) as store:
        model = Model(base_url=url, name="m")
        agent = ActingAgent(options.actions)
        with Engine(EngineOptions(agent=agent, sandbox=backend, model=model, store=store)) as engine:
            rollout(engine, task)
            return [rollout(engine, task) for _ in range(options.rounds)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--actions", type=int, default=150)
    parser.add_argument("--out", type=Path, help="also write the report into this file")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with process("endpoint") as port, backends() as found:
        url = f"http://127.0.0.1:{port}/v1"
        bare(url, options.actions)
        alone = [bare(url, options.actions) for _ in range(options.rounds)]
        rounds: dict[str, list[Taxes] | str] = {}
        for name, backend in found.items():
            try:
                rounds[name] = backend if isinstance(backend, str) else measure(backend, url, options)
            except SandboxError as exc:
                rounds[name] = str(exc)
    report = table(rounds, (median([one for one, _ in alone]), median([one for _, one in alone])), options.actions)
    report += f"\n\n{os.cpu_count()} cores, load {load:.1f} before the run, Python {platform.python_version()}."
    print(report)
    if options.out is not None:
        options.out.write_text(report + "\n")


if __name__ == "__main__":
    main()
