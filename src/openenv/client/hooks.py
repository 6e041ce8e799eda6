"""`ClientHooks`: convert a client's models to JSON and JSON to its models, by default from its type parameters.

A class is inspected once, when its first object is made. Knows models and payloads; must not know
connections.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import types
import typing
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import Self

from openenv.errors import ProtocolError
from openenv.protocol.generics import class_path, generic_arguments
from openenv.protocol.json_values import jsonable
from openenv.protocol.schema import array_dtype
from openenv.types import State, StepResult

ActT = TypeVar("ActT")
ObsT = TypeVar("ObsT")
StateT = TypeVar("StateT")

Decoder = Callable[[Any], Any]
_HOOKS = ("_step_payload", "_parse_result", "_parse_state")
_BESIDE = ("reward", "done", "metadata")  # travel beside the observation's other fields
_MOST_PROBLEMS = 3


class ClientHooks(ABC, Generic[ActT, ObsT, StateT]):
    """Convert an environment's models to JSON, and JSON to its models.

    The type parameters name the models: `class WordEnv(EnvClient[WordAction, WordObservation, WordState]): pass`.
    Override any of the three methods if the wire has another shape than the models.

    Raises:
        TypeError: A method is not overridden, and its type parameter is missing.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse a class with unknown models."""
        if cls not in _MODELS:
            _MODELS[cls] = _find_models(cls)
        return super().__new__(cls)

    def _step_payload(self, action: ActT) -> dict[str, Any]:
        """Turn an action into JSON-able fields."""
        if isinstance(action, BaseModel):
            payload: dict[str, Any] = action.model_dump(mode="json", fallback=jsonable)
        elif isinstance(action, Mapping):
            payload = dict(action)
        else:
            payload = TypeAdapter(type(action)).dump_python(action, mode="json", fallback=jsonable)
        if not payload.get("metadata", True):  # a field that nearly all actions leave empty
            del payload["metadata"]
        return payload

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[ObsT]:
        """Turn a reply to reset or step into a result."""
        return _MODELS[type(self)].observation.parse_result(payload)

    def _parse_state(self, payload: dict[str, Any]) -> StateT:
        """Turn a reply to state into a state."""
        state: StateT = _MODELS[type(self)].state.parse(dict(payload))
        return state


@dataclass(frozen=True, slots=True)
class ModelParser:
    """Makes values of one type from JSON.

    Args:
        name: Of the type.
        validate: Makes the value, or raises `ValidationError`.
        beside: Which of reward, done and metadata the type has.
        decoders: Fields that need conversion before validation: bytes, which travel as base64 text, and arrays.
    """

    name: str
    validate: Callable[[Any], Any]
    beside: tuple[str, ...] = ()
    decoders: Mapping[str, Decoder] = field(default_factory=dict)

    def parse(self, fields: dict[str, Any]) -> Any:
        """Make a value from its JSON, which may be changed.

        Raises:
            ProtocolError: It does not fit the type.
        """
        for name, decode in self.decoders.items():
            if name in fields:
                fields[name] = decode(fields[name])
        try:
            return self.validate(fields)
        except ValidationError as exc:
            problems = [f"{'.'.join(map(str, one['loc'])) or 'value'}: {one['msg']}" for one in exc.errors()]
            more = f" (and {len(problems) - _MOST_PROBLEMS} more)" if len(problems) > _MOST_PROBLEMS else ""
            raise ProtocolError(
                f"The server sent something that is no {self.name}: {'; '.join(problems[:_MOST_PROBLEMS])}{more}. "
                "Are client and server of the same version?",
                details={"errors": problems},
            ) from exc

    def parse_result(self, payload: Mapping[str, Any]) -> StepResult[Any]:
        """Make a result from a reply to reset or step; raises as `parse` does."""
        fields = dict(payload.get("observation") or {})
        for name in self.beside:
            if (value := payload.get(name)) is not None or name == "reward":
                fields[name] = value
        reward, done, metadata = payload.get("reward"), bool(payload.get("done")), payload.get("metadata")
        return StepResult(self.parse(fields), reward, done, metadata)


@dataclass(frozen=True, slots=True)
class _ClientModels:
    observation: ModelParser
    state: ModelParser


_MODELS: WeakKeyDictionary[type[Any], _ClientModels] = WeakKeyDictionary()


def _find_models(cls: type[Any]) -> _ClientModels:
    models = dict(zip(_HOOKS, generic_arguments(cls, ClientHooks), strict=False))
    if models.get("_parse_state") is Any:  # clients of the first release had two parameters
        models["_parse_state"] = State
    missing = [
        hook
        for hook in _HOOKS
        if getattr(cls, hook) is getattr(ClientHooks, hook) and _is_unknown(models.get(hook, Any))
    ]
    if missing:
        raise TypeError(
            f"the models of {cls.__name__} are unknown: write `class {cls.__name__}(EnvClient[MyAction, "
            f"MyObservation, MyState])`, or the methods {', '.join(missing)}. GenericEnvClient needs no models, and "
            "openenv.connect(url) takes those of the server."
        )
    return _ClientModels(model_parser(models.get("_parse_result", Any)), model_parser(models.get("_parse_state", Any)))


def _is_unknown(model: Any) -> bool:
    return model is Any or isinstance(model, (TypeVar, typing.ForwardRef))


def model_parser(model: Any) -> ModelParser:
    """Return what makes values of a type from JSON."""
    name = getattr(model, "__name__", str(model))
    if _is_unknown(model):  # its method is overridden
        return ModelParser(name, lambda value: value)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return ModelParser(name, TypeAdapter(model).validate_python, _BESIDE)
    beside = tuple(one for one in _BESIDE if one in model.model_fields)
    return ModelParser(name, model.model_validate, beside, _field_decoders(model))


def _field_decoders(model: type[BaseModel], inside: tuple[type[BaseModel], ...] = ()) -> dict[str, Decoder]:
    return {
        field.alias or name: decode
        for name, field in model.model_fields.items()
        if (decode := _decoder(field.annotation, (*inside, model))) is not None
    }


def _decoder(annotation: Any, inside: tuple[type[BaseModel], ...]) -> Decoder | None:
    """Return a function from JSON to a value that pydantic accepts for a type; None if pydantic accepts the JSON.

    Args:
        annotation: The type.
        inside: The models that it is part of, the innermost last.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    kinds = [one for one in arguments if one not in (type(None), Ellipsis)]
    if origin in (typing.Union, types.UnionType):  # of several kinds, pydantic takes the one that fits
        return _decoder(kinds[0], inside) if len(kinds) == 1 else None
    if origin in (list, tuple, set, dict) and len(kinds) == 1 + (origin is dict):
        each = _decoder(kinds[-1], inside)
        return None if each is None else _collection_decoder(each)
    kind = origin or annotation
    if kind is bytes and inside[-1].model_config.get("ser_json_bytes") == "base64":
        return _decode_base64
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in inside:
        decoders = _field_decoders(kind, inside)
        return _fields_decoder(decoders) if decoders else None
    if class_path(kind) == "numpy.ndarray":
        return _array_decoder(array_dtype(annotation))
    if class_path(kind) in ("torch.Tensor", "torch._tensor.Tensor"):
        torch = importlib.import_module("torch")  # the model has it already
        return lambda value: torch.as_tensor(value) if isinstance(value, (list, int, float)) else value
    return None


def _fields_decoder(decoders: Mapping[str, Decoder]) -> Decoder:
    def decode_fields(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: decoders[key](one) if key in decoders else one for key, one in value.items()}

    return decode_fields


def _collection_decoder(decode: Decoder) -> Decoder:
    def decode_all(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(one) for one in value]
        return {key: decode(one) for key, one in value.items()} if isinstance(value, dict) else value

    return decode_all


def _array_decoder(dtype: str | None) -> Decoder:
    """Return what makes nested lists into a NumPy array of a type, or of the type that the numbers suggest."""
    numpy = importlib.import_module("numpy")

    def decode(value: Any) -> Any:
        return numpy.asarray(value, dtype=dtype) if isinstance(value, (list, int, float)) else value

    return decode


def _decode_base64(value: Any) -> Any:
    try:
        return base64.b64decode(value, altchars=b"-_", validate=True) if isinstance(value, str) else value
    except binascii.Error:
        return value  # another server may send text
