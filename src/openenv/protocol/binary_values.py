"""Encode environment values as MessagePack, which keeps bytes and arrays as they are.

| value                             | in MessagePack                                  |
|-----------------------------------|-------------------------------------------------|
| bytes, bytearray, memoryview      | `bin`                                           |
| NumPy array, torch tensor         | extension type 1; scalars as numbers            |
| an integer of more than 64 bits   | its digits, as text                             |
| a key that is not text            | the key's text in JSON                          |
| models, dataclasses, dates, ...   | as in `model_dump()`, then as in JSON           |
| anything else                     | its `repr`                                      |

As in JSON, a value that cannot be encoded never loses the step that made it. Knows pydantic; must not know frames.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from .json_values import (
    BESIDE,
    ValueLimit,
    add_prompt,
    checked_reward,
    dumps_itself,
    envelope_values,
    jsonable,
    own_dump,
    plain_fields,
)

# -- arrays: MessagePack extension type 1, `[dtype, shape, bytes]`; NumPy is loaded for the first array ---------------

ARRAY_TYPE: Final = 1

# Everything that means the same on every machine. Others (text, objects, long doubles) travel as nested lists.
_PLAIN_DTYPE: Final = re.compile(r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16)")
_MAX_DIMENSIONS: Final = 32
# An array without values takes a few bytes and can be billions of empty lists, as which many models know arrays only.
_MAX_EMPTY_LISTS: Final = 256
_STRUCT_CODES: Final = {
    "b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d",
}  # fmt: skip

ArrayParts = tuple[str, list[int], bytes]


def array_parts(value: Any) -> ArrayParts | None:
    """Return dtype, shape and bytes of a NumPy array or a tensor; None for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if not isinstance(value, numpy.ndarray):
        value = _from_tensor(value)
        if not isinstance(value, numpy.ndarray):
            return None
    dtype = _plain_dtype(value.dtype)
    if dtype is None:
        return None
    shape = list(value.shape)
    return None if 0 in shape and _empty_lists(shape) > _MAX_EMPTY_LISTS else (dtype, shape, value.tobytes())


@functools.lru_cache(maxsize=64)
def _plain_dtype(dtype: Any) -> str | None:
    """Return the name of a dtype that means the same on every machine; None for another."""
    return dtype.str if dtype.names is None and _PLAIN_DTYPE.fullmatch(dtype.str) else None


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _from_tensor(value: Any) -> Any:
    """Return a torch tensor as an array, where its type has one."""
    detach = getattr(value, "detach", None)
    if not callable(detach) or not hasattr(value, "layout"):
        return None
    try:
        return detach().cpu().numpy()
    except Exception:  # bfloat16, sparse: they travel as lists
        return None


def array_of(parts: Any) -> Any:
    """Build an array from its parts: a writable NumPy array, or nested lists where NumPy is not installed.

    Raises:
        ValueError: The parts do not fit together.
    """
    if not isinstance(parts, list) or len(parts) != 3:
        raise ValueError("an array must be [dtype, shape, bytes]")
    dtype, shape, data = parts
    try:
        size = _known_bytes(dtype, *shape) if type(shape) is list else _checked_bytes(dtype, shape)
    except TypeError:  # a list of lists
        size = _checked_bytes(dtype, shape)
    if not isinstance(data, bytes) or size != len(data):
        raise ValueError(f"an array's bytes do not fit its shape {shape}")
    try:
        import numpy as np  # an optional dependency
    except ImportError:
        return _lists(dtype, shape, data)
    return np.ndarray(shape, dtype=dtype, buffer=bytearray(data))


def _checked_bytes(dtype: Any, shape: Any) -> int:
    """Return how many bytes an array has.

    Raises:
        ValueError: NumPy has no array of that type and shape.
    """
    if not isinstance(dtype, str) or not _PLAIN_DTYPE.fullmatch(dtype):
        raise ValueError(f"unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(_is_length(size) for size in shape):
        raise ValueError("the shape of an array must be a list of lengths")
    if 0 in shape and _empty_lists(shape) > _MAX_EMPTY_LISTS:
        raise ValueError(f"an array without values must not have the shape {shape}")
    return math.prod(shape) * int(dtype[2:])


@functools.lru_cache(maxsize=256, typed=True)  # observations look alike; typed, because True equals 1 but is no length
def _known_bytes(dtype: Any, *shape: Any) -> int:
    return _checked_bytes(dtype, list(shape))


def _empty_lists(shape: list[int]) -> int:
    """How many empty lists an array without values is, as nested lists."""
    return math.prod(shape[: shape.index(0)])


def _is_length(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**40


def _lists(dtype: str, shape: list[int], data: bytes) -> Any:
    order, kind = ("<" if dtype[0] == "|" else dtype[0]), dtype[1:]
    if kind.startswith("c"):
        part = "f" if kind == "c8" else "d"
        numbers = struct.unpack(f"{order}{2 * math.prod(shape)}{part}", data)
        flat: Iterable[Any] = [complex(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
    else:
        flat = struct.unpack(f"{order}{math.prod(shape)}{_STRUCT_CODES[kind]}", data)
    values = list(flat)
    for size in reversed(shape[1:]):
        count = len(values) // size if size else math.prod(shape[:-1])
        values = [values[at * size : (at + 1) * size] for at in range(count)]
    return values if shape else values[0]


logger = logging.getLogger(__name__)

PackArray = Callable[[ArrayParts], Any]

_SCALARS: Final = frozenset({str, int, float, bool, type(None), bytes, bytearray})
_MAX_DEPTH: Final = 100  # readers of JSON stop at 200
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


def observation_message(observation: Any) -> dict[str, Any]:
    """Return `{"observation", "reward", "done"[, "metadata"]}` of an observation, bytes and arrays as they are.

    The rules are those of JSON: reward and done are separate keys, and non-empty metadata is repeated.

    Raises:
        TypeError: The value is not an observation.
        NonFiniteReward: The reward is not a finite number.
    """
    add_prompt(observation)
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


def without_arrays(value: Any, limit: ValueLimit | None = None) -> Any:
    """Copy a value with nested lists for arrays, for models that know lists only.

    Raises:
        TooManyValues: The arrays would be more lists and numbers than the limit.
    """
    if limit is not None:
        arrays = list(_arrays_in(value))
        lists = sum(math.prod(array.shape[:depth]) for array in arrays for depth in range(array.ndim))
        limit.check_counts(lists + sum(array.size for array in arrays), lists)
    return _as_lists(value)


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_lists(item) for item in value]
    return value.tolist() if is_array(value) else value


def has_arrays(value: Any) -> bool:
    """Whether there is an array anywhere in a value."""
    return next(_arrays_in(value), None) is not None


def _arrays_in(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _arrays_in(item)
    elif is_array(value):
        yield value
