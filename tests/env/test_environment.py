"""`Environment` itself: defaults, transforms, rubrics, and the async methods it brings along."""

from __future__ import annotations

from typing import Any

import pytest

from openenv.env.environment import CompositeTransform, Environment, NullTransform, TaskProvider, Transform
from openenv.env.rubrics.rubric import Rubric
from openenv.types import Action, Observation, State


class Add(Action):
    amount: int = 1


class Total(Observation):
    total: int = 0


class Adder(Environment[Add, Total, State]):
    """Adds up."""

    def __init__(self, transform: Transform[Total] | None = None, rubric: Rubric | None = None) -> None:
        super().__init__(transform, rubric)
        self.total = 0
        self.seen: dict[str, Any] = {}

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Total:
        self.seen = {"seed": seed, "episode_id": episode_id, **kwargs}
        self._reset_rubric()
        return self._apply_transform(Total())

    def step(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Total:
        self.seen = {"timeout_s": timeout_s, **kwargs}
        self.total += action.amount
        observation = Total(total=self.total)
        observation.reward = self._apply_rubric(action, observation)
        return self._apply_transform(observation)

    @property
    def state(self) -> State:
        return State(step_count=self.total)


class Plus(Transform[Total]):
    def __init__(self, amount: int) -> None:
        self.amount = amount

    def __call__(self, observation: Total) -> Total:
        observation.total = observation.total * 2 + self.amount
        return observation


class TotalIsReward(Rubric):
    def __init__(self) -> None:
        super().__init__()
        self.resets = 0

    def forward(self, action: Any, observation: Any) -> float:
        return float(observation.total)

    def reset(self) -> None:
        self.resets += 1


class AsyncRubric(Rubric):
    async def forward(self, action: Any, observation: Any) -> float:
        return 0.75


def test_the_three_methods_must_be_written() -> None:
    class Unfinished(Environment[Add, Total, State]):
        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Total:
            return Total()

    with pytest.raises(TypeError):
        Unfinished()  # type: ignore[abstract]


def test_defaults_are_harmless() -> None:
    env = Adder()
    assert env.SUPPORTS_CONCURRENT_SESSIONS is False
    assert env.REQUIRES_SINGLE_THREAD_EXECUTOR is False
    assert env.close() is None  # type: ignore[func-returns-value]
    assert env.render_web({}) is None
    assert env.web_actions({}) == []
    assert not isinstance(env, TaskProvider)


def test_metadata_is_named_after_the_class() -> None:
    metadata = Adder().get_metadata()
    assert (metadata.name, metadata.description, metadata.version) == ("Adder", "Adds up.", "1.0.0")


def test_an_environment_that_does_not_call_super_init_has_no_rubric_and_no_transform() -> None:
    class Careless(Adder):
        def __init__(self) -> None:
            self.total = 0

    assert Careless().step(Add()).reward == 0.0


@pytest.mark.anyio
async def test_the_async_methods_call_the_sync_ones_by_default() -> None:
    env = Adder()
    await env.reset_async(seed=3, episode_id="e", level=2)
    assert env.seen == {"seed": 3, "episode_id": "e", "level": 2}
    assert (await env.step_async(Add(amount=4), timeout_s=1.5, hint="h")).total == 4
    assert env.seen == {"timeout_s": 1.5, "hint": "h"}


def test_transforms_are_applied_first_to_last() -> None:
    env = Adder(transform=CompositeTransform([Plus(1), NullTransform(), Plus(10)]))
    assert env.step(Add(amount=1)).total == (1 * 2 + 1) * 2 + 10


def test_an_empty_composite_changes_nothing() -> None:
    observation = Total(total=3)
    assert CompositeTransform[Total]([])(observation) is observation
    assert NullTransform[Total]()(observation) is observation


def test_a_rubric_scores_a_step_and_is_reset_with_the_episode() -> None:
    rubric = TotalIsReward()
    env = Adder(rubric=rubric)
    env.reset()
    assert env.step(Add(amount=2)).reward == 2.0
    assert rubric.resets == 1


def test_an_async_rubric_in_a_sync_step_is_a_clear_error() -> None:
    with pytest.raises(TypeError, match="_apply_rubric_async"):
        Adder(rubric=AsyncRubric()).step(Add())


@pytest.mark.anyio
async def test_both_kinds_of_rubric_can_be_awaited() -> None:
    assert await Adder(rubric=AsyncRubric())._apply_rubric_async(Add(), Total()) == 0.75
    assert await Adder(rubric=TotalIsReward())._apply_rubric_async(Add(), Total(total=5)) == 5.0
    assert await Adder()._apply_rubric_async(Add(), Total()) == 0.0
    await Adder(rubric=TotalIsReward())._reset_rubric_async()


@pytest.mark.anyio
async def test_a_rubric_may_have_an_asynchronous_reset() -> None:
    class Remembering(TotalIsReward):
        resets = 0

        async def reset_async(self) -> None:
            self.resets += 1

    rubric = Remembering()
    await Adder(rubric=rubric)._reset_rubric_async()
    assert rubric.resets == 1
