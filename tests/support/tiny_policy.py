"""A policy without weights from a hub, for TRL's real trainers: a tokenizer of bytes, a random model, and a script.

Needs the environment of TRL.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

END = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", END, "<tool_call>", "</tool_call>", "<think>", "</think>"]
TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with a chat template that TRL knows."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(symbols)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token=END, pad_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:]
    )
    tokenizer.chat_template = TEMPLATE.read_text()
    return tokenizer


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a random model of a few thousand weights."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=8192, **shape))


def tool_call(name: str, **arguments: Any) -> str:
    """Return an answer that calls a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>{END}'


class ScriptedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, but for what its model samples: `answer` says it, of a conversation's text and its number."""

    answer: Callable[[str, int], str]

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        texts = [self.processing_class.decode(ids) for ids in prompt_ids]
        sampled = [self.answer(text, number) for number, text in enumerate(texts)]
        return [self.processing_class.encode(text, add_special_tokens=False) for text in sampled], None


def trained(
    answer: Callable[[str, int], str],
    folder: Path,
    *,
    steps: int = 1,
    generations: int = 2,
    max_completion_length: int = 2048,
    trainer: type[ScriptedGRPOTrainer] = ScriptedGRPOTrainer,
    **arguments: Any,
) -> ScriptedGRPOTrainer:
    """Train a tiny model for some steps, and return the trainer."""
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=generations,
        num_generations=generations,
        max_completion_length=max_completion_length,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        chat_template_kwargs={"enable_thinking": False},
    )
    tokenizer = tiny_tokenizer()
    made = trainer(model=tiny_model(tokenizer), processing_class=tokenizer, args=config, **arguments)
    made.answer = answer
    made.train()
    return made
