"""Train a small language model to guess numbers: GRPO over episodes of several turns, through our server and proxy.

    openenv serve (sessions) <── players: openenv.train.play ──> capture proxy ──> policy.py (samples)
                                        │ groups
                                        └── advantages, batch ──────────────────> policy.py (updates)

python examples/guess_number/train.py --environment URL --policy URL --out FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import msgpack

from openenv.rollout import Model, Sampling
from openenv.train import EpisodeSample, SampleGroup, collate, play

SYSTEM = "Find the secret number. Answer with one number and nothing else."
FIELDS = ("input_ids", "attention_mask", "loss_mask", "old_logprobs", "advantages")


def play_round(seeds: range, *, environment: str, policy: str, samples: int, max_tokens: int) -> list[SampleGroup]:
    """Play the episodes of some seeds, all at once; runs in a process of its own."""
    model = Model(
        base_url=f"{policy}/v1",
        name="smollm2",
        engine="vllm",
        token_in=False,  # this engine keeps the IDs of its answers itself
        sampling=Sampling(),
        top_logprobs=0,
        max_tokens_cap=max_tokens,
    )
    options: dict[str, Any] = {"samples": samples, "concurrency": samples * len(seeds), "max_tokens": max_tokens}

    async def groups() -> list[SampleGroup]:
        async with play(environment, model, seeds, system=SYSTEM, text_only=True, **options) as stream:
            return [group async for group in stream]

    return asyncio.run(groups())


def train(arguments: argparse.Namespace) -> None:
    """Play, update, and write down what came of it, until the time is over."""
    end = time.monotonic() + arguments.minutes * 60
    size = arguments.groups // arguments.players
    one_round = partial(
        play_round,
        environment=arguments.environment,
        policy=arguments.policy,
        samples=arguments.samples,
        max_tokens=arguments.max_tokens,
    )
    spawn = multiprocessing.get_context("spawn")
    with (
        httpx2.Client(base_url=arguments.policy, timeout=600, trust_env=False) as http,
        ProcessPoolExecutor(arguments.players, mp_context=spawn) as players,
        (arguments.out / f"log-{arguments.seed}.jsonl").open("w") as log,
    ):
        before: dict[str, float] = http.get("/stats").json()
        seed = 1 + 1_000_000 * arguments.seed
        while time.monotonic() < end:
            began = time.perf_counter()
            parts = [range(start, start + size) for start in range(seed, seed + arguments.groups, size)]
            groups = [group for part in players.map(one_round, parts) for group in part]
            seed += arguments.groups
            played_s = time.perf_counter() - began
            batch = collate(groups, "grpo")
            data = msgpack.packb({name: getattr(batch, name) for name in FIELDS})
            update = http.post("/update", content=data).raise_for_status().json()
            after: dict[str, float] = http.get("/stats").json()
            row = {
                **update,
                **figures([sample for group in groups for sample in group.samples]),
                "failed": sum(len(group.failed) for group in groups),
                "played_s": played_s,
                "iteration_s": time.perf_counter() - began,
                "update_s": after["updated_s"] - before["updated_s"],
                "engine_s": after["sampled_s"] - before["sampled_s"],
                "sampled_tokens": after["sampled_tokens"] - before["sampled_tokens"],
                "engine_batches": after["batches"] - before["batches"],
            }
            before = after
            log.write(json.dumps(row) + "\n")
            log.flush()
            print(
                "{version:4.0f}  reward {reward:.3f}  found {found:.2f}  turns {turns:.1f}  "
                "gap {mean_gap:.1e} (max {max_gap:.1e})  played {played_s:.1f} s  update {update_s:.1f} s".format(
                    **row
                ),
                flush=True,
            )


def figures(samples: list[EpisodeSample]) -> dict[str, float]:
    """Return the means over the episodes of one iteration."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    count = len(rewards)
    return {
        "episodes": len(samples),
        "sequences": sum(len(sample.trainable) for sample in samples),
        "reward": sum(rewards) / count,
        "found": sum(reward >= 0.3 for reward in rewards) / count,
        "turns": sum(len(sample.outcome.turns) for sample in samples) / len(samples),
        # How long an episode waited for each.
        "environment_wait_s": sum(sample.outcome.phase_s["environment"] for sample in samples) / len(samples),
        "model_wait_s": sum(sample.outcome.phase_s["model"] for sample in samples) / len(samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", default="http://127.0.0.1:8000")
    parser.add_argument("--policy", default="http://127.0.0.1:8100")
    parser.add_argument("--groups", type=int, default=64, help="starts per update")
    parser.add_argument("--samples", type=int, default=8, help="episodes per start")
    parser.add_argument("--players", type=int, default=8, help="processes that play; must divide --groups")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the secret numbers; part of the log's name")
    parser.add_argument("--out", type=Path, default=Path("."))
    arguments = parser.parse_args()
    if arguments.groups % arguments.players:
        parser.error("--players must divide --groups")
    arguments.out.mkdir(parents=True, exist_ok=True)
    train(arguments)


if __name__ == "__main__":
    main()
