"""`GymnasiumVectorEnv`: many sessions of a served environment as a `gymnasium.vector.VectorEnv`.

Knows both interfaces; stepping is `VectorEnv`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import gymnasium
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from ..client.vector.results import Autoreset, VectorResult
from ..client.vector.vector_env import VectorEnv
from .advertised import FromObservation, ToAction, interface_of
from .spaces import SomeSpace

_MODES: Final[dict[str, AutoresetMode]] = {
    "next_step": AutoresetMode.NEXT_STEP,
    "same_step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}


class GymnasiumVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Many sessions behind Gymnasium's vector interface.

    Args:
        url: The server, or several.
        num_envs: How many sessions.
        action_space: The actions of one; by default what the server says.
        observation_space: The observations of one; by default what the server says.
        to_action: Turns a value of the action space into the fields of an action.
        from_observation: Turns the fields of an observation into a value of the observation space.
        autoreset: What follows an episode's end, as in `VectorEnv`.
        token: Sent as `Authorization: Bearer`; by default `OPENENV_TOKEN`.
        options: For `VectorEnv`. A slot that fails raises: Gymnasium has no place for it.

    Raises:
        ValueError: The spaces are neither given nor told.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        num_envs: int,
        *,
        action_space: SomeSpace | None = None,
        observation_space: SomeSpace | None = None,
        to_action: ToAction | None = None,
        from_observation: FromObservation | None = None,
        autoreset: Autoreset = "next_step",
        token: str | None = None,
        **options: Any,
    ) -> None:
        self._interface = interface_of(
            url if isinstance(url, str) else url[0],
            token=token,
            action_space=action_space,
            observation_space=observation_space,
            to_action=to_action,
            from_observation=from_observation,
        )
        self.num_envs = num_envs
        self.single_action_space = self._interface.action_space
        self.single_observation_space = self._interface.observation_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.metadata = {"autoreset_mode": _MODES[autoreset]}
        self._env: VectorEnv[Any, Any] = VectorEnv(url, num_envs, autoreset=autoreset, token=token, **options)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in each slot."""
        kwargs: dict[str, Any] = {} if options is None else {"options": options}
        result = self._env.reset(seed=seed, **kwargs)
        return self._batch(result.observations), self._infos(result)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take an action in each slot."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send actions."""
        self._env.step_async([self._interface.to_action(action) for action in iterate(self.action_space, actions)])

    def step_wait(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Wait for what comes of them."""
        result = self._env.step_wait()
        observations = self._batch(result.observations)
        return observations, result.rewards, result.terminated, result.truncated, self._infos(result)

    def close_extras(self, **kwargs: Any) -> None:
        """End all sessions."""
        self._env.close()

    def _batch(self, observations: Sequence[Any]) -> Any:
        values = [self._interface.from_observation(fields) for fields in observations]
        space = self.single_observation_space
        empty: Any = create_empty_array(space, self.num_envs)
        return concatenate(space, values, empty)

    def _infos(self, result: VectorResult[Any]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for slot, (info, final) in enumerate(zip(result.infos, result.finals, strict=True)):
            told = dict(info)
            if final is not None:
                told["final_obs"] = self._interface.from_observation(final.observation)
                told["final_info"] = dict(final.metadata or {})
            infos = self._add_info(infos, told, slot)
        return infos
