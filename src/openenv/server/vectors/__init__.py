"""Local vectors: the slots of a `VectorEnv` in worker processes of this machine, with arrays in shared memory.

`pool` is the program's side and `host` the worker's; `messages` and `memory` are what they share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openenv._lazy import load_plugin
from openenv.env.binding import factory_class, infer_models
from openenv.protocol.schema import json_schema

TARGETS = "openenv.targets"


def environment_of(target: str | Callable[[], Any]) -> Callable[[], Any]:
    """Return what makes an environment: a class or function as it is, or the class of `gymnasium:ID` and the like.

    Raises:
        ValueError: No plugin makes environments of that kind, or the plugin does not know this one.
    """
    if not isinstance(target, str):
        return target
    scheme, _, name = target.partition(":")
    made: Callable[[], Any] = load_plugin(TARGETS, scheme, kind="kind of environment")(name)
    return made


def schemas_of(target: str | Callable[[], Any]) -> dict[str, Any]:
    """Return the JSON schemas of an environment's actions and observations; empty for an unknown class."""
    cls = factory_class(environment_of(target))
    if cls is None:
        return {}
    models = infer_models(cls)
    return {"action": json_schema(models.action), "observation": json_schema(models.observation)}
