"""Arrays as MessagePack extension type 1: `[dtype, shape, bytes]`, and back, with or without NumPy.

Knows dtypes and bytes; NumPy is loaded only where an array is really there.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections.abc import Iterable
from typing import Any, Final

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
    dtype: str = value.dtype.str
    if value.dtype.names is not None or not _PLAIN_DTYPE.fullmatch(dtype):
        return None
    shape = list(value.shape)
    return None if 0 in shape and _empty_lists(shape) > _MAX_EMPTY_LISTS else (dtype, shape, value.tobytes())


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
    dtype, shape, data = _checked(parts)
    try:
        import numpy as np  # an optional dependency
    except ImportError:
        return _lists(dtype, shape, data)
    return np.ndarray(shape, dtype=dtype, buffer=bytearray(data))


def _checked(parts: Any) -> ArrayParts:
    if not isinstance(parts, list) or len(parts) != 3:
        raise ValueError("an array must be [dtype, shape, bytes]")
    dtype, shape, data = parts
    if not isinstance(dtype, str) or not _PLAIN_DTYPE.fullmatch(dtype):
        raise ValueError(f"unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(_is_length(size) for size in shape):
        raise ValueError("the shape of an array must be a list of lengths")
    if not isinstance(data, bytes) or math.prod(shape) * int(dtype[2:]) != len(data):
        raise ValueError(f"an array's bytes do not fit its shape {shape}")
    if 0 in shape and _empty_lists(shape) > _MAX_EMPTY_LISTS:
        raise ValueError(f"an array without values must not have the shape {shape}")
    return dtype, shape, data


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
