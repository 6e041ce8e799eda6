"""Evaluation on held-out tasks: mean reward and pass@k, each with an interval over tasks.

    async with rollouts(held_out, samples=8, ...) as stream:
        report = await evaluate(stream, k=(1, 8))

A sample without a reward failed because of the infrastructure. It counts in no estimate, only in `unscored`.
"""

# Tasks are independent, the samples of a task are not. So each task gives one value, and the interval says how far the
# mean would change with other tasks of the same kind:
#
#     task A   rewards 1 1 0 1   pass@2 = 1 - C(1,2)/C(4,2) = 1.00 ┐
#     task B   rewards 0 1 0 0   pass@2 = 1 - C(3,2)/C(4,2) = 0.50 ├─> mean, interval
#     task C   rewards 0 0 0 0   pass@2 = 1 - C(4,2)/C(4,2) = 0.00 ┘
#
# Values from 0 to 1 get a Wilson interval, which stays inside 0 to 1 and has a width even if every task is solved. Its
# number of trials is the effective sample size: p(1 - p) / (variance of the mean), as for clustered surveys. Other
# rewards get Student's interval.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, pi, sqrt, tan
from statistics import NormalDist, fmean, variance
from typing import Any

from typing_extensions import Self

from .groups import EpisodeSample, SampleGroup
from .stream import GroupStream


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks, with its confidence interval."""

    value: float
    low: float | None
    """The lower end of the interval; None with fewer than two tasks."""
    high: float | None
    tasks: int
    """The number of tasks in the mean."""

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation."""

    reward: Estimate
    """The mean over tasks of the mean reward of their samples."""
    pass_at: Mapping[int, Estimate]
    """By k: the probability that at least one of k samples solves a task. Tasks with fewer than k rewards are left
    out."""
    tasks: int
    """The number of tasks with a reward."""
    unscored_tasks: int
    """The number of tasks without any reward."""
    samples: int
    """The number of samples with a reward."""
    unscored: int
    """The number of samples without a reward, in tasks that have one."""
    cut_off: float
    """The share of samples that a limit of time, turns or tokens ended."""
    policy_versions: frozenset[str]
    """The versions of the policy that sampled, if the endpoint names them. Several mean that the weights changed during
    the evaluation."""
    rewards: Mapping[str, list[float | None]]
    """The rewards of each task's samples, by its name."""

    @classmethod
    def of_groups(
        cls,
        groups: Iterable[SampleGroup],
        *,
        k: Sequence[int] = (1,),
        success: float = 1.0,
        level: float = 0.95,
        unscored_tasks: int = 0,
    ) -> Self:
        """Estimate reward and pass@k from groups; those with the same name belong to one task.

        Args:
            groups: The groups.
            k: As in `evaluate`, like `success` and `level`.
            success: The lowest reward that solves a task.
            level: The confidence level.
            unscored_tasks: The number of other tasks, which have no reward.

        Raises:
            ValueError: an argument is out of range, or no sample has a reward.
        """
        _check(k, level)
        rewards_of: dict[str, list[float | None]] = {}
        samples: list[EpisodeSample] = []
        for group in groups:
            if all(reward is None for reward in group.rewards):
                unscored_tasks += 1
                continue
            rewards_of.setdefault(group.name, []).extend(group.rewards)
            samples += group.samples
        if not samples:
            raise ValueError("no sample has a reward, so nothing can be estimated")
        of_tasks = [[reward for reward in rewards if reward is not None] for rewards in rewards_of.values()]
        pass_at = {}
        for count in k:
            values = [
                pass_at_k(sum(reward >= success for reward in rewards), len(rewards), count)
                for rewards in of_tasks
                if len(rewards) >= count
            ]
            if values:
                trials = sum(len(rewards) for rewards in of_tasks) / count
                pass_at[count] = estimate(values, trials=trials, level=level)
        rewarded = sum(map(len, of_tasks))
        return cls(
            reward=estimate([fmean(rewards) for rewards in of_tasks], trials=rewarded, level=level),
            pass_at=pass_at,
            tasks=len(rewards_of),
            unscored_tasks=unscored_tasks,
            samples=rewarded,
            unscored=len(samples) - rewarded,
            cut_off=sum(sample.is_cut_off for sample in samples) / len(samples),
            policy_versions=frozenset(version for sample in samples for version in sample.policy_versions),
            rewards=rewards_of,
        )

    def metrics(self, prefix: str = "eval/") -> dict[str, float]:
        """Return the estimates as metrics for a tracker, such as `eval/pass@1` and `eval/pass@1_low`."""
        estimates = {"reward": self.reward, **{f"pass@{k}": value for k, value in sorted(self.pass_at.items())}}
        metrics: dict[str, float] = {}
        for name, estimate in estimates.items():
            ends = {"": estimate.value, "_low": estimate.low, "_high": estimate.high}
            metrics |= {f"{prefix}{name}{end}": value for end, value in ends.items() if value is not None}
        counts = ("tasks", "unscored_tasks", "samples", "unscored", "cut_off")
        return metrics | {f"{prefix}{name}": float(getattr(self, name)) for name in counts}


