"""JSON in and out, with a defined encoding for everything an environment may put into an observation.

| value                        | on the wire                                            |
|------------------------------|--------------------------------------------------------|
| NaN, Infinity                | null; as a reward, an error (`NonFiniteReward`)        |
| bytes, bytearray, memoryview | URL-safe base64 text                                   |
| numpy or torch array         | nested lists; scalars as numbers                       |
| PIL image                    | `data:image/png;base64,...`                            |
| anything else                | its `repr`                                             |

A value that cannot be encoded never loses the step that made it: it is replaced, field by field, and logged.
Knows pydantic-core; must not know sessions, environments or frames.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json, to_json, to_jsonable_python

from openenv.errors import NonFiniteReward

logger = logging.getLogger(__name__)
ReplyT = TypeVar("ReplyT", covariant=True)


BESIDE = {"reward", "done"}
_DUMP = BaseModel.model_dump
_isfinite = math.isfinite
_OMITTED_WHEN_UNSET = {"terminated", "truncated"}
NONFINITE_REWARD_KEY = "nonfinite_reward"
"""The key in the metadata of an observation whose reward was not a finite number and was sent as null."""
PROMPT_KEY = "to_prompt"
"""The metadata key for the text of an observation's `to_prompt()`."""
_FEWEST_VALUES = 500_000
_BYTES_PER_VALUE = 50
_PIECE = 256 * 1024
_NOT_STRUCTURE = bytes(set(range(256)) - set(b',[{"'))


def decode(raw: bytes | bytearray | memoryview | str) -> Any:
    """Parse JSON text.

    Raises:
        ValueError: The text is not JSON, or nested too deeply.
    """
    return from_json(bytes(raw) if isinstance(raw, memoryview) else raw, cache_strings="keys")


