"""`GymnasiumEnv`: a served environment as a `gymnasium.Env`.

Knows both interfaces; the session behind it is that of a `VectorEnv` with one slot, which resumes what can be resumed.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from ..client.env_client import EnvClient
from ..client.vector.results import SlotResult
from ..client.vector.vector_env import VectorEnv
from ..errors import SlotsFailed
from .advertised import FromObservation, ToAction, interface_of
from .served_gymnasium import RENDER_KEY
from .spaces import SomeSpace


class GymnasiumEnv(gymnasium.Env[Any, Any]):
    """A served environment behind Gymnasium's interface.

    Args:
        url: Where the server is, or a client of it, whose hooks are used then: `to_action` makes its actions and
            `from_observation` gets its observations.
        action_space: Its actions; by default what the server says.
        observation_space: Its observations; by default what the server says.
        to_action: Turns a value of the action space into the fields of an action.
        from_observation: Turns the fields of an observation into a value of the observation space.
        render_mode: `rgb_array` to have pictures, where the environment makes them.
        token: Sent as `Authorization: Bearer`; by default `OPENENV_TOKEN`.
        options: For `VectorEnv`.

    Raises:
        ValueError: The spaces are neither given nor told.
    """

    def __init__(
        self,
        url: str | EnvClient[Any, Any, Any],
        *,
        action_space: SomeSpace | None = None,
        observation_space: SomeSpace | None = None,
        to_action: ToAction | None = None,
        from_observation: FromObservation | None = None,
        render_mode: str | None = None,
        token: str | None = None,
        **options: Any,
    ) -> None:
        client = url if isinstance(url, EnvClient) else None
        address = str(url.base_url) if isinstance(url, EnvClient) else url
        self._interface = interface_of(
            address,
            token=token,
            action_space=action_space,
            observation_space=observation_space,
            to_action=to_action,
            from_observation=from_observation,
        )
        self.action_space = self._interface.action_space
        self.observation_space = self._interface.observation_space
        self.metadata = {"render_modes": ["rgb_array"]}
        self.render_mode = render_mode
        self._picture: Any = None
        self._env: VectorEnv[Any, Any] = VectorEnv(
            address, 1, client=client, autoreset="disabled", token=token, **options
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        kwargs: dict[str, Any] = {} if options is None else {"options": options}
        if self.render_mode is not None:
            kwargs["render"] = True
        told = _only(lambda: self._env.reset(seed=seed, **kwargs))
        return self._seen(told)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take an action."""
        told = _only(lambda: self._env.step([self._interface.to_action(action)]))
        observation, info = self._seen(told)
        return observation, told.reward, told.terminated, told.truncated, info

    def render(self) -> Any:
        """Return the picture that came with the last observation."""
        return self._picture

    def close(self) -> None:
        """End the session."""
        self._env.close()

    def _seen(self, told: SlotResult[Any]) -> tuple[Any, dict[str, Any]]:
        assert told.result is not None
        info = dict(told.result.metadata or {})
        picture = info.pop(RENDER_KEY, None)
        if picture is not None:
            self._picture = _pixels(picture)
        return self._interface.from_observation(told.result.observation), info


def _only(ask: Any) -> SlotResult[Any]:
    """Return the one slot's result.

    Raises:
        OpenEnvError: It failed.
    """
    try:
        told: SlotResult[Any] = ask().by_slot[0]
        return told
    except SlotsFailed as exc:
        raise exc.errors[0] from None


def _pixels(picture: Any) -> Any:
    """Return a picture as an array, whichever way it came."""
    import numpy as np

    if not isinstance(picture, str):
        return np.asarray(picture, dtype=np.uint8)
    import base64
    import io

    from PIL import Image  # an optional dependency

    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture.partition(",")[2]))))
