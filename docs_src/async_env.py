from __future__ import annotations

import asyncio
from typing import Any

from openenv import Action, Environment, LocalEnv, Observation, State


class Question(Action):
    text: str


class Oracle(Environment[Question, Observation, State]):
    """Waits for something slow, without holding a thread."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._state = State(episode_id=episode_id)
        return Observation()

    def step(self, action: Question, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise NotImplementedError("only step_async is used")

    async def step_async(self, action: Question, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        await asyncio.sleep(0.01)  # a model, a database, a browser
        self._state.step_count += 1
        return Observation(reward=1.0, metadata={"answer": action.text.upper()})

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    with LocalEnv(Oracle).sync() as env:
        env.reset()
        print(env.step(Question(text="why?")).metadata)
