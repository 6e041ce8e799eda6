"""The uvicorn protocol classes of a server with several workers: they route each connection to the right worker.

The accepting worker reads the first request. If another worker has the session, it hands over the connection and the
bytes read so far (`SCM_RIGHTS`). The client notices nothing, and no byte passes a second process. A kept-alive
connection may move again between two requests. A v2 WebSocket names its session in the first message, after the
handshake, so it moves then.

    accept --> RoutedFirstRead -- upgrade: v1, the page --> handed over, or RoutedUpgrade
                    |              upgrade: v2 -----------> RoutedUpgrade -- first message --> handed over, or kept
                    +-- HTTP --> RoutedHttp -- request ---> handed over before a byte of it is parsed, or answered
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from uvicorn.config import Config
from uvicorn.server import ServerState

from ..asgi import MOST_HEAD_BYTES
from ..fast.dispatch import DirectDispatch
from ..fast.frame_socket import FrameSocket
from ..fast.http import HEAD_TIMEOUT_S, FirstRead, LimitedHttpProtocol
from ..fast.upgrade import UpgradeProtocol
from ..request_head import RequestHead, announced_sessions, is_plain_upgrade, is_request, read_head
from ..runners import loop_local
from ..slow_clients import PartialRequests
from ..sockets import SocketHandler
from ..ws_v2 import V2Connection
from .routing import MOST_BODY_BYTES, Destination

if TYPE_CHECKING:
    from .worker import ServerWorker

logger = logging.getLogger("uvicorn.error")

WORKERS_HEADER: Final = b"x-openenv-workers"
STEPS_HEADER: Final = b"x-openenv-steps"
_MOST_HELD: Final = 256 * 1024  # pipelined bytes to buffer before reading pauses
_UNFLUSHED_S: Final = 0.005  # how soon to check again whether a response was sent
_SETTLE_S: Final = 10.0  # a v2 connection that is silent for this long stays with its worker


class Stage(IntEnum):
    """The progress of a connection when it is handed over."""

    REQUEST = 1  # the bytes begin with a request
    MESSAGES = 2  # the bytes are a WebSocket handshake that was answered, and then messages


@dataclass(frozen=True, slots=True)
class AdoptedConnection:
    """A connection that another worker has handed over.

    Args:
        stage: How far that worker has come.
        head: The WebSocket handshake, if it was answered there.
        early: Bytes that were read and not handled.
    """

    stage: Stage
    head: bytes
    early: bytes


class RoutedFirstRead(FirstRead):
    """A connection before its first bytes: this worker serves it or hands it over.

    Args:
        config: As uvicorn passes it, like the next two.
        server_state: Connections and tasks.
        app_state: The lifespan's state.
        worker: This worker.
        adopted: What another worker has handed over; None for a connection that was just accepted.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        worker: ServerWorker,
        adopted: AdoptedConnection | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._worker = worker
        self._adopted = adopted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle what another worker has read. At once: the next read must come after it."""
        super().connection_made(transport)
        adopted = self._adopted
        if adopted is None:
            return
        if adopted.stage is Stage.REQUEST:
            self.data_received(adopted.early)
        else:
            upgrade = self._upgrade()
            upgrade.adopt(adopted.early)
            self.pass_on(upgrade, adopted.head)

    def data_received(self, data: bytes) -> None:
        """Hand the connection over to another worker, or choose its protocol."""
        is_adopted = self._adopted is not None
        if is_plain_upgrade(data):
            if not is_adopted:
                choice = self._choose(data)
                if choice.place != self._worker.index and self._hand_over(choice, data):
                    return
                self._worker.arrived(choice.sessions)  # before the connection opens its session, which may be at once
            self.pass_on(self._upgrade(), data)
        else:
            protocol = RoutedHttp(self._config, self._state, self._app_state, worker=self._worker)
            protocol.app = DirectDispatch.of(self._config)
            protocol.is_adopted = is_adopted
            self.pass_on(protocol, data)

    def _choose(self, data: bytes) -> Destination:
        head = read_head(data)
        return Destination(self._worker.index) if head is None else self._worker.router.of_upgrade(head)

    def _hand_over(self, choice: Destination, data: bytes) -> bool:
        return self._worker.hand_over(self._transport, choice, AdoptedConnection(Stage.REQUEST, b"", data))

    def _upgrade(self) -> RoutedUpgrade:
        return RoutedUpgrade(self._config, self._state, self._app_state, worker=self._worker)


class RoutedHttp(LimitedHttpProtocol):
    """An HTTP connection that can move between workers from one request to the next.

    It buffers bytes until a request can be routed. The parser gets one request at a time, and the next one after the
    response. So the connection can be handed over between any two requests.
    """

    is_adopted = False  # whether another worker has routed the first request here
    can_be_heard = True  # nothing but the client delays a request

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], *, worker: ServerWorker
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._worker = worker
        self._held = b""
        self._rest = 0  # missing bytes of the current request's body
        self._is_open_ended = False  # whether only the parser can find the end of the current request
        self._is_answering = False
        self._is_first = True
        self._is_given_away = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._partial = loop_local(self.loop, PartialRequests)

    def data_received(self, data: bytes) -> None:
        """Buffer the bytes, and pass on complete parts."""
        if self._is_given_away:
            return
        if self._rest and not self._held and len(data) <= self._rest:  # the common case of a large body
            self._rest -= len(data)
            super().data_received(data)
            return
        self._held = self._held + data if self._held else data
        self._advance()

    def _advance(self) -> None:
        while self._held and not self._is_given_away and not self.transport.is_closing():
            if self._rest:
                part, self._held = self._held[: self._rest], self._held[self._rest :]
                self._rest -= len(part)
                super().data_received(part)
            elif self._is_open_ended or self._is_refused:
                data, self._held = self._held, b""
                super().data_received(data)
            elif self._is_answering:
                if len(self._held) > _MOST_HELD:
                    self.flow.pause_reading()  # until the response is sent
                return
            elif not self._next_request():
                return

    def _next_request(self) -> bool:
        """Pass the next request to the parser or another worker; False if more of it has to arrive first."""
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            if len(self._held) <= MOST_HEAD_BYTES and is_request(self._held):
                self._await_head()
                return False
            head = None
        else:
            self._end_head_timer()
            head = read_head(self._held[: end + 4]) if end <= MOST_HEAD_BYTES else None
        if head is None:  # the parser reports the error
            return self._parse(None)
        if not self.is_adopted:
            if self.transport.get_write_buffer_size():  # the client still reads the previous response
                self._await_head()
                self.loop.call_later(_UNFLUSHED_S, self._advance)
                return False
            choice = self._choose(head)
            if choice is None:
                return False
            if choice.place != self._worker.index and self._worker.hand_over(
                self.transport, choice, AdoptedConnection(Stage.REQUEST, b"", self._held)
            ):
                self._is_given_away = True
                self._held = b""
                return False
            self._worker.arrived(choice.sessions)  # before the session that it opens, which may be there at once
        self._parse(head)
        return True

    def _choose(self, head: RequestHead) -> Destination | None:
        """Return the worker for the next request; None while routing needs more of the body."""
        router, body = self._worker.router, b""
        if head.body_bytes is not None and router.needs_body(head):
            start = len(head.raw)
            wanted = start + min(head.body_bytes, MOST_BODY_BYTES)
            if len(self._held) < wanted:
                self._await_head()
                return None
            body = self._held[start:wanted]
        return router.of_request(head, body, is_first=self._is_first)

    def _parse(self, head: RequestHead | None) -> bool:
        self.is_adopted = self._is_first = False
        self._end_head_timer()
        if head is None or head.body_bytes is None:
            self._is_open_ended = True
            data, self._held = self._held, b""
        else:
            size = len(head.raw) + head.body_bytes
            data = self._held
            self._held = b""
            if len(data) > size:
                data, self._held = data[:size], data[size:]
            self._rest = size - len(data)
        self._is_answering = True
        super().data_received(data)
        return True

    def _await_head(self) -> None:
        """Give the rest of a request the time limit of a head."""
        self._partial.hold(self, len(self._held))
        if self._head_timer is None:
            self._unset_keepalive_if_required()
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _end_head_timer(self) -> None:
        timer, self._head_timer = self._head_timer, None
        if timer is not None:
            timer.cancel()
            self._partial.discard(self)

    def drop_request(self, reason: str) -> None:
        """Drop the buffered part of a request, and end the connection."""
        self._held = b""
        self.transport.abort()

    def on_response_complete(self) -> None:
        """Continue with the next request, which may have arrived already."""
        super().on_response_complete()
        self._is_answering = False
        if self._is_open_ended and not self.pipeline and not (self.cycle is not None and self.cycle.more_body):
            self._is_open_ended = False
        if self._held:
            self._unset_keepalive_if_required()
            self.loop.call_soon(self._advance)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of an incomplete request."""
        self._end_head_timer()
        self._held = b""
        super().connection_lost(exc)


