"""Groups of samples with the same start or task, their advantages, and batches as lists or tensors.

    samples ──advantages──> one number per sample ──collate──> rows of one length (padded) or one long row (packed)

Every row is a captured sequence: the engine's token IDs, a mask of the sampled tokens, and their log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any, Literal

from openenv.rollout import capture
from openenv.rollout.capture.export import token_counts
from openenv.rollout.capture.training_trace import TokenCounts
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.tasks.task import Task

Layout = Literal["padded", "packed"]
Method = Literal["grpo", "rloo", "reinforce++"]
"""How a reward becomes an advantage:

- `grpo`: its distance from the mean of the group, in standard deviations.
- `rloo`: its distance from the mean of the other rewards in the group.
- `reinforce++`: its distance from the mean of all groups, in standard deviations.
"""
Rewards = Sequence[float | None]

_SMALLEST = 1e-6
"""Added to a standard deviation, so that a group with nearly equal rewards gets no huge advantages."""


@dataclass(frozen=True, slots=True)
class EpisodeSample:
    """One episode: how it ended, and the token sequences to train on."""

    outcome: Outcome
    """`reward` is None after an infrastructure failure; `status` and `reason` describe it."""
    sequences: list[capture.Sequence] = field(default_factory=list)
    is_rewarded: bool = True
    """Whether the reward was given. If not, the environment gave none in this episode, which counts as 0."""

    @property
    def reward(self) -> float | None:
        """The reward of the episode."""
        return self.outcome.reward

    @property
    def trainable(self) -> list[capture.Sequence]:
        """The sequences for training; empty if the sample has no reward."""
        return [] if self.reward is None else [sequence for sequence in self.sequences if sequence.trainable]

    def tokens(self) -> TokenCounts:
        """Return the numbers of sampled, trained and excluded tokens."""
        counts = token_counts(self.outcome.turns, self.sequences)
        return counts if self.reward is not None else counts.without("no_reward")

    @property
    def policy_versions(self) -> set[str]:
        """The versions of the policy that sampled it, if the endpoint names them."""
        return {name for sequence in self.sequences for name in sequence.policy_versions if name is not None}


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Samples with the same start or task."""

    name: str
    start: Mapping[str, Any]
    """The arguments of `reset`; empty for samples of a task."""
    samples: list[EpisodeSample]
    failed: list[EpisodeSample] = field(default_factory=list)
    """Attempts that were repeated after an infrastructure failure; they count in no baseline."""
    task: Task | None = None
    """The task, for samples of `rollouts`; samples of `play` have `start`."""

    @property
    def rewards(self) -> list[float | None]:
        """The rewards of the samples."""
        return [sample.reward for sample in self.samples]

    @property
    def spread(self) -> float:
        """The difference between the highest and the lowest reward. A group with spread 0 teaches nothing."""
        rewarded = [reward for reward in self.rewards if reward is not None]
        return max(rewarded) - min(rewarded) if rewarded else 0.0

    def advantages(self, method: Method = "grpo") -> list[float | None]:
        """Return the advantages of the samples within this group."""
        return advantages([self.rewards], method)[0]

    def collate(self, method: Method = "grpo", *, layout: Layout = "padded", pad_id: int = 0) -> TrainingBatch:
        """Return the group as one batch."""
        return collate([self], method, layout=layout, pad_id=pad_id)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Rows to train on, as lists; `torch()` converts them to tensors.

    With layout `padded`, each sequence is a row, and `attention_mask` is 0 for padding. With layout `packed`, all
    sequences form one row: `position_ids` restart at 0 with each sequence, and `sequence_ends` has their ends.
    """

    input_ids: list[list[int]]
    loss_mask: list[list[int]]
    """1 for tokens that the policy sampled; always 0 for the first token of a sequence."""
    old_logprobs: list[list[float]]
    """The engine's log-probability of each token with `loss_mask` 1, else 0."""
    advantages: list[list[float]]
    attention_mask: list[list[int]]
    position_ids: list[list[int]]
    sequence_ends: list[int]
    """The length of each sequence if padded; its end in the row if packed."""

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.sequence_ends)

    @property
    def n_tokens(self) -> int:
        """The number of tokens with `loss_mask` 1."""
        return sum(map(sum, self.loss_mask))

    def torch(self, device: Any = None) -> dict[str, Any]:
        """Return a dictionary of tensors with the field names as keys.

        Raises:
            ImportError: PyTorch is not installed.
        """
        try:
            import torch  # type: ignore[import-not-found,unused-ignore]
        except ImportError as exc:
            raise ImportError("Tensors need PyTorch: pip install torch") from exc
        kinds = {"old_logprobs": torch.float32, "advantages": torch.float32}
        return {
            name: torch.tensor(getattr(self, name), dtype=kinds.get(name, torch.long), device=device)
            for name in self.__dataclass_fields__
        }


