"""The server's side of protocol v2: messages to requests, results to messages.

Stateless, one per served environment. Knows shapes and codes; must not know sessions, sockets or threads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeGuard, cast

from pydantic import BaseModel, FailFast, Field, TypeAdapter, ValidationError
from pydantic_core import to_json
from typing_extensions import NotRequired

from openenv.errors import ExecutionError
from openenv.types import WSErrorCode

from .binary_values import has_arrays, observation_message, state_message, without_arrays
from .codec import JSON, MAX_MESSAGE_BYTES, MSGPACK, Codec, pack_plain
from .json_values import ValueLimit, encode_state, observation_json
from .schema import deserialize_action, has_plain_validation, strict_frame
from .server_v1 import error_data, error_list


@dataclass(slots=True)
class Request:
    """One request; fields that do not belong to its type are None."""

    type: str
    id: int
    session: str | None = None
    data: Any = None
    kwargs: Mapping[str, Any] | None = None
    timeout_s: float | None = None
    extra: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Batch:
    """Requests that run side by side; one that is malformed is `RefusedRequest`."""

    id: int
    requests: list[Request | RefusedRequest]
    each: bool = False
    steps: list[dict[str, Any]] | None = None
    """Where all of them are steps and resets, these as they came and were checked; `requests` is empty then."""

    def in_full(self) -> list[Request | RefusedRequest]:
        """Return the requests, steps too."""
        return self.requests if self.steps is None else [request_of(step) for step in self.steps]


@dataclass(slots=True)
class ColumnBatch:
    """Steps in columns; the arrays are not checked yet.

    Args:
        id: The message's id.
        sessions: The session of each row; None for those of the last such message.
        ids: The request id of each row.
        actions: The arrays.
        resets: The rows that are resets instead of steps.
        reset: The keywords of these resets.
    """

    id: int
    sessions: list[str] | None
    ids: list[int]
    actions: list[Any]
    resets: frozenset[int]
    reset: dict[str, Any]


@dataclass(slots=True)
class RefusedRequest:
    """An invalid message: the error to answer with."""

    id: int | None
    session: str | None
    error: dict[str, Any]


Parsed = Request | Batch | ColumnBatch | RefusedRequest

NONCE_CHARS: Final = (16, 128)
DEFAULT_MAX_BATCH: Final = 10_000
_MAX_ID: Final = 2**63 - 1  # what every encoding and language has an integer for
RequestId = Annotated[int, Field(strict=True, ge=-_MAX_ID, le=_MAX_ID)]
_REPLIES: Final = ("observation", "error", "state", "mcp", "forked", "restored", "rendered", "closed")
_OF_SESSION: Final = ("reset", "step", "state", "mcp", "fork", "restore", "render", "close")
_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "open": frozenset({"resume", "wait_s", "nonce", "compress"}),
    "reset": frozenset({"session", "data", "timeout_s", "traceparent"}),
    "step": frozenset({"session", "data", "kwargs", "timeout_s", "traceparent"}),
    "state": frozenset({"session", "traceparent"}),
    "mcp": frozenset({"session", "data"}),
    "fork": frozenset({"session", "data"}),
    "restore": frozenset({"session", "data"}),
    "render": frozenset({"session", "data"}),
    "close": frozenset({"session"}),
    "batch": frozenset({"requests", "each"}),
    "columns": frozenset({"sessions", "ids", "actions", "resets", "reset"}),
    "cancel": frozenset({"request", "session"}),
    "ping": frozenset(),
}


class Invalid(Exception):
    """A message does not fit; carries what pydantic would say."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(text)
        self.errors = [{"type": "value_error", "loc": [where[:100]] if where else [], "msg": text}]


