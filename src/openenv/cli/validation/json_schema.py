"""JSON schemas as pydantic writes them: which values break one (by `jsonschema`), and small values that satisfy one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
_DEEPEST = 24


class Unmakeable(Exception):
    """No value can be generated for a schema; the text names the place."""


def violations(value: Any, schema: Schema) -> list[str]:
    """Return each violation as `place: reason`; an empty list where the value satisfies the schema.

    A schema that cannot be evaluated (an unknown type, a reference that leads nowhere or in a circle, a pattern in
    another dialect of regular expressions) is not the value's fault, so it violates nothing.
    """
    import jsonschema
    import referencing

    # The empty registry keeps a schema from another server from making this process fetch what it refers to.
    validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
    problems: list[str] = []
    try:
        for error in validator.iter_errors(value):
            problems += _sentences(error)
    except (jsonschema.exceptions.UnknownType, referencing.exceptions.Unresolvable, re.error, RecursionError):
        pass
    return problems


def _sentences(error: Any) -> Iterator[str]:
    """Describe one `jsonschema.ValidationError` in a line, or in one per unknown field."""
    inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    place = inner.removeprefix(".") or "value"
    rule, limit, value = error.validator, error.validator_value, error.instance
    if rule == "additionalProperties" and limit is False:
        for name in value.keys() - error.schema.get("properties", {}).keys():
            yield f"{inner}.{name}".removeprefix(".") + ": there is no such field"
        return
    if rule in ("anyOf", "oneOf"):
        if len(limit) == 1:
            for only in error.context:
                yield from _sentences(only)
            return
        reason = f"{_shown(value)} fits no alternative"
    elif rule == "type":
        reason = f"{_shown(value)} is not of type {limit if isinstance(limit, str) else ' or '.join(limit)}"
    elif rule == "required":
        reason = f"{next((name for name in limit if error.message.startswith(repr(name))), limit)} is missing"
    elif rule in ("const", "enum"):
        reason = f"{_shown(value)} is {'not' if rule == 'const' else 'none of'} {_shown(limit)}"
    elif rule in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        reason = f"{value} is too {'small' if 'inimum' in rule else 'large'}"
    elif rule in ("minLength", "maxLength", "minItems", "maxItems"):
        reason = f"its length {len(value)} is out of bounds"
    elif rule == "pattern":
        reason = f"{_shown(value)} does not match {limit}"
    else:
        reason = str(error.message)
    yield f"{place}: {reason}"


def _item_schema(schema: Schema, index: int) -> Any:
    first = schema.get("prefixItems", ())
    return first[index] if index < len(first) else schema.get("items")


def _resolved(schema: Schema, root: Schema) -> Schema:
    """Follow a reference into the document's own definitions."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part, {}) if isinstance(target, Mapping) else {}
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def make(schema: Schema, variant: int = 0) -> Any:
    """Generate a small value that satisfies a schema: required fields only, smallest values; higher variants vary them.

    Raises:
        Unmakeable: The schema asks for something that cannot be generated, such as a pattern.
    """
    value = _make(schema, schema, variant, "action", 0)
    if problems := violations(value, schema):
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
