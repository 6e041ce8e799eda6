"""Stable-Baselines3: many sessions of a served environment, or processes of this machine, as its `VecEnv`.

Needs stable-baselines3 (2.0 or newer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from openenv.adapters import importing
from openenv.adapters.gymnasium.gymnasium_env import FromObservation, ToAction, columns_of, infos_of, interface_of
from openenv.adapters.gymnasium.spaces import SomeSpace
from openenv.client.rewards import RewardHistory
from openenv.client.vector.results import VectorResult
from openenv.client.vector.vector_env import VectorEnv
from openenv.errors import NonFiniteReward
from openenv.protocol.columns import nest

with importing("stable-baselines3>=2.0", needed_by="openenv.train.trainers.sb3"):
    from stable_baselines3.common.vec_env import VecEnv

_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
Infos = list[dict[str, Any]]


class ServedVecEnv(VecEnv):  # type: ignore[misc]
    """Many sessions, stepped together, behind the interface of Stable-Baselines3.

    A finished episode is followed by the next one in the same step; its last observation is in the info, as
    `terminal_observation`. A session that fails raises `SlotsFailed`: no reward is made up for it.

    Args:
        url: The server, or several; or an environment for this machine, as for `VectorEnv`.
        num_envs: The number of sessions.
        action_space: Of one session; by default the server's.
        observation_space: Of one session; by default the server's.
        to_action: Turns a value of the action space into the fields of an action.
        from_observation: Turns the fields of an observation into a value of the observation space.
        options: For `VectorEnv`, such as `workers`, or `token`, which is sent as `Authorization: Bearer`; by default
            `OPENENV_TOKEN`.

    Raises:
        ValueError: Neither the server nor the arguments describe the spaces.
    """

    def __init__(
        self,
        url: str | Sequence[str] | Callable[[], Any],
        num_envs: int,
        *,
        action_space: SomeSpace | None = None,
        observation_space: SomeSpace | None = None,
        to_action: ToAction | None = None,
        from_observation: FromObservation | None = None,
        **options: Any,
    ) -> None:
        self._actions, self._observations = interface_of(
            url if isinstance(url, str) or callable(url) else url[0],
            token=options.get("token"),
            action_space=action_space,
            observation_space=observation_space,
            to_action=to_action,
            from_observation=from_observation,
        )
        # Before the base class, which asks for attributes.
        self._env: VectorEnv[Any, Any] = VectorEnv(url, num_envs, autoreset="same_step", **options)
        self._rewards = RewardHistory()
        # Arrays go through as they are, unless the caller translates them.
        self._action_columns = None if to_action else columns_of(self._actions.space, "action")
        self._observation_columns = None if from_observation else columns_of(self._observations.space, "observation")
        super().__init__(num_envs, self._observations.space, self._actions.space)

    def reset(self) -> Any:
        """Begin an episode in each session."""
        if any(options != self._options[0] for options in self._options):
            raise ValueError("set_options: all sessions must have the same options")
        extra = {"options": self._options[0]} if self._options[0] else {}
        result = self._env.reset(seed=None if None in self._seeds else list(self._seeds), **extra)
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = [dict(info) for info in result.infos]
        return self._batch(result)

    def step_async(self, actions: Any) -> None:
        """Send an action to each session."""
        columns = self._action_columns
        if columns is not None and columns.is_single and self._env.column_layout is not None:
            self._env.step_async(nest(columns.columns, [np.asarray(actions)]))
            return
        write = self._actions.write
        self._env.step_async([write(action) for action in actions])

    def step_wait(self) -> tuple[Any, Any, Any, Infos]:
        """Wait for the results. A missing reward is 0.

        Raises:
            SlotsFailed: Sessions failed; a reward that is not a finite number is such a failure (`NonFiniteReward`).
            NonFiniteReward: A reward is not finite as a float32, or a failed slot is masked.
            NoRewards: The environment has never given a reward, in many episodes.
        """
        result = self._env.step_wait()
        # Rewards as the buffers of Stable-Baselines3 have them.
        rewards = np.array(self._rewards.values(result), np.float32)
        if not np.isfinite(rewards).all():  # a float64 may be too large for a float32
            slot = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise NonFiniteReward.of(result.by_slot[slot].reward)
        return self._batch(result), rewards, result.dones, self._infos(result)

    def close(self) -> None:
        """End all sessions."""
        self._env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of each environment; only `render_mode` is known here.

        Raises:
            AttributeError: It is another one.
        """
        if attr_name != "render_mode":
            raise AttributeError(f"served environments have no attribute {attr_name!r} here")
        return [None for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refuse: environments run in another process.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(f"{attr_name!r} cannot be set: served environments run in another process")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Refuse: environments run in another process.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(f"{method_name!r} cannot be called: served environments run in another process")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Say for each environment that it is not wrapped."""
        return [False for _ in self._get_indices(indices)]

    def _batch(self, result: VectorResult[Any]) -> Any:
        """Return observations as one array, or as arrays by key."""
        if result.columns is not None and self._observation_columns is not None:
            return self._observation_columns.join(result.columns.observations)
        read, space = self._observations.read, self.observation_space
        values = [read(fields) for fields in result.observations]
        if isinstance(space, _ARRAYS):
            return np.array(values, space.dtype)
        empty: Any = create_empty_array(space, self.num_envs)
        batch = concatenate(space, values, empty)
        return dict(batch) if isinstance(batch, dict) else batch

    def _infos(self, result: VectorResult[Any]) -> Infos:
        infos: Infos = [{} for _ in range(self.num_envs)]
        for slot, info, final in infos_of(result):
            if final is None:
                infos[slot] = info
                continue
            ended = result.by_slot[slot]
            infos[slot] = {
                **(final.metadata or {}),
                "terminal_observation": self._observations.read(final.observation),
                "TimeLimit.truncated": ended.truncated and not ended.terminated,
            }
        return infos
