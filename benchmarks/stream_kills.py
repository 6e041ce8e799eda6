"""Is each group trained exactly once if the trainer is killed again and again? Exit code 1 if not.

    python benchmarks/stream_kills.py --kills 1000

    this process ──fork──> trainer: restores the last checkpoint, plays groups, "trains", writes a checkpoint
        └── kill -9 after a random time, from its start on; then the next trainer, until the run is complete

The environment and the scripted model are served by another process, which nobody kills. The "weights" are the list of
trained groups, so a checkpoint shows what was trained: a group that is there twice was trained twice, and a group of
the order that is missing was lost. The store shows samples that were made again although a finished one existed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from journal_kills import forked

from openenv import Action, Environment, Observation, State, create_app
from openenv.rollout import Model, RolloutStore, Sampling
from openenv.testing import Script, ScriptedModel, Turn, serve
from openenv.train import Curriculum, play, shuffled
from openenv.train.stream import INFRASTRUCTURE

SEEDS = 12
GROUPS_PER_UPDATE = 2
UPDATES = 12
SAMPLES = 3


@dataclass(slots=True)
class Result:
    """What the kills did."""

    runs: int = 0
    kills: int = 0
    groups: int = 0
    trained_twice: int = 0
    lost: int = 0
    made_twice: int = 0
    """Samples that were made again although the store had a finished one."""
    too_stale: int = 0

    def is_exact(self) -> bool:
        """Return whether nothing was trained twice, lost or made again."""
        return self.groups > 0 and not self.trained_twice + self.lost + self.made_twice + self.too_stale


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: its order, its limit of staleness and its folder."""

    url: str
    model: dict[str, Any]
    folder: Path
    seed: int
    max_staleness: int | None
    has_curriculum: bool

    @property
    def checkpoint(self) -> Path:
        """Return the path of the newest checkpoint."""
        return self.folder / "checkpoint.json"

    def items(self) -> Any:
        """Return the starts of the groups, the same ones in every process."""
        if self.has_curriculum:
            return Curriculum(range(SEEDS), seed=self.seed)
        return shuffled(range(SEEDS), seed=self.seed, epochs=UPDATES * GROUPS_PER_UPDATE // SEEDS)


async def train(plan: Plan) -> None:
    """Continue a run from its checkpoint, or begin it."""
    saved: dict[str, Any] | None = json.loads(plan.checkpoint.read_text()) if plan.checkpoint.exists() else None
    weights: list[dict[str, Any]] = [] if saved is None else saved["weights"]
    model = Model(**plan.model, sampling=Sampling())
    with RolloutStore(plan.folder / "store") as store:
        options: dict[str, Any] = {"samples": SAMPLES, "concurrency": 6, "store": store}
        options |= {"groups_per_update": GROUPS_PER_UPDATE, "max_staleness": plan.max_staleness}
        # Before the first checkpoint there is no state, but perhaps a stream with finished samples.
        async with play(plan.url, model, plan.items(), resume=saved is None, **options) as stream:
            if saved is not None:
                stream.load_state_dict(saved["stream"])
            for update in range(len(weights) // GROUPS_PER_UPDATE + 1, UPDATES + 1):
                groups = await stream.take(GROUPS_PER_UPDATE)
                weights += [{"group": group.name, "rewards": group.rewards} for group in groups]
                stream.policy_version = update
                stale = max(stream.counts.staleness, default=0)
                state = {"weights": weights, "stream": stream.state_dict(), "staleness": stale}
                unfinished = plan.checkpoint.with_suffix(".new")
                unfinished.write_text(json.dumps(state))
                unfinished.replace(plan.checkpoint)


def one_run(plan: Plan, draw: random.Random, longest_s: float, result: Result) -> None:
    """Kill trainers of a run until one completes it; then compare checkpoint, order and store."""
    while True:
        child = forked(lambda: asyncio.run(train(plan)), plan.folder / "trainer.log")
        ends_at = time.monotonic() + draw.uniform(0, longest_s)
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < ends_at:
            time.sleep(0.002)
        if ended != (0, 0):
            if ended[1] != 0:
                raise SystemExit(f"a trainer failed: {(plan.folder / 'trainer.log').read_text()[-3000:]}")
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        result.kills += 1
    compare(plan, result)


def compare(plan: Plan, result: Result) -> None:
    """Count what was trained twice or lost in a complete run, and what was made again."""
    saved = json.loads(plan.checkpoint.read_text())
    trained = Counter(entry["group"] for entry in saved["weights"])
    expected = names_of_order(plan, sum(trained.values()))
    result.runs += 1
    result.groups += sum(trained.values())
    result.trained_twice += sum(count - 1 for count in trained.values())
    result.lost += len(set(expected) - set(trained))
    result.too_stale += plan.max_staleness is not None and saved["staleness"] > plan.max_staleness
    with RolloutStore(plan.folder / "store") as store:
        outcomes = [store.read(row).outcome for row in store.find()]
    made = Counter(
        (each.metadata["group"], each.metadata["sample"])
        for each in outcomes
        if each.status not in INFRASTRUCTURE and each.status != "cancelled" and "sample" in each.metadata
    )
    result.made_twice += sum(count - 1 for count in made.values())


def names_of_order(plan: Plan, count: int) -> list[str]:
    """Return the names of the first groups of the order: the draws of the stream file, or the shuffled seeds."""
    if plan.has_curriculum:
        (file,) = (plan.folder / "store" / "streams").glob("*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        draws = {line["number"]: line["index"] for line in lines if "index" in line}
        seeds = [draws[number] for number in range(count)]
    else:
        seeds = list(plan.items())
    seen: Counter[int] = Counter()
    names = []
    for seed in seeds:
        seen[seed] += 1
        names.append(f"seed-{seed}" if seen[seed] == 1 else f"seed-{seed}.{seen[seed]}")
    return names


class Answer(Action):
    """What the model says."""

    text: str


class Question(Observation):
    """What the model reads."""

    text: str = ""


class TwoAnswers(Environment[Answer, Question, State]):
    """Ends after two answers; episodes of one seed have different rewards."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Question:
        self._state = State(episode_id=episode_id)
        self._reward = random.random() * (1 + (seed or 0) % 3)
        return Question(text=f"Question {seed}")

    def step(self, action: Answer, timeout_s: float | None = None, **kwargs: Any) -> Question:
        self._state.step_count += 1
        return Question(text="And now?", reward=self._reward, done=self._state.step_count == 2)

    @property
    def state(self) -> State:
        return self._state


def serve_until_closed() -> None:
    """Serve the environment and the model until standard input ends."""
    app = create_app(TwoAnswers, Answer, Question, max_concurrent_envs=64)
    script = Script(name="answers", turns=[Turn(text="This."), Turn(text="That.")])
    with ScriptedModel(script) as model, serve(app) as served:
        print(json.dumps({"url": served.url, "model": model.model()}), flush=True)
        sys.stdin.read()


def main() -> None:
    """Kill trainers, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest-s", type=float, default=1.5, help="longest life of a trainer that is killed")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve_until_closed()
    draw, result = random.Random(arguments.seed), Result()
    pipe = subprocess.PIPE
    began = time.monotonic()
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        at = json.loads(server.stdout.readline())
        while result.kills < arguments.kills:
            with tempfile.TemporaryDirectory() as folder:
                staleness = draw.choice([None, 0, 1, 2, 4])
                plan = Plan(at["url"], at["model"], Path(folder), draw.randrange(1000), staleness, draw.random() < 0.5)
                if staleness is None and plan.has_curriculum:
                    continue  # its groups come as they end, so the first ones need not be the trained ones
                one_run(plan, draw, arguments.longest_s, result)
            print(json.dumps({**asdict(result), "seconds": round(time.monotonic() - began)}), flush=True)
        server.stdin.close()
    sys.exit(not result.is_exact())


if __name__ == "__main__":
    main()
