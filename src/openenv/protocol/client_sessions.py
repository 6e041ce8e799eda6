"""The client's side of both protocols, sans IO: requests to messages, messages to results, error codes to exceptions.

A session also tracks whether its episode still exists. Knows no socket and no clock;
`openenv.client` moves the bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json, to_json

from openenv.errors import (
    AccessDenied,
    EnvironmentFactoryError,
    ExecutionError,
    Forbidden,
    InvalidMessageError,
    NonFiniteReward,
    NotForkable,
    OpenEnvError,
    ProtocolError,
    ReplyTooLarge,
    RequestCancelled,
    RequestValidationError,
    ServerError,
    SessionCapacityError,
    SessionClosedError,
    SessionElsewhere,
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
        NonFiniteReward,
        SessionError,
        ReplyTooLarge,
        NotForkable,
        AccessDenied,
    )
}
# A server that was restarted does not know the session at all; for the episode that is the same.
_GONE_CODES = frozenset({SessionLost.code, SessionClosedError.code, SessionNotFoundError.code})
_REPLY_TYPES: Mapping[str, str] = {
    "reset": "observation",
    "step": "observation",
    "state": "state",
    "mcp": "mcp",
    "fork": "forked",
    "restore": "restored",
    "render": "rendered",
    "close": "closed",
}
_FIELDS_SHOWN = 3


class ClientSession:
    """A v1 session, which ends with its connection: encodes requests, checks replies, remembers a lost episode."""

    __slots__ = ("_lost",)

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
    if code == SessionElsewhere.code:
        return SessionElsewhere(str(details.get("session_id", "")), text)
    if code == StaleRequest.code:
        return StaleRequest(_int(details.get("request_id")), _int(details.get("last_id")), text)
    if code == RequestCancelled.code:
        return RequestCancelled(text)
    if code == Forbidden.code:
        return Forbidden(str(details.get("role", "")), text)
    return _SIMPLE_ERRORS.get(code, ServerError)(text, details=details)


def _explained(code: str, message: str, details: Mapping[str, Any]) -> str:
    """Add to a server's message what helps to fix the problem."""
    if code == RequestValidationError.code and (fields := field_errors(details.get("errors"))):
        return f"{message}: {fields}"
    if code == EnvironmentFactoryError.code and (reason := details.get("reason")) and str(reason) not in message:
        return f"{message} {reason}"
    if code == ExecutionError.code and (exception := details.get("exception")):
        place = details.get("place")
        return f"{message} ({exception}{f' at {place}' if place else ''})"
    if code == AccessDenied.code:
        return f"{message} Pass token=, or set OPENENV_TOKEN."
    if code == SessionCapacityError.code:
        return f"{message} Close a session or serve with more (--max-sessions)."
    return message


def field_errors(errors: Any) -> str:
    """Name the first refused fields and the reasons; return an empty text if the server names none."""
    if not isinstance(errors, list):
        return ""
    lines = []
    for error in errors[:_FIELDS_SHOWN]:
        if isinstance(error, dict) and isinstance(error.get("msg"), str):
            loc = error.get("loc")
            place = ".".join(str(part) for part in loc) if isinstance(loc, list) else ""
            lines.append(f"{place}: {error['msg']}" if place else error["msg"])
    more = len(errors) - _FIELDS_SHOWN
    return "; ".join(lines) + (f"; and {more} more" if lines and more > 0 else "")


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


# -- protocol v2 --------------------------------------------------------------------------------------------------

SUBPROTOCOL_JSON: Final = "openenv.v2.json"

# Requests that concern no session count from here, so that a reply to one of them never matches a session's request.
_FIRST_CONNECTION_ID: Final = 2**52
_LAST_SESSION_ID: Final = _FIRST_CONNECTION_ID - 1

# Encoded in advance: it is sent when the client is garbage collected. The id is above that of every other request.
CLOSE: Final = b'{"type":"close","id":%d}' % _LAST_SESSION_ID


@dataclass(frozen=True, slots=True)
class Event:
    """An `event` message about a request that is not answered yet."""

    name: str
    content: Mapping[str, Any]


class ContinuedElsewhere(SessionLost):
    """Another client has gone on with the session."""

    def __init__(self) -> None:
        super().__init__("continued elsewhere")


