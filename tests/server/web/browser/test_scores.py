"""The page shows the scores of a rubric's parts beside the observation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from openenv import Action, Environment, Observation, Rubric, State
from openenv.env.rubrics import WeightedSum

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect


class Solved(Rubric):
    def forward(self, action: Any, observation: Any) -> float:
        return 1.0


class Brevity(Rubric):
    def forward(self, action: Any, observation: Any) -> float:
        return 0.25


class Seen(Observation):
    text: str = "seen"


class Judged(Environment[Action, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self.rubric = WeightedSum([Solved(), Brevity()], [0.5, 0.5])

    def reset(self, **kwargs: Any) -> Seen:
        return Seen()

    def step(self, action: Action, **kwargs: Any) -> Seen:
        observation = Seen(metadata={"note": "kept apart"})
        observation.reward = self.rubric_reward(action, observation)
        return observation


@pytest.mark.slow
def test_scores_of_parts_are_shown(site: Callable[..., Any], visit: Callable[..., Any]) -> None:
    page = visit(site(Judged, Action, Seen).url).page()
    page.get_by_role("button", name="Reset").first.click()
    page.get_by_role("button", name="Step").first.click()
    scores = page.locator("section.part", has=page.get_by_role("heading", name="Scores"))
    expect(scores).to_contain_text("Solved")
    expect(scores).to_contain_text("0.25")
