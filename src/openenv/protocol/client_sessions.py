"""The client's side of protocol v1: requests to frames, frames to results, error codes to exceptions.

`ClientSession` also keeps the one truth a client must not forget: whether its episode still exists.
Knows no socket and no clock; the drivers in `openenv.client` move the bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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


# client: The client's side of one v2 session: requests with ids, replies matched by them, and what a resume needs.
#
# A reply reaches the request that asked for it or nobody. Knows messages; no socket and no clock; `openenv.client`
# moves the bytes. JSON only.


SUBPROTOCOL_JSON: Final = "openenv.v2.json"

# Requests that concern no session count from here, so that no reply to one of them can be taken for a session's.
_FIRST_CONNECTION_ID: Final = 2**52
_LAST_SESSION_ID: Final = _FIRST_CONNECTION_ID - 1

# Written in advance: it is sent when there is no time left to think. Nothing of the session comes after it.
CLOSE: Final = b'{"type":"close","id":%d}' % _LAST_SESSION_ID


@dataclass(frozen=True, slots=True)
class Event:
    """News of a request that is not answered yet."""

    name: str
    content: Mapping[str, Any]


def new_nonce() -> str:
    """Make a name for a session that is to be opened; it is as secret as the session's token."""
    return secrets.token_urlsafe(24)


class ContinuedElsewhere(SessionLost):
    """Another client has gone on with the session."""

    def __init__(self) -> None:
        super().__init__("continued elsewhere")


