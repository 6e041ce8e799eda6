"""A served environment as a `gymnasium.Env`, and many of its sessions as a `gymnasium.vector.VectorEnv`.

Sessions work as in `client.vector.VectorEnv`, with one slot for a single environment.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from openenv.client.env_client import EnvClient
from openenv.client.network import ConnectionOptions, with_token
from openenv.client.rewards import RewardHistory, reward_history
from openenv.client.schema_client import read_schemas
from openenv.client.vector.results import Autoreset, SlotResult, VectorResult
from openenv.client.vector.vector_env import VectorEnv, is_environment
from openenv.errors import SlotsFailed
from openenv.protocol.columns import nest
from openenv.server.vectors import schemas_of
from openenv.types import StepResult

from .served_gymnasium import RENDER_KEY
from .spaces import (
    SPACE_KEY,
    SomeSpace,
    SpaceCodec,
    SpaceColumns,
    UnsupportedSpace,
    derive,
    from_wire,
    is_of_arrays,
    space_of,
    wire_writer,
)

_TIMEOUT_S = 30.0

ToAction = Callable[[Any], Mapping[str, Any]]
FromObservation = Callable[[Mapping[str, Any]], Any]


def interface_of(
    url: Any,
    *,
    token: str | None = None,
    action_space: SomeSpace | None = None,
    observation_space: SomeSpace | None = None,
    to_action: ToAction | None = None,
    from_observation: FromObservation | None = None,
) -> tuple[SpaceCodec, SpaceCodec]:
    """Return the spaces of a served environment's actions and observations, and how their values are written and read.

    They come from the schemas of the server, or of the environment on this machine; arguments override them.

    Raises:
        ValueError: The server's models have no spaces, and the arguments name none.
    """
    # The server is asked only if it is needed, so that callers who pass both spaces can work offline.
    schemas: Mapping[str, Any] = {}
    if action_space is None or observation_space is None:
        schemas = schemas_of(url) if is_environment(url, None) or not isinstance(url, str) else _schemas(url, token)
    actions = _codec(schemas, "action", action_space)
    observations = _codec(schemas, "observation", observation_space)
    return (
        replace(actions, write=to_action or actions.write),
        replace(observations, read=from_observation or observations.read),
    )


def _codec(schemas: Mapping[str, Any], name: str, override: SomeSpace | None) -> SpaceCodec:
    """Take the caller's space, else the one that the schema describes, else derive it from the model's fields."""
    # Order of preference: the caller's space, the space in the schema, a space derived from the fields.
    schema = schemas.get(name, {})
    description = schema.get(SPACE_KEY)
    if override is None and not isinstance(description, dict):
        try:
            return derive(schema)
        except UnsupportedSpace as exc:
            raise ValueError(
                f"the environment's {name} has no Gymnasium space ({exc}); "
                f"pass {name}_space=, and {'to_action' if name == 'action' else 'from_observation'}= to translate"
            ) from exc
    space = space_of(description) if override is None else override
    write = wire_writer(space)
    # Models made by `gymnasium_environment` have one field, named like the side: `action` or `observation`.
    return SpaceCodec(
        space,
        lambda value: {name: write(value)},
        lambda fields: from_wire(space, fields[name]),
    )


def _schemas(url: str, token: str | None) -> Mapping[str, Any]:
    return read_schemas(url, ConnectionOptions(connect_timeout_s=_TIMEOUT_S, headers=with_token(None, token)))


class GymnasiumEnv(gymnasium.Env[Any, Any]):
    """A served environment behind Gymnasium's interface.

    Args:
        url: The server's address, or a client of it: then `to_action` makes the client's actions and
            `from_observation` gets the client's observations. Or an environment for a process of this machine, as for
            `VectorEnv`.
        action_space: By default the server's.
        observation_space: By default the server's.
        to_action: Turns a value of the action space into the fields of an action.
        from_observation: Turns the fields of an observation into a value of the observation space.
        render_mode: `rgb_array` for pictures, if the environment draws them.
        token: Sent as `Authorization: Bearer`; by default `OPENENV_TOKEN`.
        options: For `VectorEnv`.

    Raises:
        ValueError: Neither the server nor the arguments describe the spaces.
    """

    def __init__(
        self,
        url: str | EnvClient[Any, Any, Any] | Callable[[], Any],
        *,
        action_space: SomeSpace | None = None,
        observation_space: SomeSpace | None = None,
        to_action: ToAction | None = None,
        from_observation: FromObservation | None = None,
        render_mode: str | None = None,
        token: str | None = None,
        **options: Any,
    ) -> None:
        # A client knows its address, and its hooks translate actions; a plain URL uses dicts.
        client = url if isinstance(url, EnvClient) else None
        address: Any = str(url.base_url) if isinstance(url, EnvClient) else url
        self._actions, self._observations = interface_of(
            address,
            token=token,
            action_space=action_space,
            observation_space=observation_space,
            to_action=to_action,
            from_observation=from_observation,
        )
        self.action_space = self._actions.space
        self.observation_space = self._observations.space
        self.metadata = {"render_modes": ["rgb_array"]}
        self.render_mode = render_mode
        self._picture: Any = None
        # `autoreset="disabled"`: Gymnasium's single environments never reset themselves.
        self._env: VectorEnv[Any, Any] = VectorEnv(
            address, 1, client=client, autoreset="disabled", token=token, **options
        )
        self._rewards = reward_history(str(address))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        # Gymnasium seeds `np_random` here. The episode's randomness is on the server, seeded below.
        super().reset(seed=seed)
        kwargs: dict[str, Any] = {} if options is None else {"options": options}
        if self.render_mode is not None:
            kwargs["render"] = True
        return self._observed(_only(lambda: self._env.reset(seed=seed, **kwargs)))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take an action. A missing reward is 0.

        Raises:
            NonFiniteReward: The reward is NaN, infinite or not a number.
            NoRewards: The environment has never given a reward, in many episodes.
        """
        result = _only(lambda: self._env.step([self._actions.write(action)]))
        observation, info = self._observed(result)
        (reward,) = self._rewards.values(VectorResult([result]))
        return observation, reward, result.terminated, result.truncated, info

    def render(self) -> Any:
        """Return the picture that came with the last observation."""
        return self._picture

    def close(self) -> None:
        """End the session."""
        self._env.close()

    def _observed(self, slot: SlotResult[Any]) -> tuple[Any, dict[str, Any]]:
        assert slot.result is not None
        info = dict(slot.result.metadata or {})
        # The picture travels in the metadata, but is not part of Gymnasium's info.
        picture = info.pop(RENDER_KEY, None)
        if picture is not None:
            self._picture = _pixels(picture)
        return self._observations.read(slot.result.observation), info


