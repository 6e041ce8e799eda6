"""Our advantages beside those of TRL: its trainers score random rewards, and log rewards and advantages."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trainers")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from openenv.train import advantages
from openenv.train.groups import Method
from tiny_policy import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow]
GROUPS, SAMPLES = 4, 4
TRLS_EPSILON = 1e-4  # added to the deviation of a group; ours and veRL's is 1e-6


def logged(folder: Path, seed: int, trainer_class: Any, config_class: Any, **options: Any) -> tuple[list[float], ...]:
    """Train one step on random rewards; return the rewards and advantages that the trainer logged."""
    draw = random.Random(seed)
    seen: list[float] = []

    def score(completions: list[Any], **fields: Any) -> list[float]:
        seen.extend(draw.choice([0.0, 0.25, 1.0, -3.5]) for _ in completions)
        return seen[-len(completions) :]

    config = config_class(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=GROUPS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=4,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        beta=0.0,
        **options,
    )
    tokenizer = tiny_tokenizer()
    prompts = Dataset.from_list([{"prompt": f"question {number}"} for number in range(GROUPS)])
    trainer = trainer_class(
        model=tiny_model(tokenizer), processing_class=tokenizer, args=config, reward_funcs=score, train_dataset=prompts
    )
    trainer.train()
    return seen, list(trainer._logs["advantages"])


@pytest.mark.parametrize(
    ("method", "trainer_class", "config_class", "options"),
    [
        ("grpo", GRPOTrainer, GRPOConfig, {"scale_rewards": "group"}),
        ("dr_grpo", GRPOTrainer, GRPOConfig, {"scale_rewards": "none"}),
        ("rloo", RLOOTrainer, RLOOConfig, {"normalize_advantages": False}),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_advantages_equal_those_of_trl(
    tmp_path: Path, method: Method, trainer_class: Any, config_class: Any, options: dict[str, Any], seed: int
) -> None:
    rewards, theirs = logged(tmp_path, seed, trainer_class, config_class, **options)
    groups = [rewards[start : start + SAMPLES] for start in range(0, GROUPS * SAMPLES, SAMPLES)]
    ours = [value for group in advantages(groups, method) for value in group]
    if method == "grpo":
        deviations = [deviation for group in groups for deviation in [stdev(group)] * SAMPLES]
        theirs = [
            value * (deviation + TRLS_EPSILON) / (deviation + 1e-6)
            for value, deviation in zip(theirs, deviations, strict=True)
        ]
    assert len(theirs) == GROUPS * SAMPLES
    assert any(theirs)
    assert ours == pytest.approx(theirs, abs=1e-5)
