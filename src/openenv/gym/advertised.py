"""What a served environment says of its spaces, in the JSON schemas of its models.

Knows the schema route and where spaces stand in it; must not know sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from ..settings import client_token
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
