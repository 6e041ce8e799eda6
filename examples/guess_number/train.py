"""Train a small language model to guess numbers: GRPO over episodes of several turns, through our server and proxy.

    openenv serve (sessions) <── openenv.train.play ──> capture proxy ──> policy.py (samples)
                                        │ groups, advantages
                                        └──────────────────────────────> policy.py (updates)

python examples/guess_number/train.py --environment URL --policy URL --out FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

import httpx2
import msgpack

from openenv.rollout import Model
from openenv.train import SampleGroup, collate, play

SYSTEM = "Find the secret number. Answer with one number and nothing else."


def pack(groups: list[SampleGroup]) -> bytes:
    """Return a batch as the policy's `/update` reads it."""
    batch = collate(groups, "grpo")
    names = ("input_ids", "attention_mask", "loss_mask", "old_logprobs", "advantages")
    data: bytes = msgpack.packb({name: getattr(batch, name) for name in names})
    return data


async def train(arguments: argparse.Namespace) -> None:
    model = Model(
        base_url=f"{arguments.policy}/v1", name="smollm2", engine="vllm", sampling={"temperature": 1.0},
        top_logprobs=0, max_tokens_cap=arguments.max_tokens,
    )  # fmt: skip
    sessions = arguments.groups * arguments.samples
    log = (arguments.out / "log.jsonl").open("w")
    end = time.monotonic() + arguments.minutes * 60
    async with httpx2.AsyncClient(base_url=arguments.policy, timeout=600, trust_env=False) as http:
        before: dict[str, float] = (await http.get("/stats")).json()
        async with play(
            arguments.environment, model, itertools.count(1), samples=arguments.samples, concurrency=sessions,
            system=SYSTEM, max_turns=12, max_tokens=arguments.max_tokens, max_staleness=1,
        ) as stream:  # fmt: skip
            stream.policy_version = 0
            while time.monotonic() < end:
                began = time.perf_counter()
                groups = [await anext(stream) for _ in range(arguments.groups)]
                played_s = time.perf_counter() - began
                stream.pause()  # no call is made while weights change
                try:
                    answer = await http.post("/update", content=pack(groups))
                    update: dict[str, Any] = answer.raise_for_status().json()
                finally:
                    stream.resume()
                stream.policy_version = int(update["version"])
                after: dict[str, float] = (await http.get("/stats")).json()
                row = summary(groups, update, stream) | {
                    "played_s": played_s,
                    "iteration_s": time.perf_counter() - began,
                    "engine_s": after["sampled_s"] - before["sampled_s"],
                    "sampled_tokens": after["sampled_tokens"] - before["sampled_tokens"],
                    "engine_batches": after["batches"] - before["batches"],
                }
                before = after
                log.write(json.dumps(row) + "\n")
                log.flush()
                print(
                    f"{row['version']:4.0f}  reward {row['reward']:.3f}  solved {row['solved']:.2f}  turns {row['turns']:.1f}  "
                    f"gap {row['mean_gap']:.1e} (max {row['max_gap']:.1e})  {row['iteration_s']:.1f} s",
                    flush=True,
                )
    log.close()


def summary(groups: list[SampleGroup], update: dict[str, Any], stream: Any) -> dict[str, Any]:
    """Return the figures of one iteration."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    sequences = [sequence for sample in samples for sequence in sample.trainable]
    return {
        **update,
        "update_s": update["seconds"],
        "reward": sum(rewards) / len(rewards),
        "solved": sum(reward > 0.3 - 1e-9 for reward in rewards) / len(rewards),
        "turns": sum(len(sample.outcome.turns) for sample in samples) / len(samples),
        "episodes": len(samples),
        "sequences": len(sequences),
        "failed": stream.counts.failed,
        "stale_groups": stream.counts.stale_groups,
        # How long an episode waited for each, on average.
        "environment_wait_s": sum(sample.outcome.phase_s["environment"] for sample in samples) / len(samples),
        "model_wait_s": sum(sample.outcome.phase_s["model"] for sample in samples) / len(samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", default="http://127.0.0.1:8000")
    parser.add_argument("--policy", default="http://127.0.0.1:8100")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--out", type=Path, default=Path("."))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(train(arguments))


if __name__ == "__main__":
    main()
