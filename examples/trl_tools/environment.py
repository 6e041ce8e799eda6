"""Press the button in the colour of the lamp: an episode is one call of a tool, with the right argument.

python -m openenv serve examples/trl_tools/environment.py:app
"""

from __future__ import annotations

import random
from typing import Any, Literal, get_args

from openenv import Environment, create_app
from openenv.types import Action, Observation, State

Colour = Literal["red", "green", "blue", "yellow"]
COLOURS: tuple[Colour, ...] = get_args(Colour)


class Press(Action):
    """Press a button."""

    colour: Colour


class Lamp(Observation):
    """What the panel shows."""

    text: str = ""


class Panel(Environment[Press, Lamp, State]):
    """A lamp lights up, and the button of the same colour earns 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    RUNS_INLINE = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._lit: Colour = COLOURS[0]

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Lamp:
        """Light the lamp."""
        self._state = State(episode_id=episode_id)
        self._lit = random.Random(seed).choice(COLOURS)
        return Lamp(text=f"The lamp is {self._lit.upper()}.")

    def step(self, action: Press, timeout_s: float | None = None, **kwargs: Any) -> Lamp:
        """Press a button."""
        self._state.step_count += 1
        return Lamp(text="The lamp is out.", reward=float(action.colour == self._lit), done=True)

    @property
    def state(self) -> State:
        """The episode's id and step count."""
        return self._state


app = create_app(Panel, Press, Lamp, max_concurrent_envs=256)
