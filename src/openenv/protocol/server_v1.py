"""The server's side of protocol v1: frames to requests, results to frames.

Stateless, one per served environment. Knows shapes and codes; must not know sessions, sockets or threads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ValidationError

from openenv.errors import OpenEnvError, message_of
from openenv.types import WSCloseMessage, WSErrorCode, WSResetMessage, WSStateMessage, WSStepMessage

from .json_values import decode, encode, encode_state, encode_with_null, observation_json
from .jsonrpc import WSMCPMessage
from .schema import deserialize_action, step_frame_parser

logger = logging.getLogger(__name__)

# A validation error does not repeat the input of a request above this size, nor name more problems than this: the
# answer to a bad 50 MB action is short.
ECHO_LIMIT: Final = 65_536
_MOST_ERRORS: Final = 100


class V1Request(NamedTuple):
    """A frame: its type, and the action, keywords or JSON-RPC request in it."""

    type: str
    data: Any = None


class Malformed(NamedTuple):
    """An invalid frame; `reply` is the error frame to send."""

    reply: bytes
    code: WSErrorCode


_FRAMES: Final[Mapping[str, type[BaseModel]]] = {
    "step": WSStepMessage,
    "reset": WSResetMessage,
    "state": WSStateMessage,
    "close": WSCloseMessage,
    "mcp": WSMCPMessage,
}


class ServerProtocol:
    """Parses and writes v1 frames for one action class."""

    def __init__(self, action_cls: type[Any] | None) -> None:
        self._action_cls = action_cls
        self._parse_step = step_frame_parser(action_cls)

    def parse_step(self, raw: bytes) -> Any:
        """Return the action of a step frame in one pass, or None for what only `parse` understands."""
        if self._parse_step is not None and b'"step"' in raw[:32]:
            try:
                return self._parse_step(raw)
            except Exception:  # `parse` describes the problem
                pass
        return None

    def parse(self, raw: bytes) -> V1Request | Malformed:
        """Read one frame; return `Malformed` for any problem with it."""
        try:
            message = decode(raw)
        except ValueError as exc:
            return _malformed(WSErrorCode.INVALID_JSON, f"Invalid JSON: {exc}")
        if not isinstance(message, dict):
            kind = type(message).__name__
            return _malformed(WSErrorCode.INVALID_JSON, f"Invalid JSON: expected an object, got {kind}")
        kind = message.get("type", "")
        frame_cls = _FRAMES.get(kind) if isinstance(kind, str) else None
        if frame_cls is None:
            return _malformed(WSErrorCode.UNKNOWN_TYPE, f"Unknown message type: {_short(kind)}")
        try:
            data: Any = getattr(frame_cls.model_validate(message), "data", None)
            return V1Request(kind, self.action(data) if kind == "step" else data)
        except Exception as exc:  # validators may raise anything
            errors = error_list(exc, echo_input=len(raw) <= ECHO_LIMIT)
            return _malformed(WSErrorCode.VALIDATION_ERROR, "Invalid message", {"errors": errors})

    def action(self, data: Mapping[str, Any]) -> Any:
        """Validate a dict as this server's action.

        Raises:
            pydantic.ValidationError: The data does not fit the action class.
        """
        return dict(data) if self._action_cls is None else deserialize_action(data, self._action_cls)


def observation_frame(observation: Any) -> bytes:
    """Answer to reset and step.

    Raises:
        NonFiniteReward: The reward is not a finite number; `reply` has the frame with null.
    """
    return encode_with_null(_observation_frame, observation)


def _observation_frame(observation: Any, *, null_reward: bool = False) -> bytes:
    return observation_json(observation, before=b'{"type":"observation","data":', after=b"}", null_reward=null_reward)


def state_frame(state: Any) -> bytes:
    """Answer to state."""
    return b'{"type":"state","data":' + encode_state(state) + b"}"


def frame_type(raw: bytes) -> str | None:
    """Return the type of a request frame, or None for any other frame."""
    try:
        message = decode(raw)
    except ValueError:
        return None
    kind = message.get("type") if isinstance(message, dict) else None
    return kind if isinstance(kind, str) and kind in _FRAMES else None


def rpc_frame(response: Mapping[str, Any]) -> bytes:
    """Answer to an `mcp` frame."""
    return encode({"type": "mcp", "data": response})


def error_frame(code: WSErrorCode | str, message: str, details: Mapping[str, Any] | None = None) -> bytes:
    """Report a failure."""
    text = code.value if isinstance(code, WSErrorCode) else code
    return encode({"type": "error", "data": {"message": message, "code": text, **(details or {})}})


def exception_frame(exc: BaseException) -> bytes:
    """Report an exception."""
    return encode({"type": "error", "data": error_data(exc)})


def error_data(exc: BaseException) -> dict[str, Any]:
    """Describe an exception: the framework's own with its code, anything else as the environment's failure."""
    if isinstance(exc, OpenEnvError):
        return {"message": str(exc), "code": exc.code, **exc.details}
    return {"message": message_of(exc), "code": WSErrorCode.EXECUTION_ERROR.value}


def error_list(exc: Exception, *, echo_input: bool = True) -> list[dict[str, Any]]:
    """Describe a validation failure as JSON-able dicts; exceptions inside become their text."""
    if isinstance(exc, ValidationError):
        try:
            text = exc.json(include_url=False, include_input=echo_input)
            errors: list[dict[str, Any]] = decode(text)
        except ValueError:
            errors = [dict(one) for one in exc.errors(include_url=False, include_context=False, include_input=False)]
        return errors[:_MOST_ERRORS]
    return [{"type": "value_error", "loc": [], "msg": f"{type(exc).__name__}: {message_of(exc)}"}]


def _malformed(code: WSErrorCode, message: str, details: Mapping[str, Any] | None = None) -> Malformed:
    return Malformed(error_frame(code, message, details), code)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:100] + "…"
