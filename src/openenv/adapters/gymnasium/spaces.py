"""Gymnasium's spaces on the wire: spaces as JSON, schemas of their values, values, and spaces derived from a schema.

Knows Gymnasium and NumPy; must not know environments or clients.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from openenv.protocol.columns import Column, PathPart

SPACE_KEY: Final = "x-gymnasium-space"
"""The key in a JSON schema that holds the space of an action or observation model."""

SomeSpace = spaces.Space[Any]
_MOST_SPACES: Final = 10_000
_MOST_ELEMENTS: Final = 2**25
_UNREADABLE: Final = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(MemoryError, RecursionError, TypeError, ValueError),
)
"""The errors of Gymnasium and NumPy for values that describe no space."""


class UnsupportedSpace(TypeError):
    """A space or a schema that cannot be translated."""


def describe(space: SomeSpace) -> dict[str, Any]:
    """Return a space as JSON.

    Raises:
        UnsupportedSpace: It is of another kind.
    """
    # The class of a space decides its form on the wire. Subclasses of a listed class take its form.
    match space:
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
        case spaces.Box():
            bounds = {"low": _bound(space.low), "high": _bound(space.high)}
            # `dtype.str` includes the byte order ("<f4"), so the receiver rebuilds the same type on any machine.
            return {"type": "Box", "shape": list(space.shape), "dtype": space.dtype.str, **bounds}
        case spaces.MultiDiscrete():
            numbers = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
            return {"type": "MultiDiscrete", "dtype": np.dtype(space.dtype).str, **numbers}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
        case spaces.Text():
            lengths = {"min_length": space.min_length, "max_length": space.max_length}
            # Sorted, because a set of characters has no order and equal spaces must have equal descriptions.
            return {"type": "Text", "charset": "".join(sorted(space.character_set)), **lengths}
        case spaces.Dict():
            return {"type": "Dict", "spaces": {key: describe(inner) for key, inner in space.spaces.items()}}
        case spaces.Tuple():
            return {"type": "Tuple", "spaces": [describe(inner) for inner in space.spaces]}
        case _:
            raise UnsupportedSpace(f"{type(space).__name__} spaces cannot be described")


def space_of(description: dict[str, Any]) -> SomeSpace:
    """Build a space from its description, which a server may have sent.

    Raises:
        UnsupportedSpace: It is of another kind, too large, or no description of a space.
    """
    try:
        return _space_of(description, _SpaceLimit())
    except UnsupportedSpace:
        raise
    except _UNREADABLE as exc:
        raise UnsupportedSpace(f"this describes no space: {type(exc).__name__}: {exc}") from exc


class _SpaceLimit:
    """Counts spaces and elements: Gymnasium allocates the bounds of every element of a `Box`."""

    def __init__(self) -> None:
        self._spaces = self._elements = 0

    def count(self, elements: int = 1) -> None:
        """Count a space.

        Raises:
            UnsupportedSpace: There are too many, or it is too large.
        """
        self._spaces += 1
        self._elements += max(1, elements)
        if self._spaces > _MOST_SPACES or self._elements > _MOST_ELEMENTS:
            raise UnsupportedSpace(f"there are more than {_MOST_SPACES} spaces, or {_MOST_ELEMENTS} elements in them")


def _space_of(description: dict[str, Any], limit: _SpaceLimit) -> SomeSpace:
    size = description.get("shape", description.get("n") if description.get("type") == "MultiBinary" else None)
    limit.count(size if isinstance(size, int) else math.prod(size or ()))
    match description.get("type"):
        case "Discrete":
            return spaces.Discrete(description["n"], start=description.get("start", 0))
        case "Box":
            dtype: Any = np.dtype(description["dtype"])
            shape = tuple(description["shape"])
            # Bounds may be the texts "inf" and "-inf" (see `_finite`), which only a float type can parse.
            kind = np.float64 if dtype.kind == "f" else dtype
            low, high = (np.broadcast_to(np.asarray(description[key], kind), shape) for key in ("low", "high"))
            return spaces.Box(low.astype(dtype), high.astype(dtype), shape, dtype.type)
        case "MultiDiscrete":
            # Older servers send no `start`; Gymnasium then begins at 0.
            return spaces.MultiDiscrete(
                description["nvec"], np.dtype(description["dtype"]).type, start=description.get("start")
            )
        case "MultiBinary":
            return spaces.MultiBinary(description["n"])
        case "Text":
            return spaces.Text(
                description["max_length"], min_length=description["min_length"], charset=description["charset"]
            )
        case "Dict":
            return spaces.Dict({key: _space_of(inner, limit) for key, inner in description["spaces"].items()})
        case "Tuple":
            return spaces.Tuple([_space_of(inner, limit) for inner in description["spaces"]])
        case other:
            raise UnsupportedSpace(f"spaces of the type {other!r} are not supported")


def schema_of(space: SomeSpace) -> dict[str, Any]:
    """Return the JSON schema of a space's values."""
    match space:
        case spaces.Discrete():
            return {"type": "integer", "minimum": int(space.start), "maximum": int(space.start + space.n - 1)}
        case spaces.Box():
            # Schemas describe shapes exactly, but no bounds per element: the space in the schema's extension has them.
            return _array_schema("integer" if space.dtype.kind in "iu" else "number", space.shape)
        case spaces.MultiDiscrete() | spaces.MultiBinary():
            return _array_schema("integer", space.shape)
        case spaces.Text():
            return {"type": "string", "minLength": space.min_length, "maxLength": space.max_length}
        case spaces.Dict():
            inner = {key: schema_of(value) for key, value in space.spaces.items()}
            return {"type": "object", "properties": inner, "required": list(inner)}
        case spaces.Tuple():
            count = len(space.spaces)
            items = [schema_of(value) for value in space.spaces]
            return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}
        # Unknown spaces accept any value. `describe` has refused them before a server could publish this.
        case _:
            return {}


