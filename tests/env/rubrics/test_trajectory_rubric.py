"""How trajectory rubrics collect an episode and spread its score over the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from openenv.env.rubrics import ExponentialDiscountingTrajectoryRubric, Sequential, TrajectoryRubric


@dataclass(frozen=True)
class Seen:
    done: bool = False


class StepCount(TrajectoryRubric):
    def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
        return float(len(trajectory))

    def compute_step_rewards(self) -> list[float]:
        return [1.0 for _ in self.trajectory]


class Won(ExponentialDiscountingTrajectoryRubric):
    def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
        return 1.0


def test_steps_get_the_intermediate_reward_until_one_is_done() -> None:
    rubric = StepCount(intermediate_reward=0.1)

    assert [rubric("a", Seen()), rubric("b", object()), rubric("c", Seen(done=True))] == [0.1, 0.1, 3.0]
    assert rubric.last_score == 3.0


def test_the_trajectory_is_a_copy_of_the_pairs() -> None:
    rubric = StepCount()
    rubric("a", Seen())
    rubric.trajectory.clear()

    assert rubric.trajectory == [("a", Seen())]


def test_reset_forgets_the_episode_also_inside_a_container() -> None:
    rubric = StepCount()
    tree = Sequential(rubric)
    tree("a", Seen(done=True))

    tree.reset()

    assert rubric.trajectory == []


@pytest.mark.parametrize(
    ("gamma", "expected"), [(0.5, [0.25, 0.5, 1.0]), (0.0, [0.0, 0.0, 1.0]), (1.0, [1.0, 1.0, 1.0])]
)
def test_earlier_steps_get_a_discounted_score(gamma: float, expected: list[float]) -> None:
    rubric = Won(gamma)
    for done in (False, False, True):
        rubric("a", Seen(done))

    assert rubric.compute_step_rewards() == expected


def test_no_steps_have_no_rewards() -> None:
    assert Won().compute_step_rewards() == []


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_gamma_outside_the_unit_interval_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        Won(gamma)


def test_the_state_holds_the_configuration_and_can_be_loaded_in_part() -> None:
    rubric = Won()
    assert rubric.state_dict() == {"intermediate_reward": 0.0, "gamma": 0.99}

    rubric.load_state_dict({"gamma": 0.5})
    assert rubric.state_dict() == {"intermediate_reward": 0.0, "gamma": 0.5}

    with pytest.raises(ValueError, match="gamma"):
        rubric.load_state_dict({"gamma": 2.0, "intermediate_reward": 7.0})
    assert rubric.intermediate_reward == 0.0
