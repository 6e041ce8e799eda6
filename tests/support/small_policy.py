"""A policy without weights from a hub: a random model of transformers and a tokenizer of bytes.

Needs torch and transformers, but no trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from openenv.train.learner.policy import Policy, PolicyOptions

END = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", END]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes without a chat template."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(symbols)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token=END, pad_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:]
    )


def random_model(vocabulary: int, *, size: int = 32, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """Return a random model with grouped heads."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": size, "intermediate_size": 2 * size, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=8192, **shape, **heads))


def small_policy(**options: Any) -> Policy:
    """Return a random policy."""
    tokenizer = byte_tokenizer()
    options.setdefault("device", "cpu")
    return Policy(random_model(len(tokenizer)), tokenizer, PolicyOptions(**options))


def save_model(folder: Path, *, size: int = 32) -> Path:
    """Write a random model and its tokenizer as transformers reads them."""
    tokenizer = byte_tokenizer()
    random_model(len(tokenizer), size=size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