def to_wire(space: SomeSpace, value: Any) -> Any:
    """Turn a value of a space into numbers, text, arrays, lists and maps."""
    match space:
        case spaces.Discrete():
            return int(value)
        case spaces.Text():
            return str(value)
        case spaces.Dict():
            return {key: to_wire(inner, value[key]) for key, inner in space.spaces.items()}
        case spaces.Tuple():
            # `strict`: a tuple of another length would otherwise lose its tail silently.
            return [to_wire(inner, one) for inner, one in zip(space.spaces, value, strict=True)]
        case _:
            return np.asarray(value, dtype=space.dtype)


def from_wire(space: SomeSpace, value: Any) -> Any:
    """Turn JSON into a value of a space.

    Raises:
        ValueError: It does not fit.
    """
    # MessagePack carries arrays with their type, JSON carries nested lists. Only lists have to be converted.
    # An array of MessagePack is the value already.
    if type(value) is np.ndarray and value.dtype == space.dtype and value.shape == space.shape:
        return value
    try:
        return _from_wire(space, value)
    except (TypeError, KeyError, OverflowError) as exc:
        raise ValueError(f"not a value of {space}: {exc}") from None


def checker(space: SomeSpace) -> Callable[[Any], Any]:
    """Return a function that turns JSON into a value that is in a space.

    It raises ValueError for one that does not fit, or is out of bounds.
    """

    def check(value: Any) -> Any:
        converted = from_wire(space, value)
        if not space.contains(converted):
            raise ValueError(f"{str(value)[:100]} is not in {str(space)[:200]}")
        return converted

    # `contains` of a Discrete space builds arrays. Most environments have one, and each step pays for it.
    if not isinstance(space, spaces.Discrete):
        return check
    first, last = int(space.start), int(space.start + space.n - 1)

    def check_choice(value: Any) -> Any:  # nearly all actions, in a third of the time
        return np.int64(value) if type(value) is int and first <= value <= last else check(value)

    return check_choice


def wire_writer(space: SomeSpace) -> Callable[[Any], Any]:
    """Return `to_wire` of a space; for numbers and arrays without looking at the space again."""
    if isinstance(space, spaces.Discrete):
        return int
    # Arrays are encoded by the protocol (MessagePack as bytes, JSON as lists), so no conversion happens here.
    return partial(np.asarray, dtype=space.dtype) if is_of_arrays(space) else partial(to_wire, space)


def is_of_arrays(space: SomeSpace) -> bool:
    """Whether the values of a space are arrays."""
    return isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary))


# -- values as columns ------------------------------------------------------------------------------------------------