class ServerProtocolV2:
    """Reads v2 messages for one action class.

    Args:
        action_cls: The action class; None accepts any action.
        max_batch: How many requests a batch may hold.
        limit: How many values a message may hold.
    """

    def __init__(
        self, action_cls: type[Any] | None, *, max_batch: int = DEFAULT_MAX_BATCH, limit: ValueLimit | None = None
    ) -> None:
        self._action_cls = action_cls
        self._max_batch = max_batch
        self.limit = limit or ValueLimit.within(MAX_MESSAGE_BYTES)
        self._step = self._steps = self._mixed = None
        if action_cls is not None and has_plain_validation(action_cls):
            step = _step_frame(action_cls)
            mixed: Any = Annotated[step | _reset_frame(), Field(discriminator="type")]
            self._step = TypeAdapter(step).validator.validate_json
            self._steps = TypeAdapter(_batch_frame(step, max_batch)).validator
            self._mixed = TypeAdapter(_batch_frame(mixed, max_batch)).validator

    def parse_step(self, raw: bytes) -> dict[str, Any] | None:
        """Read a step in one pass, as its checked keys; None for what only `read` understands."""
        if self._step is None or b'"step"' not in raw[:40]:
            return None
        try:
            step: dict[str, Any] = self._step(raw)
            return step
        except Exception:  # an action's validators may raise anything; `read` describes the problem
            return None

    def parse_batch(self, raw: bytes) -> Batch | None:
        """Read a batch of steps and resets in one pass; None for what only `read` understands."""
        batch = self._mixed if b'"reset"' in raw else self._steps  # a union takes a tenth longer to read
        if batch is None or b'"batch"' not in raw[:40]:
            return None
        try:
            return _batch(batch.validate_json(raw))
        except Exception:  # as above
            return None

    def parse_map(self, message: dict[str, Any], *, echo_input: bool = True) -> Parsed:
        """Read a decoded message; a batch of steps and resets in one pass.

        Args:
            message: The message.
            echo_input: Whether errors show the values that they are about; the reply to a large message is short.
        """
        if self._steps is not None and self._mixed is not None and message.get("type") == "batch":
            try:
                is_mixed = any(request["type"] == "reset" for request in message["requests"])
                return _batch((self._mixed if is_mixed else self._steps).validate_python(message))
            except Exception:  # as above
                pass
        return self.read(message, echo_input=echo_input)

    def read(self, message: Any, *, echo_input: bool = True, in_batch: bool = False) -> Parsed:
        """Read a decoded message; return `RefusedRequest` for any problem with it."""
        if not isinstance(message, dict):
            return _refused(None, WSErrorCode.INVALID_JSON, "Invalid JSON: expected an object")
        request_id = message.get("id")
        if not _is_id(request_id):
            request_id = None
        kind = message.get("type")
        if not isinstance(kind, str) or kind not in _KEYS:
            is_short = kind is None or isinstance(kind, (str, int, float))
            shown = str(kind)[:100] if is_short else type(kind).__name__
            return _refused(request_id, WSErrorCode.UNKNOWN_TYPE, f"Unknown message type: {shown}")
        if in_batch and kind not in _OF_SESSION:  # not read, since it may be a batch of batches
            return _refused(request_id, WSErrorCode.VALIDATION_ERROR, "only requests of sessions go into a batch")
        session = message.get("session")
        try:
            return self._read(kind, message, echo_input)
        except Exception as exc:  # an action's own validators may raise anything
            errors = exc.errors if isinstance(exc, Invalid) else error_list(exc, echo_input=echo_input)
            refused = _refused(request_id, WSErrorCode.VALIDATION_ERROR, "Invalid message", errors=errors)
            refused.session = session if isinstance(session, str) else None
            return refused

    def _read(self, kind: str, message: dict[str, Any], echo_input: bool) -> Parsed:
        request_id = message.get("id")
        if not _is_id(request_id):
            raise Invalid("id", "id must be an integer of at most 64 bits")
        unknown = message.keys() - _KEYS[kind] - {"type", "id"}
        if unknown and kind != "open":  # later versions announce their features in `open`
            raise Invalid(sorted(unknown)[0], "unknown key")
        if kind == "batch":
            return self._read_batch(message, echo_input)
        if kind == "columns":
            return _read_columns(message)
        session = _optional(message, "session", str)
        request = Request(kind, request_id, session, extra=message)
        if kind == "step":
            if "data" not in message:
                raise Invalid("data", "Field required")
            request.data = self.action(message["data"])
            request.kwargs = _optional(message, "kwargs", dict)
        elif kind in ("reset", "mcp", "render"):
            request.data = _optional(message, "data", dict) or {}
        elif kind == "fork":
            request.data = self._fork_options(_optional(message, "data", dict) or {})
        elif kind == "restore":
            request.data = _restore_options(_optional(message, "data", dict) or {})
        elif kind == "open":
            _check_open(message)
        elif kind == "cancel" and not _is_id(message.get("request")):
            raise Invalid("request", "expected the id of a request")
        request.timeout_s = _seconds(message, "timeout_s")
        return request

    def _fork_options(self, data: dict[str, Any]) -> dict[str, Any]:
        _check_keys(data, {"n", "wait_s"})
        n = data.get("n", 1)
        if not (_is_id(n) and 1 <= n <= self._max_batch):
            raise Invalid("n", f"expected how many copies, from 1 to {self._max_batch}")
        _check_wait(data.get("wait_s"))
        return {"n": n, "wait_s": float(data.get("wait_s") or 0.0)}

    def _read_batch(self, message: dict[str, Any], echo_input: bool) -> Batch | RefusedRequest:
        request_id, requests = message["id"], message.get("requests")
        if not isinstance(requests, list):
            raise Invalid("requests", "expected a list")
        if len(requests) > self._max_batch:
            text = f"A batch of {len(requests)} requests is over the limit of {self._max_batch}"
            details = {"errors": Invalid("requests", text).errors, "max_batch": self._max_batch}
            return _refused(request_id, WSErrorCode.VALIDATION_ERROR, text, **details)
        parts = [self.read(one, echo_input=echo_input, in_batch=True) for one in requests]
        return Batch(request_id, cast(list[Request | RefusedRequest], parts), bool(message.get("each", False)))

    def action(self, data: Any) -> Any:
        """Validate an action.

        Raises:
            pydantic.ValidationError: It does not fit the action class.
        """
        if self._action_cls is None:
            return data
        if not isinstance(data, dict):
            raise Invalid("data", "expected an object")
        try:
            return deserialize_action(data, self._action_cls)
        except ValidationError:
            if not has_arrays(data):
                raise
        return deserialize_action(without_arrays(data, self.limit), self._action_cls)  # as if they had come as JSON


