"""A served game whose reward shows each step that was lost or taken twice: 111 times the seed after three steps.

As a program it is a trainer: `python sum_app.py URL MODEL_URL STORE` plays it and prints a line per group.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from openenv import Action, Environment, Observation, State, create_app
from openenv.rollout import Model, RolloutStore
from openenv.train import play
from slow_steps import take

TURNS = 3


class Say(Action):
    """Any word."""

    text: str


class Sum(Observation):
    """What the reward is made of."""

    hint: str = ""


class SumGame(Environment[Say, Sum, State]):
    """Pays the seed, ten times the seed, a hundred times the seed; each step takes a moment, to be killed in."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._seed = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Sum:
        self._state, self._seed = State(episode_id=episode_id), seed or 0
        return Sum(hint=f"Begin {seed}.")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Sum:
        take(0.03)
        reward = float(self._seed * 10**self._state.step_count)
        self._state.step_count += 1
        return Sum(hint=f"Step {self._state.step_count}.", reward=reward, done=self._state.step_count >= TURNS)

    @property
    def state(self) -> State:
        return self._state


app = create_app(SumGame, Say, Sum, max_concurrent_envs=16)


async def train(url: str, model_url: str, store: RolloutStore) -> None:
    """Play without end, and print each group."""
    model = Model(base_url=model_url, name="scripted/talker")
    async with play(url, model, range(1, 100_000), samples=2, concurrency=4, store=store) as stream:
        async for group in stream:
            sys.stdout.write(f"{group.name} {group.rewards}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    with RolloutStore(sys.argv[3]) as kept:
        asyncio.run(train(sys.argv[1], sys.argv[2], kept))
