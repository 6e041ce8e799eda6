"""What a served environment says of its spaces, in the JSON schemas of its models.

Knows the schema route and where spaces stand in it; must not know sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import gymnasium
import httpx2
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from ..client.env_client import EnvClient
from ..client.vector.results import Autoreset, SlotResult, VectorResult
from ..client.vector.vector_env import VectorEnv
from ..errors import SlotsFailed
from ..settings import client_token
from .served_gymnasium import RENDER_KEY
from .spaces import SPACE_KEY, Derived, SomeSpace, UnsupportedSpace, derive, from_wire, space_of, to_wire

_TIMEOUT_S = 30.0

ToAction = Callable[[Any], Mapping[str, Any]]
FromObservation = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Interface:
    """The two spaces of an environment, and how their values travel."""

    action_space: SomeSpace
    observation_space: SomeSpace
    to_action: ToAction
    from_observation: FromObservation


def interface_of(
    url: str,
    *,
    token: str | None = None,
    action_space: SomeSpace | None = None,
    observation_space: SomeSpace | None = None,
    to_action: ToAction | None = None,
    from_observation: FromObservation | None = None,
) -> Interface:
    """Find out how to speak with a served environment; what is given is not asked for.

    Raises:
        ValueError: The server's models have no spaces, and they are not given.
    """
    schemas: dict[str, Any] = {}
    if action_space is None or observation_space is None:
        schemas = _schemas(url, client_token() if token is None else token)
    actions = _told(schemas, "action", given=action_space)
    observations = _told(schemas, "observation", given=observation_space)
    return Interface(
        actions.space, observations.space, to_action or actions.write, from_observation or observations.read
    )


def _told(schemas: Mapping[str, Any], name: str, *, given: SomeSpace | None) -> Derived:
    """Take the space that is given, else the one that the schema names, else the one of the model's fields."""
    schema = schemas.get(name, {})
    description = schema.get(SPACE_KEY)
    if given is None and not isinstance(description, dict):
        try:
            return derive(schema)
        except UnsupportedSpace as exc:
            raise ValueError(
                f"the environment's {name} has no Gymnasium space ({exc}); "
                f"pass {name}_space=, and {'to_action' if name == 'action' else 'from_observation'}= to translate"
            ) from exc
    space = space_of(description) if given is None else given
    return Derived(
        space,
        lambda value: {name: to_wire(space, value)},
        lambda fields: from_wire(space, fields[name]),
    )


def _schemas(url: str, token: str | None) -> dict[str, Any]:
    base = url.replace("ws://", "http://", 1).replace("wss://", "https://", 1).rstrip("/").removesuffix("/ws")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    response = httpx2.get(f"{base}/schema", headers=headers, timeout=_TIMEOUT_S)
    response.raise_for_status()
    schemas: dict[str, Any] = response.json()
    return schemas


# single: `GymnasiumEnv`: a served environment as a `gymnasium.Env`.
#
# Knows both interfaces; the session behind it is that of a `VectorEnv` with one slot, which resumes what can be resumed.


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


# vector: `GymnasiumVectorEnv`: many sessions of a served environment as a `gymnasium.vector.VectorEnv`.
#
# Knows both interfaces; stepping is `VectorEnv`'s.


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