class SpaceColumns:
    """The arrays that hold values of a space, one value in each row.

    A `Dict` or `Tuple` has an array for each of its parts.

    Args:
        space: The space.
        name: The field of the model that has the value.

    Raises:
        UnsupportedSpace: A part of the space is not an array of numbers.
    """

    def __init__(self, space: SomeSpace, name: str) -> None:
        self._space = space
        parts = list(_parts(space, (name,)))
        self._spaces = [part for _, part in parts]
        self.columns = tuple(Column(path, np.dtype(part.dtype).str, part.shape or ()) for path, part in parts)
        self._bounds = [_bounds(part) for part in self._spaces]
        # Most spaces have one array. Its rows are the values.
        self.is_single = is_of_arrays(space) or isinstance(space, spaces.Discrete)

    def split(self, value: Any) -> list[Any]:
        """Return the part of a value for each column."""
        return [value] if self.is_single else list(_leaves(self._space, value))

    def join(self, parts: Sequence[Any]) -> Any:
        """Return the value of these parts; also a batch of values of a batch for each part."""
        return parts[0] if self.is_single else _joined(self._space, iter(parts))

    def contains(self, arrays: Sequence[Any]) -> Any:
        """Return for each row whether the space contains its value."""
        inside = None
        for array, (low, high) in zip(arrays, self._bounds, strict=True):
            fits = (array >= low) & (array <= high)
            if fits.ndim > 1:
                fits = fits.reshape(len(array), -1).all(1)
            inside = fits if inside is None else inside & fits
        return inside


def _parts(space: SomeSpace, path: tuple[PathPart, ...]) -> Iterator[tuple[tuple[PathPart, ...], SomeSpace]]:
    match space:
        case spaces.Dict():
            for key, inner in space.spaces.items():
                yield from _parts(inner, (*path, key))
        case spaces.Tuple():
            for index, inner in enumerate(space.spaces):
                yield from _parts(inner, (*path, index))
        case spaces.Discrete() | spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            yield path, space
        case _:
            raise UnsupportedSpace(f"values of {type(space).__name__} spaces are not arrays")


def _leaves(space: SomeSpace, value: Any) -> Iterator[Any]:
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _leaves(inner, value[key])
    elif isinstance(space, spaces.Tuple):
        for inner, one in zip(space.spaces, value, strict=True):
            yield from _leaves(inner, one)
    else:
        yield value


def _joined(space: SomeSpace, parts: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _joined(inner, parts) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_joined(inner, parts) for inner in space.spaces)
    return next(parts)


def _bounds(space: SomeSpace) -> tuple[Any, Any]:
    """Return the least and the greatest value of each number in a value."""
    match space:
        case spaces.Discrete():
            return int(space.start), int(space.start + space.n - 1)
        case spaces.Box():
            return space.low, space.high
        case spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
        case _:
            return 0, 1


def _from_wire(space: SomeSpace, value: Any) -> Any:
    match space:
        case spaces.Discrete():
            # `True` is an int in Python, and 1.5 would be cut off to 1. Both are mistakes of the caller.
            if isinstance(value, bool) or int(value) != value:
                raise ValueError(f"{value!r} must be an integer")
            return np.int64(value)
        case spaces.Text():
            return str(value)
        case spaces.Dict():
            return {key: _from_wire(inner, value[key]) for key, inner in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_from_wire(inner, one) for inner, one in zip(space.spaces, value, strict=True))
        case _:
            return _array(np.asarray(_nan_for_none(value)), np.dtype(space.dtype)).reshape(space.shape)


def _array(numbers: Any, dtype: Any) -> Any:
    if numbers.dtype.kind not in "biuf":
        raise ValueError("numbers were expected")
    # NumPy warns about every overflow; the comparison below reports it as an error instead.
    with np.errstate(all="ignore"):
        array = numbers.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(array, numbers):  # else 300 would become the byte 44
        raise ValueError(f"integers of the type {dtype} were expected")
    return array


def _nan_for_none(value: Any) -> Any:
    """Read null as NaN: JSON has no infinities and no NaN, and all become null."""
    if value is None:
        return float("nan")
    if isinstance(value, list) and any(one is None or isinstance(one, list) for one in value):
        return [_nan_for_none(one) for one in value]
    return value


def _bound(values: Any) -> Any:
    """Write bounds: one number if all are equal; infinities and NaN as text, which JSON can carry."""
    # An image has 3 x 84 x 84 equal bounds. One number instead makes its description readable.
    array = np.asarray(values)
    if array.size and (array == array.flat[0]).all():
        array = array.flat[0]
    return _finite(array.tolist())


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return value if not isinstance(value, float) or np.isfinite(value) else str(value)


