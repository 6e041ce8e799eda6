"""Groups of samples with the same start or task, their advantages, and batches as lists or tensors.

    samples ──advantages──> one number per sample or turn ──collate──> a row per sequence (padded), or one row (packed)

Every row is a captured sequence: the engine's token IDs, a mask of the sampled tokens, and their log-probabilities.
`docs/topics/exactness.md` names the reference of each formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, Literal

from openenv.rollout import capture
from openenv.rollout.capture.export import token_counts
from openenv.rollout.capture.routed_experts import UNKNOWN, RoutedExperts
from openenv.rollout.capture.training_trace import TokenCounts
from openenv.rollout.store.outcome import Outcome, group_of
from openenv.rollout.tasks.task import Task

Layout = Literal["padded", "packed"]
Method = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"]
"""How a reward becomes an advantage:

- `grpo`: its distance from the mean of the group, in standard deviations of the group (n - 1).
- `dr_grpo`: its distance from the mean of the group.
- `rloo`: its distance from the mean of the other rewards in the group.
- `reinforce++`: its distance from the mean of all groups, in standard deviations. Both count a sample once for each of
  its tokens.
- `reinforce++-baseline`: like `reinforce++`, for the distances from the means of the groups.
"""
METHODS: tuple[Method, ...] = ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline")
Rewards = Sequence[float | None]

_SMALLEST = 1e-6
"""Added to the standard deviation of a group, so that nearly equal rewards give no huge advantages."""
_LARGEST = 1e100
"""The largest reward that can be compared: squares of larger ones are infinite, and the advantages NaN."""
_NO_VERSION = -1
_SMALLEST_VARIANCE = 1e-8
"""The same for the variance of all tokens."""


@dataclass(frozen=True, slots=True)
class EpisodeSample:
    """One episode: how it ended, and the token sequences to train on."""

    outcome: Outcome
    """`reward` is None after an infrastructure failure; `status` and `reason` describe it."""
    sequences: list[capture.Sequence] = field(default_factory=list)
    is_rewarded: bool = True
    """Whether the reward was given. If not, the environment gave none in this episode, which counts as 0."""
    turn_rewards: Mapping[int, float] | None = None
    """The reward of each model call, by its number; None if only the episode has a reward. Calls that are not here
    have a reward of 0."""
    players: Mapping[str, EpisodeSample] = field(default_factory=dict)
    """The episodes of the trained players of a match (`self_play`), each with its own reward and sequences. The match
    has the first one's reward, and no sequences."""

    @property
    def reward(self) -> float | None:
        """The reward of the episode."""
        return self.outcome.reward

    @property
    def trainable(self) -> list[capture.Sequence]:
        """The sequences for training; empty if the sample has no reward."""
        return [] if self.reward is None else [sequence for sequence in self.sequences if sequence.trainable]

    def tokens(self) -> TokenCounts:
        """Return the numbers of sampled, trained and excluded tokens; of a match, those of its trained players."""
        if self.players:
            total = TokenCounts()
            for player in self.players.values():
                total.add(player.tokens())
            return total
        counts = token_counts(self.outcome.turns, self.sequences)
        return counts if self.reward is not None else counts.without("no_reward")

    @property
    def n_tokens(self) -> int:
        """The number of tokens to train on."""
        return sum(sequence.n_trainable for sequence in self.trainable)

    @property
    def is_cut_off(self) -> bool:
        """Whether a limit of time, turns or tokens ended the episode."""
        turns = self.outcome.turns
        return self.outcome.status == "truncated" or bool(turns and turns[-1].finish_reason == "length")

    @property
    def policy_versions(self) -> set[str]:
        """The versions of the policy that sampled it, if the endpoint names them."""
        named = {name for sequence in self.sequences for name in sequence.policy_versions if name is not None}
        return named | {span.version for sequence in self.sequences for span in sequence.version_spans}


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
    source: str = ""
    """The name of its stream in a `Mixture`."""

    @classmethod
    def of(cls, outcomes: Iterable[Outcome], *, task: Task | None = None) -> SampleGroup:
        """Return stored rollouts as a group, such as the branches of one rollout."""
        samples = [EpisodeSample(outcome, outcome.sequences) for outcome in outcomes]
        name = next((group_of(sample.outcome.metadata) for sample in samples), "")
        return cls(name, {}, samples, task=task)

    @property
    def rewards(self) -> list[float | None]:
        """The rewards of the samples."""
        return [sample.reward for sample in self.samples]

    @property
    def spread(self) -> float:
        """The difference between the highest and the lowest reward. A group with spread 0 teaches nothing."""
        rewarded = [reward for reward in self.rewards if reward is not None]
        return max(rewarded) - min(rewarded) if rewarded else 0.0

    def by_player(self) -> dict[str, SampleGroup]:
        """Return the episodes of each trained player of a match as a group, so that a player is compared with itself
        only."""
        names = dict.fromkeys(name for sample in self.samples for name in sample.players)
        return {
            name: replace(
                self,
                name=f"{self.name}/{name}",
                samples=[sample.players[name] for sample in self.samples if name in sample.players],
                failed=[sample.players[name] for sample in self.failed if name in sample.players],
            )
            for name in names
        }

    def advantages(self, method: Method = "grpo") -> list[float | None]:
        """Return the advantages of the samples within this group."""
        return advantages([self.rewards], method, tokens=[[sample.n_tokens or 1 for sample in self.samples]])[0]

    def collate(
        self, method: Method | Objective = "grpo", *, layout: Layout = "padded", pad_id: int = 0
    ) -> TrainingBatch:
        """Return the group as one batch."""
        return collate([self], method, layout=layout, pad_id=pad_id)


