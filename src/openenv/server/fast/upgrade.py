"""The WebSocket protocol class for uvicorn: a short handshake for own endpoints, uvicorn's protocol for all others.

    upgrade request --+-- own endpoint, nothing in between ------> 101 --> FrameSocket
                      +-- any other route, or with middleware ---> ApplicationProtocol (uvicorn's) --> ASGI messages,
                      |                                             or a FrameSocket where an endpoint takes it over
                      +-- malformed ------------------------------> 400

No extension is negotiated: on a fast network compression costs more than it saves. Knows RFC 6455, section 4.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
from functools import partial
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

from uvicorn.config import Config
from uvicorn.protocols.utils import ClientDisconnected, get_local_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS

from ..asgi import Handler, HeaderList, Message, Receive, Scope, Send
from ..ws import WsEndpoint
from .dispatch import DirectDispatch
from .frame_socket import FrameSocket

logger = logging.getLogger("uvicorn.error")

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_EXTENSIONS = b"sec-websocket-extensions"


class UpgradeProtocol(asyncio.Protocol):
    """One connection, from the upgrade request on."""

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
        self._loop = _loop or asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._socket: FrameSocket | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register with the server."""
        self._transport = cast(asyncio.Transport, transport)
        self._state.connections.add(self)  # type: ignore[arg-type]  # uvicorn lists its own classes only

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the server's list."""
        self._state.connections.discard(self)

    def shutdown(self) -> None:
        """Let the socket finish, or refuse the handshake: the server shuts down."""
        if self._socket is not None:
            self._socket.shutdown()
        else:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)

    def data_received(self, data: bytes) -> None:
        """Read the upgrade request; what follows belongs to the protocol that gets the connection."""
        transport, config = self._transport, self._config
        assert transport is not None
        request_line, *lines = data.split(b"\r\n\r\n", 1)[0].split(b"\r\n")
        method, target, _ = request_line.split(b" ", 2)
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        fields = dict(headers)
        key = fields.get(b"sec-websocket-key", b"")
        if method != b"GET" or len(key) != 24 or fields.get(b"sec-websocket-version") != b"13":
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        raw_path, _, query = target.partition(b"?")
        scope: dict[str, Any] = {
            "type": "websocket",
            "root_path": config.root_path,
            "path": config.root_path + unquote(raw_path.decode("ascii")),
            "query_string": query,
            "headers": headers,
        }
        if b"origin" in fields:  # the address matters for requests of web pages only
            scope["server"] = get_local_addr(transport)
        endpoint = DirectDispatch.of(config).endpoint(scope)
        # Both not now: uvicorn's HTTP protocol makes this the transport's protocol only when it returns.
        if endpoint is not None:
            self._loop.call_soon(self._serve, endpoint, scope, key)
        elif max(map(len, lines)) + 2 > MAX_LINE_LENGTH or len(lines) > MAX_NUM_HEADERS:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)  # uvicorn's protocol would never answer
        else:
            self._loop.call_soon(self._pass_on, request_line, headers)

    def _serve(self, endpoint: WsEndpoint, scope: Scope, key: bytes) -> None:
        """Serve as the application would, without a task for each connection."""
        transport = self._transport
        assert transport is not None
        if transport.is_closing():
            return
        subprotocol = endpoint.subprotocol(scope)
        lines = [
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: ",
            base64.b64encode(hashlib.sha1(key + _GUID).digest()),
            b"\r\n",
        ]
        for name, value in self._state.default_headers:
            lines += [name, b": ", value, b"\r\n"]
        if subprotocol is not None:
            lines += [b"sec-websocket-protocol: ", subprotocol.encode("ascii"), b"\r\n"]
        transport.write(b"".join([*lines, b"\r\n"]))
        socket = self._socket = FrameSocket(transport, self, max_size=endpoint.max_size)
        self._state.tasks.add(socket.ending)  # type: ignore[arg-type]  # the server waits for it, and cancels it
        socket.ending.add_done_callback(self._ended)
        try:
            endpoint.begin(scope, socket)
        except Exception:
            logger.exception("Exception in ASGI application\n")
            socket.close(1011)

    def _ended(self, ending: asyncio.Future[None]) -> None:
        self._state.tasks.discard(ending)
        if ending.cancelled() and self._socket is not None:  # the shutdown does not wait any longer
            self._socket.close(1012)

    def _pass_on(self, request_line: bytes, headers: HeaderList) -> None:
        """Hand the connection over to uvicorn's protocol, with the request as it came, but for extensions."""
        transport = self._transport
        assert transport is not None
        self._state.connections.discard(self)
        if transport.is_closing():
            return
        lines = [name + b": " + value for name, value in headers if name != _EXTENSIONS]
        protocol = ApplicationProtocol(self._config, self._state, self._app_state)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(b"\r\n".join([request_line, *lines, b"", b""]))

    def _refuse(self, status: HTTPStatus) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self._transport.write(head.encode())
            self._transport.close()


class ApplicationProtocol(WebSocketsSansIOProtocol):
    """Uvicorn's protocol, with a proper end for applications that fail, and for sockets when the server shuts down."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self.app = cast(Any, partial(_run_application, self.app))

    def shutdown(self) -> None:
        """Let a socket that has taken the connection over finish what runs."""
        protocol = self.transport.get_protocol()
        if isinstance(protocol, FrameSocket):
            protocol.shutdown()
        else:
            super().shutdown()


async def _run_application(app: Handler, scope: Scope, receive: Receive, send: Send) -> None:
    """Run an application; the client always gets a close frame at its end, and no denial that was only begun.

    Uvicorn would cut the connection (1006) without a word. `receive` stays uvicorn's own: `take_over` looks behind it.
    """
    is_open = False
    denial: Message | None = None  # its first message, until its body comes
    code = 1000

    async def watched_send(message: Message) -> None:
        nonlocal is_open, denial
        kind = message["type"]
        if kind == "websocket.http.response.start":
            denial = message
            return
        if denial is not None:
            await send(denial)
            denial = None
        is_open = kind == "websocket.accept" or (is_open and kind != "websocket.close")
        await send(message)

    try:
        await app(scope, receive, watched_send)
    except asyncio.CancelledError:  # the shutdown does not wait any longer
        code = 1012
    except Exception as exc:
        if not is_open or isinstance(exc, ClientDisconnected):
            raise
        logger.exception("Exception in ASGI application\n")
        code = 1011
    if is_open:
        with contextlib.suppress(ClientDisconnected, RuntimeError):  # the client may be gone
            await send({"type": "websocket.close", "code": code})
