"""Spaces for environments that were not made with Gymnasium, read from the JSON schemas of their models.

| field | space |
|---|---|
| boolean | `Discrete(2)` |
| integer with both bounds | `Discrete` |
| a choice of values (enum, literal) | `Discrete`, the number of the choice |
| number | `Box` without dimensions |
| text with a greatest length | `Text` of printable characters |
| list of a fixed length, of numbers | `Box` |
| model | `Dict` |

Anything else has no space, and neither has a model with such a field. Knows JSON schemas and spaces only.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from .spaces import SomeSpace, UnsupportedSpace

_BESIDE: Final = frozenset({"done", "reward", "metadata", "terminated", "truncated"})


@dataclass(frozen=True, slots=True)
class Derived:
    """A space, and how its values are written as JSON and read again."""

    space: SomeSpace
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def derive(schema: Mapping[str, Any]) -> Derived:
    """Find the space of a model's fields, those of the base classes left out.

    Raises:
        UnsupportedSpace: A field has none.
    """
    fields = {name: field for name, field in schema.get("properties", {}).items() if name not in _BESIDE}
    if not fields:
        raise UnsupportedSpace("the model has no fields of its own")
    return _model(fields, schema.get("$defs", {}), "")


def _model(fields: Mapping[str, Any], shared: Mapping[str, Any], path: str) -> Derived:
    found = {name: _derive(field, shared, f"{path}{name}") for name, field in fields.items()}
    return Derived(
        spaces.Dict({name: one.space for name, one in found.items()}),
        lambda value: {name: one.write(value[name]) for name, one in found.items()},
        lambda value: {name: one.read(value[name]) for name, one in found.items()},
    )


def _derive(schema: Mapping[str, Any], shared: Mapping[str, Any], path: str) -> Derived:
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _derive(shared.get(reference.rpartition("/")[2], {}), shared, path)
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if choices:
        return _choice(choices)
    kind = schema.get("type")
    if kind == "boolean":
        return Derived(spaces.Discrete(2), bool, np.int64)
    if kind == "integer" and (bounds := _integer_bounds(schema)) is not None:
        low, high = bounds
        return Derived(spaces.Discrete(high - low + 1, start=low), int, np.int64)
    if kind in ("number", "array"):
        return _box(schema, path)
    if kind == "string" and "maxLength" in schema:
        text = spaces.Text(schema["maxLength"], min_length=schema.get("minLength", 0), charset=string.printable)
        return Derived(text, str, str)
    if kind == "object" and schema.get("properties"):
        return _model(schema["properties"], shared, f"{path}.")
    raise UnsupportedSpace(f"the field {path} has no Gymnasium space")


def _choice(choices: list[Any]) -> Derived:
    return Derived(
        spaces.Discrete(len(choices)),
        lambda value: choices[int(value)],
        lambda value: np.int64(choices.index(value)),
    )


def _integer_bounds(schema: Mapping[str, Any]) -> tuple[int, int] | None:
    low = schema.get("minimum", schema.get("exclusiveMinimum", np.nan) + 1)
    high = schema.get("maximum", schema.get("exclusiveMaximum", np.nan) - 1)
    return None if low != low or high != high or high < low else (int(low), int(high))


def _box(schema: Mapping[str, Any], path: str) -> Derived:
    shape: list[int] = []
    while schema.get("type") == "array":
        size = schema.get("maxItems")
        if size is None or size != schema.get("minItems") or "items" not in schema:
            raise UnsupportedSpace(f"the field {path} is a list whose length is not fixed")
        shape.append(size)
        schema = schema["items"]
    kind: Any = {"integer": np.int64, "number": np.float64}.get(schema.get("type", ""))
    if kind is None:
        raise UnsupportedSpace(f"the field {path} is no list of numbers")
    least, most = (np.iinfo(kind).min, np.iinfo(kind).max) if kind is np.int64 else (-np.inf, np.inf)
    low = schema.get("minimum", schema.get("exclusiveMinimum", least))
    high = schema.get("maximum", schema.get("exclusiveMaximum", most))
    return Derived(
        spaces.Box(low, high, tuple(shape), kind),
        lambda value: np.asarray(value, kind).tolist(),
        lambda value: np.asarray(value, kind).reshape(shape),
    )
