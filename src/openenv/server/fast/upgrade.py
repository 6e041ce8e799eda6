"""The WebSocket protocol class for uvicorn: a short handshake, then either a takeover or plain ASGI messages.

Every WebSocket route of an application works on it; the environment's own route takes the connection over. No extension
is offered: on a fast network compression costs more than it saves. Knows RFC 6455, section 4.

    connecting -- accept --> accepted -- take_frames --> taken     a FrameSocket has the transport
        |                       |
        |                       +-- receive/send ------> accepted  a FrameSocket carries ASGI messages
        +-- reject, deny ----------------------------> closed
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http
import logging
from collections import deque
from typing import Any, cast
from urllib.parse import unquote

from uvicorn.config import Config
from uvicorn.protocols.utils import get_local_addr, get_path_with_query_string, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from ..ws import WsEndpoint
from .connection import ListedConnection
from .dispatch import DirectDispatch
from .frame_socket import FrameSocket

logger = logging.getLogger("uvicorn.error")

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_MOST_EVENTS = 16
_MOST_EVENT_BYTES = 1024 * 1024
_PHRASES = {int(status): status.phrase for status in http.HTTPStatus}


class Disconnected(OSError):
    """The client of a sent message is gone."""


class UpgradeProtocol(ListedConnection):
    """One connection, from the upgrade request on."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self._app: Any = config.loaded_app
        self._scope: dict[str, Any] = {}
        self._key = b""
        self._phase = "connecting"  # accepted, denying, taken, closed
        self._events: deque[dict[str, Any]] = deque()
        self._event_bytes = 0
        self._event_waiter: asyncio.Future[None] | None = None
        self._socket: FrameSocket | None = None
        self._denial: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Read the upgrade request; what follows belongs to the socket."""
        if self._phase == "connecting" and not self._scope:
            self._begin(data)
        elif self._phase == "accepted":
            self._carry().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Send the application a disconnect, unless a socket has taken the connection."""
        super().connection_lost(exc)
        if self._phase != "taken":
            self._phase = "closed"
            code = self._socket.close_code if self._socket is not None else None
            self._put({"type": "websocket.disconnect", "code": 1006 if code is None else code})

    def shutdown(self) -> None:
        """Let the socket finish, or refuse the handshake: the server shuts down."""
        if self._socket is not None:
            self._socket.shutdown()
        elif self._phase == "connecting":
            self._reject(http.HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            self._transport.close()

    # -- handshake ------------------------------------------------------------------------------------------------

    def _begin(self, data: bytes) -> None:
        transport = self._transport
        request_line, *lines = data.split(b"\r\n\r\n", 1)[0].split(b"\r\n")
        method, target, _ = request_line.split(b" ", 2)
        headers = [(name.lower(), value.strip()) for name, _, value in [line.partition(b":") for line in lines]]
        fields = dict(headers)
        self._key = fields.get(b"sec-websocket-key", b"")
        if method != b"GET" or len(self._key) != 24 or fields.get(b"sec-websocket-version") != b"13":
            self._reject(http.HTTPStatus.BAD_REQUEST)
            return
        raw_path, _, query = target.partition(b"?")
        root_path = self._config.root_path
        self._scope = {
            "type": "websocket",
            "root_path": root_path,
            "path": root_path + unquote(raw_path.decode("ascii")),
            "query_string": query,
            "headers": headers,
        }
        if b"origin" in fields:  # the address matters for requests of web pages only
            self._scope["server"] = get_local_addr(transport)
        endpoint = DirectDispatch.of(self._config).endpoint(self._scope)
        if endpoint is not None:
            # Not now: the server makes this the transport's protocol only when it returns.
            self._loop.call_soon(self._serve_directly, endpoint)
            return
        protocols = fields.get(b"sec-websocket-protocol", b"").decode("latin-1")
        self._scope |= {
            "asgi": {"version": self._config.asgi_version, "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "wss" if is_ssl(transport) else "ws",
            "server": get_local_addr(transport),
            "client": get_remote_addr(transport),
            "raw_path": root_path.encode("ascii") + raw_path,
            "subprotocols": [name.strip() for name in protocols.split(",") if name.strip()],
            "state": self._app_state.copy(),
            "extensions": {"websocket.http.response": {}},
        }
        self._put({"type": "websocket.connect"})
        task = self._loop.create_task(self._run())
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def _serve_directly(self, endpoint: WsEndpoint) -> None:
        """Serve as the application would, without a task for each connection."""
        if self._phase != "connecting" or self._transport.is_closing():
            return
        try:
            subprotocol = endpoint.subprotocol(self._scope)
            self._accept({"subprotocol": subprotocol})
            socket = self.take_frames(endpoint.max_size)
            if socket is None:
                return
            self._state.tasks.add(socket.ending)  # type: ignore[arg-type]  # the server waits for it, and cancels it
            socket.ending.add_done_callback(self._ended)
            endpoint.begin(self._scope, socket, subprotocol)
        except Exception:
            logger.exception("Exception in ASGI application\n")
            self._finish(1011, http.HTTPStatus.INTERNAL_SERVER_ERROR)

    def _ended(self, ending: asyncio.Future[None]) -> None:
        self._state.tasks.discard(ending)
        if ending.cancelled():  # the shutdown does not wait any longer
            self._finish(1012, http.HTTPStatus.SERVICE_UNAVAILABLE)

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self.receive, self.send)
        except Disconnected:
            pass
        except asyncio.CancelledError:  # the shutdown does not wait any longer
            self._finish(1012, http.HTTPStatus.SERVICE_UNAVAILABLE)
            raise
        except BaseException:
            logger.exception("Exception in ASGI application\n")
            self._finish(1011, http.HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self._finish(1000, http.HTTPStatus.INTERNAL_SERVER_ERROR)

    def _finish(self, code: int, status: int) -> None:
        """Close the connection if the application has ended without closing it."""
        if self._phase in ("connecting", "denying"):
            self._reject(status)
        elif self._phase == "accepted":
            self._carry().close(code)
        elif self._phase == "taken" and code != 1000:  # the endpoint that took it has failed
            assert self._socket is not None
            self._socket.close(code)

    def _accept(self, message: dict[str, Any]) -> None:
        answer = base64.b64encode(hashlib.sha1(self._key + _GUID).digest())
        lines = [
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: ",
            answer,
            b"\r\n",
        ]
        for name, value in (*self._state.default_headers, *message.get("headers", ())):
            lines += [name, b": ", value, b"\r\n"]
        if message.get("subprotocol"):
            lines += [b"sec-websocket-protocol: ", message["subprotocol"].encode("ascii"), b"\r\n"]
        lines.append(b"\r\n")
        self._write(b"".join(lines))
        self._phase = "accepted"
        if self._config.access_log and logger.isEnabledFor(logging.INFO):
            client = get_remote_addr(self._transport)
            where = "" if client is None else f"{client[0]}:{client[1]}"
            logger.info('%s - "WebSocket %s" [accepted]', where, get_path_with_query_string(cast(Any, self._scope)))

    def _reject(self, status: int, headers: Any = (), body: bytes = b"") -> None:
        phrase = _PHRASES.get(status, "")
        lines = [f"HTTP/1.1 {int(status)} {phrase}\r\n".encode(), b"connection: close\r\n"]
        names = {name.lower() for name, _ in headers}
        for name, value in headers:
            lines += [name, b": ", value, b"\r\n"]
        if b"content-length" not in names:
            lines += [b"content-length: ", str(len(body)).encode(), b"\r\n"]
        lines += [b"\r\n", body]
        self._phase = "closed"
        if not self._transport.is_closing():
            self._transport.write(b"".join(lines))
            self._transport.close()
        self._put({"type": "websocket.disconnect", "code": 1006})

    def _write(self, data: bytes) -> None:
        if self._transport.is_closing():
            raise Disconnected
        self._transport.write(data)

    # -- ASGI -----------------------------------------------------------------------------------------------------

    async def receive(self) -> dict[str, Any]:
        """Return the next event."""
        if self._phase == "accepted":
            self._carry()
        if self._socket is not None and len(self._events) <= 1:
            self._socket.resume()
        while not self._events:
            self._event_waiter = self._loop.create_future()
            await self._event_waiter
        event = self._events.popleft()
        self._event_bytes -= _size(event)
        return event

    async def send(self, message: dict[str, Any]) -> None:
        """Handle a message of the application."""
        kind = message["type"]
        if self._phase == "connecting":
            self._answer(kind, message)
        elif self._phase == "denying":
            self._deny(kind, message)
        elif self._phase == "accepted" and kind == "websocket.send":
            text, data = message.get("text"), message.get("bytes")
            if data is not None:
                self._carry().send_binary(data)
            else:
                self._carry().send((text or "").encode())
            await self._carry().drained()
        elif self._phase == "accepted" and kind == "websocket.close":
            self._carry().close(message.get("code", 1000), message.get("reason") or "")
        else:
            raise Disconnected(f"{kind} after the connection was closed")

    def _answer(self, kind: str, message: dict[str, Any]) -> None:
        if kind == "websocket.accept":
            self._accept(message)
        elif kind == "websocket.close":
            self._reject(http.HTTPStatus.FORBIDDEN)
        elif kind == "websocket.http.response.start":
            self._phase = "denying"
            self._denial = (message["status"], list(message.get("headers", [])), b"")
        else:
            raise RuntimeError(f"{kind} before the WebSocket was accepted")

    def _deny(self, kind: str, message: dict[str, Any]) -> None:
        if kind != "websocket.http.response.body" or self._denial is None:
            raise RuntimeError(f"{kind} inside a denial response")
        status, headers, body = self._denial
        body += message.get("body", b"")
        self._denial = (status, headers, body)
        if not message.get("more_body"):
            self._reject(status, headers, body)

    def _put(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        self._event_bytes += _size(event)
        is_behind = len(self._events) >= _MOST_EVENTS or self._event_bytes >= _MOST_EVENT_BYTES
        if self._socket is not None and is_behind:
            self._socket.pause()  # the application does not receive: its client has to wait
        waiter, self._event_waiter = self._event_waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- after the handshake --------------------------------------------------------------------------------------

    def take_frames(self, max_size: int) -> FrameSocket | None:
        """Hand the connection over right after it was accepted; None when it is in use or closing."""
        if self._phase != "accepted" or self._socket is not None or self._transport.is_closing():
            return None
        self._phase = "taken"
        self._socket = FrameSocket(self._transport, self, max_size=max_size)
        return self._socket

    def _carry(self) -> FrameSocket:
        """Return the socket that carries ASGI messages."""
        if self._socket is None:
            self._socket = FrameSocket(self._transport, self, max_size=self._config.ws_max_size)
            self._socket.start(self)
        return self._socket

    def on_message(self, payload: bytes) -> None:
        """Queue a text message for the application."""
        self._put({"type": "websocket.receive", "text": payload.decode("utf-8", "replace")})

    def on_binary(self, payload: bytes) -> None:
        """Queue a binary message for the application."""
        self._put({"type": "websocket.receive", "bytes": payload})

    def on_oversize(self, size: int) -> None:
        """Close, as servers do (RFC 6455, 7.4.1)."""
        assert self._socket is not None
        self._socket.close(1009, "message too big")

    def on_writable(self) -> None:
        """Nothing to do: `send` waits by itself."""

    def on_shutdown(self) -> None:
        """Close; the application gets a disconnect."""
        assert self._socket is not None
        self._socket.close(1012)

    def on_lost(self) -> None:
        """Nothing to do: `connection_lost` tells the application."""


def _size(event: dict[str, Any]) -> int:
    return len(event.get("bytes") or event.get("text") or "")
