"""Models of actions, observations and states as validators and JSON schemas; example values of such schemas.

Knows pydantic models; must not know which environment they belong to.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, from_json
from typing_extensions import TypedDict

from openenv.types import Action

from .generics import class_path
from .tool_messages import CallToolAction, ListToolsAction

_TOOL_ACTIONS: dict[str, type[Action]] = {"list_tools": ListToolsAction, "call_tool": CallToolAction}
# Only these classes stand for "any action, tools included"; a subclass means exactly itself.
_OPEN_ACTION_CLASSES = frozenset({Action, ListToolsAction, CallToolAction})
_TOOL_WORDS = frozenset({"type", "tool_name", "tool", "name", "arguments", "args"})
_TOOL_SHAPES = (
    "A tool action says which it is: "
    '{"type": "list_tools"}, or {"type": "call_tool", "tool_name": "NAME", "arguments": {...}}'
)


ARRAY_KEY = "x-openenv-array"
"""In the schema of an array, which travels as nested lists: the type of its numbers, such as `uint8`, or null."""
_ARRAY_CLASSES = ("numpy.ndarray", "torch.Tensor", "torch._tensor.Tensor")


class _TolerantSchema(GenerateJsonSchema):
    """Describes a type that JSON schema cannot express as 'anything' instead of failing as a whole."""

    def handle_invalid_for_json_schema(self, schema: CoreSchema, error_info: str) -> JsonSchemaValue:
        if class_path(schema.get("cls")) in _ARRAY_CLASSES:
            return {"description": "An array, as nested lists", "items": {}, ARRAY_KEY: None}
        return {"description": f"not expressible as JSON schema: {error_info}"}


def json_schema(model: type[Any]) -> dict[str, Any]:
    """Return the JSON schema of a model class: the one that its own `model_json_schema` returns, if it has one."""
    own = getattr(model, "model_json_schema", None)
    if own is not None and getattr(own, "__func__", None) is not getattr(BaseModel.model_json_schema, "__func__", None):
        takes_generator = "schema_generator" in inspect.signature(own).parameters
        schema: dict[str, Any] = own(schema_generator=_TolerantSchema) if takes_generator else own()
        return schema
    schema = TypeAdapter(model).json_schema(schema_generator=_TolerantSchema)
    fields = getattr(model, "model_fields", {})
    for name, described in schema.get("properties", {}).items():
        for part in (described, *described.get("anyOf", ())):
            if ARRAY_KEY in part and name in fields:  # pydantic drops an array's dtype and shape
                part[ARRAY_KEY] = array_dtype(fields[name].annotation)
    return schema


def array_dtype(annotation: Any) -> str | None:
    """Return the type of numbers that an annotation such as `NDArray[np.uint8]` names, optional or not."""
    for kind in (annotation, *typing.get_args(annotation)):
        arguments = typing.get_args(kind)
        if class_path(typing.get_origin(kind)) == "numpy.ndarray" and len(arguments) == 2:
            number = next(iter(typing.get_args(arguments[1])), None)
            return number.__name__ if isinstance(number, type) else None
    return None


def takes_tool_actions(action_cls: type[Any] | None) -> bool:
    """Whether an environment of that action class is stepped with tool calls; a subclass may take more than those."""
    if action_cls in _OPEN_ACTION_CLASSES:
        return True
    return isinstance(action_cls, type) and issubclass(action_cls, CallToolAction)


def deserialize_action(action_data: Mapping[str, Any], action_cls: type[Any]) -> Any:
    """Validate a dict as an action; recognise tool actions if the class allows them.

    Raises:
        pydantic.ValidationError: The data does not fit.
    """
    if action_cls in _OPEN_ACTION_CLASSES:
        kind = action_data.get("type")
        if isinstance(kind, str) and kind in _TOOL_ACTIONS:
            return _TOOL_ACTIONS[kind].model_validate(action_data)
        try:
            return action_cls.model_validate(action_data)
        except ValidationError as exc:
            if action_cls is Action and _TOOL_WORDS.isdisjoint(action_data):
                raise
            raise _with_shapes(exc, action_data) from None
    validate = getattr(action_cls, "model_validate", None)
    return validate(action_data) if validate is not None else _adapter(action_cls).validate_python(action_data)  # type: ignore[arg-type]


def _with_shapes(exc: ValidationError, data: Mapping[str, Any]) -> ValidationError:
    """Add the shapes of tool actions to a validation error."""
    problems = [
        InitErrorDetails(
            type=PydanticCustomError(error["type"], error["msg"], error.get("ctx")),
            loc=error["loc"],
            input=error["input"],
        )
        for error in exc.errors()
    ]
    shapes = PydanticCustomError("tool_action", _TOOL_SHAPES)
    problems.append(InitErrorDetails(type=shapes, loc=("type",), input=data.get("type")))
    return ValidationError.from_exception_data(exc.title, problems)


def problems_of(exc: ValidationError) -> str:
    """Return the problems of a validation error as `field: reason`, without the refused values."""
    lines = []
    for error in exc.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(map(str, error["loc"]))
        lines.append(f"{where}: {error['msg']}" if where else error["msg"])
    return "; ".join(lines)


@functools.lru_cache(maxsize=256)
def _adapter(cls: Any) -> TypeAdapter[Any]:
    """Return a validator for dataclasses and other classes that are not pydantic models."""
    return TypeAdapter(cls)


def deserialize_action_with_preprocessing(action_data: Mapping[str, Any], action_cls: type[Any]) -> Any:
    """Validate an action that came from a web form, where numbers, token lists and tool arguments are text.

    Raises:
        pydantic.ValidationError: The data does not fit.
    """
    fields = dict(action_data)
    if fields.get("type") == "call_tool" and isinstance(fields.get("arguments"), str):
        fields["arguments"] = _parsed(fields["arguments"], {})
    if "tokens" in fields:
        fields["tokens"] = _tokens(fields["tokens"])
    action_id = fields.get("action_id")
    if isinstance(action_id, str) and action_id.strip().lstrip("-").isdigit():
        fields["action_id"] = int(action_id)
    return deserialize_action(fields, action_cls)


def _parsed(text: str, empty: Any) -> Any:
    """Read a form's text as JSON; invalid JSON stays text, which the model then refuses."""
    try:
        return from_json(text) if text.strip() else empty
    except ValueError:
        return text


