"""JSON schemas as pydantic writes them: does a value fit, and which small values would?

Knows the keywords that models produce; what it does not know, it lets pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
_DEEPEST = 24
_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


class Unmakeable(Exception):
    """No value can be made for a schema; the text names the place."""


def misfits(value: Any, schema: Schema) -> list[str]:
    """Return what does not fit, each as `place: reason`; nothing where all does."""
    return list(_misfits(value, schema, schema, "", 0))


def _misfits(value: Any, schema: Any, root: Schema, place: str, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    schema = _resolved(schema, root)
    for keyword in ("anyOf", "oneOf"):
        if options := schema.get(keyword):
            tried = [list(_misfits(value, one, root, place, depth + 1)) for one in options]
            if all(tried):
                only = f"{place or 'value'}: {_shown(value)} fits no alternative"
                yield from tried[0] if len(tried) == 1 else [only]
    for one in schema.get("allOf", ()):
        yield from _misfits(value, one, root, place, depth + 1)
    yield from _wrong_kind(value, schema, place or "value")
    if isinstance(value, dict):
        yield from _wrong_members(value, schema, root, place, depth)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _misfits(item, _item_schema(schema, index), root, f"{place}[{index}]", depth + 1)


def _wrong_kind(value: Any, schema: Schema, place: str) -> Iterator[str]:
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    if kinds and not any(_TYPES.get(kind, lambda _: True)(value) for kind in kinds):
        yield f"{place}: {_shown(value)} is not of type {' or '.join(kinds)}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{place}: {_shown(value)} is not {_shown(schema['const'])}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {_shown(value)} is none of {_shown(schema['enum'])}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from _out_of_bounds(value, schema, place)
    size = len(value) if isinstance(value, str | list) else None
    if size is not None:
        least, most = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
        if not schema.get(least, 0) <= size <= schema.get(most, size):
            yield f"{place}: its length {size} is out of bounds"
    if isinstance(value, str) and "pattern" in schema and not _matches(schema["pattern"], value):
        yield f"{place}: {_shown(value)} does not match {schema['pattern']}"


def _out_of_bounds(value: float, schema: Schema, place: str) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if (low is not None and value < low) or (above is not None and value <= above):
        yield f"{place}: {value} is too small"
    if (high is not None and value > high) or (below is not None and value >= below):
        yield f"{place}: {value} is too large"


def _wrong_members(value: dict[str, Any], schema: Schema, root: Schema, place: str, depth: int) -> Iterator[str]:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place or 'value'}: {name} is missing"
    others = schema.get("additionalProperties", True)
    for name, item in value.items():
        inner = f"{place}.{name}" if place else name
        if name in properties:
            yield from _misfits(item, properties[name], root, inner, depth + 1)
        elif others is False:
            yield f"{inner}: there is no such field"
        else:
            yield from _misfits(item, others, root, inner, depth + 1)


def _item_schema(schema: Schema, index: int) -> Any:
    first = schema.get("prefixItems", ())
    return first[index] if index < len(first) else schema.get("items")


def _resolved(schema: Schema, root: Schema) -> Schema:
    """Follow a reference into the document's own definitions."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part, {}) if isinstance(found, Mapping) else {}
        schema = {**found, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def _matches(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def make(schema: Schema, variant: int = 0) -> Any:
    """Make a small value that fits: only what is required, and the least of it; further variants are a little more.

    Raises:
        Unmakeable: The schema asks for something that cannot be made up, such as a pattern.
    """
    value = _make(schema, schema, variant, "action", 0)
    if problems := misfits(value, schema):
        raise Unmakeable(problems[0])
    return value


def _make(schema: Any, root: Schema, variant: int, place: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise Unmakeable(f"{place} has no end")
    if not isinstance(schema, Mapping):
        return None
    schema = _resolved(schema, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][variant % len(schema["enum"])]
    if variant == 0 and "default" in schema:
        return schema["default"]
    if schema.get("examples"):
        return schema["examples"][variant % len(schema["examples"])]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if schema.get(keyword):
            return _make(schema[keyword][0], root, variant, place, depth + 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object" or "properties" in schema:
        return _make_object(schema, root, variant, place, depth)
    if kind == "array":
        count = schema.get("minItems", len(schema.get("prefixItems", ())))
        return [_make(_item_schema(schema, i), root, variant, f"{place}[{i}]", depth + 1) for i in range(count)]
    return _make_plain(kind, schema, variant)


def _make_object(schema: Schema, root: Schema, variant: int, place: str, depth: int) -> dict[str, Any]:
    properties = schema.get("properties", {})
    return {
        name: _make(properties.get(name, {}), root, variant, f"{place}.{name}", depth + 1)
        for name in schema.get("required", ())
    }


def _make_plain(kind: str | None, schema: Schema, variant: int) -> Any:
    if kind == "boolean":
        return bool(variant % 2)
    if kind == "integer":
        return _between(schema, variant)
    if kind == "number":
        return float(_between(schema, variant))
    if kind == "string":
        least = schema.get("minLength", 0)
        return ("abcdefgh" * (1 + least))[: min(least + variant, schema.get("maxLength", least + variant))]
    return None


def _between(schema: Schema, variant: int) -> int | float:
    """Return the number within the bounds that is nearest to zero, then ones further away."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if above is not None and below is not None and above + 1 > below - 1:  # an open interval of fractions
        return float(above + below) / 2
    low = above + 1 if low is None and above is not None else low
    high = below - 1 if high is None and below is not None else high
    first: int | float = 0
    first = first if low is None else max(first, low)
    first = first if high is None else min(first, high)
    for number in (first + variant, first - variant):
        if (low is None or number >= low) and (high is None or number <= high):
            return number
    return first