def advantages(groups: Sequence[Rewards], method: Method = "grpo") -> list[list[float | None]]:
    """Return the advantage of each sample, group by group.

    A sample without a reward failed because of the infrastructure: it has no advantage and counts in no mean. A group
    with a single reward has advantages of 0 with `grpo` and `rloo`, because it has nothing to compare with.

    Raises:
        ValueError: the method is unknown, or a reward is not finite.
    """
    for reward in (reward for rewards in groups for reward in rewards):
        if reward is not None and not isfinite(reward):
            raise ValueError(f"a reward must be a finite number, not {reward}")
    if method == "grpo":
        return [_standardised(rewards, *_mean_and_deviation(rewards)) for rewards in groups]
    if method == "rloo":
        return [_left_out(rewards) for rewards in groups]
    if method == "reinforce++":
        mean, deviation = _mean_and_deviation([reward for rewards in groups for reward in rewards])
        return [_standardised(rewards, mean, deviation) for rewards in groups]
    raise ValueError(f"unknown method {method!r}; choose from 'grpo', 'rloo', 'reinforce++'")


def _mean_and_deviation(rewards: Rewards) -> tuple[float, float]:
    rewarded = [reward for reward in rewards if reward is not None]
    if not rewarded:
        return 0.0, 0.0
    mean = sum(rewarded) / len(rewarded)
    return mean, sqrt(sum((reward - mean) ** 2 for reward in rewarded) / len(rewarded))


def _standardised(rewards: Rewards, mean: float, deviation: float) -> list[float | None]:
    return [None if reward is None else (reward - mean) / (deviation + _SMALLEST) for reward in rewards]


def _left_out(rewards: Rewards) -> list[float | None]:
    rewarded = [reward for reward in rewards if reward is not None]
    total, others = sum(rewarded), len(rewarded) - 1
    if not others:
        return [None if reward is None else 0.0 for reward in rewards]
    return [None if reward is None else reward - (total - reward) / others for reward in rewards]


def collate(
    groups: Iterable[SampleGroup], method: Method = "grpo", *, layout: Layout = "padded", pad_id: int = 0
) -> TrainingBatch:
    """Collect the trainable sequences of groups in a batch, each with the advantage of its sample.

    Args:
        groups: Groups of one or several starts.
        method: How rewards become advantages.
        layout: `padded` for one row per sequence, `packed` for one row in total.
        pad_id: The padding token.

    Raises:
        ValueError: the groups have no trainable sequence, or an argument has an unknown value.
    """
    groups = list(groups)
    values = advantages([group.rewards for group in groups], method)
    rows = [
        (sequence, value)
        for group, of_group in zip(groups, values, strict=True)
        for sample, value in zip(group.samples, of_group, strict=True)
        if value is not None
        for sequence in sample.trainable
    ]
    if not rows:
        samples = [sample for group in groups for sample in group.samples if sample.reward is not None]
        reasons = dict.fromkeys(text for sample in samples for each in sample.sequences for text in each.not_trainable)
        why = "; ".join(list(reasons)[:3]) or ("nothing was captured" if samples else "no sample has a reward")
        raise ValueError(f"no sequence of these groups may be trained on: {why}")
    if layout == "packed":
        return _packed(rows)
    if layout != "padded":
        raise ValueError(f"unknown layout {layout!r}; choose from 'padded', 'packed'")
    width = max(len(sequence.input_ids) for sequence, _ in rows)
    lengths = [len(sequence.input_ids) for sequence, _ in rows]

    def filled(row: Sequence[Any], value: Any) -> list[Any]:
        return [*row, *[value] * (width - len(row))]

    return TrainingBatch(
        input_ids=[filled(sequence.input_ids, pad_id) for sequence, _ in rows],
        loss_mask=[filled(_mask(sequence), 0) for sequence, _ in rows],
        old_logprobs=[filled(sequence.logprobs, 0.0) for sequence, _ in rows],
        advantages=[filled([value] * len(sequence.input_ids), 0.0) for sequence, value in rows],
        attention_mask=[filled([1] * length, 0) for length in lengths],
        position_ids=[filled(range(length), 0) for length in lengths],
        sequence_ends=lengths,
    )


def _packed(rows: list[tuple[capture.Sequence, float]]) -> TrainingBatch:
    ends: list[int] = []
    for sequence, _ in rows:
        ends.append((ends[-1] if ends else 0) + len(sequence.input_ids))
    return TrainingBatch(
        input_ids=[[token for sequence, _ in rows for token in sequence.input_ids]],
        loss_mask=[[bit for sequence, _ in rows for bit in _mask(sequence)]],
        old_logprobs=[[value for sequence, _ in rows for value in sequence.logprobs]],
        advantages=[[value for sequence, value in rows for _ in sequence.input_ids]],
        attention_mask=[[1] * ends[-1]],
        position_ids=[[place for sequence, _ in rows for place in range(len(sequence.input_ids))]],
        sequence_ends=ends,
    )


def _mask(sequence: capture.Sequence) -> list[int]:
    """Return the mask with 0 for the first token, because nothing predicts it."""
    return [0, *sequence.loss_mask[1:]]
