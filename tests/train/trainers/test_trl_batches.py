"""Packed and padded batches give the same log-probabilities in a real transformers model as each sequence alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trainers")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from openenv.rollout.capture import Sequence
from openenv.rollout.store.outcome import Outcome
from openenv.train import EpisodeSample, SampleGroup, TrainingBatch, collate

pytestmark = [pytest.mark.slow]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}


@pytest.fixture(scope="module")
def groups() -> list[SampleGroup]:
    draw = random.Random(4)

    def sample() -> EpisodeSample:
        rows = []
        for number in range(1, draw.randint(2, 4)):
            length = draw.randint(3, 30)
            ids = [draw.randrange(64) for _ in range(length)]
            mask = [0] + [1] * (length - 1)
            rows.append(Sequence("agent", 1, [number], 1, [length - 1], ids, mask, [0.0] * length, ["1"], [1]))
        return EpisodeSample(Outcome(rollout_id="r", status="ok", reward=float(draw.randint(0, 1))), rows)

    return [SampleGroup(f"g{number}", {}, [sample() for _ in range(4)]) for number in range(3)]


def logprobs(model: Any, batch: TrainingBatch) -> list[torch.Tensor]:
    """Return the log-probability of each next token, by sequence."""
    tensors = batch.torch()
    inputs = {name: tensors[name] for name in ("input_ids", "position_ids", "attention_mask") if name in tensors}
    with torch.no_grad():
        values = torch.log_softmax(model(**inputs, use_cache=False).logits.float(), -1)
    found = values[:, :-1].gather(-1, tensors["input_ids"][:, 1:, None])[..., 0]
    if batch.cu_seqlens is None:
        return [found[row, : end - 1] for row, end in enumerate(batch.sequence_ends)]
    bounds = zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)
    return [found[0, start : end - 1] for start, end in bounds]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_packed_row_gives_each_sequence_the_logprobs_that_it_has_alone(
    groups: list[SampleGroup], kind: str, attention: str
) -> None:
    torch.manual_seed(0)
    model_class, config_class = MODELS[kind]
    model = model_class(config_class(**SIZES, attn_implementation=attention)).eval()
    padded, packed = collate(groups), collate(groups, layout="packed")
    alone = [
        logprobs(model, collate([SampleGroup("one", {}, [EpisodeSample(sample.outcome, [row])])], "dr_grpo"))[0]
        for group in groups
        for sample in group.samples
        for row in sample.trainable
    ]
    for expected, in_padded, in_packed in zip(alone, logprobs(model, padded), logprobs(model, packed), strict=True):
        torch.testing.assert_close(in_padded, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(in_packed, expected, rtol=0, atol=1e-4)
    # The test can fail: with a mask of ones, as a padded batch has one, sequences attend to those before them.
    tensors = packed.torch()
    with torch.no_grad():
        joined = model(
            input_ids=tensors["input_ids"], attention_mask=torch.ones_like(tensors["input_ids"]), use_cache=False
        ).logits
        apart = model(input_ids=tensors["input_ids"], position_ids=tensors["position_ids"], use_cache=False).logits
    assert (joined - apart).abs().max() > 1e-3
