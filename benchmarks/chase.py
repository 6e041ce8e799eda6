"""A small PettingZoo environment for `gymnasium_vector.py --pettingzoo`: four agents chase a point on a plane."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

AGENTS = [f"hunter_{number}" for number in range(4)]
STEPS = 200
_MOVES = np.array([(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)], np.float32) / 10


class Chase(ParallelEnv[str, Any, int]):
    """Each agent sees all positions relative to its own, and earns less the further it is from the point."""

    metadata = {"name": "chase_v0", "render_modes": []}  # noqa: RUF012 - as PettingZoo has it
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents = AGENTS
        self._seen = spaces.Box(-np.inf, np.inf, (len(AGENTS) + 1, 2), np.float32)
        self._moves = spaces.Discrete(len(_MOVES))

    def observation_space(self, agent: str) -> Any:
        """Return the space of positions."""
        return self._seen

    def action_space(self, agent: str) -> Any:
        """Return the space of moves."""
        return self._moves

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Put everyone somewhere."""
        self.agents, self._steps = list(AGENTS), 0
        self._places = np.random.default_rng(seed).uniform(-1, 1, (len(AGENTS) + 1, 2)).astype(np.float32)
        return self._views(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        """Move everyone; the episode ends after 200 steps."""
        self._steps += 1
        self._places[:-1] += _MOVES[[actions[agent] for agent in AGENTS]]
        away = np.linalg.norm(self._places[:-1] - self._places[-1], axis=1)
        rewards = dict(zip(AGENTS, (-away).tolist(), strict=True))
        views, cut = self._views(), self._steps == STEPS
        infos: dict[str, Any] = {agent: {} for agent in AGENTS}
        if cut:
            self.agents = []
        return views, rewards, dict.fromkeys(AGENTS, False), dict.fromkeys(AGENTS, cut), infos

    def _views(self) -> dict[str, Any]:
        return {agent: self._places - place for agent, place in zip(AGENTS, self._places, strict=False)}


parallel_env = Chase
