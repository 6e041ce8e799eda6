"""TRL's `GRPOTrainer` teaches a tiny model to call a tool, on the CPU, in minutes: no weights, no hub.

The model begins with random weights, and its vocabulary has one token for each call of the tool: what is left to learn
is to call it, and to read the lamp.

    .clients/trl/bin/python examples/trl_tools/train.py --seeds 5 --plot curve.png
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from environment import COLOURS
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from openenv.providers import ProcessProvider
from openenv.train.trainers.trl import tool_environment

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"  # one whose tool calls TRL reads


def call(colour: str) -> str:
    """Return the call of the tool as the template writes it."""
    return f'<tool_call>\n{{"name": "press", "arguments": {{"colour": "{colour}"}}}}\n</tool_call>'


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer that reads the colours of the lamp, the roles and the calls, and nothing else."""
    words = [*(colour.upper() for colour in COLOURS), *(call(colour) for colour in COLOURS), "user", "assistant"]
    known = Tokenizer(models.BPE({}, []))  # without a vocabulary: what is none of these words leaves no token
    known.add_tokens([AddedToken(word, normalized=False) for word in words])
    known.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=known, eos_token=END, pad_token=PAD, additional_special_tokens=[START]
    )
    tokenizer.chat_template = TEMPLATE.read_text()
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Make a model of 48,000 random weights."""
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    # Larger weights than a large model has: the usual ones would pass hardly anything on in so narrow a model.
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, initializer_range=0.15, **shape)
    return LlamaForCausalLM(config)


class Log(TrainerCallback):  # type: ignore[misc]
    """Keeps the mean reward of each step, and prints some."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Take the figures of a step."""
        if logs is None or "reward" not in logs:
            return
        seconds = time.monotonic() - self._began
        self.rows.append({"step": state.global_step, "reward": float(logs["reward"]), "seconds": seconds})
        if state.global_step % 10 == 0 or state.global_step == 1:
            print(f"step {state.global_step:4d}  reward {float(logs['reward']):.3f}  {seconds:4.0f} s", flush=True)


def train(url: str, seed: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """Train a new model and return the mean reward of each step."""
    torch.manual_seed(seed)
    tokenizer, log = make_tokenizer(), Log()
    prompt = [{"role": "user", "content": "Press the button of the lamp."}]
    rows = [{"prompt": prompt, "seed": seed} for seed in range(options.steps * options.episodes)]
    with tool_environment(url, action_name="press") as environment:
        trainer = GRPOTrainer(
            model=make_model(tokenizer),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            environment_factory=environment,
            callbacks=[log],
            args=GRPOConfig(
                output_dir=str(options.output),
                max_steps=options.steps,
                per_device_train_batch_size=options.episodes,
                num_generations=options.group,
                max_completion_length=options.tokens,
                learning_rate=options.learning_rate,
                seed=seed,
                logging_steps=1,
                report_to=options.report_to,
                save_strategy="no",
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
                chat_template_kwargs={"enable_thinking": False},
            ),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [{"seed": seed, **row} for row in log.rows]


def plot(log: list[dict[str, float]], path: Path) -> None:
    """Draw the mean reward over the steps: a thin line for each seed, and their mean."""
    import matplotlib  # only where a picture is wanted

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    by_seed: dict[float, list[float]] = {}
    for row in log:
        by_seed.setdefault(row["seed"], []).append(row["reward"])
    curves = list(by_seed.values())
    steps = range(1, 1 + min(map(len, curves)))
    for curve in curves if len(curves) > 1 else []:
        axes.plot(steps, curve[: len(steps)], color="#3465a4", linewidth=0.7, alpha=0.5)
    axes.plot(
        steps,
        [sum(values) / len(values) for values in zip(*(curve[: len(steps)] for curve in curves), strict=True)],
        color="#3465a4",
        linewidth=2,
    )
    axes.set(xlabel="step of GRPOTrainer", ylabel="mean reward", title="A tool, called in the colour of the lamp")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Serve the environment, train, and write the log and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server of the environment; by default one is started")
    parser.add_argument("--log", type=Path, help="a file for the figures, one JSON object in each line")
    parser.add_argument("--plot", type=Path, help="a file for the curve")
    parser.add_argument("--output", type=Path, default=Path("outputs") / "trl_tools", help="TRL's folder")
    parser.add_argument("--report-to", default="none", help="wandb, trackio, tensorboard, as TRL has them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="train so many models, with seeds from --seed on")
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--episodes", type=int, default=64, help="per step")
    parser.add_argument("--group", type=int, default=16, help="episodes that begin alike")
    parser.add_argument("--tokens", type=int, default=24, help="of an episode, what the tool answers included")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    options = parser.parse_args()
    with ExitStack() as stack:
        url: Any = options.url
        if url is None:
            url = stack.enter_context(ProcessProvider(f"{Path(__file__).with_name('environment.py')}:app")).base_url
        seeds = range(options.seed, options.seed + options.seeds)
        log = [row for seed in seeds for row in train(url, seed, options)]
    if options.log is not None:
        options.log.write_text("".join(json.dumps(row) + "\n" for row in log))
    if options.plot is not None:
        plot(log, options.plot)


if __name__ == "__main__":
    main()
