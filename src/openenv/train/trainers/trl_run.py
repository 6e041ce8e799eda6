"""`openenv train --trainer trl`: a run whose updates come from TRL's `GRPOTrainer`.

TRL samples, computes losses and writes checkpoints; the served environment gives tools and rewards. Knows the settings
of a run, and TRL's names for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openenv.adapters import importing

from ..learner.policy import Policy, PolicyOptions
from ..learner.recipe import TrainingRun
from .trl import tool_environment

_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "scale_rewards": "group"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
}
"""TRL's settings for our names."""


def train_with_trl(run: TrainingRun) -> Path:
    """Train, and return the folder of the trained model.

    Raises:
        ValueError: TRL cannot train with these settings.
        PackageUnavailable: TRL is missing.
        EnvironmentError: the model cannot be read.
    """
    if run.env is None:
        raise ValueError("TRL trains on a served environment: give its URL")
    if run.updates is None:
        raise ValueError("TRL counts updates: give their number, not minutes")
    if run.algorithm not in _LOSSES:
        raise ValueError(f"TRL has no {run.algorithm!r}; choose from {', '.join(_LOSSES)}")
    with importing("trl>=1.0", needed_by="the trainer 'trl'"):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    folder = run.tracked.files
    if folder.exists() and not run.resume:
        raise FileExistsError(f"{folder} is from an earlier run: choose another folder, or continue it with --resume")
    policy = Policy.load(run.model, PolicyOptions(device=run.device))
    prompt = [{"role": "user", "content": run.system_prompt or "Use the tools."}]
    first = run.held_out + 1_000_000 * run.seed
    rows = [{"prompt": prompt, "seed": first + number} for number in range(run.updates * run.groups)]
    options: dict[str, Any] = {} if run.token is None else {"token": run.token}
    with tool_environment(run.env, **options) as environment:
        trainer = GRPOTrainer(
            model=policy.model,
            processing_class=policy.tokenizer,
            train_dataset=Dataset.from_list(rows),
            environment_factory=environment,
            args=GRPOConfig(
                output_dir=str(folder),
                max_steps=run.updates,
                per_device_train_batch_size=run.samples,
                gradient_accumulation_steps=run.groups,
                num_generations=run.samples,
                max_completion_length=run.context,
                max_tool_calling_iterations=run.max_turns,
                learning_rate=run.learning_rate,
                seed=run.seed,
                logging_steps=1,
                report_to=list(run.loggers) or "none",
                save_strategy="steps" if run.checkpoint_every else "no",
                save_steps=run.checkpoint_every or 1,
                use_cpu=policy.device.type == "cpu",
                bf16=policy.device.type == "cuda",
                disable_tqdm=True,
                **_LOSSES[run.algorithm],
            ),
        )
        trainer.train(resume_from_checkpoint=run.resume)
        trained = folder / "model"
        trainer.save_model(str(trained))
    return trained