def _only(work: Callable[[], VectorResult[Any]]) -> SlotResult[Any]:
    """Return the result of the only slot.

    Raises:
        OpenEnvError: It failed.
    """
    try:
        return work().by_slot[0]
    # A vector collects failures by slot. With one slot, the caller wants the original error.
    except SlotsFailed as exc:
        raise exc.errors[0] from None


def _pixels(picture: Any) -> Any:
    """Return a picture as an array; the encoding of the connection decides whether it came as one or as a data URL."""
    if not isinstance(picture, str):
        return np.asarray(picture, dtype=np.uint8)
    from PIL import Image  # an optional dependency

    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture.partition(",")[2]))))


def columns_of(space: SomeSpace, name: str) -> SpaceColumns | None:
    """Return the columns of a space; None if its values are not arrays."""
    try:
        return SpaceColumns(space, name)
    except UnsupportedSpace:
        return None


def infos_of(result: VectorResult[Any]) -> Iterator[tuple[int, dict[str, Any], StepResult[Any] | None]]:
    """Return the slots whose result has an info or ended an episode in the same step, with both."""
    columns = result.columns
    if columns is None or len(columns.metadata) + len(columns.single) + len(columns.finals) > len(columns) // 2:
        results: Iterable[SlotResult[Any]] = result.by_slot
    else:
        slots = result.slots
        rows = {*columns.single, *(slots.index(slot) for slot in {*columns.metadata, *columns.finals})}
        results = [result.by_slot[row] for row in sorted(rows)]
    for one in results:
        info = (one.result.metadata if one.result is not None else None) or {}
        if info or one.final is not None:
            yield one.slot, info, one.final


def _checked_mask(mask: Any, count: int) -> Any:
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError("options['reset_mask'] must be an array of booleans")
    if mask.shape != (count,) or not mask.any():
        raise ValueError(f"options['reset_mask'] must choose at least one of {count} slots, with a value for each")
    return mask


class GymnasiumVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Many sessions, or environments in processes of this machine, behind Gymnasium's vector interface.

    Args:
        url: The server, or several; or an environment for this machine, as for `VectorEnv`.
        num_envs: The number of sessions.
        action_space: Of one session; by default the server's.
        observation_space: Of one session; by default the server's.
        to_action: Turns a value of the action space into the fields of an action.
        from_observation: Turns the fields of an observation into a value of the observation space.
        autoreset: When a finished episode is reset, as in `VectorEnv`; or Gymnasium's mode.
        token: Sent as `Authorization: Bearer`; by default `OPENENV_TOKEN`.
        options: For `VectorEnv`, such as `workers`. A slot that fails raises: Gymnasium has no field for it.

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
        autoreset: Autoreset | AutoresetMode = "next_step",
        token: str | None = None,
        **options: Any,
    ) -> None:
        # All servers of a vector serve the same environment, so the first one describes it.
        self._actions, self._observations = interface_of(
            url if isinstance(url, str) or callable(url) else url[0],
            token=token,
            action_space=action_space,
            observation_space=observation_space,
            to_action=to_action,
            from_observation=from_observation,
        )
        self.num_envs = num_envs
        self.single_action_space = self._actions.space
        self.single_observation_space = self._observations.space
        # Vector interfaces have batched spaces: `Box(3,)` becomes `Box(num_envs, 3)`, `Dict` a dict of batches.
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        mode = autoreset if isinstance(autoreset, AutoresetMode) else AutoresetMode[autoreset.upper()]
        self.metadata = {"autoreset_mode": mode}
        kind: Any = mode.name.lower()
        self._env: VectorEnv[Any, Any] = VectorEnv(url, num_envs, autoreset=kind, token=token, **options)
        self._rewards = RewardHistory()
        # Arrays go through as they are, unless the caller translates them.
        self._action_columns = None if to_action else columns_of(self.single_action_space, "action")
        self._observation_columns = (
            None if from_observation else columns_of(self.single_observation_space, "observation")
        )
        self._last: Any = None  # the last observations, for resets of some slots

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in each slot, or in those of the mask `options["reset_mask"]`.

        Raises:
            TypeError: The mask is no array of booleans.
            ValueError: The mask has another length, or chooses no slot.
        """
        if options is not None and "reset_mask" in options:
            options = dict(options)
            return self._reset_some(_checked_mask(options.pop("reset_mask"), self.num_envs), seed, options)
        kwargs: dict[str, Any] = {} if options is None else {"options": options}
        result = self._env.reset(seed=seed, **kwargs)
        self._last = self._batch(result)
        return self._last, self._infos(result)

    def _reset_some(self, mask: Any, seed: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        slots = mask.nonzero()[0].tolist()
        seeds = [seed + slot for slot in slots] if isinstance(seed, int) else None
        if isinstance(seed, Sequence):
            seeds = [seed[slot] for slot in slots]
        result = self._env.reset(slots=slots, seed=seeds, options=options)
        rows = [self._observations.read(fields) for fields in result.observations]
        values = list(iterate(self.observation_space, self._last))
        for slot, row in zip(slots, rows, strict=True):
            values[slot] = row
        empty: Any = create_empty_array(self.single_observation_space, self.num_envs)
        self._last = concatenate(self.single_observation_space, values, empty)
        return self._last, self._infos(result)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take an action in each slot."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send actions."""
        columns = self._action_columns
        if columns is not None and self._env.column_layout is not None:
            self._env.step_async(nest(columns.columns, columns.split(actions)))
            return
        # `iterate` splits a batched action into one action per slot, also for nested spaces.
        self._env.step_async([self._actions.write(action) for action in iterate(self.action_space, actions)])

    def step_wait(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Wait for the results. A missing reward is 0.

        Raises:
            SlotsFailed: Sessions failed; a reward that is not a finite number is such a failure (`NonFiniteReward`).
            NoRewards: The environment has never given a reward, in many episodes.
        """
        result = self._env.step_wait()
        self._last = observations = self._batch(result)
        rewards = np.array(self._rewards.values(result), np.float64)
        ends = result if result.columns is None else result.columns
        return observations, rewards, ends.terminated, ends.truncated, self._infos(result)

    def close_extras(self, **kwargs: Any) -> None:
        """End all sessions."""
        self._env.close()

    def _batch(self, result: VectorResult[Any]) -> Any:
        if result.columns is not None and self._observation_columns is not None:
            return self._observation_columns.join(result.columns.observations)
        values = [self._observations.read(fields) for fields in result.observations]
        space = self.single_observation_space
        # The common case without Gymnasium's general, slower concatenation.
        if is_of_arrays(space):
            return np.array(values, space.dtype)
        empty: Any = create_empty_array(space, self.num_envs)
        return concatenate(space, values, empty)

    def _infos(self, result: VectorResult[Any]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        columns = result.columns
        if columns is not None and not (columns.metadata or columns.single or columns.finals):
            return infos
        # Gymnasium's format of infos: one dict of arrays, with `_name` masks that say which slots have a value.
        for slot, info, final in infos_of(result):
            slot_info = dict(info)
            if final is not None:
                # `final_obs` is the last observation of the finished episode: autoreset has replaced it in the batch.
                slot_info["final_obs"] = self._observations.read(final.observation)
                slot_info["final_info"] = dict(final.metadata or {})
            infos = self._add_info(infos, slot_info, slot)
        return infos
