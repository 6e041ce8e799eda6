from __future__ import annotations

from typing import Any

from word_env import WordAction, WordGame, WordObservation

from openenv import LocalEnv, Rubric
from openenv.env.rubrics import WeightedSum


class Solved(Rubric):
    def forward(self, action: WordAction, observation: WordObservation) -> float:
        return 1.0 if observation.marks == "=====" else 0.0


class Closeness(Rubric):
    def forward(self, action: WordAction, observation: WordObservation) -> float:
        return observation.marks.count("=") / 5


class ScoredWordGame(WordGame):
    def __init__(self) -> None:
        super().__init__()
        self.rubric = WeightedSum([Solved(), Closeness()], weights=[0.8, 0.2])

    def step(self, action: WordAction, timeout_s: float | None = None, **kwargs: Any) -> WordObservation:
        observation = super().step(action, timeout_s, **kwargs)
        observation.reward = self.rubric_reward(action, observation)
        return observation


with LocalEnv(ScoredWordGame).sync() as env:
    env.reset(seed=5)
    result = env.step({"guess": "cable"})
    print(round(result.reward, 2), result.metadata)