class ValueLimit(NamedTuple):
    """The limit on values in one client message, whatever its size: 3 bytes of JSON can take 300 bytes of memory."""

    values: int
    containers: int
    """Lists and objects among them."""

    @classmethod
    def within(cls, max_bytes: int) -> ValueLimit:
        """Return the limit of a server that reads messages up to that size."""
        values = max(_FEWEST_VALUES, max_bytes // _BYTES_PER_VALUE)
        return cls(values, values // 4)

    def check(self, raw: bytes) -> None:
        """Count the values of JSON text before it is parsed; stop at the limit.

        Raises:
            TooManyValues: The text holds more values than the limit.
        """
        if len(raw) <= 2 * self.containers:  # even `[]` takes two bytes, and `0,` too
            return
        values = containers = start = 0
        in_string = False
        while start < len(raw):
            piece = raw[start : start + _PIECE]
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # do not separate a backslash from the escaped character
                piece += raw[start + _PIECE : start + _PIECE + 1]
            start += len(piece)
            between = _structure(piece).split(b'"')  # in turn outside and inside of strings
            outside = b"".join(between[in_string::2])
            in_string ^= len(between) % 2 == 0
            opened = outside.count(b"[") + outside.count(b"{")
            containers += opened
            values += opened + outside.count(b",")
            self.check_counts(values, containers)

    def check_counts(self, values: int, containers: int) -> None:
        """Compare counts with the limit.

        Raises:
            TooManyValues: A count is over the limit.
        """
        if containers > self.containers:
            raise TooManyValues(f"more than {self.containers} lists and objects in one message")
        if values > self.values:
            raise TooManyValues(f"more than {self.values} values in one message")


def _structure(text: bytes) -> bytes:
    """Return the brackets, braces, commas and quotes of JSON text, but for quotes that are escaped or end nothing."""
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two quotes with nothing between them do not change which of the other characters are inside of a string.
    return unescaped.translate(None, _NOT_STRUCTURE).replace(b'""', b"")


class TooManyValues(ValueError):
    """A message holds more values than a server builds for one request."""


def encode(value: Any) -> bytes:
    """Dump any value as compact JSON."""
    return to_json(value, fallback=jsonable, bytes_mode="base64", inf_nan_mode="null")


def jsonable(value: Any) -> Any:
    """Turn a value that JSON does not know into one that it does (see the table above)."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.urlsafe_b64encode(bytes(value)).decode("ascii")
    if callable(getattr(value, "tolist", None)):
        detach = getattr(value, "detach", None)
        return (detach() if callable(detach) else value).tolist()
    if callable(getattr(value, "save", None)) and hasattr(value, "getbands"):
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    logger.warning("%s has no JSON encoding; its repr is sent", type(value).__name__)
    return repr(value)


class ObservationParts(NamedTuple):
    """An observation, cut into what travels apart. `fields` and `metadata` are JSON text."""

    fields: bytes
    reward: Any
    done: bool
    metadata: bytes | None


def check_observation(observation: Any) -> Any:
    """Return an observation; refuse a tuple or None, which would silently become a step without reward.

    Raises:
        TypeError: The value is neither a model nor a mapping nor a dataclass.
    """
    if isinstance(observation, (BaseModel, Mapping)) or is_dataclass(observation):
        return observation
    kind = "None" if observation is None else f"a {type(observation).__name__}"
    raise TypeError(f"the environment returned {kind}, not an Observation (reward and done are fields of it)")


def envelope_values(observation: Any) -> Mapping[str, Any]:
    """Return a mapping that has the reward, the end and the metadata of an observation.

    In an `Observation` they are fields. A plain model may have them as properties, or as extra fields.

    Raises:
        TypeError: The value is not an observation.
    """
    if not isinstance(observation, BaseModel):
        return plain_fields(check_observation(observation))
    values = observation.__dict__
    if "reward" in values and "done" in values:
        return values
    return {name: getattr(observation, name, None) for name in ("reward", "done", "metadata")}


def split_observation(observation: Any, *, null_reward: bool = False) -> ObservationParts:
    """Encode an observation; never raises for a field that has no encoding.

    Args:
        observation: The observation.
        null_reward: Whether a reward that is not a finite number becomes null, with a note in the metadata.

    Raises:
        TypeError: The value is not an observation.
        NonFiniteReward: The reward is not a finite number.
    """
    add_prompt(observation)
    values = envelope_values(observation)
    metadata = values.get("metadata")
    reward = values.get("reward")
    if type(reward) is not float or not math.isfinite(reward):
        reward, metadata = checked_reward(reward, metadata, null_reward=null_reward)
    fields = _model_json(observation, exclude=BESIDE)
    return ObservationParts(fields, reward, bool(values.get("done")), _dict_json(metadata) if metadata else None)


def observation_json(observation: Any, *, before: bytes = b"", after: bytes = b"", null_reward: bool = False) -> bytes:
    """Encode an observation as the payload `{"observation", "reward", "done"[, "metadata"]}`.

    Args:
        observation: The observation.
        before: Text to put in front, so that an envelope costs no second copy of a large payload.
        after: Text to put behind.
        null_reward: Whether a reward that is not a finite number becomes null, with a note in the metadata.

    Raises:
        TypeError: The value is not an observation.
        NonFiniteReward: The reward is not a finite number.
    """
    cls: Any = type(observation)
    to_json = _dumper(cls)
    if to_json is not None:
        values = observation.__dict__
        reward = values.get("reward")
        if type(reward) is float and _isfinite(reward) and "done" in values and not values.get("metadata"):
            try:  # nearly all of them
                fields = to_json(observation, exclude=BESIDE, fallback=jsonable)
            except Exception:  # encode field by field: that keeps the other fields and describes the bad one
                pass
            else:
                end = b',"done":true}' if values["done"] else b',"done":false}'
                return b"".join((before, b'{"observation":', fields, b',"reward":', repr(reward).encode(), end, after))
    fields, reward, done, metadata = split_observation(observation, null_reward=null_reward)
    reward_json = b"null" if reward is None else repr(reward).lower().encode()
    done_json = b',"done":true' if done else b',"done":false'
    beside = b"}" if metadata is None else b',"metadata":' + metadata + b"}"
    return b"".join((before, b'{"observation":', fields, b',"reward":', reward_json, done_json, beside, after))


@functools.lru_cache(maxsize=256)
def _dumper(cls: Any) -> Callable[..., bytes] | None:
    """Return pydantic's JSON writer of a model class; None for other classes, and for those with a method of their own.

    Cached, because attribute lookups on a model class are slow.
    """
    is_plain = getattr(cls, "model_dump", None) is _DUMP and prompt_hook(cls) is None
    return cls.__pydantic_serializer__.to_json if is_plain else None


@functools.lru_cache(maxsize=256)
def prompt_hook(cls: Any) -> Callable[[Any], str] | None:
    """Return the method `to_prompt` of an observation class, or None."""
    hook = getattr(cls, "to_prompt", None)
    return hook if callable(hook) else None


def add_prompt(observation: Any) -> None:
    """Write the text of an observation's `to_prompt()` into its metadata, for language models that play.

    Raises:
        TypeError: The text is not a string, or the observation has no metadata.
    """
    cls: Any = type(observation)
    hook = prompt_hook(cls)
    if hook is None:
        return
    text, metadata = hook(observation), getattr(observation, "metadata", None)
    if not isinstance(text, str) or not isinstance(metadata, dict):
        raise TypeError(f"{cls.__name__}.to_prompt() needs a text to return, and a dict `metadata` for it")
    metadata[PROMPT_KEY] = text


def finite_reward(reward: Any) -> Any:
    """Return a reward as a finite number, a bool or None; scalars of NumPy and torch become numbers.

    Raises:
        NonFiniteReward: It is NaN, infinite, or not a number.
    """
    number = reward
    item = getattr(reward, "item", None)
    if callable(item):
        with contextlib.suppress(Exception):  # an array of several values has no scalar
            number = item()
    if reward is None or isinstance(number, bool):
        return number
    if isinstance(number, int) and abs(number) <= sys.float_info.max:
        return int(number)
    if isinstance(number, float) and math.isfinite(number):
        return float(number)
    raise NonFiniteReward.of(reward if number is None else number)  # `item()` of NumPy's NaT is None


def reply_reward(reward: Any, metadata: Mapping[str, Any] | None) -> Any:
    """Return the reward of a server's reply. Servers of other releases, and protocol v1, send null with a note, or NaN.

    Raises:
        NonFiniteReward: The environment's reward was not a finite number.
    """
    if reward is None and metadata and NONFINITE_REWARD_KEY in metadata:
        raise NonFiniteReward.noted(metadata[NONFINITE_REWARD_KEY])
    return reward if type(reward) is float and math.isfinite(reward) else finite_reward(reward)


def checked_reward(reward: Any, metadata: Any, *, null_reward: bool = False) -> tuple[Any, Any]:
    """Return a finite reward, and the metadata.

    Args:
        reward: The reward of an observation.
        metadata: Its metadata.
        null_reward: Whether a reward that is not a finite number becomes None, with a note in the metadata.

    Raises:
        NonFiniteReward: The reward is not a finite number.
    """
    try:
        return finite_reward(reward), metadata
    except NonFiniteReward as exc:
        if not null_reward:
            raise
        others = metadata if isinstance(metadata, Mapping) else {}
        return None, {**others, NONFINITE_REWARD_KEY: exc.details["value"]}


class ObservationEncoder(Protocol[ReplyT]):
    """Encodes an observation; with `null_reward`, it never raises `NonFiniteReward`."""

    def __call__(self, observation: Any, *, null_reward: bool = False) -> ReplyT:
        """Encode an observation."""
        ...


def encode_with_null(encode: ObservationEncoder[ReplyT], observation: Any) -> ReplyT:
    """Encode an observation for a surface that publishes null for a reward that is not a finite number.

    Raises:
        NonFiniteReward: Its `reply` has the null. The session counts and logs the error, then sends the reply.
    """
    try:
        return encode(observation)
    except NonFiniteReward as exc:
        exc.reply = encode(observation, null_reward=True)
        raise


def serialize_observation(observation: Any) -> dict[str, Any]:
    """Return the v1 payload of an observation as a JSON-able dict; a reward that is not finite becomes None."""
    payload: dict[str, Any] = decode(observation_json(observation, null_reward=True))
    return payload


def encode_state(state: Any) -> bytes:
    """Encode a state with all fields of its class; None becomes an empty object."""
    return b"{}" if state is None else _model_json(state, exclude=None)


def dumps_itself(model: BaseModel) -> bool:
    """Return whether a model's class overrides `model_dump`, which may hide fields or reshape them."""
    return type(model).model_dump is not _DUMP


def own_dump(model: BaseModel, exclude: set[str] | None) -> Any:
    """Return a model's overridden `model_dump`. If it fails, the environment has failed and nothing is sent."""
    return model.model_dump() if exclude is None else model.model_dump(exclude=set(exclude))


def _model_json(model: Any, *, exclude: set[str] | None) -> bytes:
    if isinstance(model, BaseModel) and dumps_itself(model):
        dumped = own_dump(model, exclude)
        return _dict_json(dumped) if isinstance(dumped, Mapping) else encode(dumped)
    try:
        if isinstance(model, BaseModel):
            serializer = type(model).__pydantic_serializer__
            return serializer.to_json(model, exclude=exclude, fallback=jsonable)
        data = to_jsonable_python(model, fallback=jsonable, bytes_mode="base64", inf_nan_mode="null")
        if exclude and isinstance(data, dict):
            data = {key: value for key, value in data.items() if key not in exclude}
        return encode(data)
    except Exception as exc:
        logger.warning("%s could not be encoded at once (%s); encoding it field by field", type(model).__name__, exc)
        return _dict_json({key: value for key, value in plain_fields(model).items() if key not in (exclude or ())})


def plain_fields(model: Any) -> dict[str, Any]:
    if isinstance(model, BaseModel):
        fields = {**model.__dict__, **(model.__pydantic_extra__ or {})}
        return {key: value for key, value in fields.items() if value is not None or key not in _OMITTED_WHEN_UNSET}
    if isinstance(model, Mapping):
        return {str(key): value for key, value in model.items()}
    return dict(vars(model)) if hasattr(model, "__dict__") else {"value": model}


def _dict_json(data: Mapping[str, Any]) -> bytes:
    try:
        return encode(data)
    except Exception:
        parts = [_value_json(str(key)) + b":" + _value_json(value) for key, value in data.items()]
        return b"{" + b",".join(parts) + b"}"


def _value_json(value: Any) -> bytes:
    try:
        return encode(value)
    except Exception as exc:
        logger.warning("a %s could not be encoded (%s); its repr is sent", type(value).__name__, exc)
        return encode(f"<{type(value).__name__} that could not be encoded: {exc}>")
