"""Models from the JSON schemas that a server publishes: read into specifications, which become classes or source text.

Knows JSON schema as pydantic writes it; must not know clients. Omits constraints that Python's types cannot express:
the server checks them again.
"""

from __future__ import annotations

import builtins
import datetime
import importlib.util
import keyword
import math
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ForwardRef, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaError

from openenv.protocol.schema import ARRAY_KEY
from openenv.types import Action, Observation, State

BASES: dict[str, type[BaseModel]] = {"Action": Action, "Observation": Observation, "State": State}
_DEEPEST = 32
_MOST_NODES, _MOST_MODELS, _MOST_ALTERNATIVES = 5_000, 500, 200
"""Limits on the schemas of a server: types, models, and the alternatives of one type."""
_LONGEST = 2**31
_DTYPES = frozenset(
    [
        "bool_",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)
_PLAIN: dict[str, type[Any]] = {"string": str, "integer": int, "number": float, "boolean": bool, "null": type(None)}
_FORMATS: dict[str, type[Any]] = {
    "date-time": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "duration": datetime.timedelta,
    "uuid": uuid.UUID,
    "base64url": bytes,
}
_LIMITS = {
    "minimum": "ge",
    "exclusiveMinimum": "gt",
    "maximum": "le",
    "exclusiveMaximum": "lt",
    "multipleOf": "multiple_of",
    "minLength": "min_length",
    "maxLength": "max_length",
    "minItems": "min_length",
    "maxItems": "max_length",
    "pattern": "pattern",
}
# Names that a class or a field of a module made from a schema must not take.
_TAKEN = frozenset(
    {*dir(builtins), "Action", "Annotated", "Any", "ConfigDict", "EnvClient", "Field", "Literal", "NDArray"}
    | {"BaseModel", "Observation", "State", "annotations", "datetime", "np", "uuid"}
)


_RECEIVED = frozenset({"Observation", "State"})
"""The base classes of models that clients receive and never send."""


class SchemaUnreadable(ValueError):
    """The server's schemas do not describe models; the text names the place."""


@dataclass(frozen=True, slots=True)
class TypeSpec:
    """A type. `kind` says which of the other fields count.

    plain: `python`; any; array: `dtype`; list, dict: one of `parts`; tuple, union: `parts`; literal: `values`;
    model: `name`.
    """

    kind: Literal["plain", "any", "array", "list", "tuple", "dict", "union", "literal", "model"]
    python: type[Any] | None = None
    parts: tuple[TypeSpec, ...] = ()
    values: tuple[Any, ...] = ()
    name: str = ""
    dtype: str | None = None
    limits: tuple[tuple[str, Any], ...] = ()


ANY = TypeSpec("any")
NONE = TypeSpec("plain", type(None))


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """A field of a model.

    Args:
        name: In Python.
        wire: In JSON.
        type: Its type.
        is_required: Whether it has no default.
        default: Its default, if the schema has one.
        is_unknown: Whether the server has a default that the schema does not tell; while unset, the field is not sent.
        makes_empty: Whether its default is a new list or dict.
        description: Its description.
    """

    name: str
    wire: str
    type: TypeSpec
    is_required: bool
    default: Any = None
    is_unknown: bool = False
    makes_empty: bool = False
    description: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A class: its name, its base class among `BASES` or None, its fields, and its description."""

    name: str
    base: str | None
    fields: tuple[FieldSpec, ...]
    description: str | None = None
    allows_extra: bool = False

    @property
    def has_other_names(self) -> bool:
        """Whether a field has another name in JSON."""
        return any(one.name != one.wire for one in self.fields)


@dataclass(slots=True)
class SchemaModels:
    """The types of an environment: of its actions, observations and states, and the classes that they refer to."""

    action: TypeSpec
    observation: TypeSpec
    state: TypeSpec
    models: dict[str, ModelSpec] = field(default_factory=dict)


def read_models(schemas: Mapping[str, Any]) -> SchemaModels:
    """Read the reply to `GET /schema`.

    Raises:
        SchemaUnreadable: It is none, or larger than the limits.
    """
    try:
        return _read_models(schemas)
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError) as exc:  # a server may send anything
        raise SchemaUnreadable(f"a part has another type than JSON schema gives it: {exc}") from exc


def _read_models(schemas: Mapping[str, Any]) -> SchemaModels:
    reader = _Reader()
    action = reader.document(schemas, "action", "Action")
    observation = reader.document(schemas, "observation", "Observation")
    first = schemas.get("reset_observation")
    if isinstance(first, Mapping) and first != schemas.get("observation"):
        of_reset = reader.document(schemas, "reset_observation", "Observation")
        if of_reset != observation:
            observation = TypeSpec("union", parts=(observation, of_reset))
    state = reader.document(schemas, "state", "State")
    return SchemaModels(
        action, observation, state, {name: _apart(model, reader.models) for name, model in reader.models.items()}
    )


def _apart(model: ModelSpec, models: Mapping[str, ModelSpec]) -> ModelSpec:
    """Rename fields that have the name of a model: `Inner: Inner = None` would hide the class from the annotation."""
    taken = {one.name for one in model.fields}.union(models)
    fields = []
    for one in model.fields:
        name = one.name
        while name in models or (name != one.name and name in taken):
            name = f"{name}_"
        fields.append(replace(one, name=name))
        taken.add(name)
    return replace(model, fields=tuple(fields))


class _Reader:
    """Reads schemas into one set of models; a name that two documents use for different models gets a number."""

    def __init__(self) -> None:
        self.models: dict[str, ModelSpec] = {}
        self._root: Mapping[str, Any] = {}
        self._names: dict[str, str] = {}  # of this document: reference to name of model
        self._nodes = 0
        self._nested = 0

    def document(self, schemas: Mapping[str, Any], key: str, base: str) -> TypeSpec:
        schema = schemas.get(key)
        if not isinstance(schema, Mapping):
            raise SchemaUnreadable(f"the schema of {key} is {type(schema).__name__}, not an object")
        self._root, self._names = schema, {}
        if "$ref" in schema and "properties" not in schema:
            schema = self._target(str(schema["$ref"]))
        if "properties" in schema or schema.get("type") == "object":
            return self._model(schema, str(schema.get("title") or base), base)
        return self._type(schema, base, 0)

    def _target(self, reference: str) -> Mapping[str, Any]:
        target: Any = self._root
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping) or not reference.startswith("#/"):
            raise SchemaUnreadable(f"{reference} refers to nothing in its schema")
        return target

    def _model(self, schema: Mapping[str, Any], title: str, base: str | None, reference: str = "") -> TypeSpec:
        if self._nested >= _DEEPEST or len(self.models) >= _MOST_MODELS:
            raise SchemaUnreadable(f"models are nested more than {_DEEPEST} deep, or there are over {_MOST_MODELS}")
        self._nested += 1
        try:
            return self._read_model(schema, title, base, reference)
        finally:
            self._nested -= 1

    def _read_model(self, schema: Mapping[str, Any], title: str, base: str | None, reference: str) -> TypeSpec:
        properties = schema.get("properties") or {}
        inherited = frozenset(BASES[base].model_fields) if base is not None else frozenset[str]()
        # A class that has all fields of a base is taken for a subclass of it; servers of openenv 0.10 know fewer.
        if base is not None and not inherited - {"terminated", "truncated"} <= properties.keys():
            base, inherited = None, frozenset()
        if base is not None and title == base and not properties.keys() - inherited:
            return TypeSpec("model", name=base)
        name = self._free_name(title)
        if reference:
            self._names[reference] = name
        self.models[name] = ModelSpec(name, base, ())  # keeps the name while the fields are read
        required = schema.get("required") or ()
        fields: list[FieldSpec] = []
        for wire, described in properties.items():
            if wire in inherited and wire not in required:
                continue
            spec = self._field(str(wire), described, is_required=wire in required, is_received=base in _RECEIVED)
            taken = {one.name for one in fields}
            while spec.name in taken:
                spec = replace(spec, name=f"{spec.name}_")
            fields.append(spec)
        description = schema.get("description")
        extra = bool(schema.get("additionalProperties", base is None or base == "State"))
        text = " ".join(description.split()) if isinstance(description, str) else None
        model = ModelSpec(name, base, tuple(fields), text, extra)
        del self.models[name]
        return TypeSpec("model", name=self._add(model, reference))

    def _add(self, model: ModelSpec, reference: str) -> str:
        """Add a model, or find the same one of another document; return its name."""
        for other in self.models.values():
            if replace(other, name="") == replace(model, name="") and _stem(other.name) == _stem(model.name):
                self._names[reference] = other.name
                return other.name
        self.models[model.name] = model
        return model.name

    def _free_name(self, title: str) -> str:
        name = class_name(title)
        number = 2
        while name in self.models or name in _TAKEN:
            name = f"{class_name(title)}{number}"
            number += 1
        return name

    def _field(self, wire: str, described: Any, *, is_required: bool, is_received: bool) -> FieldSpec:
        schema = described if isinstance(described, Mapping) else {}
        kind = self._type(schema, wire, 0)
        default = schema.get("default")
        # Schemas do not tell the default of `default_factory`. In an answer of the server, an empty list says the same
        # as a missing one; in a request, it would replace the server's default.
        is_empty = default in ([], {}) if "default" in schema else is_received
        makes_empty = not is_required and kind.kind in ("list", "dict") and is_empty
        is_known = "default" in schema and (default is None or _is_simple(kind))
        is_unknown = not (is_required or is_known or makes_empty)
        if makes_empty:
            default = None
        if is_unknown:
            kind, default = _union([kind, NONE]), None
        text = schema.get("description")
        description = " ".join(text.split()) if isinstance(text, str) and ARRAY_KEY not in schema else None
        return FieldSpec(field_name(wire), wire, kind, is_required, default, is_unknown, makes_empty, description)

    def _type(self, schema: Any, name: str, depth: int) -> TypeSpec:
        self._nodes += 1
        if self._nodes > _MOST_NODES:  # references that branch (`anyOf: [A, A]`) double with each level
            raise SchemaUnreadable(f"there are more than {_MOST_NODES} types")
        return self._read_type(schema, name, depth) if isinstance(schema, Mapping) and depth <= _DEEPEST else ANY

    def _read_type(self, schema: Mapping[str, Any], name: str, depth: int) -> TypeSpec:
        if isinstance(reference := schema.get("$ref"), str):
            return self._referred(reference, depth)
        if ARRAY_KEY in schema:
            dtype = schema[ARRAY_KEY]
            return TypeSpec("array", dtype=dtype if isinstance(dtype, str) and dtype in _DTYPES else None)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and choices:
            return _literal(choices)
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            if isinstance(parts, list) and parts and (key != "allOf" or len(parts) == 1):
                return _union([self._type(part, name, depth + 1) for part in parts])
        kind = schema.get("type")
        if isinstance(kind, list):
            return _union([self._type({**schema, "type": one}, name, depth + 1) for one in kind])
        if kind == "array":
            return self._array(schema, name, depth)
        if kind == "object" or "properties" in schema:
            if schema.get("properties"):
                return self._model(schema, str(schema.get("title") or name), None)
            values = schema.get("additionalProperties")
            return TypeSpec("dict", parts=(self._type(values, name, depth + 1),))
        if kind not in _PLAIN:
            return ANY
        plain = _FORMATS.get(str(schema.get("format")), str) if kind == "string" else _PLAIN[str(kind)]
        return TypeSpec("plain", plain, limits=_limits(schema, plain))

    def _referred(self, reference: str, depth: int) -> TypeSpec:
        if reference in self._names:
            return TypeSpec("model", name=self._names[reference])
        target = self._target(reference)
        title = str(target.get("title") or reference.rpartition("/")[2])
        if target.get("properties"):
            return self._model(target, title, None, reference)
        return self._type(target, title, depth + 1)

    def _array(self, schema: Mapping[str, Any], name: str, depth: int) -> TypeSpec:
        first = schema.get("prefixItems")
        if isinstance(first, list) and first and len(first) == schema.get("maxItems", len(first)):
            return TypeSpec("tuple", parts=tuple(self._type(one, name, depth + 1) for one in first))
        each = self._type(schema.get("items"), name, depth + 1)
        return TypeSpec("list", parts=(each,), limits=_limits(schema, list))


def _is_simple(kind: TypeSpec) -> bool:
    """Whether a value of a type is the same in JSON and in Python."""
    if kind.kind == "plain":
        return kind.python in _PLAIN.values()
    return kind.kind in ("any", "literal", "list", "dict", "union") and all(_is_simple(part) for part in kind.parts)


def _literal(choices: list[Any]) -> TypeSpec:
    # Of `1` and `true`, which Python takes for equal, a `Literal` keeps one.
    is_plain = all(isinstance(one, (str, int, bool, type(None))) for one in choices)
    # pydantic takes no half of a surrogate pair.
    has_surrogates = any(isinstance(one, str) and re.search("[\ud800-\udfff]", one) for one in choices)
    if is_plain and not has_surrogates and len(set(choices)) == len(choices):
        return TypeSpec("literal", values=tuple(choices))
    return ANY


def _union(parts: list[TypeSpec]) -> TypeSpec:
    flat: list[TypeSpec] = []
    for part in parts:
        flat += [one for one in (part.parts if part.kind == "union" else (part,)) if one not in flat]
        if len(flat) > _MOST_ALTERNATIVES:
            return ANY
    if ANY in flat:
        return ANY
    return flat[0] if len(flat) == 1 else TypeSpec("union", parts=tuple(flat))


def _limits(schema: Mapping[str, Any], python: type[Any]) -> tuple[tuple[str, Any], ...]:
    limits: dict[str, Any] = {}
    for key, name in _LIMITS.items():
        value = schema.get(key)
        if key == "pattern" and isinstance(value, str) and python is str and _is_pattern(value):
            limits[name] = value
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            is_length = name.endswith("length")
            if is_length and python in (str, bytes, list):
                limits.update({name: int(value)} if 0 <= value < _LONGEST and value == int(value) else {})
            elif not is_length and python in (int, float) and (name != "multiple_of" or value > 0):
                limits[name] = value
    return tuple(limits.items())


def _is_pattern(pattern: str) -> bool:
    """Return whether pydantic accepts a regular expression; other languages have more syntax."""
    try:
        TypeAdapter(Annotated[str, Field(pattern=pattern)])
    except SchemaError:
        return False
    return True


def _stem(name: str) -> str:
    return name.rstrip("0123456789")


def class_name(text: str) -> str:
    """Make a name for a class from any text."""
    words = [word for word in re.split(r"[^0-9A-Za-z]+", text) if word]
    name = "".join(word[0].upper() + word[1:] for word in words) or "Model"
    return f"Model{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def field_name(wire: str) -> str:
    """Make a name for a field of a model from its name in JSON."""
    name = re.sub(r"\W", "_", wire, flags=re.ASCII).lstrip("_") or "value"
    if name[0].isdigit():
        name = f"value_{name}"
    taken = keyword.iskeyword(name) or hasattr(BaseModel, name) or name in _TAKEN or name.startswith("model_")
    return f"{name}_" if taken else name


# -- classes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelTypes:
    """The types of an environment, for pydantic."""

    action: Any
    observation: Any
    state: Any


def build_types(models: SchemaModels) -> ModelTypes:
    """Make classes of specifications.

    Raises:
        SchemaUnreadable: pydantic refuses them.
    """
    try:
        return _build_types(models)
    except (AttributeError, NameError, PydanticUserError, RecursionError, SchemaError, TypeError, ValueError) as exc:
        raise SchemaUnreadable(f"they make no valid models: {exc}") from exc


def _build_types(models: SchemaModels) -> ModelTypes:
    made: dict[str, type[BaseModel]] = dict(BASES)
    for spec in models.models.values():
        made[spec.name] = _build(spec)
    for name in models.models:
        made[name].model_rebuild(_types_namespace=made)

    def final(spec: TypeSpec) -> Any:
        kinds = [made[part.name] if part.kind == "model" else build_type(part) for part in _alternatives(spec)]
        return _union_of(kinds)

    return ModelTypes(final(models.action), final(models.observation), final(models.state))


def _alternatives(spec: TypeSpec) -> Iterator[TypeSpec]:
    yield from spec.parts if spec.kind == "union" else (spec,)


def _build(spec: ModelSpec) -> type[BaseModel]:
    extra: Literal["allow", "forbid"] = "allow" if spec.allows_extra else "forbid"
    config = ConfigDict(extra=extra, arbitrary_types_allowed=True, ser_json_bytes="base64")
    if spec.has_other_names:
        config |= ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)
    own: type[BaseModel] = type("_Configured", (BASES.get(spec.base or "", BaseModel),), {"model_config": config})
    fields: dict[str, Any] = {one.name: (build_type(one.type), _field_info(one)) for one in spec.fields}
    return create_model(spec.name, __base__=own, __doc__=spec.description, **fields)


def _field_info(spec: FieldSpec) -> Any:
    options: dict[str, Any] = {"description": spec.description}
    if spec.name != spec.wire:
        options["alias"] = spec.wire
    if spec.makes_empty:
        options["default_factory"] = list if spec.type.kind == "list" else dict
    elif not spec.is_required:
        options["default"] = spec.default
    if spec.is_unknown:
        options["exclude_if"] = _is_none
    return Field(**options)


def _is_none(value: Any) -> bool:
    return value is None


def build_type(spec: TypeSpec) -> Any:
    """Return the type of a specification; models are references by name."""
    parts = [build_type(part) for part in spec.parts]
    kind: Any
    if spec.kind == "plain":
        kind = spec.python
    elif spec.kind == "model":
        kind = ForwardRef(spec.name)
    elif spec.kind == "list":
        kind = list[parts[0]]  # type: ignore[valid-type]
    elif spec.kind == "dict":
        kind = dict[str, parts[0]]  # type: ignore[valid-type]
    elif spec.kind == "tuple":
        kind = tuple[tuple(parts)]  # type: ignore[misc]
    elif spec.kind == "union":
        kind = _union_of(parts)
    elif spec.kind == "literal":
        kind = Literal[spec.values]
    else:
        kind = _array_type(spec.dtype) if spec.kind == "array" else Any
    return Annotated[kind, Field(**dict(spec.limits))] if spec.limits else kind


def _union_of(parts: list[Any]) -> Any:
    return Union[tuple(parts)]  # noqa: UP007 - references by name have no `|`


def _array_type(dtype: str | None) -> Any:
    """Return NumPy's array class if NumPy is installed; otherwise arrays are lists."""
    if importlib.util.find_spec("numpy") is None:
        return Any
    import numpy as np  # an optional dependency

    number: Any = getattr(np, dtype or "", None)
    return np.ndarray[Any, np.dtype[number]] if isinstance(number, type) else np.ndarray
