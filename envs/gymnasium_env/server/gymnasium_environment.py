"""The Gymnasium environment: one interface to all ids, with images. `openenv.adapters.gymnasium` makes the classes."""

from __future__ import annotations

import base64
import html
import io
import json
import secrets
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AddRenderObservation
from PIL import Image
from pydantic import ValidationError
from typing_extensions import TypedDict

from gymnasium_env.models import GymnasiumAction, GymnasiumObservation, GymnasiumState
from openenv import Environment
from openenv.adapters.gymnasium import gymnasium_environment
from openenv.adapters.gymnasium.served_gymnasium import RENDER_KEY, ServedGymnasium
from openenv.adapters.gymnasium.spaces import describe
from openenv.core.env_server.types import EnvironmentMetadata
from openenv.env.tasks import TaskCatalogue

DEFAULT_ENV_ID = "CartPole-v1"
SPLITS = {"train": range(1000), "test": range(1_000_000, 1_000_100)}
"""The seeds of each split."""
_MOST_BUTTONS = 18
_MOST_BARS = 64

Served = ServedGymnasium[Any, Any]


class Task(TypedDict):
    """A seed of a split; `reset(split=..., index=...)` or `reset(seed=...)` begins it."""

    split: str
    index: int
    seed: int


class GymnasiumEnvironment(TaskCatalogue[Task], Environment[GymnasiumAction, GymnasiumObservation, GymnasiumState]):
    """Play any Gymnasium environment.

    Args:
        env_id: The environment of episodes that name none. It may be `module:Id`, which imports a module.
    """

    SPLITS = SPLITS

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, env_id: str = DEFAULT_ENV_ID) -> None:
        super().__init__()
        self._default_id = env_id
        self._inner: Served | None = None
        self._is_over = True
        self._shows_pixels = False

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        env_id: str | None = None,
        env_kwargs: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        render: bool = False,
        pixels: bool = False,
        split: str | None = None,
        index: int = 0,
        **kwargs: Any,
    ) -> GymnasiumObservation:
        """Begin an episode.

        Args:
            seed: Drawn if there is none, and shown in the state.
            episode_id: A name for the episode.
            env_id: Which environment; by default the server's own.
            env_kwargs: Arguments of `gymnasium.make`.
            options: Gymnasium's options of a reset.
            render: Whether each observation's metadata holds a picture.
            pixels: Whether the picture is the observation, as an array of height, width and colour.
            split: Takes the seed from the tasks of a split.
            index: Which task of the split.

        Raises:
            ValueError: The id may not be chosen by clients, or an argument cannot be used.
            IndexError: The split has no such task.
            gymnasium.error.Error: There is no such environment, or it cannot be made here.
        """
        if split is not None:
            seed = _task(split, index)["seed"]
        seed = secrets.randbelow(2**31) if seed is None else seed
        served = self._find(env_id, env_kwargs or {}, pixels)
        if type(self._inner) is not served:
            self.close()
            self._inner = served()
        inner = self._inner
        assert inner is not None
        # An environment of pixels always renders, and would be made again without its wrapper.
        first = inner.reset(seed=seed, options=options, render=None if pixels else render)
        self._is_over, self._shows_pixels = False, pixels
        self.state.env_id, self.state.seed = env_id or self._default_id, seed
        observation = self._observe(first)
        observation.action_space = describe(inner.action_space)
        observation.observation_space = describe(inner.observation_space)
        return observation

    def step(self, action: GymnasiumAction, timeout_s: float | None = None, **kwargs: Any) -> GymnasiumObservation:
        """Take an action.

        Raises:
            RuntimeError: No episode is running.
            ValueError: The action is not in the action space.
        """
        if self._inner is None or self._is_over:
            raise RuntimeError("no episode is running: call reset first")
        try:
            valid = self._inner.action_cls.model_validate({"action": action.action})
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"{self.state.env_id} does not take this action: {reason}") from None
        observation = self._observe(self._inner.step(valid))
        self._is_over = observation.done
        self.state.total_reward += float(observation.reward or 0.0)
        return observation

    def _find(self, env_id: str | None, env_kwargs: dict[str, Any], pixels: bool) -> type[Served]:
        if env_id is not None and env_id != self._default_id and ":" in env_id:
            raise ValueError("an env_id with a module is for the server: start it with GYMNASIUM_ENV_ID=module:Id")
        if "render_mode" in env_kwargs:
            raise ValueError("render_mode is set by the environment: reset with render=True or pixels=True")
        return _served(env_id or self._default_id, json.dumps(env_kwargs, sort_keys=True), pixels)

    def _observe(self, inner: Any) -> GymnasiumObservation:
        if self._shows_pixels:
            inner.metadata.pop(RENDER_KEY, None)  # the same picture once more
        return GymnasiumObservation(
            observation=inner.observation,
            env_id=self.state.env_id,
            reward=inner.reward,
            done=inner.done,
            terminated=inner.terminated,
            truncated=inner.truncated,
            metadata=inner.metadata,
        )

    def close(self) -> None:
        """Close the Gymnasium environment."""
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name="gymnasium_env",
            description=f"Any Gymnasium environment; {self._default_id} if a reset names no other.",
            version="0.11.0",
        )

    def render_web(self, observation: dict[str, Any]) -> str | None:
        """Show the picture, or bars for a row of numbers."""
        picture = (observation.get("metadata") or {}).get(RENDER_KEY)
        values = observation.get("observation")
        if isinstance(picture, str) and picture.startswith("data:image/"):
            return _image(picture)
        if _is_image(values):
            return _image(_png(values))
        return _bars(values) if isinstance(values, list) and 0 < len(values) <= _MOST_BARS else None

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Offer the actions of a small discrete space."""
        space = None if self._inner is None else self._inner.action_space
        if not isinstance(space, gymnasium.spaces.Discrete) or space.n > _MOST_BUTTONS:
            return []
        return [(str(number), {"action": number}) for number in range(int(space.start), int(space.start + space.n))]

    # -- tasks ----------------------------------------------------------------------------------------------------

    def num_tasks(self, split: str) -> int:
        """Count the tasks of a split."""
        return len(_seeds(split))

    def get_task(self, split: str, index: int) -> Task:
        """Return one task."""
        return _task(split, index)


@lru_cache(maxsize=64)
def _served(env_id: str, env_kwargs: str, pixels: bool) -> type[Served]:
    """Return the class of an id and its arguments; it takes a sample environment to make one."""
    kwargs = json.loads(env_kwargs)
    if pixels:
        return gymnasium_environment(_make_pixels, env_id=env_id, env_kwargs=kwargs)
    return gymnasium_environment(env_id, **kwargs)


def _make_pixels(env_id: str, env_kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    return AddRenderObservation(gymnasium.make(env_id, render_mode="rgb_array", **env_kwargs))


def _seeds(split: str) -> range:
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}: choose one of {', '.join(SPLITS)}")
    return SPLITS[split]


def _task(split: str, index: int) -> Task:
    if not 0 <= index < len(_seeds(split)):
        raise IndexError(f"{split} has tasks 0 to {len(_seeds(split)) - 1}, not {index}")
    return Task(split=split, index=index, seed=_seeds(split)[index])


def _is_image(values: Any) -> bool:
    shape = np.shape(values) if isinstance(values, list) and values and isinstance(values[0], list) else ()
    return len(shape) == 3 and shape[2] in (1, 3, 4)


def _png(pixels: Any) -> str:
    array = np.asarray(pixels, np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _image(url: str) -> str:
    return f'<img src="{html.escape(url)}" alt="Picture of the environment" style="max-width:100%">'


def _bars(values: list[Any]) -> str | None:
    """Draw numbers as bars to the left and right of zero, on a common scale."""
    numbers = [0.0 if value is None else value for value in values]
    if not all(isinstance(number, int | float) for number in numbers):
        return None
    scale = max(1e-9, *(abs(number) for number in numbers))
    rows = []
    for row, number in enumerate(numbers):
        width = 180 * abs(number) / scale
        left, y = (200 - width if number < 0 else 200), 26 * row
        rows.append(
            f'<rect x="{left:.1f}" y="{y + 4}" width="{max(1.0, width):.1f}" height="16" rx="3" fill="#2e7de9"/>'
            f'<text x="395" y="{y + 17}">{number:.4g}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="480" height="{26 * len(numbers)}" role="img" '
        f'style="font:13px system-ui;fill:light-dark(#222,#ddd)" aria-label="Observation">{"".join(rows)}</svg>'
    )
