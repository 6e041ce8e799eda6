"""The client's side of protocol v1: requests to frames, frames to results, error codes to exceptions.

`ClientSession` also keeps the one truth a client must not forget: whether its episode still exists.
Knows no socket and no clock; the drivers in `openenv.client` move the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from ..errors import (
    AccessDenied,
    EnvironmentFactoryError,
    ExecutionError,
    Forbidden,
    InvalidMessageError,
    OpenEnvError,
    ProtocolError,
    RequestCancelled,
    RequestValidationError,
    ServerError,
    SessionCapacityError,
    SessionClosedError,
    SessionError,
    SessionLost,
    SessionNotFoundError,
    StaleRequest,
    UnknownTypeError,
)
from .json_values import decode, jsonable

_SIMPLE_ERRORS: Mapping[str, type[ServerError]] = {
    cls.code: cls
    for cls in (
        InvalidMessageError,
        UnknownTypeError,
        RequestValidationError,
        ExecutionError,
        SessionError,
        AccessDenied,
    )
}
# A server that was started anew does not know the session at all; for the episode that is the same.
_GONE_CODES = frozenset({SessionLost.code, SessionClosedError.code, SessionNotFoundError.code})
_REPLY_TYPES: Mapping[str, str] = {"reset": "observation", "step": "observation", "state": "state", "mcp": "mcp"}

_FIELDS_TOLD = 3


class ClientSession:
    """Encodes requests, checks replies, remembers a lost episode until `reset`."""

    def __init__(self) -> None:
        self._lost: str | None = None

    @property
    def lost_reason(self) -> str | None:
        """Why the episode is gone, or None while it is not."""
        return self._lost

    def lose(self, reason: str) -> None:
        """Record that the episode is gone."""
        if self._lost is None:
            self._lost = reason

    def request(self, kind: str, data: Any = None) -> bytes:
        """Encode a request.

        Raises:
            SessionLost: The episode is gone and this is not a reset.
        """
        if kind != "reset" and self._lost is not None:
            raise SessionLost(self._lost)
        message: dict[str, Any] = {"type": kind} if data is None else {"type": kind, "data": data}
        return to_json(message, fallback=jsonable, bytes_mode="base64", inf_nan_mode="constants")

    def reply(self, kind: str, raw: bytes | str) -> dict[str, Any]:
        """Decode the reply to a request of that kind and return its data.

        Raises:
            ServerError: The server reported an error; the class follows its code.
            ProtocolError: The reply is not of this protocol.
        """
        try:
            message = decode(raw)
        except ValueError as exc:
            raise ProtocolError(f"The server's reply is not JSON: {exc}") from None
        if not isinstance(message, dict) or not isinstance(message.get("data"), dict):
            raise ProtocolError(f"The server's reply is not an OpenEnv frame: {str(message)[:200]}")
        data: dict[str, Any] = message["data"]
        if message.get("type") == "error":
            raise error_from_frame(data)
        if message.get("type") != _REPLY_TYPES[kind]:
            raise ProtocolError(f"Expected a {_REPLY_TYPES[kind]!r} frame, got {message.get('type')!r}")
        if kind == "reset":  # not before: a reset that failed has begun nothing
            self._lost = None
        return data


def error_from_frame(data: Mapping[str, Any]) -> OpenEnvError:
    """Build the exception of an error frame's code; its text keeps the form old code matches on."""
    code = str(data.get("code", "UNKNOWN"))
    details = {key: value for key, value in data.items() if key not in ("message", "code")}
    text = f"Server error: {_explained(code, str(data.get('message', 'Unknown error')), details)} (code: {code})"
    if code == SessionCapacityError.code:
        wait_s = details.get("retry_after_s")
        return SessionCapacityError(
            _int(details.get("active_sessions")),
            _int(details.get("max_sessions")),
            text,
            retry_after_s=float(wait_s) if isinstance(wait_s, (int, float)) else None,
        )
    if code == EnvironmentFactoryError.code:
        reason = details.get("reason")
        name = str(details.get("factory_name", ""))
        return EnvironmentFactoryError(name, text, reason=None if reason is None else str(reason))
    if code in _GONE_CODES:
        return SessionLost(str(details.get("reason", "unknown to the server")), text)
    if code == StaleRequest.code:
        return StaleRequest(_int(details.get("request_id")), _int(details.get("last_id")), text)
    if code == RequestCancelled.code:
        return RequestCancelled(text)
    if code == Forbidden.code:
        return Forbidden(str(details.get("role", "")), text)
    return _SIMPLE_ERRORS.get(code, ServerError)(text, details=details)


def _explained(code: str, message: str, details: Mapping[str, Any]) -> str:
    """Add to a server's message what helps whoever reads only that."""
    if code == RequestValidationError.code and (found := field_errors(details.get("errors"))):
        return f"{message}: {found}"
    if code == EnvironmentFactoryError.code and (reason := details.get("reason")) and str(reason) not in message:
        return f"{message} {reason}"
    if code == AccessDenied.code:
        return f"{message} Pass token=, or set OPENENV_TOKEN."
    if code == SessionCapacityError.code:
        return f"{message} Close a session or serve with more (--max-sessions)."
    return message


def field_errors(errors: Any) -> str:
    """Name the first fields that were refused, and why; empty where nothing is known."""
    if not isinstance(errors, list):
        return ""
    lines = []
    for error in errors[:_FIELDS_TOLD]:
        if isinstance(error, dict) and isinstance(error.get("msg"), str):
            loc = error.get("loc")
            place = ".".join(str(part) for part in loc) if isinstance(loc, list) else ""
            lines.append(f"{place}: {error['msg']}" if place else error["msg"])
    more = len(errors) - _FIELDS_TOLD
    return "; ".join(lines) + (f"; and {more} more" if lines and more > 0 else "")


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0
