"""The fields of an action as forms know them: `action_fields`, which custom pages are given.

Knows JSON schemas; the page itself makes its form from the whole schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..protocol.schema import json_schema

_LONG_TEXT = 100
_LONG_NAMES = ("message", "code")
_KINDS = {"boolean": "checkbox", "integer": "number", "number": "number", "string": "text"}


def action_fields(action_cls: type[Any] | None) -> list[dict[str, Any]]:
    """Describe each field of an action class; `metadata`, which every action has, is left out."""
    if action_cls is None:
        return []
    try:
        schema = json_schema(action_cls)
    except Exception:  # a class that pydantic cannot describe has no form
        return []
    required = schema.get("required", ())
    return [
        _field(name, _resolved(described, schema), is_required=name in required)
        for name, described in schema.get("properties", {}).items()
        if name != "metadata"
    ]


def is_chat(action_cls: type[Any] | None) -> bool:
    """Say whether an action is the tokens of a message: its field `tokens` is a tensor."""
    described = getattr(action_cls, "model_fields", {}).get("tokens")
    return described is not None and "Tensor" in str(described.annotation)


def _field(name: str, schema: Mapping[str, Any], *, is_required: bool) -> dict[str, Any]:
    description = schema.get("description", "")
    kind = _kind(name, schema)
    choices = schema.get("enum")
    if choices is None and "const" in schema:
        choices = [schema["const"]]
    return {
        "name": name,
        "type": kind,
        "required": is_required,
        "description": description,
        "default_value": schema.get("default"),
        "choices": choices,
        "min_value": schema.get("minimum", schema.get("exclusiveMinimum")),
        "max_value": schema.get("maximum", schema.get("exclusiveMaximum")),
        "min_length": schema.get("minLength"),
        "max_length": schema.get("maxLength"),
        "pattern": schema.get("pattern"),
        "placeholder": _placeholder(name, kind),
        "help_text": description or _help(name, kind),
    }


def _kind(name: str, schema: Mapping[str, Any]) -> str:
    lower = name.lower()
    if "tokens" in lower:
        return "tensor"
    if "enum" in schema or "const" in schema:
        return "select"
    kind = _KINDS.get(str(schema.get("type")), "text")
    is_long = schema.get("maxLength", 0) > _LONG_TEXT or any(word in lower for word in _LONG_NAMES)
    return "textarea" if kind == "text" and schema.get("type") == "string" and is_long else kind


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Follow references, and see through what only says that a value may be missing."""
    found = dict(schema)
    for _ in range(8):
        if "$ref" in found:
            target = root.get("$defs", {}).get(str(found.pop("$ref")).rsplit("/", 1)[-1], {})
            found = {**target, **found}
        options = [option for option in found.get("anyOf", ()) if option.get("type") != "null"]
        if len(options) == 1:
            del found["anyOf"]
            found = {**options[0], **found}
        elif "$ref" not in found:
            break
    return found


def _placeholder(name: str, kind: str) -> str:
    words = name.replace("_", " ")
    if kind == "tensor":
        return "Token ids, separated by commas: 1, 2, 3"
    return f"{words[:1].upper()}{words[1:]}"


def _help(name: str, kind: str) -> str:
    lower = name.lower()
    if kind == "tensor":
        return "The ids of the tokens, as whole numbers separated by commas"
    if "code" in lower:
        return "Source code that the environment runs"
    if "message" in lower:
        return "What to say"
    return ""
