"""The first read of a connection: WebSocket upgrades go straight to `UpgradeProtocol`, all else to uvicorn's HTTP.

Most connections to an environment are upgrades. Setting up the HTTP protocol for each, parsing the request, writing it
down again and handing it on was a sixth of opening a session.

    accept --> FirstRead -- plain upgrade request --> UpgradeProtocol --> FrameSocket
                   |
                   +-- anything else ---------------> LimitedHttpProtocol (uvicorn's, with limits) --> DirectDispatch
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from ..asgi import MOST_FIELDS, MOST_HEAD_BYTES, head_bytes
from ..runners import loop_local
from ..unread import UnreadReplies
from .dispatch import DirectDispatch
from .upgrade import UpgradeProtocol

# A whole request head in its simplest form (RFC 9112, 3 and 5): no folding, nothing before a colon, nothing behind.
# Anything written in another way is left to the real parser, which also says what is wrong with it.
_PLAIN_HEAD = re.compile(rb"GET /[!-~]* HTTP/1\.1\r\n(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r\n)+\r\n")
_UPGRADE = re.compile(rb"\r\nupgrade:[\t ]*websocket[\t ]*\r\n", re.IGNORECASE)
_CONNECTION = re.compile(rb"\r\nconnection:[^\r]*\bupgrade\b", re.IGNORECASE)

# No token has been shown yet: a request that does not come must hold neither a connection nor memory.
HEAD_TIMEOUT_S = 60.0
_LINGER_S = 2.0
_LINGER_BYTES = 8 * 1024 * 1024
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class FirstRead(asyncio.Protocol):
    """A connection before its first bytes; chooses the protocol that gets them."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config = config
        self._state = server_state
        self._app_state = app_state
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time that a client has for its first bytes."""
        self._transport = cast(asyncio.Transport, transport)
        self._state.connections.add(self)  # type: ignore[arg-type]  # uvicorn lists its own classes only
        self._timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._transport.close)

    def data_received(self, data: bytes) -> None:
        """Pass the connection on to the protocol that fits."""
        assert self._transport is not None
        assert self._timer is not None
        self._timer.cancel()
        self._state.connections.discard(self)
        ours = self._config.ws_protocol_class is UpgradeProtocol and is_plain_upgrade(data)
        protocol: UpgradeProtocol | LimitedHttpProtocol
        if ours:
            protocol = UpgradeProtocol(self._config, self._state, self._app_state)
        else:
            protocol = LimitedHttpProtocol(self._config, self._state, self._app_state)
            protocol.app = DirectDispatch.of(self._config)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """A client left without sending anything."""
        assert self._timer is not None
        self._timer.cancel()
        self._state.connections.discard(self)

    def shutdown(self) -> None:
        """Close: no request waits for a reply here."""
        assert self._transport is not None
        self._transport.close()


class LimitedHttpProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with limits on the size and the time of a request's head, and on unread responses."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._beside_body = 0  # bytes of the request under way, less some for each of its body
        self._in_head = True
        self._may_be_large = False
        self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None

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
        """Answer 431; what the client still sends is dropped for a while, or it would never see the answer."""
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
        loop_local(self.loop, UnreadReplies).add(self.transport, lambda reason: self.transport.abort())

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


def is_plain_upgrade(head: bytes) -> bool:
    """Whether this is a whole request for a WebSocket, within the limits, and nothing else."""
    if len(head) > MOST_HEAD_BYTES or head.count(b"\r\n") > MOST_FIELDS + 2:
        return False
    return bool(_UPGRADE.search(head) and _CONNECTION.search(head) and _PLAIN_HEAD.fullmatch(head))
