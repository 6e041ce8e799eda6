"""Rewards that are what they say: a number or an error, never a coroutine, a stray digit or a silent null."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from environments import Idle
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.types import Action, Observation
from openenv.core.rubrics import LLMJudge, Rubric, Sequential
from openenv.env.rubrics.llm_judge import ScoreParseError
from servers import Serve


class Constant(Rubric):
    """Always the same score."""

    def __init__(self, score: float) -> None:
        super().__init__()
        self.score = score

    def forward(self, action: Any, observation: Any) -> float:
        return self.score


class Slow(Constant):
    """The same score after a wait."""

    async def forward(self, action: Any, observation: Any) -> float:  # type: ignore[override]
        await asyncio.sleep(0)
        return self.score


class Scored(Idle):
    """Scores each step inside a coroutine."""

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise AssertionError("the asynchronous one is there")

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        observation = Observation()
        observation.reward = self._apply_rubric(action, observation)
        return observation


class ScoredAsync(Scored):
    """The same with the awaiting method."""

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        observation = Observation()
        observation.reward = await self._apply_rubric_async(action, observation)
        return observation


@pytest.mark.parametrize(("scores", "expected"), [((1.0, 0.5), 0.5), ((0.0, 0.5), 0.0)])
def test_a_rubric_in_an_asynchronous_step_gives_a_number(
    serve: Serve, peer: Any, scores: tuple[float, float], expected: float
) -> None:
    """W34: `_apply_rubric` inside a running loop returns the score, whatever the score is."""
    for env_cls in (Scored, ScoredAsync):
        app = create_app(lambda cls=env_cls: cls(rubric=Sequential(*map(Constant, scores))), Action, Observation)
        one = peer(serve(app).port)
        one.reset()
        assert one.step()["data"]["reward"] == expected


def test_an_asynchronous_rubric_is_awaited_or_refused_but_never_a_reward(serve: Serve, peer: Any) -> None:
    """W34: with the plain method it is an error that names the right one; with the awaiting method it is a score."""
    one = peer(serve(create_app(lambda: Scored(rubric=Slow(0.25)), Action, Observation)).port)
    refused = one.step()
    assert refused["data"]["code"] == "EXECUTION_ERROR"
    assert "_apply_rubric_async" in refused["data"]["message"]
    two = peer(serve(create_app(lambda: ScoredAsync(rubric=Slow(0.25)), Action, Observation)).port)
    assert two.step()["data"]["reward"] == 0.25


@pytest.mark.anyio
@pytest.mark.parametrize("first", [0.0, 1.0])
async def test_a_sequence_of_plain_rubrics_is_a_number_inside_a_loop(first: float) -> None:
    """W34: the kind of result depends neither on the running loop nor on the score."""
    score = Sequential(Constant(first), Constant(0.5))(Action(), Observation())
    assert isinstance(score, float)


class Says:
    """A model that always says the same."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    async def complete(self, prompt: str, **kwargs: Any) -> str:
        return self.answer


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("-1", 0.0),
        ("8/10", 0.8),
        ("On a scale of 0 to 1 I give 0.9", 0.9),
        ("<score>0.75</score>", 0.75),
        ("Score: 3/4", 0.75),
        ("I saw 3 files and 2 tests fail", None),
        ("no idea", None),
    ],
)
async def test_a_judge_reads_the_score_it_was_given(answer: str, score: float | None) -> None:
    """W35: signs, fractions and stated scales are understood; an answer without a score fails loudly."""
    judge = LLMJudge("{action} {observation}", Says(answer))
    if score is None:
        with pytest.raises(ScoreParseError):
            await judge.acall("a", "o")
    else:
        assert await judge.acall("a", "o") == pytest.approx(score)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_reported(serve: Serve, peer: Any, reward: float) -> None:
    """W22: it is null on the wire, and the metadata says what it was."""
    one = peer(serve(create_app(lambda: ScoredAsync(rubric=Constant(reward)), Action, Observation)).port)
    data = one.step()["data"]
    assert data["reward"] is None
    assert data["metadata"]["nonfinite_reward"] == repr(reward)
