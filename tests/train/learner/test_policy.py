"""The policy of the learner: its loss, its gradients and its files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner has an environment of its own: make test-trainers")

import torch

from openenv.train.groups import TrainingBatch
from openenv.train.learner.policy import Policy, PolicyOptions
from small_policy import small_policy

LENGTHS = (5, 9, 4, 12)
GAINS = (1.0, -0.5, 0.25, 2.0)
SAMPLED = 3
"""The number of sampled tokens at the end of each sequence."""


def sequence(number: int) -> list[int]:
    return [(11 * number + 3 * place) % 250 for place in range(LENGTHS[number])]


def logprobs(policy: Policy, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the last tokens of one sequence, computed alone."""
    rows = torch.log_softmax(policy.model(input_ids=torch.tensor([ids])).logits[0], -1)
    places = range(len(ids) - SAMPLED, len(ids))
    return torch.stack([rows[place - 1, ids[place]] for place in places])


def batch(policy: Policy, *, shift: float = 0.0) -> TrainingBatch:
    """Return four packed sequences; `shift` is added to the log-probabilities of sampling."""
    ids, mask, old, gains, places, ends = [], [], [], [], [], []
    for number, length in enumerate(LENGTHS):
        prompt = length - SAMPLED
        with torch.no_grad():
            values = [float(value) + shift for value in logprobs(policy, sequence(number))]
        ids += sequence(number)
        mask += [0] * prompt + [1] * SAMPLED
        old += [0.0] * prompt + values
        gains += [0.0] * prompt + [GAINS[number]] * SAMPLED
        places += range(length)
        ends.append(len(ids))
    return TrainingBatch(
        input_ids=[ids],
        loss_mask=[mask],
        old_logprobs=[old],
        advantages=[gains],
        turn_ids=[mask],
        policy_versions=[mask],
        position_ids=[places],
        attention_mask=None,
        sequence_ends=ends,
        sample_ids=[0, 1, 2, 3],
        group_ids=[0, 0, 1, 1],
        routed_experts=[None] * 4,
    )


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in policy.model.parameters()])


@pytest.mark.parametrize("pass_tokens", [1, 14, 4096])  # one sequence per pass, two, all
def test_an_update_is_a_step_along_the_mean_gradient_of_all_sampled_tokens(pass_tokens: int) -> None:
    policy, reference = small_policy(pass_tokens=pass_tokens, warmup=0), small_policy()
    figures = policy.update(batch(policy))

    losses = [-gain * logprobs(reference, sequence(number)).sum() for number, gain in enumerate(GAINS)]
    torch.stack(losses).sum().div(SAMPLED * len(GAINS)).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 1.0)
    reference.optimizer.step()

    assert figures.gap < 1e-5
    assert figures.largest_gap < 1e-4
    assert figures.grad_norm == pytest.approx(float(norm), rel=1e-3)
    assert figures.loss == pytest.approx(-sum(GAINS) / len(GAINS), rel=1e-4)  # all ratios are 1
    assert (figures.tokens, figures.steps, figures.clipped) == (SAMPLED * len(GAINS), 1, 0.0)
    # Adam's first step is the sign of the gradient, so only gradients near 0 may differ.
    moved = (weights(policy) - weights(reference)).abs()
    assert float(moved.mean()) < 0.02 * policy.options.learning_rate


def test_gains_become_likelier_and_losses_less_likely() -> None:
    policy = small_policy(learning_rate=1e-3, warmup=0, epochs=4)
    data = batch(policy)
    before = [float(logprobs(policy, sequence(number)).detach().sum()) for number in range(4)]
    policy.update(data)
    after = [float(logprobs(policy, sequence(number)).detach().sum()) for number in range(4)]
    changes = [new - old for old, new in zip(before, after, strict=True)]
    assert changes[3] > changes[0] > 0 > changes[1]
    assert policy.version == 1


def test_tokens_beyond_the_clip_range_have_no_gradient() -> None:
    # The ratio is exp(1) = 2.7: gains are clipped, losses (the second sequence) are not.
    policy = small_policy(warmup=0)
    figures = policy.update(batch(policy, shift=-1.0))
    assert figures.clipped == pytest.approx(3 / 4)
    assert figures.gap == pytest.approx(1.0, abs=1e-4)
    expected = -(1.28 * (1.0 + 0.25 + 2.0) - 0.5 * math.e) / 4
    assert figures.loss == pytest.approx(expected, rel=1e-3)


def test_minibatches_and_epochs_take_a_step_each() -> None:
    policy = small_policy(epochs=3, minibatches=2)
    assert policy.update(batch(policy)).steps == 6


def test_the_learning_rate_rises_during_the_warm_up() -> None:
    policy = small_policy(learning_rate=1.0, warmup=4, epochs=6)
    rates: list[float] = []
    step = policy.optimizer.step

    def recorded() -> None:
        rates.append(policy.optimizer.param_groups[0]["lr"])
        policy.optimizer.param_groups[0]["lr"] = 0.0
        step()

    policy.optimizer.step = recorded
    policy.update(batch(policy))
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_restored_policy_continues_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    policy = small_policy(minibatches=2, learning_rate=1e-3)
    data = batch(policy)
    policy.update(data)
    policy.save(tmp_path)
    expected = policy.update(data)

    again = Policy.load(str(tmp_path), PolicyOptions(device="cpu", minibatches=2, learning_rate=1e-3))
    again.restore(tmp_path)
    assert again.version == 1
    assert again.update(data) == expected
    assert torch.equal(weights(again), weights(policy))
    assert again.end_ids == policy.end_ids


def test_the_tiny_model_reads_and_writes_characters(tmp_path: Path) -> None:
    policy = Policy.load("tiny", PolicyOptions(device="cpu"))
    policy.save(tmp_path)
    for tokenizer in (policy.tokenizer, Policy.load(str(tmp_path), PolicyOptions(device="cpu")).tokenizer):
        messages = [{"role": "user", "content": "From 1\nto 64: é!"}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == "<|im_start|>user\nFrom 1\nto 64: !<|im_end|>\n<|im_start|>assistant\n"
        assert ids.count(tokenizer.eos_token_id) == 1
    assert policy.end_ids == {policy.tokenizer.eos_token_id}
    other = Policy.load("tiny", PolicyOptions(device="cpu", seed=1))
    assert not torch.equal(weights(policy), weights(other))


def test_a_padded_batch_is_refused() -> None:
    policy = small_policy()
    data = batch(policy)
    padded = replace(data, attention_mask=[[1] * len(data.input_ids[0])])
    with pytest.raises(ValueError, match="layout='packed'"):
        policy.update(padded)


@pytest.mark.parametrize(
    "options",
    [{"epochs": 0}, {"minibatches": 0}, {"learning_rate": 0.0}, {"clip_low": 2.0}, {"warmup": -1}, {"pass_tokens": 0}],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        PolicyOptions(**options)
