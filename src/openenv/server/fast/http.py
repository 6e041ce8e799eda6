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

from .dispatch import DirectDispatch
from .upgrade import UpgradeProtocol

# A whole request head in its simplest form (RFC 9112, 3 and 5): no folding, nothing before a colon, nothing behind.
# Anything written in another way is left to the real parser, which also says what is wrong with it.
_PLAIN_HEAD = re.compile(rb"GET /[!-~]* HTTP/1\.1\r\n(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r\n)+\r\n")
_UPGRADE = re.compile(rb"\r\nupgrade:[\t ]*websocket[\t ]*\r\n", re.IGNORECASE)
_CONNECTION = re.compile(rb"\r\nconnection:[^\r]*\bupgrade\b", re.IGNORECASE)

# No token has been shown yet: a request that does not come must hold neither a connection nor memory.
HEAD_TIMEOUT_S = 60.0
_MOST_HEAD_BYTES = 65_536
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
        protocol = (UpgradeProtocol if ours else LimitedHttpProtocol)(self._config, self._state, self._app_state)
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
    """Uvicorn's protocol with direct dispatch, and limits on the size and the time of a request's head."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self.app = DirectDispatch.of(config)
        self._beside_body = 0  # bytes of the request under way, less some for each of its body
        self._in_head = True
        self._timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse a request with too much beside its body: fields, trailers, an address."""
        self._beside_body += len(data)
        super().data_received(data)
        if self._beside_body > _MOST_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._timer is None and self._in_head and self._beside_body:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def on_headers_complete(self) -> None:
        """Stop the time of the head."""
        self._in_head = False
        self._end_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Allow for the bytes around each chunk of a body, which may be small."""
        self._beside_body -= 9 * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Start counting for the next request."""
        self._in_head = True
        self._beside_body = 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time of a head that will not come."""
        self._end_timer()
        super().connection_lost(exc)

    def _end_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


def is_plain_upgrade(head: bytes) -> bool:
    """Whether this is a whole request for a WebSocket and nothing else."""
    return bool(_UPGRADE.search(head) and _CONNECTION.search(head) and _PLAIN_HEAD.fullmatch(head))
