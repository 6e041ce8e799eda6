"""What a connection of a `VectorEnv` speaks: protocol v2, which carries many sessions, or v1, where it is one itself.

The fleet asks in the words of v2; a dialect says the same in those of its server, and reads the answers back. So
nothing else has to know which of them it is. Sans IO: knows messages and payloads, must not know sockets or slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Final

from ..errors import ConnectFailed, EnvironmentFactoryError, SessionCapacityError, SessionError, SessionLost
from ..protocol.client import ClientSession, error_from_frame
from ..protocol.codec import decode
from ..protocol.v2.codec import BY_NAME, JSON, Codec

_ENDS: Final = (SessionCapacityError, EnvironmentFactoryError, SessionError, SessionLost)
_UNASKED: Final = "the server sent a message that nobody asked for"
_NO_QUEUE: Final = (
    "Each slot takes a session of its own, and a server without protocol v2 has no queue for them: wait_s does not "
    "help. One of openenv 0.10 takes as many as create_app(max_concurrent_envs=...) says, by default 1."
)


class Dialect(ABC):
    """One way to ask sessions on a connection, and to read what they answer."""

    name: str
    """What is shown of it: the subprotocol, or `v1`."""
    is_binary: bool = False
    """Whether messages are sent in binary frames."""
    is_session: bool = False
    """Whether a connection is one session, that ends with it; otherwise it carries many, that outlive it."""
    is_over: bool = False
    """Whether the connection is of no use any more: its only session has ended."""

    @abstractmethod
    def encode(self, messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
        """Return payloads of frames that say the same as these messages of protocol v2."""

    @abstractmethod
    def decode(self, payload: bytes, *, binary: bool, max_bytes: int) -> dict[str, Any]:
        """Return the message of protocol v2 that says the same as the payload of a frame.

        Raises:
            ValueError: It is no message.
        """


class Multiplexed(Dialect):
    """Protocol v2, in one of its encodings."""

    def __init__(self, codec: Codec) -> None:
        self.name = codec.name
        self.is_binary = codec.is_binary
        self._codec = codec

    def encode(self, messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
        """Write messages as they are."""
        return [self._codec.encode(message) for message in messages]

    def decode(self, payload: bytes, *, binary: bool, max_bytes: int) -> dict[str, Any]:
        """Read a message as it is."""
        return self._codec.decode(payload, binary=binary, max_bytes=max_bytes)


class SingleSession(Dialect):
    """Protocol v1: no ids, but every request is answered once and in order, so that ids are told by counting.

    `open` is a request for the state: it begins nothing, and whatever is answered shows that the server has made the
    session, or why not. `close` has no answer; the server hangs up.
    """

    name = "v1"
    is_session = True

    def __init__(self) -> None:
        self._session = token_hex(8)  # for those who tell sessions apart by name; the server gives none
        self._writer = ClientSession()
        self._asked: deque[tuple[str, int]] = deque()
        self._is_open = False

    def encode(self, messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
        """Write what the messages ask for, a frame for each request."""
        payloads = []
        for message in messages:
            if message["type"] == "open":
                self._asked.append(("open", message["id"]))
                payloads.append(self._writer.request("state"))
                continue
            for request in message["requests"]:
                if request["type"] != "close":
                    self._asked.append((request["type"], request["id"]))
                payloads.append(self._writer.request(request["type"], request.get("data")))
        return payloads

    def decode(self, payload: bytes, *, binary: bool, max_bytes: int) -> dict[str, Any]:
        """Read an answer, and say which request it is for.

        A message that nobody asked for ends the session: the next answer might not be that of the next request.
        """
        message = decode(payload)
        if not isinstance(message, dict) or not isinstance(message.get("data"), dict):
            raise ValueError(f"not an OpenEnv frame: {str(message)[:200]}")
        data = message["data"]
        error = error_from_frame(data) if message.get("type") == "error" else None
        self.is_over = isinstance(error, _ENDS)
        if not self._asked and self._is_open:
            self.is_over = True
            reason = _UNASKED if error is None else getattr(error, "reason", None) or str(error)
            return {"type": "event", "event": "detached", "session": self._session, "reason": reason}
        kind, request_id = self._asked.popleft() if self._asked else ("open", 1)
        if kind != "open":
            return {"type": message.get("type"), "id": request_id, "session": self._session, "data": data}
        if self.is_over:
            return {"type": "error", "id": request_id, "data": _advised(data)}
        self._is_open = True
        return {"type": "opened", "id": request_id, "session": self._session}


def _advised(data: dict[str, Any]) -> dict[str, Any]:
    """Add to a refusal for lack of room what helps against it."""
    if data.get("code") != SessionCapacityError.code:
        return data
    return {**data, "message": f"{data.get('message', '')} {_NO_QUEUE}".strip()}


def agreed(chosen: str | None, offered: Sequence[str], *, insists: bool) -> Dialect:
    """Return the dialect of a connection.

    Args:
        chosen: The subprotocol that the server has chosen, if any.
        offered: Those that it could choose from.
        insists: Whether nothing but protocol v2 will do.

    Raises:
        ConnectFailed: The server has chosen none, and v1 will not do.
    """
    if chosen is not None:
        return Multiplexed(BY_NAME[chosen])
    if insists:
        raise ConnectFailed(
            f"the server does not speak {' or '.join(offered)}. One of openenv 0.10 or before has no protocol v2: "
            "protocol='auto' uses a socket for each session with it"
        )
    if offered and JSON.name not in offered:
        raise ConnectFailed(
            f"the server does not speak {' or '.join(offered)}. codec='json' and codec='auto' work with servers that "
            "have no MessagePack, and with those of openenv 0.10 and before"
        )
    return SingleSession()
