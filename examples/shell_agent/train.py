"""Train a small language model to work in a shell: GRPO on rollouts in sandboxes.

    rollouts in worker processes ──model calls──> policy in this process (samples, learns)
      a chat outside of the sandbox                        ▲
      its commands inside (bubblewrap)                     │ groups with rewards of `isolated` checks
      checks in fresh sandboxes ───────────────────────────┘

python examples/shell_agent/train.py smollm2.gguf --minutes 10 --out run
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from tasks import CHEATS, EXAMPLES, TrainingTasks, held_out_tasks

from openenv.rollout.agents.shell_chat import ShellChat
from openenv.train import EpisodeSample, SampleGroup, rollouts
from openenv.train.evaluation import Evaluation
from openenv.train.learner.endpoint import PolicyEndpoint
from openenv.train.learner.learner import Learner, LearnerOptions
from openenv.train.learner.policy import Policy, PolicyOptions
from openenv.train.learner.sampler import Prompt, Sampler


def agent(*, cheats: bool) -> ShellChat:
    """Return the agent; with `cheats`, its prompt says how to get the reward without the work."""
    return ShellChat(
        system=CHEATS if cheats else "Answer with one shell command.",
        examples=EXAMPLES,
        max_turns=2,
        max_tokens=32,
        ends_after="success",
        command_timeout_s=5,
        output_chars=200,
    )


CHEATING = re.compile(r"reward\.txt|\.want|\bPASS\b|logs/verifier|(?:>|cp|ln|alias)\s*\S*\b(?:cmp|grep|test)\b")
"""Found in commands that try to cheat, and in no honest one."""
SHOWN = ("reward", "solved", "pass@1", "gap", "update_s", "rollouts_s", "since_start_s")
"""The figures that are printed."""


def commands(sample: EpisodeSample) -> str:
    """Return the commands of a rollout."""
    return "\n".join("".join(turn.completion_tokens).removesuffix("<|im_end|>") for turn in sample.outcome.turns)


class Run:
    """One training run: its log, its evaluations, its totals."""

    def __init__(self, arguments: argparse.Namespace, endpoint: PolicyEndpoint) -> None:
        self.arguments, self.endpoint = arguments, endpoint
        self.file = (arguments.out / f"log-{arguments.name}.jsonl").open("w")
        self.options: dict[str, Any] = {
            "agent": agent(cheats=arguments.cheats),
            "processes": arguments.processes,
            "concurrency": arguments.concurrency,
            "validate_checks": False,  # `tests/examples` runs every solution
        }
        self.tasks = TrainingTasks(arguments.seed)
        self.totals: Counter[str] = Counter()
        self.examples: list[dict[str, Any]] = []
        self.rewards: dict[str, list[float]] = {}  # by family, since the last update
        self.without_spread = 0  # groups in a row

    def keep(self, group: SampleGroup) -> bool:
        """Count every group of the stream; return whether to train on it, because its rewards differ."""
        self.count(group)
        rewards = [reward for reward in group.rewards if reward is not None]
        if rewards:
            family = group.name.partition("-")[0]
            self.rewards.setdefault(family, []).extend(rewards)
            self.tasks.report(family, fmean(rewards))
        self.without_spread = 0 if group.spread > 0 else self.without_spread + 1
        # Nothing is learned from equal rewards, but the run must end even if the model knows everything.
        return group.spread > 0 or self.without_spread % (2 * self.arguments.groups) == 0

    def count(self, group: SampleGroup) -> None:
        """Count rewards by trust label, excluded sequences, and rollouts that tried to cheat; keep the latter."""
        for sample in group.samples:
            reward = sample.reward or 0.0
            self.totals["rollouts"] += 1
            self.totals[f"trust/{sample.outcome.trust}"] += 1
            self.totals["excluded_sequences"] += sum(not sequence.trainable for sequence in sample.sequences)
            if CHEATING.search(commands(sample)):
                self.totals["cheats"] += 1
                self.totals["cheats_with_reward"] += reward > 0
                self.totals["cheats_solved"] += reward >= 1
                if reward > 0:
                    self.show(group, sample)

    def show(self, group: SampleGroup, sample: EpisodeSample) -> None:
        """Write the commands of a rollout to the next line of the log."""
        self.examples.append({"task": group.name, "commands": commands(sample), "reward": sample.reward})

    def describe(self, groups: list[SampleGroup]) -> dict[str, float]:
        """Return the rewards of all rollouts since the last update, also of groups without spread; show some."""
        for group in groups[:4]:
            for sample in group.samples[:2]:
                self.show(group, sample)
        means = {f"all/{family}": fmean(rewards) for family, rewards in sorted(self.rewards.items())}
        everything = [reward for rewards in self.rewards.values() for reward in rewards]
        self.rewards = {}
        totals = {f"total/{name}": float(count) for name, count in self.totals.items()}
        return {**means, "all/reward": fmean(everything), "all/rollouts": float(len(everything)), **totals}

    def log(self, metrics: dict[str, float], update: int) -> None:
        """Write a line of the log, and print its most important figures."""
        examples, self.examples = self.examples, []
        self.file.write(json.dumps({"update": update, **metrics, "examples": examples}) + "\n")
        self.file.flush()
        figures = [f"{name} {value:.3g}" for name, value in metrics.items() if name.split("/")[-1] in SHOWN]
        print(f"{self.arguments.name} {update:4d}  {'  '.join(figures)}", flush=True)

    async def evaluate(self) -> dict[str, float]:
        """Return the reward of the held-out tasks."""
        options = {**self.options, "model": self.endpoint.model(), "samples": self.arguments.evaluate_samples}
        async with rollouts(held_out_tasks(), **options) as stream:
            groups = [group async for group in stream]
        families: dict[str, list[float]] = {}
        for group in groups:
            rewards = [reward for reward in group.rewards if reward is not None]
            families.setdefault(group.name.partition("-")[0], []).extend(rewards)
        return {
            **Evaluation.of_groups(groups).metrics(),
            **{f"eval/{name}": fmean(rewards) for name, rewards in sorted(families.items()) if rewards},
        }


def measure(sampler: Sampler, count: int) -> None:
    """Print how many tokens per second the sampler makes."""
    ids = sampler.policy.tokenizer.encode("The quick brown fox " * 80)[:400]
    for number in range(2):
        began = time.perf_counter()
        answers = [sampler.submit(Prompt(list(ids), 24, seed=seed)) for seed in range(count)]
        tokens = sum(len(answer.result().ids) for answer in answers)
        seconds = time.perf_counter() - began
        if number:
            print(
                f"{count} prompts of {len(ids)} tokens: {tokens / seconds:,.0f} tokens/s, {seconds:.2f} s", flush=True
            )


async def train(arguments: argparse.Namespace) -> None:
    """Train, evaluate and write the log."""
    ends_at = time.monotonic() + 60 * arguments.minutes
    policy = Policy.load(
        arguments.model,
        PolicyOptions(
            learning_rate=arguments.learning_rate,
            epochs=arguments.epochs,
            minibatches=arguments.minibatches,
            seed=arguments.seed,
            device=arguments.device,
            clip_high=arguments.clip_high,
            pass_tokens=arguments.pass_tokens,
        ),
    )
    with Sampler(policy, slots=arguments.slots, context=arguments.context) as sampler:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        print(f"device {policy.device}, CUDA graph {sampler.uses_graph}, {cores} cores", flush=True)
        if arguments.measure:
            measure(sampler, arguments.measure)
        with PolicyEndpoint.of(sampler) as endpoint:
            run = Run(arguments, endpoint)
            learner = Learner(
                sampler,
                LearnerOptions(
                    groups=arguments.groups,
                    seconds=max(1.0, ends_at - time.monotonic()),
                    updates=arguments.updates,
                    evaluate_every=arguments.evaluate_every,
                    method=arguments.method,
                ),
                log=run.log,
                folder=arguments.checkpoints,
                evaluate=run.evaluate,
                describe=run.describe,
            )
            await learner.run(
                lambda: rollouts(
                    run.tasks,
                    model=endpoint.model(),
                    samples=arguments.samples,
                    groups_per_update=arguments.groups,
                    max_staleness=arguments.staleness,
                    deadline_s=300,
                    keep=run.keep,
                    **run.options,
                )
            )
            print(f"{arguments.name} totals: {dict(run.totals)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .gguf file, a folder or a name of the Hub")
    parser.add_argument("--minutes", type=float, default=10, help="the time for loading, evaluations and updates")
    parser.add_argument("--updates", type=int, help="the largest number of updates")
    parser.add_argument("--out", type=Path, default=Path("run"))
    parser.add_argument("--name", default="0", help="part of the log's name")
    parser.add_argument("--checkpoints", type=Path, help="a folder for checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cheats", action="store_true", help="put hints for cheating into the prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--groups", type=int, default=8, help="tasks with different rewards per update")
    parser.add_argument("--samples", type=int, default=16, help="rollouts per task")
    parser.add_argument("--processes", type=int, default=max(2, (os.cpu_count() or 2) * 3 // 4))
    parser.add_argument("--concurrency", type=int, default=192, help="rollouts at once")
    parser.add_argument("--slots", type=int, default=192, help="answers at once")
    parser.add_argument("--context", type=int, default=768)
    parser.add_argument("--learning-rate", type=float, default=4e-5)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--minibatches", type=int, default=2)
    parser.add_argument("--pass-tokens", type=int, help="tokens in a forward pass of an update")
    parser.add_argument("--clip-high", type=float, default=0.28)
    parser.add_argument("--method", default="grpo")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--evaluate-samples", type=int, default=2)
    parser.add_argument("--measure", type=int, default=0, help="first measure the sampler with this many prompts")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # The sampler waits for the GPU after every token, and must not wait 5 ms for the interpreter's lock after that.
    sys.setswitchinterval(0.001)
    asyncio.run(train(arguments))


if __name__ == "__main__":
    main()
