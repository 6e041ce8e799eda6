"""The Notes environment: tools that work on a desk of notes, and a reward for what is there in the end.

Agents call tools and see results. The orchestrator, which steps the environment, also sees reward and end.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from typing import Any

from fastmcp import FastMCP

from notes_env.models import NotesObservation, NotesState
from notes_env.server.catalogue import draw_task, make_task
from notes_env.server.desk import Desk
from notes_env.server.rubric import notes_rubric
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation

MAX_STEPS = 40


def _random_seed() -> int:
    return secrets.randbelow(2**31)


class NotesEnvironment(MCPEnvironment):
    """Do a task with notes. An episode is terminated by `submit` and truncated after 40 tool calls.

    Args:
        draw_seed: Gives the seed of an episode that is begun without one.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, draw_seed: Callable[[], int] = _random_seed) -> None:
        self._desk = Desk()
        server = FastMCP("notes_env")
        for tool in self._desk.tools:
            server.tool(tool)
        super().__init__(server)
        self.rubric = notes_rubric(self._desk)
        self._draw_seed = draw_seed
        self._state = NotesState()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, task_id: str | None = None, **kwargs: Any
    ) -> NotesObservation:
        """Begin an episode with a task of the catalogue, or with any.

        Raises:
            ValueError: There is no such task.
        """
        seed = self._draw_seed() if seed is None else seed
        task = draw_task(seed) if task_id is None else make_task(task_id, seed)
        self._desk.begin(task)
        self._state = NotesState(episode_id=episode_id or str(uuid.uuid4()), task_id=task.id, seed=seed)
        self._reset_rubric()
        return NotesObservation(task_id=task.id, instruction=task.instruction, titles=list(task.notes))

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Call a tool, and score what it led to; listing the tools is free.

        Raises:
            RuntimeError: No episode is running.
        """
        if not isinstance(action, CallToolAction):
            return super().step(action, timeout_s=timeout_s, **kwargs)
        if self._desk.task is None or self._is_over:
            raise RuntimeError("no episode is running: call reset first")
        observation = super().step(action, timeout_s=timeout_s, **kwargs)
        self._state.step_count += 1
        observation.terminated = self._desk.is_submitted
        observation.truncated = not observation.terminated and self._state.step_count >= MAX_STEPS
        observation.done = self._is_over
        observation.reward = self._apply_rubric(action, observation)
        self._note(observation.reward)
        return observation

    @property
    def _is_over(self) -> bool:
        return self._desk.is_submitted or self._state.step_count >= MAX_STEPS

    def _note(self, reward: float) -> None:
        assert self.rubric is not None
        self._state.total_reward += reward
        self._state.scores = {
            type(rubric).__name__.lower(): rubric.last_score
            for _, rubric in self.rubric.named_rubrics()
            if rubric.last_score is not None
        }

    @property
    def state(self) -> NotesState:
        """The running episode."""
        desk, state = self._desk, self._state
        state.notes, state.is_submitted, state.progress = dict(desk.notes), desk.is_submitted, desk.progress()
        return state

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name="notes_env",
            description="Read and write notes with tools until a task is done.",
            version="0.11.0",
        )