class ResumableSession:
    """Encodes requests, matches replies, and remembers how to go on after a lost connection.

    Args:
        token: The resume token of a session that is there already; else one is opened.
        lost_reason: Why an earlier episode of this client is gone.
    """

    def __init__(self, token: str | None = None, *, lost_reason: str | None = None) -> None:
        self._lost = lost_reason
        self._token = token
        self._last_id = 0
        self._pending: int | None = None
        self._kind = self._expected = ""
        self._last_open_id = _FIRST_CONNECTION_ID
        self._nonce: str | None = None
        self.is_attached = False

    @property
    def token(self) -> str | None:
        """The secret that resumes the session, here or elsewhere; None before it is opened and when it is lost."""
        return self._token if self._lost is None else None

    @property
    def lost_reason(self) -> str | None:
        """Why the episode is gone, or None while it is not."""
        return self._lost

    @property
    def is_waiting(self) -> bool:
        """Whether a request is not answered yet."""
        return self._pending is not None

    def lose(self, reason: str, *, is_stranded: bool = False) -> None:
        """Record that the episode is gone.

        Args:
            reason: Why.
            is_stranded: Whether the session may be there all the same, out of reach. The next reset then begins in it
                if it is, so that it does not hold a second slot.
        """
        if self._lost is None:
            self._lost = reason
        if is_stranded:
            self._pending = None
            self.is_attached = False
        else:
            self.forget()

    def forget(self) -> None:
        """Give up the session; the next one is new."""
        self._token = self._nonce = None
        self._last_id = 0
        self._pending = None
        self.is_attached = False

    # -- opening --------------------------------------------------------------------------------------------------

    @property
    def is_resuming(self) -> bool:
        """Whether there is a session to go back to, be it only for a reset."""
        return self._token is not None

    def open_request(self, wait_s: float | None = None) -> bytes:
        """Encode the request for a session: the one that the token names, or a new one.

        Until it is answered, each of them is for one and the same new session.

        Args:
            wait_s: How long to wait in the queue for a new one; None for not at all.
        """
        self.is_attached = False
        self._last_open_id += 1
        message: dict[str, Any] = {"type": "open", "id": self._last_open_id}
        if self._token is not None:
            message["resume"] = self._token
        else:
            self._nonce = message["nonce"] = self._nonce or new_nonce()
            if wait_s is not None:
                message["wait_s"] = wait_s
        return to_json(message)

    def opened(self, raw: bytes) -> bool:
        """Take in a message while the session is being opened; say whether it is open now.

        Raises:
            SessionLost: The session to be resumed is gone, or somebody else has gone on with it.
            ServerError: The server refused; the class follows its code.
            ProtocolError: The message is not of this protocol.
        """
        message = _message(raw)
        if message.get("id") != self._last_open_id:
            if message.get("type") == "error" and message.get("id") is None:
                raise error_from_frame(_data(message))
            return False
        kind = message.get("type")
        if kind == "event":
            return False
        if kind == "error":
            raise error_from_frame(_data(message))
        token, last_id = message.get("token"), message.get("last_id")
        if kind != "opened" or not isinstance(token, str) or not isinstance(last_id, int):
            raise ProtocolError(f"Expected an 'opened' message, got {str(message)[:200]}")
        self._settle(last_id)
        self._token, self._nonce = token, None
        self.is_attached = True
        return True

    def _settle(self, last_id: int) -> None:
        """Count on from where the session is."""
        if last_id > self._last_id:
            if self._pending is not None:  # the reply to that id would be somebody else's
                raise ContinuedElsewhere
            self._last_id = last_id

    # -- asking ---------------------------------------------------------------------------------------------------

    def request(self, kind: str, data: Any = None, extra: Mapping[str, Any] | None = None) -> bytes:
        """Encode a request under the next id. To repeat it after a resume, send the same bytes again.

        Args:
            kind: The type of the request.
            data: What it is about.
            extra: Further keys.

        Raises:
            SessionLost: The episode is gone and this is not a reset.
        """
        if self._lost is not None and kind != "reset":
            raise SessionLost(self._lost)
        request_id = self._last_id + 1
        message: dict[str, Any] = {"type": kind, "id": request_id}
        if data is not None:
            message["data"] = data
        if extra:
            message.update(extra)
        payload = to_json(message, fallback=jsonable, bytes_mode="base64", inf_nan_mode="constants")
        self._last_id = self._pending = request_id
        self._kind, self._expected = kind, _REPLY_TYPES[kind]
        return payload

    def cancel_request(self) -> bytes | None:
        """Encode the request that takes back what is not answered yet: a request, or else `open`."""
        wanted = self._pending if self.is_attached else self._last_open_id
        if wanted is None:
            return None
        self._last_open_id += 1
        return to_json({"type": "cancel", "id": self._last_open_id, "request": wanted})

    def receive(self, raw: bytes) -> dict[str, Any] | Event | None:
        """Take in a message: the data of the awaited reply, news of it, or None for what answers nothing open.

        Raises:
            SessionLost: The session has ended, or another connection has it.
            ServerError: The request failed; the class follows the code.
            ProtocolError: The message is not of this protocol.
        """
        message = _message(raw)
        if self._pending is None or message.get("id") != self._pending or message.get("type") != self._expected:
            return self._other(message)
        data = message.get("data")
        if not isinstance(data, dict):
            raise ProtocolError(f"The server's reply has no data: {str(message)[:200]}")
        self._pending = None
        if self._kind == "reset":  # not before: a reset that failed has begun nothing
            self._lost = None
        return data

    def _other(self, message: dict[str, Any]) -> Event | None:
        kind, request_id = message.get("type"), message.get("id")
        if kind == "event":
            name = str(message.get("event"))
            if name == "detached" and self.is_attached:
                raise SessionLost(str(message.get("reason", "unknown")))
            return Event(name, message) if request_id is not None and request_id == self._pending else None
        # An error without an id answers a message that the server could not read: ours, since there is no other.
        if self._pending is None or (request_id != self._pending and not (kind == "error" and request_id is None)):
            return None
        self._pending = None
        if kind == "error":
            raise error_from_frame(_data(message))
        raise ProtocolError(f"Expected {self._expected!r} in answer to {self._kind!r}, got {kind!r}")


def _message(raw: bytes) -> dict[str, Any]:
    try:
        message = decode(raw)
    except ValueError as exc:
        raise ProtocolError(f"The server's message is not JSON: {exc}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"The server's message is not an OpenEnv message: {str(message)[:200]}")
    return message


def _data(message: Mapping[str, Any]) -> Mapping[str, Any]:
    data = message.get("data")
    return data if isinstance(data, Mapping) else {}
