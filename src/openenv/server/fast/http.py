"""The first read of a connection: WebSocket upgrades go straight to `UpgradeProtocol`, all else to uvicorn's HTTP.

Most connections to an environment are upgrades. Setting up the HTTP protocol for each, parsing the request, writing it
down again and handing it on was a sixth of opening a session.

    accept --> FirstRead -- plain upgrade request --> UpgradeProtocol --> FrameSocket
                   |
                   +-- anything else ---------------> LimitedHttpProtocol (uvicorn's, with limits) --> DirectDispatch
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..asgi import MOST_FIELDS, MOST_HEAD_BYTES, head_bytes
from ..request_head import is_plain_upgrade
from ..runners import loop_local
from ..slow_clients import UnreadReplies
from .connection import ListedConnection
from .dispatch import DirectDispatch
from .upgrade import UpgradeProtocol

# No token has been shown yet: a request that does not come must hold neither a connection nor memory.
HEAD_TIMEOUT_S = 60.0
_LINGER_S = 2.0
_LINGER_BYTES = 8 * 1024 * 1024
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class FirstRead(ListedConnection):
    """A connection before its first bytes; chooses the protocol that gets them."""

    is_new = True  # no request has begun
    _timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time limit for the first bytes."""
        super().connection_made(transport)
        self._timer = self._loop.call_later(HEAD_TIMEOUT_S, self._transport.close)

    def data_received(self, data: bytes) -> None:
        """Choose the protocol of the connection."""
        if self._config.ws_protocol_class is UpgradeProtocol and is_plain_upgrade(data):
            self.pass_on(UpgradeProtocol(self._config, self._state, self._app_state), data)
            return
        protocol = LimitedHttpProtocol(self._config, self._state, self._app_state)
        protocol.app = DirectDispatch.of(self._config)
        self.pass_on(protocol, data)

    def pass_on(self, protocol: UpgradeProtocol | LimitedHttpProtocol, data: bytes) -> None:
        """Give the connection and its first bytes to another protocol."""
        self._timer.cancel()
        self._state.connections.discard(self)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the time limit of a client that left without sending anything."""
        self._timer.cancel()
        super().connection_lost(exc)


class LimitedHttpProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with limits on the size and the time of a request's head, and on unread responses."""

    _beside_body = 0  # bytes of the request under way, less some for each byte of its body
    _in_head = True
    _may_be_large = False
    _is_refused = False
    _timer: asyncio.TimerHandle | None = None

    @property
    def is_new(self) -> bool:
        """Whether no request has begun on this connection."""
        return self.cycle is None

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse a request with too much beside its body: fields, trailers, an address."""
        if self._is_refused:
            self._drop(data)
            return
        self._beside_body += len(data)
        self._may_be_large = self._beside_body > MOST_HEAD_BYTES
        # One read may be larger than the limit, so the end of a head is looked for before it is parsed.
        if self._may_be_large and self._in_head:
            end = data.find(b"\r\n\r\n")
            if self._beside_body - (0 if end < 0 else len(data) - end) > MOST_HEAD_BYTES:
                self._refuse()
                return
        super().data_received(data)
        if self._is_refused or (self._beside_body > MOST_HEAD_BYTES and not self.transport.is_closing()):
            self._refuse()
        elif self._timer is None and self._in_head and self._beside_body:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _refuse(self) -> None:
        """Answer 431. Drop further bytes for a while: closing at once could reset the connection unread."""
        self._is_refused = True
        self._beside_body = 0
        self._end_timer()
        if self.transport.is_closing():
            return
        self.transport.write(_TOO_LARGE)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._timer = self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _drop(self, data: bytes) -> None:
        self._beside_body += len(data)
        if self._beside_body > _LINGER_BYTES:
            self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        """Hand an upgrade over, unless its head is too large."""
        if not self._is_refused:
            super().handle_websocket_upgrade()

    def on_headers_complete(self) -> None:
        """Stop the time of the head; drop a request with too many fields, or one that hid behind another one."""
        self._in_head = False
        self._end_timer()
        if len(self.headers) > MOST_FIELDS or (
            self._may_be_large and head_bytes(self.url, self.headers) > MOST_HEAD_BYTES
        ):
            self._is_refused = True
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Allow for the bytes around each chunk of a body, which may be small."""
        self._beside_body -= 9 * len(body)
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Start counting for the next request."""
        self._in_head = True
        self._beside_body = 0
        if not self._is_refused:
            super().on_message_complete()

    def pause_writing(self) -> None:
        """Watch a client that does not read its response."""
        super().pause_writing()
        loop_local(self.loop, UnreadReplies).add(self.transport, lambda *_: self.transport.abort())

    def resume_writing(self) -> None:
        """The client has caught up."""
        loop_local(self.loop, UnreadReplies).discard(self.transport)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time of a head that will not come."""
        self._end_timer()
        loop_local(self.loop, UnreadReplies).discard(self.transport)
        super().connection_lost(exc)

    def _end_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