class ResumableSession:
    """The client's view of one v2 session: request ids, the unanswered request, and the data for a resume.

        NEW --- open ---> OPENING --- opened ---> ATTACHED --- request ---> WAITING --- reply ---> ATTACHED
         ^                   ^                        |                        |
         |                   |                  connection lost          connection lost
       forget()              |                        v                        v
         |                   +------- resume --- DETACHED (the token is kept; `pending` is sent again after the resume)
         |
        LOST <--- lose(): only a reset goes on, in a new session.
        STRANDED <--- lose(is_stranded=True): the same, but the reset first tries the old session. The server may still
                      hold it and its slot; only the connection is broken.

    A request that was sent but not answered is repeated under the same id, and the server answers a repeated id from
    its ledger: nothing runs twice (docs/protocol.md, section 4). A nonce does the same for `open`: until the server
    has named a token, each `open` with the same nonce is for one and the same new session.

    `EnvClient` has one session per connection and uses the JSON methods (`request`, `receive`, `open_request`,
    `opened`); a `VectorEnv` has many and uses messages (`message`, `take`, `open_message`, `take_opened`), which it
    puts into batches of its codec.

    Args:
        token: The resume token of a session that exists; otherwise one is opened.
        lost_reason: Why an earlier episode of this client is gone.
    """

    __slots__ = (
        "_expected",
        "_last_id",
        "_lost",
        "_nonce",
        "_open_id",
        "_token",
        "is_attached",
        "name",
        "pending",
    )

    def __init__(self, token: str | None = None, *, lost_reason: str | None = None) -> None:
        self._lost = lost_reason
        self._token = token
        self._last_id = 0
        self._expected = ""
        self._open_id = _FIRST_CONNECTION_ID
        self._nonce: str | None = None
        self.is_attached = False
        # The request that is not answered yet.
        self.pending: dict[str, Any] | None = None
        # Sent with each request where several sessions share a connection.
        self.name: str | None = None

    @property
    def token(self) -> str | None:
        """The secret that resumes the session in any client; None before `opened` and after `lose`."""
        return self._token if self._lost is None else None

    @property
    def lost_reason(self) -> str | None:
        """Why the episode is gone, or None while it is not."""
        return self._lost

    @property
    def is_waiting(self) -> bool:
        """Whether a request is not answered yet."""
        return self.pending is not None

    @property
    def is_resuming(self) -> bool:
        """Whether there is a session to go back to, even if only for a reset."""
        return self._token is not None

    def lose(self, reason: str, *, is_stranded: bool = False) -> None:
        """Record that the episode is gone; the first reason counts.

        Args:
            reason: Why.
            is_stranded: Whether the session may still exist, out of reach. The next reset then begins in it, so that
                it does not hold a second slot.
        """
        if self._lost is None:
            self._lost = reason
        if is_stranded:
            self.pending = None
            self.is_attached = False
        else:
            self.forget()

    def forget(self) -> None:
        """Give up the session; the next one is new."""
        self._token = self._nonce = self.name = None
        self._last_id = 0
        self.pending = None
        self.is_attached = False

    # -- opening --------------------------------------------------------------------------------------------------

    def open_message(self, open_id: int) -> dict[str, Any]:
        """Return the request for a session: the one that the token names, or a new one."""
        self.is_attached = False
        self._open_id = open_id
        if self._token is not None:
            return {"type": "open", "id": open_id, "resume": self._token}
        self._nonce = self._nonce or secrets.token_urlsafe(24)  # as secret as the token
        return {"type": "open", "id": open_id, "nonce": self._nonce}

    def open_request(self, wait_s: float | None = None) -> bytes:
        """Encode the request for a session.

        Args:
            wait_s: How long to wait in the queue for a new one; None for not at all.
        """
        message = self.open_message(self._open_id + 1)
        if wait_s is not None and self._token is None:
            message["wait_s"] = wait_s
        return to_json(message)

    def opened(self, raw: bytes) -> bool:
        """Take in an encoded message while the session is being opened; see `take_opened`."""
        return self.take_opened(_message(raw))

    def take_opened(self, message: Mapping[str, Any]) -> bool:
        """Take in a message while the session is being opened; return whether it is open now.

        Raises:
            SessionLost: The session to be resumed is gone, or another client has gone on with it.
            ServerError: The server refused; the class follows its code.
            ProtocolError: The message is not of this protocol.
        """
        kind = message.get("type")
        if message.get("id") != self._open_id:
            if kind == "error" and message.get("id") is None:
                raise error_from_frame(_data(message))
            return False
        if kind == "event":
            return False
        if kind == "error":
            raise error_from_frame(_data(message))
        token, last_id = message.get("token"), message.get("last_id")
        if kind != "opened" or not isinstance(token, str) or not isinstance(last_id, int):
            raise ProtocolError(f"Expected an 'opened' message, got {str(message)[:200]}")
        if last_id > self._last_id:
            if self.pending is not None:  # the reply that the server keeps for that id is another client's
                raise ContinuedElsewhere
            self._last_id = last_id
        self._token, self._nonce = token or None, None  # an empty token: nothing to resume
        self.is_attached = True
        return True

    # -- requests and replies -------------------------------------------------------------------------------------

    def message(self, kind: str, data: Any = None, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a request under the next id; it is `pending` until its reply comes.

        Args:
            kind: The type of the request.
            data: The request's data, such as an action.
            extra: Further keys.

        Raises:
            SessionLost: The episode is gone and this is not a reset.
        """
        if self._lost is not None and kind != "reset":
            raise SessionLost(self._lost)
        self._last_id += 1
        message: dict[str, Any] = {"type": kind, "id": self._last_id}
        if self.name is not None:
            message["session"] = self.name
        if data is not None:
            message["data"] = data
        if extra:
            message.update(extra)
        self.pending = message
        self._expected = _REPLY_TYPES[kind]
        return message

    def request(self, kind: str, data: Any = None, extra: Mapping[str, Any] | None = None) -> bytes:
        """Encode a request under the next id. To repeat it after a resume, send the same bytes again."""
        message = self.message(kind, data, extra)
        try:
            return to_json(message, fallback=jsonable, bytes_mode="base64", inf_nan_mode="constants")
        except BaseException:  # nothing was sent: the next request has this id
            self.pending = None
            self._last_id -= 1
            raise

    def cancel_request(self) -> bytes | None:
        """Encode the cancellation of the unanswered request, or of `open`."""
        wanted = self._open_id
        if self.is_attached:
            if self.pending is None:
                return None
            wanted = self.pending["id"]
        self._open_id += 1
        return to_json({"type": "cancel", "id": self._open_id, "request": wanted})

    def receive(self, raw: bytes) -> dict[str, Any] | Event | None:
        """Take in an encoded message; see `take`."""
        return self.take(_message(raw))

    def take(self, message: Mapping[str, Any]) -> dict[str, Any] | Event | None:
        """Take in a message: return the data of the awaited reply, an event of it, or None for what answers nothing.

        Raises:
            SessionLost: The session has ended, or another connection has it.
            ServerError: The request failed; the class follows the code.
            ProtocolError: The message is not of this protocol.
        """
        pending = self.pending
        if pending is None or message.get("id") != pending["id"] or message.get("type") != self._expected:
            return self._take_other(message)
        data = message.get("data")
        if not isinstance(data, dict):
            raise ProtocolError(f"The server's reply has no data: {str(message)[:200]}")
        self.pending = None
        if pending["type"] == "reset":  # not before: a reset that failed has begun nothing
            self._lost = None
        return data

    def _take_other(self, message: Mapping[str, Any]) -> Event | None:
        kind, request_id, pending = message.get("type"), message.get("id"), self.pending
        is_ours = pending is not None and request_id == pending["id"]
        if kind == "event":
            name = str(message.get("event"))
            if name == "detached" and self.is_attached:
                raise SessionLost(str(message.get("reason", "unknown")))
            return Event(name, message) if is_ours and request_id is not None else None
        # An error without an id answers a message that the server could not read. Only one request is pending: ours.
        if pending is None or not (is_ours or (kind == "error" and request_id is None)):
            return None
        self.pending = None
        if kind == "error":
            raise error_from_frame(_data(message))
        raise ProtocolError(f"Expected {self._expected!r} in answer to {pending['type']!r}, got {kind!r}")


def _message(raw: bytes) -> dict[str, Any]:
    try:
        message = from_json(raw, cache_strings="keys")
    except ValueError as exc:
        raise ProtocolError(f"The server's message is not JSON: {exc}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"The server's message is not an OpenEnv message: {str(message)[:200]}")
    return message


def _data(message: Mapping[str, Any]) -> Mapping[str, Any]:
    data = message.get("data")
    return data if isinstance(data, Mapping) else {}
