"""Scenarios of rubrics: a reward is a number, whatever runs around it and whatever a judge writes."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from openenv.core.env_server.types import Action, Observation
from openenv.core.rubrics import LLMJudge, Rubric, Sequential

from .environment import Move, Seen, Watched
from .stage import Stage


class Constant(Rubric):
    """Always the same score."""

    def __init__(self, score: float) -> None:
        super().__init__()
        self.score = score

    def forward(self, action: Any, observation: Any) -> float:
        return self.score


def sequence_inside_a_loop(stage: Stage) -> str:
    """W34: the kind of result of the same rubric for a score of nought and for another."""

    async def play() -> list[str]:
        kinds = []
        for score in (0.0, 0.5):
            value = Sequential(Constant(score), Constant(0.5))(Action(), Observation())
            kinds.append(type(value).__name__)
            if inspect.iscoroutine(value):
                await value
        return kinds

    return " and ".join(asyncio.run(play()))


def rubric_in_an_asynchronous_step(stage: Stage) -> str:
    """W34: the reward on the wire when a coroutine applies a rubric."""

    class Scored(Watched):
        def __init__(self, watch: Any) -> None:
            super().__init__(watch)
            self.rubric = Sequential(Constant(1.0), Constant(0.5))

        async def step_async(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
            seen = self.step(action)
            seen.reward = self._apply_rubric(action, seen)
            return seen

    return f"reward {stage.socket(stage.serve(stage.app(Scored))).step()['data'].get('reward')}"


def replaced_child(stage: Stage) -> str:
    """W34: a child of a sequence is replaced; which one scores?"""
    rubric: Any = Sequential(Constant(0.25))
    rubric.rubric_0 = Constant(0.75)
    return f"scores {rubric(Action(), Observation())}"


def judge_answers(stage: Stage) -> str:
    """W35: what a judge with default settings makes of usual answers."""

    class Says:
        def __init__(self, answer: str) -> None:
            self.answer = answer

        async def complete(self, prompt: str, **kwargs: Any) -> str:
            return self.answer

    async def score(answer: str) -> float:
        judge: Any = LLMJudge("{action} {observation}", Says(answer))
        return float(await judge.forward("a", "o"))

    answers = ("-1", "8/10", "On a scale of 0 to 1 I give 0.9")
    return ", ".join(str(asyncio.run(score(answer))) for answer in answers)