class RoutedUpgrade(UpgradeProtocol):
    """A WebSocket from its upgrade request on. The handshake tells the client the number of workers."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], *, worker: ServerWorker
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.worker = worker
        self.head = b""
        self.early: bytes | None = None  # messages that were read before the socket existed
        self.is_adopted = False

    def adopt(self, early: bytes) -> None:
        """Continue after a handshake that another worker has answered."""
        self.is_adopted = True
        self.early = early

    def data_received(self, data: bytes) -> None:
        """Store the handshake, and messages that arrive before the socket exists."""
        if not self.head:
            self.head = data
            super().data_received(data)
        elif self.early is not None:
            self.early += data
        else:
            super().data_received(data)

    def _accept(self, message: dict[str, Any]) -> None:
        if self.is_adopted:
            self._phase = "accepted"
            return
        headers = [*message.get("headers", ()), (WORKERS_HEADER, str(self.worker.workers).encode())]
        if self.worker.has_short_steps:
            headers.append((STEPS_HEADER, b"short"))
        super()._accept({**message, "headers": headers})

    def take_frames(self, max_size: int) -> FrameSocket | None:
        """Hand the connection over to a socket that waits for the first message."""
        if self._phase != "accepted" or self._socket is not None or self._transport.is_closing():
            return None
        self._phase = "taken"
        self._socket = RoutedSocket(self._transport, self, max_size=max_size)
        return self._socket

    def taken_early(self) -> bytes:
        """Return the messages read so far; from now on the socket reads."""
        early, self.early = self.early or b"", None
        return early


class RoutedSocket(FrameSocket):
    """A WebSocket that may move to another worker with its first message, if it speaks protocol v2."""

    def __init__(self, transport: asyncio.Transport, origin: RoutedUpgrade, *, max_size: int) -> None:
        super().__init__(transport, origin, max_size=max_size)
        self._upgrade = origin
        self._raw: bytes | None = None
        self._settling: asyncio.TimerHandle | None = None

    def start(self, handler: SocketHandler) -> None:
        """Begin to deliver messages."""
        if isinstance(handler, V2Connection) and not self._upgrade.is_adopted:
            self._raw = b""
            super().start(FirstMessage(self, handler))
            self._settling = self._loop.call_later(_SETTLE_S, self.settle)
        else:
            super().start(handler)
            self._upgrade.head = b""
        early = self._upgrade.taken_early()
        if early:
            self.data_received(early)

    def data_received(self, data: bytes) -> None:
        """Store the bytes until the first message is routed."""
        if self._raw is not None:
            self._raw += data
            if len(self._raw) > MOST_BODY_BYTES:  # too long for an `open`
                self.settle()
        super().data_received(data)

    def settle(self) -> None:
        """Keep the connection here."""
        handler = self._handler
        if isinstance(handler, FirstMessage):
            self._handler = handler.connection
        self._forget()

    def _forget(self) -> None:
        self._raw = None
        self._upgrade.head = b"\0"  # not empty: an empty head means that the handshake is still to come
        timer, self._settling = self._settling, None
        if timer is not None:
            timer.cancel()

    def route(self, choice: Destination) -> bool:
        """Hand the connection over if another worker was chosen; return whether it stays here."""
        worker = self._upgrade.worker
        raw, head = self._raw or b"", self._upgrade.head
        adopted = AdoptedConnection(Stage.MESSAGES, head, raw)
        if choice.place != worker.index and worker.hand_over(self._transport, choice, adopted):
            self._closing = True  # drops the rest of this read
            self._forget()
            return False
        self.settle()
        worker.arrived(choice.sessions)
        return True

    def choose(self, payload: bytes, connection: V2Connection, *, binary: bool) -> Destination:
        """Choose the worker by the first message."""
        return self._upgrade.worker.router.of_first_message(
            payload,
            connection.codec,
            binary=binary,
            role=connection.role.value,
            limit=connection.max_bytes,
            sessions=announced_sessions(self._upgrade.head),
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for the first message."""
        if self._settling is not None:
            self._settling.cancel()
        super().connection_lost(exc)