def _array_schema(kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": kind}
    # From the innermost dimension outwards: shape (2, 3) is a list of 2 lists of 3 numbers.
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema


# -- spaces of models that were not made with Gymnasium ---------------------------------------------------------------

# Fields that every observation has. They are Gymnasium's reward, flags and info, not its observation.
_BASE_FIELDS: Final = frozenset({"done", "reward", "metadata", "terminated", "truncated"})


@dataclass(frozen=True, slots=True)
class SpaceCodec:
    """A space, and how its values are written as JSON and read back."""

    space: SomeSpace
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def derive(schema: Mapping[str, Any]) -> SpaceCodec:
    """Find the space of a model's own fields.

    | field | space |
    |---|---|
    | boolean | `Discrete(2)` |
    | integer with both bounds | `Discrete` |
    | a choice of values (enum, literal) | `Discrete`, the index of the choice |
    | number | `Box` without dimensions |
    | text with a maximum length | `Text` of printable characters |
    | list of numbers, of a fixed length | `Box` |
    | model | `Dict` |

    Raises:
        UnsupportedSpace: A field is of another kind.
    """
    try:
        fields = {name: field for name, field in schema.get("properties", {}).items() if name not in _BASE_FIELDS}
        if not fields:
            raise UnsupportedSpace("the model adds no fields to its base class")
        return _model(fields, schema.get("$defs", {}), "")
    except UnsupportedSpace:
        raise
    except _UNREADABLE as exc:  # references in a circle, for example
        raise UnsupportedSpace(f"the schema has no space: {type(exc).__name__}: {exc}") from exc


def _model(fields: Mapping[str, Any], shared: Mapping[str, Any], path: str) -> SpaceCodec:
    codecs = {name: _derive(field, shared, f"{path}{name}") for name, field in fields.items()}
    return SpaceCodec(
        spaces.Dict({name: codec.space for name, codec in codecs.items()}),
        lambda value: {name: codec.write(value[name]) for name, codec in codecs.items()},
        lambda value: {name: codec.read(value[name]) for name, codec in codecs.items()},
    )


def _derive(schema: Mapping[str, Any], shared: Mapping[str, Any], path: str) -> SpaceCodec:
    # Pydantic moves nested models to `$defs` and refers to them: {"$ref": "#/$defs/Point"}.
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _derive(shared.get(reference.rpartition("/")[2], {}), shared, path)
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if choices:
        return _choice(choices)
    kind = schema.get("type")
    if kind == "boolean":
        return SpaceCodec(spaces.Discrete(2), bool, np.int64)
    # An integer without both bounds has no Discrete space: Gymnasium needs a finite number of choices.
    if kind == "integer" and (bounds := _integer_bounds(schema)) is not None:
        low, high = bounds
        return SpaceCodec(spaces.Discrete(high - low + 1, start=low), int, np.int64)
    if kind in ("number", "array"):
        return _box(schema, path)
    # Text without a maximum length has no space either: `Text` samples up to that length.
    if kind == "string" and "maxLength" in schema:
        text = spaces.Text(schema["maxLength"], min_length=schema.get("minLength", 0), charset=string.printable)
        return SpaceCodec(text, str, str)
    if kind == "object" and schema.get("properties"):
        return _model(schema["properties"], shared, f"{path}.")
    raise UnsupportedSpace(f"the field {path} has no Gymnasium space")


def _choice(choices: list[Any]) -> SpaceCodec:
    return SpaceCodec(
        spaces.Discrete(len(choices)),
        lambda value: choices[int(value)],
        lambda value: np.int64(choices.index(value)),
    )


def _integer_bounds(schema: Mapping[str, Any]) -> tuple[int, int] | None:
    # A missing bound becomes NaN, and NaN differs from itself: that is the test in the last line.
    low = schema.get("minimum", schema.get("exclusiveMinimum", np.nan) + 1)
    high = schema.get("maximum", schema.get("exclusiveMaximum", np.nan) - 1)
    return None if low != low or high != high or high < low else (int(low), int(high))


def _box(schema: Mapping[str, Any], path: str) -> SpaceCodec:
    # Each level of nesting is one dimension, and must have a fixed length.
    shape: list[int] = []
    while schema.get("type") == "array":
        size = schema.get("maxItems")
        if size is None or size != schema.get("minItems") or "items" not in schema:
            raise UnsupportedSpace(f"the field {path} is a list without a fixed length")
        shape.append(size)
        schema = schema["items"]
    _SpaceLimit().count(math.prod(shape))
    kind: Any = {"integer": np.int64, "number": np.float64}.get(schema.get("type", ""))
    if kind is None:
        raise UnsupportedSpace(f"the field {path} must be a list of numbers")
    # Unbounded integers get the limits of int64, unbounded numbers infinity.
    least, most = (np.iinfo(kind).min, np.iinfo(kind).max) if kind is np.int64 else (-np.inf, np.inf)
    low = schema.get("minimum", schema.get("exclusiveMinimum", least))
    high = schema.get("maximum", schema.get("exclusiveMaximum", most))
    return SpaceCodec(
        spaces.Box(low, high, tuple(shape), kind),
        lambda value: np.asarray(value, kind).tolist(),
        lambda value: np.asarray(value, kind).reshape(shape),
    )