class Writer(ABC):
    """Writes messages from encoded data."""

    codec: Codec
    closing = b""
    """The end of an envelope, after the data."""

    @abstractmethod
    def observation(self, observation: Any) -> bytes:
        """Encode the data of an observation."""

    @abstractmethod
    def state(self, state: Any) -> bytes:
        """Encode the data of a state."""

    @abstractmethod
    def message(self, kind: str, request_id: int | None, session: str | None, data: bytes | None) -> bytes:
        """Put an envelope around data."""

    def observed(self, observation: Any, request_id: int, session: str) -> bytes:
        """Write an observation with its envelope."""
        return self.message("observation", request_id, session, self.observation(observation))

    def data(self, value: Mapping[str, Any]) -> bytes:
        """Encode any data."""
        return self.codec.encode(value)

    def error(self, exc: BaseException) -> bytes:
        """Encode the data of a failure."""
        return self.data(error_data(exc))

    def repeat(self, reply: bytes, first: Writer, request_id: int, session: str, name: str | None) -> bytes:
        """Write a reply once more, in this writer's encoding.

        Args:
            reply: The message as it was sent, with its envelope.
            first: The writer that wrote it.
            request_id: The id of its request.
            session: The id of its session.
            name: How the repeated request names the session, which may differ from the first.
        """
        kind, data = first._opened(reply, request_id, session)
        if first is not self:
            try:
                data = self.data(first.codec.decode(data, binary=first.codec.is_binary))
            except ValueError as exc:  # nested too deeply, or a number of thousands of digits
                text = f"The reply is kept in another encoding, and cannot be read there: {exc}"
                kind, data = "error", self.error(ExecutionError(text))
        return self.message(kind, request_id, name, data)

    def _opened(self, message: bytes, request_id: int, session: str) -> tuple[str, bytes]:
        """Take the envelope off a reply, which may name the session or not; return its type and its data."""
        for name in (session, None):
            for kind in _REPLIES:
                head = self.message(kind, request_id, name, b"").removesuffix(self.closing)
                if message.startswith(head):
                    return kind, message[len(head) : len(message) - len(self.closing)]
        raise ValueError("not the reply to that request")


class _JsonWriter(Writer):
    codec = JSON
    closing = b"}"
    observation = staticmethod(observation_json)  # without a method between: every step passes here
    state = staticmethod(encode_state)

    def message(self, kind: str, request_id: int | None, session: str | None, data: bytes | None) -> bytes:
        named = f',"session":{to_json(session).decode()}' if session is not None else ""
        head = f'{{"type":"{kind}","id":{"null" if request_id is None else request_id}{named}'.encode()
        return head + b"}" if data is None else b"".join((head, b',"data":', data, b"}"))

    def observed(self, observation: Any, request_id: int, session: str) -> bytes:
        head = f'{{"type":"observation","id":{request_id},"session":"{session}","data":'
        return observation_json(observation, before=head.encode(), after=b"}")


class _MsgPackWriter(Writer):
    codec = MSGPACK

    def observation(self, observation: Any) -> bytes:
        return self.codec.encode(observation_message(observation))

    def state(self, state: Any) -> bytes:
        return self.codec.encode(state_message(state))

    def observed(self, observation: Any, request_id: int, session: str) -> bytes:
        # As `message` would, with one packer instead of two.
        data = observation_message(observation)
        return self.codec.encode({"type": "observation", "id": request_id, "session": session, "data": data})

    def message(self, kind: str, request_id: int | None, session: str | None, data: bytes | None) -> bytes:
        envelope: dict[str, Any] = {"type": kind, "id": request_id}
        if session is not None:
            envelope["session"] = session
        head = pack_plain(envelope)
        if data is None:
            return head
        # A map of up to 15 entries begins with 0x80 + their number; the data is one more.
        return b"".join((bytes((head[0] + 1,)), head[1:], b"\xa4data", data))