class FirstMessage:
    """The handler of a v2 connection until its first message is routed."""

    def __init__(self, socket: RoutedSocket, connection: V2Connection) -> None:
        self._socket = socket
        self.connection = connection
        self._is_routed = False

    def _route(self, payload: bytes, *, binary: bool, deliver: Callable[[bytes], None]) -> None:
        if not self._is_routed:
            self._is_routed = True
            if not self._socket.route(self._socket.choose(payload, self.connection, binary=binary)):
                return
        deliver(payload)  # later messages of the same read, too

    def on_message(self, payload: bytes) -> None:
        """Route by a text message."""
        self._route(payload, binary=False, deliver=self.connection.on_message)

    def on_binary(self, payload: bytes) -> None:
        """Route by a binary message."""
        self._route(payload, binary=True, deliver=self.connection.on_binary)

    def on_oversize(self, size: int) -> None:
        """Keep the connection: its first message is refused."""
        self._is_routed = True
        self._socket.settle()
        self.connection.on_oversize(size)

    def on_writable(self) -> None:
        """Pass it on."""
        self.connection.on_writable()

    def on_shutdown(self) -> None:
        """Pass it on."""
        self.connection.on_shutdown()

    def on_lost(self) -> None:
        """Pass it on."""
        self.connection.on_lost()
