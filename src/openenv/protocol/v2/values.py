"""Values of environments as values of MessagePack: bytes and arrays stay what they are.

| value                             | in MessagePack                                  |
|-----------------------------------|-------------------------------------------------|
| bytes, bytearray, memoryview      | `bin`                                           |
| NumPy array, torch tensor         | extension type 1 (see `arrays`); scalars as numbers |
| an integer of more than 64 bits   | its digits, as text                             |
| a key that is no text             | the text that JSON would have                   |
| models, dataclasses, dates, ...   | as in `model_dump()`, then as in JSON           |
| anything else                     | its `repr`                                      |

As in JSON, a value that cannot be encoded never loses the step that made it. Knows pydantic; must not know frames.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from ..json_values import BESIDE, checked_reward, dumps_itself, envelope_values, jsonable, own_dump, plain_fields
from .arrays import ArrayParts, array_parts, is_array

logger = logging.getLogger(__name__)

PackArray = Callable[[ArrayParts], Any]

_SCALARS: Final = frozenset({str, int, float, bool, type(None), bytes, bytearray})
_MAX_DEPTH: Final = 100  # readers of JSON stop at 200
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


def observation_message(observation: Any) -> dict[str, Any]:
    """Return `{"observation", "reward", "done"[, "metadata"]}` of an observation, bytes and arrays as they are.

    The rules are those of JSON: reward and done stand beside, metadata is repeated where it is not empty, and a reward
    that is no finite number is None with a note in the metadata.

    Raises:
        TypeError: It is no observation at all.
    """
    values = envelope_values(observation)
    reward, metadata = values.get("reward"), values.get("metadata")
    if type(reward) is not float or not math.isfinite(reward):
        reward, metadata = checked_reward(reward, metadata)
    message = {
        "observation": _fields(observation, exclude=BESIDE),
        "reward": reward,
        "done": bool(values.get("done")),
    }
    if metadata:
        message["metadata"] = metadata
    return message


def state_message(state: Any) -> Any:
    """Return all fields of a state, bytes and arrays as they are; no state at all is an empty map."""
    return {} if state is None else _fields(state, exclude=None)


def _fields(model: Any, *, exclude: set[str] | None) -> Any:
    if isinstance(model, BaseModel):
        if dumps_itself(model):
            return own_dump(model, exclude)
        try:
            return type(model).__pydantic_serializer__.to_python(model, exclude=exclude)
        except Exception as exc:
            logger.warning("%s could not be dumped at once (%s); it is sent field by field", type(model).__name__, exc)
    return {key: value for key, value in plain_fields(model).items() if key not in (exclude or ())}


def is_plain(value: Any) -> bool:
    """Whether every map in a value has keys of text; what else it holds is the packer's to find out."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str or (type(item) not in _SCALARS and not is_plain(item)):
                return False
        return True
    if kind is list or kind is tuple:
        return set(map(type, value)) <= _SCALARS or all(map(is_plain, value))
    return not isinstance(value, (Mapping, list, tuple))


def packable(value: Any, pack_array: PackArray) -> Any:
    """Turn one value that MessagePack does not know into one that it does (see the table above)."""
    parts = array_parts(value)
    if parts is not None:
        return pack_array(parts)
    return cleaned(value, pack_array)


def cleaned(value: Any, pack_array: PackArray, depth: int = 0) -> Any:
    """Copy a value as something that MessagePack takes for sure."""
    try:
        return _cleaned(value, pack_array, depth)
    except Exception as exc:
        logger.warning("a %s could not be encoded (%s)", type(value).__name__, exc)
        return f"<{type(value).__name__} that could not be encoded: {_text(str(exc))}>"


def _cleaned(value: Any, pack_array: PackArray, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if _MIN_INT <= value <= _MAX_INT else str(int(value))
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [cleaned(item, pack_array, depth + 1) for item in value]
    if (fields := _mapping_of(value)) is not None:
        return {_key(key): cleaned(item, pack_array, depth + 1) for key, item in fields.items()}
    if (parts := array_parts(value)) is not None:
        return pack_array(parts)
    return cleaned(_simpler(value), pack_array, depth + 1)


def _mapping_of(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, BaseModel):
        fields: Mapping[Any, Any] = _fields(value, exclude=None)
        return fields
    if isinstance(value, Mapping):
        return value
    return dict(vars(value)) if is_dataclass(value) and not isinstance(value, type) else None


def _simpler(value: Any) -> Any:
    """Do what JSON does with a value that only it knows: scalars of arrays, dates, enums, images."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        simple = item()
        return float(simple) if type(simple) is type(value) else simple
    return to_jsonable_python(value, fallback=jsonable, bytes_mode="base64")


def _key(key: Any) -> str:
    if isinstance(key, str):
        return _text(key)
    simple = to_jsonable_python({key: None}, fallback=jsonable, bytes_mode="base64")
    return next(iter(simple), "") if isinstance(simple, dict) else str(key)


def _text(value: str) -> str:
    """Replace halves of surrogate pairs, which have no UTF-8."""
    return value.encode("utf-8", "replace").decode() if not value.isascii() else str(value)


def without_arrays(value: Any) -> Any:
    """Copy a value with nested lists for arrays, for models that know lists only."""
    if isinstance(value, dict):
        return {key: without_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_arrays(item) for item in value]
    return value.tolist() if is_array(value) else value


def has_arrays(value: Any) -> bool:
    """Whether there is an array anywhere in a value."""
    if isinstance(value, dict):
        return any(map(has_arrays, value.values()))
    if isinstance(value, list):
        return any(map(has_arrays, value))
    return is_array(value)


__all__ = ["cleaned", "has_arrays", "is_plain", "observation_message", "packable", "state_message", "without_arrays"]