# -- what is optimised ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPenalty:
    """Lowers the reward of long episodes, linearly over the last `buffer` tokens before `limit`.

        reward - 0                       up to limit - buffer sampled tokens
        reward - factor * share          in the buffer: 0 at its start, `factor` at its end
        reward - factor                  from `limit` on

    Raises:
        ValueError: a value is out of range.
    """

    limit: int
    buffer: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit or not 0 <= self.factor <= _LARGEST:
            raise ValueError("a length penalty needs 0 < buffer <= limit, and a finite factor of at least 0")

    def of(self, tokens: int) -> float:
        """Return the penalty of an episode with this number of sampled tokens."""
        share = (tokens - (self.limit - self.buffer)) / self.buffer
        return self.factor * min(1.0, max(0.0, share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """How rewards become the advantages of a batch. `collate` takes one instead of a method's name.

    Raises:
        ValueError: a value is unknown or out of range, or `method` has no per-turn form.
    """

    method: Method = "grpo"
    credit: Literal["episode", "turn"] = "episode"
    """`episode` gives all tokens of an episode one advantage. `turn` gives each model call the rewards from it on: with
    `grpo`, turn rewards in standard deviations of all turns of the group, summed; with `reinforce++`, discounted sums,
    compared over all tokens."""
    discount: float = 1.0
    """The weight of the next turn's reward with `credit="turn"`."""
    length_penalty: LengthPenalty | None = None
    """Subtracted from the rewards of long episodes before they are compared."""
    mask_cut_off: bool = False
    """Whether episodes that a limit ended are excluded from training. They still count in the means."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}; choose from {', '.join(map(repr, METHODS))}")
        if self.credit not in ("episode", "turn"):
            raise ValueError(f"unknown credit {self.credit!r}; choose from 'episode', 'turn'")
        if self.credit == "turn" and self.method not in ("grpo", "reinforce++"):
            raise ValueError(f"{self.method!r} has no advantages per turn; choose 'grpo' or 'reinforce++'")
        if not 0 <= self.discount <= 1:
            raise ValueError("discount must be from 0 to 1")

    def reward(self, sample: EpisodeSample) -> float | None:
        """Return the reward of a sample after the length penalty."""
        if sample.reward is None or self.length_penalty is None:
            return sample.reward
        return sample.reward - self.length_penalty.of(sample.n_tokens)


def advantages(
    groups: Sequence[Rewards], method: Method = "grpo", *, tokens: Sequence[Sequence[int]] | None = None
) -> list[list[float | None]]:
    """Return the advantage of each sample, group by group.

    A sample without a reward failed because of the infrastructure: it has no advantage and counts in no mean. A group
    with a single reward has advantages of 0, because it has nothing to compare with.

    Args:
        groups: The rewards of each group.
        method: How a reward becomes an advantage.
        tokens: The number of sampled tokens of each sample, for the methods that compare tokens; by default 1.

    Raises:
        ValueError: the method is unknown, or a reward is not finite or too large to compare.
    """
    _check_finite(reward for rewards in groups for reward in rewards)
    if method == "reinforce++":
        return _whitened(groups, tokens)
    if method == "reinforce++-baseline":
        return _whitened([_compared(rewards, _distances) for rewards in groups], tokens)
    of_group = {"grpo": _standardised, "dr_grpo": _distances, "rloo": _left_out}
    if method not in of_group:
        raise ValueError(f"unknown method {method!r}; choose from {', '.join(map(repr, METHODS))}")
    return [_compared(rewards, of_group[method]) for rewards in groups]


def _check_finite(rewards: Iterable[float | None]) -> None:
    for reward in rewards:
        if reward is not None and not abs(reward) <= _LARGEST:  # also true for NaN
            raise ValueError(f"a reward must be a finite number, at most {_LARGEST:g}, not {reward}")


def _compared(rewards: Rewards, compare: Callable[[list[float]], list[float]]) -> list[float | None]:
    """Compare the rewards of a group; None stays None. Equal rewards, or a single one, have advantages of 0."""
    rewarded = [reward for reward in rewards if reward is not None]
    # Exactly 0: the mean of equal large rewards is rounded, and its distance would count as a difference.
    values = iter(compare(rewarded) if len(set(rewarded)) > 1 else [0.0] * len(rewarded))
    return [None if reward is None else next(values) for reward in rewards]


def _distances(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _standardised(rewards: list[float]) -> list[float]:
    distances = _distances(rewards)
    deviation = sqrt(sum(value * value for value in distances) / (len(rewards) - 1))
    return [value / (deviation + _SMALLEST) for value in distances]


def _left_out(rewards: list[float]) -> list[float]:
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def _whitened(groups: Sequence[Rewards], tokens: Sequence[Sequence[int]] | None) -> list[list[float | None]]:
    """Subtract the mean over all tokens, and divide by their standard deviation (n - 1)."""
    counts = tokens or [[1] * len(rewards) for rewards in groups]
    weighted = [
        (reward, count)
        for rewards, of_group in zip(groups, counts, strict=True)
        for reward, count in zip(rewards, of_group, strict=True)
        if reward is not None
    ]
    total = sum(count for _, count in weighted)
    if total < 2 or len({reward for reward, _ in weighted}) == 1:
        return [[None if reward is None else 0.0 for reward in rewards] for rewards in groups]
    mean = sum(reward * count for reward, count in weighted) / total
    variance = sum(count * (reward - mean) ** 2 for reward, count in weighted) / (total - 1)
    scale = 1 / sqrt(variance + _SMALLEST_VARIANCE)
    return [[None if reward is None else (reward - mean) * scale for reward in rewards] for rewards in groups]


# -- batches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Rows to train on, as lists; `torch()` converts them to tensors.

    With layout `padded`, each sequence is a row, and `attention_mask` is 0 for padding. With layout `packed`, all
    sequences form one row. Then `position_ids` restart at 0 with each sequence and `cu_seqlens` has their bounds; there
    is no `attention_mask`, because a mask of ones would let a sequence attend to those before it. Transformers finds
    the bounds in `position_ids` if it gets no mask.
    """

    input_ids: list[list[int]]
    loss_mask: list[list[int]]
    """1 for tokens that the policy sampled; always 0 for the first token of a sequence."""
    old_logprobs: list[list[float]]
    """The engine's log-probability of each token with `loss_mask` 1, else 0."""
    advantages: list[list[float]]
    turn_ids: list[list[int]]
    """The number of the model call that sampled each token, counted from 1 in its episode; 0 for all other tokens."""
    policy_versions: list[list[int]]
    """The version of the policy that sampled each token; -1 for an unknown version or one that is not a whole number,
    and for all other tokens."""
    position_ids: list[list[int]]
    attention_mask: list[list[int]] | None
    """0 for padding; None if packed."""
    sequence_ends: list[int]
    """The length of each sequence if padded; its end in the row if packed."""
    sample_ids: list[int]
    """The position of each sequence's sample in the batch, over all groups."""
    group_ids: list[int]
    """The position of each sequence's group in the batch."""
    routed_experts: list[RoutedExperts | None]
    """The experts of each sequence's tokens; None for an engine that does not report them."""

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.sequence_ends)

    @property
    def n_tokens(self) -> int:
        """The number of tokens with `loss_mask` 1."""
        return sum(map(sum, self.loss_mask))

    @property
    def cu_seqlens(self) -> list[int] | None:
        """The bounds of the sequences in the row, from 0, as attention kernels for packed rows take them; None if
        padded."""
        return [0, *self.sequence_ends] if self.attention_mask is None else None

    def torch(self, device: Any = None) -> dict[str, Any]:
        """Return a dictionary of tensors: the fields that are not None, and `cu_seqlens` if packed.

        `routed_experts` has the shape rows, tokens, layers, experts per token; -1 for unknown ones and padding.

        Raises:
            ImportError: PyTorch is not installed.
        """
        try:
            import torch  # type: ignore[import-not-found,unused-ignore]
        except ImportError as exc:
            raise ImportError("Tensors need PyTorch: pip install torch") from exc
        plain = (name for name in self.__dataclass_fields__ if name != "routed_experts")
        kinds = {"old_logprobs": torch.float32, "advantages": torch.float32, "cu_seqlens": torch.int32}
        values = {name: getattr(self, name) for name in (*plain, "cu_seqlens")}
        tensors = {
            name: torch.tensor(value, dtype=kinds.get(name, torch.long), device=device)
            for name, value in values.items()
            if value is not None
        }
        experts = self._experts(torch, device)
        return tensors if experts is None else {**tensors, "routed_experts": experts}

    def _experts(self, torch: Any, device: Any) -> Any:
        """Return the experts as a tensor of rows, tokens and their shape; `UNKNOWN` for padding. None without any."""
        reported = [one for one in self.routed_experts if one is not None]
        if not reported:
            return None
        rows, width = len(self.input_ids), len(self.input_ids[0])
        tensor = torch.full((rows, width, *reported[0].shape[1:]), UNKNOWN, dtype=torch.int16, device=device)
        is_packed = self.attention_mask is None
        starts = [0, *self.sequence_ends] if is_packed else [0] * len(self)
        for number, experts in enumerate(self.routed_experts):
            if experts is not None:
                row, start = 0 if is_packed else number, starts[number]
                values = torch.tensor(experts.values().tolist(), dtype=torch.int16, device=device)
                tensor[row, start : start + experts.shape[0]] = values.reshape(experts.shape)
        return tensor


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence of a batch, with a value per token."""

    sequence: capture.Sequence
    advantages: list[float]
    sample: int
    group: int

    def __len__(self) -> int:
        return len(self.sequence.input_ids)

    @property
    def loss_mask(self) -> list[int]:
        """Return the mask with 0 for the first token, because nothing predicts it."""
        return [0, *self.sequence.loss_mask[1:]]

    @property
    def policy_versions(self) -> list[int]:
        """Return the version of each sampled token as a whole number, or -1."""
        return [_version_number(version) for version in self.sequence.token_versions()]

    @property
    def turn_ids(self) -> list[int]:
        """Return the number of the call that sampled each token, or 0."""
        ids = [0] * len(self)
        for number, span in turns_of(self.sequence):
            for place in span:
                ids[place] = number
        return ids


def _version_number(version: str | None) -> int:
    is_number = version is not None and len(version) < 19 and version.isascii() and version.isdecimal()
    return int(version) if version is not None and is_number else _NO_VERSION


def turns_of(sequence: capture.Sequence) -> Iterator[tuple[int, range]]:
    """Yield the number of each call of a sequence, and the positions of the tokens that it sampled."""
    for number, start, length in zip(sequence.node_ids, sequence.turn_starts, sequence.turn_lengths, strict=True):
        yield number, range(start, start + length)


def collate(
    groups: Iterable[SampleGroup],
    method: Method | Objective = "grpo",
    *,
    layout: Layout = "padded",
    pad_id: int = 0,
) -> TrainingBatch:
    """Collect the trainable sequences of groups in a batch, each with the advantages of its sample.

    Args:
        groups: Groups of one or several starts.
        method: How rewards become advantages: the name of a method, or an `Objective`.
        layout: `padded` for one row per sequence, `packed` for one row in total.
        pad_id: The padding token.

    Raises:
        ValueError: the groups have no trainable sequence, an argument has an unknown value, a reward is not finite,
            or `credit="turn"` and a sample has no turn rewards.
    """
    groups = list(groups)
    objective = method if isinstance(method, Objective) else Objective(method=method)
    rows = list(_rows(groups, objective))
    if not rows:
        raise ValueError(f"no sequence of these groups may be trained on: {_why_nothing(groups)}")
    if layout not in ("padded", "packed"):
        raise ValueError(f"unknown layout {layout!r}; choose from 'padded', 'packed'")
    lengths = [len(row) for row in rows]
    width = max(lengths)

    def joined(values: Iterable[Sequence[Any]], padding: Any) -> list[list[Any]]:
        if layout == "packed":
            return [[value for row in values for value in row]]
        return [[*row, *[padding] * (width - len(row))] for row in values]

    ends = lengths if layout == "padded" else [sum(lengths[: index + 1]) for index in range(len(lengths))]
    return TrainingBatch(
        input_ids=joined((row.sequence.input_ids for row in rows), pad_id),
        loss_mask=joined((row.loss_mask for row in rows), 0),
        old_logprobs=joined((row.sequence.logprobs for row in rows), 0.0),
        advantages=joined((row.advantages for row in rows), 0.0),
        turn_ids=joined((row.turn_ids for row in rows), 0),
        policy_versions=joined((row.policy_versions for row in rows), _NO_VERSION),
        position_ids=joined(map(range, lengths), 0),
        attention_mask=joined(([1] * length for length in lengths), 0) if layout == "padded" else None,
        sequence_ends=ends,
        sample_ids=[row.sample for row in rows],
        group_ids=[row.group for row in rows],
        routed_experts=[row.sequence.routed_experts for row in rows],
    )


def _rows(groups: Sequence[SampleGroup], objective: Objective) -> Iterator[_Row]:
    """Yield the trainable sequences, each with an advantage per token."""
    give = _turn_credit if objective.credit == "turn" else _episode_credit
    number = 0
    for group_number, (group, credits_) in enumerate(zip(groups, give(groups, objective), strict=True)):
        for sample, credit in zip(group.samples, credits_, strict=True):
            if credit is not None and not (objective.mask_cut_off and sample.is_cut_off):
                for sequence in sample.trainable:
                    yield _Row(sequence, credit(sequence), number, group_number)
            number += 1


Credit = Callable[[capture.Sequence], list[float]]
"""Returns the advantage of each token of a sequence."""


def _episode_credit(groups: Sequence[SampleGroup], objective: Objective) -> list[list[Credit | None]]:
    def same(value: float) -> Credit:
        return lambda sequence: [value] * len(sequence.input_ids)

    values = advantages(
        [[objective.reward(sample) for sample in group.samples] for group in groups],
        objective.method,
        tokens=[[sample.n_tokens for sample in group.samples] for group in groups],
    )
    return [[None if value is None else same(value) for value in of_group] for of_group in values]


# Credit by turn, of a sample with three calls and the turn rewards 0, 1, 2:
#
#     reinforce++   sums from each call on, 3 3 2, then compared with the sums at all tokens of the batch
#     grpo          each turn reward compared with those of the group, z1 z2 z3, then summed: z1+z2+z3, z2+z3, z3


def _turn_credit(groups: Sequence[SampleGroup], objective: Objective) -> list[list[Credit | None]]:
    tables = [[_turn_rewards(sample, objective) for sample in group.samples] for group in groups]
    everything = [table for of_group in tables for table in of_group]
    if objective.method == "grpo":
        for of_group in tables:
            rewards = [reward for table in of_group for reward in table.values()]
            _replace(of_group, _compared(rewards, _standardised))
    for table in everything:
        rest = 0.0
        for number in sorted(table, reverse=True):
            rest = table[number] + objective.discount * rest
            table[number] = rest
    if objective.method == "reinforce++":
        samples = [sample for group in groups for sample in group.samples]
        counts = [_turn_tokens(sample, table) for sample, table in zip(samples, everything, strict=True)]
        white = _whitened([list(table.values()) for table in everything], counts)
        _replace(everything, [value for values in white for value in values])
    return [
        [
            None if sample.reward is None else _by_turn(table)
            for sample, table in zip(group.samples, of_group, strict=True)
        ]
        for group, of_group in zip(groups, tables, strict=True)
    ]


def _turn_rewards(sample: EpisodeSample, objective: Objective) -> dict[int, float]:
    """Return the reward of each call in their order; empty if the sample has no reward."""
    if sample.reward is None:
        return {}
    if sample.turn_rewards is None:
        raise ValueError(
            f"{sample.outcome.rollout_id} has one reward for the episode and none per turn: use credit='episode', or "
            "set turn_rewards"
        )
    _check_finite(sample.turn_rewards.values())
    numbers = {number for sequence in sample.sequences for number in sequence.node_ids}
    table = {number: sample.turn_rewards.get(number, 0.0) for number in sorted(numbers | set(sample.turn_rewards))}
    if table and objective.length_penalty is not None:
        table[max(table)] -= objective.length_penalty.of(sample.n_tokens)
    return table


def _turn_tokens(sample: EpisodeSample, table: Mapping[int, float]) -> list[int]:
    """Return the number of tokens to train on of each call of a table."""
    counts = dict.fromkeys(table, 0)
    for sequence in sample.trainable:
        for number, span in turns_of(sequence):
            counts[number] += sum(sequence.loss_mask[span.start : span.stop])
    return list(counts.values())


def _replace(tables: Sequence[dict[int, float]], values: Iterable[float | None]) -> None:
    """Replace the values of tables, one after the other."""
    new = iter(values)
    for table in tables:
        for number in table:
            table[number] = next(new) or 0.0


def _by_turn(table: Mapping[int, float]) -> Credit:
    def spread(sequence: capture.Sequence) -> list[float]:
        row = [0.0] * len(sequence.input_ids)
        for number, span in turns_of(sequence):
            for place in span:
                row[place] = table[number]
        return row

    return spread


def _why_nothing(groups: Sequence[SampleGroup]) -> str:
    """Return why groups have no sequence to train on."""
    samples = [sample for group in groups for sample in group.samples if sample.reward is not None]
    if not samples:
        return "no sample has a reward"
    reasons = dict.fromkeys(text for sample in samples for each in sample.sequences for text in each.not_trainable)
    if not reasons and any(sample.trainable for sample in samples):
        return "a limit ended every sample, and mask_cut_off is set"
    return "; ".join(list(reasons)[:3]) or "nothing was captured"
