"""A guard never costs an honest solution its reward: a hundred of them, here and in the tests of links and settings."""

from __future__ import annotations

import shutil

import pytest

from honest_solutions import SOLUTIONS, Honest
from openenv.rollout import run_rollout
from openenv.rollout.agents import Shell
from openenv.sandboxes.base import Sandboxes


@pytest.mark.parametrize(
    "honest",
    [
        pytest.param(one, id=one.name, marks=[] if number % 12 == 0 else [pytest.mark.slow])
        for number, one in enumerate(SOLUTIONS)
    ],
)
def test_an_honest_solution_keeps_its_reward(local: Sandboxes, honest: Honest) -> None:
    if shutil.which(honest.options.get("needs", "sh")) is None:
        pytest.skip(f"there is no {honest.options['needs']}")
    task = honest.task()
    idle = run_rollout(task, agent="noop", sandbox=local)
    outcome = run_rollout(task, agent=Shell([honest.lines]), sandbox=local)
    assert (outcome.status, outcome.reward) == ("ok", 1.0), (outcome.verify_results, outcome.metadata.get("protected"))
    assert idle.reward == 0.0