WRITERS: Final[Mapping[Codec, Writer]] = {JSON: _JsonWriter(), MSGPACK: _MsgPackWriter()}


def _step_frame(action_cls: type[BaseModel]) -> Any:
    fields: dict[str, Any] = {
        "type": Literal["step"],
        "id": RequestId,
        "session": NotRequired[str],
        "data": action_cls,
        "kwargs": NotRequired[dict[str, Any]],
        "timeout_s": NotRequired[Annotated[float, Field(gt=0, strict=True)]],
    }
    return strict_frame("step", fields)


def _reset_frame() -> Any:
    # Whenever an episode of a vector is over, a reset stands among the steps of the others.
    fields: dict[str, Any] = {"type": Literal["reset"], "id": RequestId, "session": str, "data": dict[str, Any]}
    return strict_frame("reset", fields)


def _batch_frame(request: Any, max_batch: int) -> Any:
    # Stop at the first request that does not fit. `read` describes the problem, and a list of a million errors, one
    # for each empty request, would take gigabytes.
    steps = Annotated[list[request], FailFast(), Field(max_length=max_batch)]
    fields = {"type": Literal["batch"], "id": RequestId, "each": NotRequired[bool], "requests": steps}
    return strict_frame("batch", fields)


def _batch(message: dict[str, Any]) -> Batch:
    return Batch(message["id"], [], message.get("each", False), message["requests"])


def _read_columns(message: dict[str, Any]) -> ColumnBatch:
    sessions, actions = _optional(message, "sessions", list), message.get("actions")
    ids = message.get("ids")
    if has_arrays(ids):
        ids = ids.tolist()  # type: ignore[union-attr]
    if not isinstance(ids, list) or not all(map(_is_id, ids)):
        raise Invalid("ids", "expected the id of each step")
    if sessions is not None and not all(isinstance(name, str) for name in sessions):
        raise Invalid("sessions", "expected names of sessions, as text")
    if not isinstance(actions, list):
        raise Invalid("actions", "expected a list of arrays")
    resets, kwargs = _optional(message, "resets", list) or [], _optional(message, "reset", dict) or {}
    if not all(type(row) is int and 0 <= row < len(ids) for row in resets):
        raise Invalid("resets", "expected rows of the message")
    return ColumnBatch(message["id"], sessions, ids, actions, frozenset(resets), kwargs)


def request_of(step: dict[str, Any]) -> Request:
    """Return a step, or a reset, that was read in one pass."""
    return Request(
        step["type"], step["id"], step.get("session"), step["data"], step.get("kwargs"), step.get("timeout_s")
    )


def _refused(request_id: int | None, code: WSErrorCode, text: str, **details: Any) -> RefusedRequest:
    return RefusedRequest(request_id, None, {"message": text, "code": code.value, **details})


def _optional(message: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    value = message.get(key)
    if value is not None and not isinstance(value, kind):
        raise Invalid(key, f"expected {'text' if kind is str else 'an object'}")
    return value


def _is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -_MAX_ID <= value <= _MAX_ID


def _check_keys(data: Mapping[str, Any], known: set[str]) -> None:
    unknown = data.keys() - known
    if unknown:
        raise Invalid(sorted(map(str, unknown))[0], "unknown key")


def _restore_options(data: dict[str, Any]) -> dict[str, Any]:
    _check_keys(data, {"from"})
    if not isinstance(data.get("from"), str):
        raise Invalid("from", "expected the token of a session, as text")
    return data


def _check_open(message: Mapping[str, Any]) -> None:
    # A token that is none must not open another session: the client would go on in it as if nothing had happened.
    if "resume" in message and not isinstance(message["resume"], str):
        raise Invalid("resume", "expected the token of a session, as text")
    compress = message.get("compress")
    if compress is not None and not (_is_id(compress) and compress >= 0):
        raise Invalid("compress", "expected a number of bytes")
    _check_nonce(_optional(message, "nonce", str))
    _check_wait(message.get("wait_s"))


def _check_nonce(nonce: str | None) -> None:
    if nonce is not None and not NONCE_CHARS[0] <= len(nonce) <= NONCE_CHARS[1]:
        raise Invalid("nonce", f"expected {NONCE_CHARS[0]} to {NONCE_CHARS[1]} characters that cannot be guessed")


def _check_wait(wait_s: Any) -> None:
    is_number = isinstance(wait_s, (int, float)) and not isinstance(wait_s, bool)
    if wait_s is not None and not (is_number and (0 <= wait_s < 1e300 or wait_s == math.inf)):
        raise Invalid("wait_s", "expected a number of seconds")


def _seconds(message: Mapping[str, Any], key: str) -> float | None:
    value = message.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise Invalid(key, "expected a positive number of seconds")
    return float(value)
