"""Mean reward and pass@k on held-out tasks: exact estimates, intervals with the stated coverage, nothing left out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import combinations
from math import isclose
from statistics import fmean, stdev
from typing import Any

import pytest

from openenv.rollout import Model, RolloutStore, Task
from openenv.rollout.store.outcome import Outcome
from openenv.testing import Script, ScriptedModel, Turn
from openenv.train import EpisodeSample, Evaluation, SampleGroup, evaluate, pass_at_k, rollouts
from openenv.train.evaluation import estimate


def group(name: str, *rewards: float | None) -> SampleGroup:
    samples = [
        EpisodeSample(
            Outcome(rollout_id=f"{name}-{place}", status="env_failed" if reward is None else "ok", reward=reward)
        )
        for place, reward in enumerate(rewards)
    ]
    return SampleGroup(name, {}, samples)


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_all_sets_with_a_success(samples: int) -> None:
    for successes in range(samples + 1):
        for k in range(1, samples + 1):
            sets = list(combinations([1] * successes + [0] * (samples - successes), k))
            assert isclose(pass_at_k(successes, samples, k), fmean(any(chosen) for chosen in sets))


def test_pass_at_k_is_exact_for_many_samples() -> None:
    assert isclose(pass_at_k(1, 10_000, 100), 0.01, rel_tol=1e-9)
    assert pass_at_k(10_000, 10_000, 1) == 1.0


@pytest.mark.parametrize("counts", [(1, 2, 3), (3, 2, 1), (-1, 2, 1), (0, 0, 1), (1, 2, 0)])
def test_pass_at_k_refuses_impossible_counts(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least k samples"):
        pass_at_k(*counts)


@pytest.mark.parametrize(
    ("tasks", "samples", "alpha", "beta", "k"), [(40, 4, 0.5, 0.5, 1), (10, 8, 0.5, 0.5, 1), (40, 8, 0.3, 3.0, 4)]
)
def test_intervals_contain_the_truth_as_often_as_stated(
    tasks: int, samples: int, alpha: float, beta: float, k: int
) -> None:
    draw = random.Random(5)
    truth = fmean(1 - (1 - draw.betavariate(alpha, beta)) ** k for _ in range(100_000))
    hits = 0
    for _ in range(400):
        rates = [draw.betavariate(alpha, beta) for _ in range(tasks)]
        values = [pass_at_k(sum(draw.random() < rate for _ in range(samples)), samples, k) for rate in rates]
        result = estimate(values, trials=tasks * samples / k)
        assert result.low is not None
        assert result.high is not None
        hits += result.low <= truth <= result.high
    assert hits >= 0.92 * 400


@pytest.mark.parametrize(
    ("tasks", "samples", "alpha", "beta"), [(40, 2, 1.0, 1.0), (60, 4, 0.3, 0.3), (40, 8, 2.0, 3.0)]
)
def test_intervals_are_about_as_wide_as_those_of_a_bootstrap_over_tasks(
    tasks: int, samples: int, alpha: float, beta: float
) -> None:
    draw = random.Random(3)
    ours, reference = 0.0, 0.0
    for _ in range(15):
        rates = [draw.betavariate(alpha, beta) for _ in range(tasks)]
        values = [sum(draw.random() < rate for _ in range(samples)) / samples for rate in rates]
        means = sorted(fmean(draw.choices(values, k=tasks)) for _ in range(400))
        reference += means[389] - means[10]
        result = estimate(values, trials=tasks * samples)
        assert result.low is not None
        assert result.high is not None
        ours += result.high - result.low
    assert 0.95 < ours / reference < 1.15


def test_an_interval_has_a_width_even_if_every_task_is_solved() -> None:
    result = estimate([1.0] * 10, trials=80)
    assert (result.value, result.high) == (1.0, 1.0)
    assert result.low is not None
    assert 0.6 < result.low < 0.8


def test_rewards_outside_of_0_to_1_get_students_interval() -> None:
    result = estimate([-2.0, 0.0, 2.0])
    assert result.value == 0.0
    assert result.high == pytest.approx(4.303 * 2 / 3**0.5, rel=1e-3)
    assert estimate([3.0]).low is None, "one task says nothing about others"
    assert str(estimate([3.0])) == "3.000"


# From published tables of Student's distribution, for intervals of 95 %.
@pytest.mark.parametrize(
    ("tasks", "quantile"), [(2, 12.7062), (3, 4.3027), (4, 3.1824), (5, 2.7764), (6, 2.5706), (11, 2.2281)]
)
def test_students_interval_is_that_of_the_tables(tasks: int, quantile: float) -> None:
    values = [float(number) for number in range(2, tasks + 2)]
    result = estimate(values)
    assert result.high is not None
    half = result.high - fmean(values)
    assert half == pytest.approx(quantile * stdev(values) / tasks**0.5, rel=2e-3)


def test_a_sample_without_a_reward_counts_in_no_estimate() -> None:
    report = Evaluation.of_groups(
        [group("a", 1.0, None, 0.0), group("b", None, None), group("c", 1.0, 1.0, 1.0), group("a", 1.0)], k=(1, 3)
    )
    assert report.reward.value == pytest.approx((2 / 3 + 1) / 2), "the two groups of task a are one task"
    assert report.pass_at[1].value == pytest.approx((2 / 3 + 1) / 2)
    assert (report.pass_at[3].value, report.pass_at[3].tasks) == (1.0, 2)
    assert (report.tasks, report.unscored_tasks, report.samples, report.unscored) == (2, 1, 6, 1)
    metrics = report.metrics()
    assert metrics["eval/pass@3"] == 1.0
    assert metrics["eval/reward_low"] < metrics["eval/reward"] < metrics["eval/reward_high"]


def test_tasks_with_too_few_rewards_are_left_out_of_pass_at_k() -> None:
    report = Evaluation.of_groups([group("a", 1.0, None), group("b", 0.0, 0.0)], k=(2, 3))
    assert (report.pass_at[2].tasks, set(report.pass_at)) == (1, {2})


def test_without_any_reward_there_is_no_estimate() -> None:
    with pytest.raises(ValueError, match="no sample has a reward"):
        Evaluation.of_groups([group("a", None)])


def evaluated(stream_options: dict[str, Any], k: Sequence[int] = (1, 2)) -> Evaluation:
    from asking_agent import AskingAgent

    tasks = [
        Task(task_id=name, instruction=f"Do {name}.", verify=(f"test {name} = right",)) for name in ("right", "wrong")
    ]

    async def run(model: Model) -> Evaluation:
        options: dict[str, Any] = {"samples": 2, "concurrency": 2, "agent": AskingAgent(), "model": model}
        async with rollouts(tasks, **options, **stream_options) as stream:
            return await evaluate(stream, k=k)

    with ScriptedModel(Script(name="worker", turns=(Turn(text="Looking."),), ending="Done.")) as server:
        return asyncio.run(asyncio.wait_for(run(Model(**server.model())), 120))


def test_a_stream_of_held_out_tasks_is_evaluated_to_its_end(local: Any, tmp_path: Any) -> None:
    with RolloutStore(tmp_path) as store:
        report = evaluated({"store": store, "sandbox": local})
        assert store.count() == 4
    assert report.rewards == {"right": [1.0, 1.0], "wrong": [0.0, 0.0]}
    assert report.pass_at[2].value == 0.5


@pytest.mark.parametrize(
    ("options", "k", "text"),
    [
        ({"keep": lambda group: True}, (1,), "every sample"),
        ({"oversample": 1}, (1,), "every sample"),
        ({}, (3,), "at least 3 samples"),
        ({}, (), "one or more"),
        ({}, (0,), "at least 1"),
    ],
)
def test_an_evaluation_that_would_be_biased_is_refused(options: dict[str, Any], k: Sequence[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        evaluated(options, k)


@pytest.mark.parametrize("level", [0, 1, 1.5])
def test_an_impossible_confidence_level_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match="level must be above 0 and below 1"):
        Evaluation.of_groups([group("a", 1.0)], level=level)