def _tokens(value: Any) -> Any:
    """Turn a list of token ids, or its text, into a tensor where torch is installed."""
    if isinstance(value, str):
        value = _parsed(value, [])
    if not isinstance(value, list):
        return value
    try:
        import torch  # an optional dependency of the environment, never ours
    except ImportError:
        return value
    return torch.tensor(value, dtype=torch.long)


def step_frame_parser(action_cls: type[Any] | None) -> Callable[[bytes], Any] | None:
    """Build a one-pass parser from a step frame's bytes to its action; None if the class does not allow one.

    The parser raises `pydantic.ValidationError` for anything but a valid step frame; the caller then parses the frame
    in full to describe the problem.
    """
    if action_cls is None or not has_plain_validation(action_cls):
        return None
    frame = strict_frame("step", {"type": Literal["step"], "data": action_cls})
    validate = TypeAdapter(frame).validator.validate_json

    def parse(raw: bytes) -> Any:
        return validate(raw)["data"]

    return parse


def strict_frame(name: str, fields: dict[str, Any]) -> Any:
    """Return the type of a frame with these keys and no others."""
    frame: Any = TypedDict(name, fields)  # type: ignore[misc]
    setattr(frame, "__pydantic_config__", ConfigDict(extra="forbid"))  # noqa: B010
    return frame


def has_plain_validation(action_cls: type[Any]) -> bool:
    """Whether an action class is a pydantic model that is validated as pydantic does, and means exactly itself."""
    if action_cls is Action or action_cls is ListToolsAction:
        return False  # a call of a tool would look like another action
    if not (isinstance(action_cls, type) and issubclass(action_cls, BaseModel)):
        return False
    return _function(action_cls) is _function(BaseModel)


def _function(model: type[BaseModel]) -> Any:
    return getattr(model.model_validate, "__func__", None)


# -- JSON schemas as pydantic writes them -----------------------------------------------------------------------------

_DEEPEST = 24


class Unmakeable(ValueError):
    """No value can be made for a schema; the text says why."""


def resolve_reference(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a schema's `$ref` into the definitions of its document; keywords beside the reference stay."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part, {}) if isinstance(target, Mapping) else {}
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def make_example(schema: Mapping[str, Any], text: Callable[[Mapping[str, Any]], str], *, variant: int = 0) -> Any:
    """Make a small value that satisfies a schema: required fields only, the shortest lists, numbers near zero.

    Args:
        schema: The schema, with its definitions.
        text: Makes a string that satisfies a schema.
            variant: 0 takes defaults and first choices; other numbers take different values if possible.

    Raises:
        Unmakeable: The schema requires itself.
    """
    return _ExampleMaker(schema, text, variant).value(schema)


@dataclass(frozen=True, slots=True)
class _ExampleMaker:
    root: Mapping[str, Any]
    text: Callable[[Mapping[str, Any]], str]
    variant: int

    def value(self, schema: Any, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise Unmakeable("it requires itself, without end")
        if not isinstance(schema, Mapping):  # `true` allows anything
            return None
        schema = resolve_reference(schema, self.root)
        if "const" in schema:
            return schema["const"]
        if self.variant == 0 and "default" in schema:
            return schema["default"]
        for keyword in ("examples", "enum"):
            if choices := schema.get(keyword):
                return choices[self.variant % len(choices)]
        for keyword in ("anyOf", "oneOf", "allOf"):
            if parts := schema.get(keyword):
                return self.value(next((part for part in parts if part.get("type") != "null"), {}), depth + 1)
        return self._typed(schema, depth)

    def _typed(self, schema: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "object" or "properties" in schema:
            fields = schema.get("properties", {})
            return {name: self.value(fields.get(name), depth + 1) for name in schema.get("required", ())}
        if kind == "array":
            first = schema.get("prefixItems", ())
            rest = [schema.get("items")] * (schema.get("minItems", 0) - len(first))
            return [self.value(item, depth + 1) for item in (*first, *rest)]
        if kind == "boolean":
            return bool(self.variant % 2)
        if kind in ("integer", "number"):
            number = self._number(schema)
            return number if kind == "integer" else float(number)
        return self.text(schema) if kind == "string" else None

    def _number(self, schema: Mapping[str, Any]) -> int | float:
        """Return the number within the bounds that is nearest to zero; higher variants are further away."""
        low, high, unit = schema.get("minimum"), schema.get("maximum"), schema.get("multipleOf", 1)
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        if above is not None and below is not None and above + unit > below - unit:  # an open interval of fractions
            return float(above + below) / 2
        low = above + unit if low is None and above is not None else low
        high = below - unit if high is None and below is not None else high
        first: int | float = max(0, 0 if low is None else low)
        first = first if high is None else min(first, high)
        for number in (first + self.variant, first - self.variant):
            if (low is None or number >= low) and (high is None or number <= high):
                return number
        return first