async def evaluate(
    stream: GroupStream[Any], *, k: Sequence[int] = (1,), success: float = 1.0, level: float = 0.95
) -> Evaluation:
    """Take all groups of a stream on held-out tasks, and estimate reward and pass@k.

    Use a stream of `play` or `rollouts` with a store of its own, because `resume=True` continues the newest stream of a
    store. While the stream runs, do not change the weights: `policy_versions` shows whether that happened.

    Args:
        stream: The stream; its items must end. `samples` is the number of samples per task.
        k: The numbers of attempts for pass@k.
        success: The lowest reward that solves a task.
        level: The confidence level of the intervals.

    Raises:
        ValueError: an argument is out of range, or the stream prefers some samples (`keep`, `oversample`).
        RolloutError: the stream failed.
    """
    _check(k, level)
    options = stream.options
    if options.keep is not None or options.oversample:
        raise ValueError("an evaluation must count every sample: remove keep and oversample")
    if max(k) > options.samples:
        raise ValueError(f"pass@{max(k)} needs at least {max(k)} samples per task, not samples={options.samples}")
    groups = [group async for group in stream]
    return Evaluation.of_groups(groups, k=k, success=success, level=level, unscored_tasks=stream.counts.failed_groups)


def _check(k: Sequence[int], level: float) -> None:
    if not k or min(k) < 1:
        raise ValueError("k must be one or more numbers of at least 1")
    if not 0 < level < 1:
        raise ValueError("level must be above 0 and below 1, such as 0.95")


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples solves the task.

    It is the share of all sets of k samples with a success (Chen et al. 2021, section 2.1).

    Raises:
        ValueError: there are fewer than k samples, or the numbers are not counts.
    """
    if not 0 <= successes <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least k samples and 0 to {samples} successes, not {successes}")
    return 1.0 - comb(samples - successes, k) / comb(samples, k)


def estimate(values: Sequence[float], *, trials: float | None = None, level: float = 0.95) -> Estimate:
    """Return the mean of independent values, one per task, with its interval.

    Values from 0 to 1 get a Wilson interval with the effective number of trials, others Student's interval.

    Args:
        values: One value per task.
        trials: The number of samples behind the values, the largest possible number of effective trials; by default
            the number of values.
        level: The confidence level.
    """
    count = len(values)
    mean = fmean(values)
    if count < 2:
        return Estimate(mean, None, None, count)
    t = _student_quantile((1 + level) / 2, count - 1)
    error = variance(values) / count  # of the mean
    if min(values) < 0 or max(values) > 1:
        return Estimate(mean, mean - t * sqrt(error), mean + t * sqrt(error), count)
    if 0 < mean < 1:
        most = max(trials or count, count)
        effective = most if error == 0 else min(most, mean * (1 - mean) / error)
    else:  # all values are equal to 0 or to 1: they do not say how much samples of one task agree
        effective = count
    middle = (mean + t * t / (2 * effective)) / (1 + t * t / effective)
    half = t / (1 + t * t / effective) * sqrt(mean * (1 - mean) / effective + (t / (2 * effective)) ** 2)
    return Estimate(mean, max(0.0, middle - half), min(1.0, middle + half), count)


def _student_quantile(share: float, degrees: int) -> float:
    """Return a quantile of Student's distribution, with an error below 1 % for levels up to 0.99."""
    if degrees == 1:
        return tan(pi * (share - 0.5))
    if degrees == 2:
        return (2 * share - 1) * sqrt(2 / (4 * share * (1 - share)))
    # Abramowitz and Stegun 26.7.5
    z, v = NormalDist().inv_cdf(share), degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )
