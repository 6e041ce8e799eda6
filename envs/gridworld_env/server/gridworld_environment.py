"""The Gridworld: episodes on a map, one move at a time. Knows maps, rewards and tasks; drawing is elsewhere."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from typing import Any

from gridworld_env.models import (
    GOAL,
    OFFSETS,
    PIT,
    WALL,
    Event,
    GridworldAction,
    GridworldObservation,
    GridworldState,
)
from gridworld_env.server import catalogue
from gridworld_env.server.catalogue import Task
from gridworld_env.server.drawing import draw_svg, draw_text
from gridworld_env.server.rubric import gridworld_rubric
from gridworld_env.server.world import World, make_world
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata
from openenv.env.tasks import TaskCatalogue

DEFAULT_SIZE = 8
SIZES = range(4, 33)
_ARROWS = {"up": "↑", "down": "↓", "left": "←", "right": "→"}
_LAST_EVENTS = ("goal", "pit", "timeout")


def _random_seed() -> int:
    return secrets.randbelow(2**31)


class GridworldEnvironment(TaskCatalogue[Task], Environment[GridworldAction, GridworldObservation, GridworldState]):
    """Find the goal, stay out of the pits.

    An episode is terminated by the goal or a pit and truncated after `4 * size` moves (twice the
    shortest way, where that is more).

    Args:
        draw_seed: Gives the seed of an episode that is begun without one.
    """

    SPLITS = catalogue.SPLITS

    SUPPORTS_CONCURRENT_SESSIONS = True
    RUNS_INLINE = True  # a move takes some 50 microseconds

    def __init__(self, draw_seed: Callable[[], int] = _random_seed) -> None:
        super().__init__(rubric=gridworld_rubric())
        self._draw_seed = draw_seed
        self._world: World | None = None
        self._is_over = False
        self._state = GridworldState()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        size: int = DEFAULT_SIZE,
        split: str | None = None,
        index: int = 0,
        **kwargs: Any,
    ) -> GridworldObservation:
        """Begin an episode on the map of a seed, of a task (`split` and `index`), or on any map.

        Raises:
            ValueError: The size is not possible, or there is no such split.
            IndexError: The split has no such task.
        """
        if size not in SIZES:
            raise ValueError(f"size must be between {SIZES[0]} and {SIZES[-1]}, not {size}")
        if split is not None:
            seed = catalogue.task(split, index)["seed"]
        if seed is None:
            seed = self._draw_seed()
        world = make_world(seed, size)
        state = GridworldState(
            episode_id=episode_id or str(uuid.uuid4()),
            seed=seed,
            size=size,
            position=world.start,
            goal=world.goal,
            shortest_path=world.shortest_path,
            max_steps=max(4 * size, 2 * world.shortest_path),
        )
        self._world, self._state, self._is_over = world, state, False
        self._reset_rubric()
        return self._observe(world, "start")

    def step(self, action: GridworldAction, timeout_s: float | None = None, **kwargs: Any) -> GridworldObservation:
        """Move one cell.

        Raises:
            RuntimeError: No episode is running.
        """
        world, state = self._world, self._state
        if world is None or self._is_over:
            raise RuntimeError("no episode is running: call reset first")
        event = self._move(world, action)
        state.step_count += 1
        if event not in _LAST_EVENTS and state.step_count >= state.max_steps:
            event = "timeout"
        observation = self._observe(world, event)
        observation.terminated = event in ("goal", "pit")
        observation.truncated = event == "timeout"
        observation.done = self._is_over = observation.terminated or observation.truncated
        observation.reward = self._apply_rubric(action, observation)
        self._note(observation.reward)
        return observation

    def _move(self, world: World, action: GridworldAction) -> Event:
        state = self._state
        rows, columns = OFFSETS[action.move]
        target = (state.position[0] + rows, state.position[1] + columns)
        tile = world.tile(target)
        if tile == WALL:
            return "bumped"
        state.position = target
        return "goal" if tile == GOAL else "pit" if tile == PIT else "moved"

    def _observe(self, world: World, event: Event) -> GridworldObservation:
        state = self._state
        return GridworldObservation(
            board=draw_text(world.tiles, state.position),
            tiles=list(world.tiles),
            position=state.position,
            event=event,
            steps_left=state.max_steps - state.step_count,
        )

    def _note(self, reward: float) -> None:
        assert self.rubric is not None
        self._state.total_reward += reward
        self._state.scores = {
            type(rubric).__name__.lower(): rubric.last_score or 0.0 for rubric in self.rubric.children()
        }

    @property
    def state(self) -> GridworldState:
        """The running episode."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name="gridworld_env",
            description="Find the goal on a seeded board with walls and pits.",
            version="0.11.0",
        )

    def render_web(self, observation: dict[str, Any]) -> str | None:
        """Draw the board."""
        tiles, position = observation.get("tiles"), observation.get("position")
        if not tiles or position is None:
            return None
        return draw_svg(tiles, (position[0], position[1]))

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Offer the four moves while the episode runs."""
        if observation.get("event") in _LAST_EVENTS:
            return []
        return [(f"{_ARROWS[move]} {move}", {"move": move}) for move in OFFSETS]

    # -- tasks ----------------------------------------------------------------------------------------------------

    def num_tasks(self, split: str) -> int:
        """Count the tasks of a split."""
        return len(catalogue.seeds(split))

    def get_task(self, split: str, index: int) -> Task:
        """Return one task."""
        return catalogue.task(split, index)
