"""`/ws`: chooses the protocol of a connection (v2 if the client offers it, else v1) and starts its handler."""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import parse_qs

from openenv.protocol.codec import BY_NAME, choose

from .access import role_of
from .asgi import Receive, Scope, Send, header, origin_of
from .fast.frame_socket import open_socket
from .mcp.openenv_rpc import OpenEnvRpc
from .runners import current_dispatcher
from .service import EnvService
from .sockets import Socket
from .ws_v1 import V1Connection
from .ws_v2 import V2Connection


class WsEndpoint:
    """The ASGI endpoint of `/ws`."""

    connection: ClassVar[type[V1Connection]] = V1Connection

    def __init__(self, service: EnvService) -> None:
        self._service = service
        self._rpc = OpenEnvRpc(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept a connection and serve it until it ends."""
        await receive()  # websocket.connect
        subprotocol = self.subprotocol(scope)
        await send({"type": "websocket.accept", "subprotocol": subprotocol})
        socket = open_socket(receive, send, max_size=self.max_size, fast=self._service.options.fast)
        connection = self.begin(scope, socket, subprotocol)
        try:
            await socket.wait_closed()
        finally:
            connection.on_lost()

    @property
    def max_size(self) -> int:
        """The largest accepted message, in bytes."""
        return self._service.options.max_message_bytes

    def subprotocol(self, scope: Scope) -> str | None:
        """Choose from the client's offers; None means protocol v1."""
        offered = header(scope, b"sec-websocket-protocol")
        codec = choose(name.strip() for name in offered.split(",")) if offered else None
        return codec.name if codec is not None and self.connection is V1Connection else None

    def begin(self, scope: Scope, socket: Socket, subprotocol: str | None) -> V1Connection | V2Connection:
        """Serve an accepted connection until its socket is lost."""
        if subprotocol is not None:
            codec, role = BY_NAME[subprotocol], role_of(scope)
            v2 = V2Connection(self._service, socket, current_dispatcher(), self._rpc, codec, role)
            v2.address = _address(scope)
            if self._service.manager.wants_origins:
                v2.traceparent = origin_of(scope).traceparent
            socket.start(v2)
            return v2
        connection = self.connection(self._service, socket, current_dispatcher(), self._rpc)
        connection.role = role_of(scope)
        connection.address = _address(scope)
        socket.start(connection)
        if self._service.manager.wants_origins:
            connection.origin = origin_of(scope)
        query = scope.get("query_string")
        names = parse_qs(query.decode("latin-1")).get("session_id") if query else None
        connection.begin(names[0] if names else None)
        return connection


def _address(scope: Scope) -> str | None:
    """Return the address of a client, as a proxy may have named it; None if the socket knows it."""
    client = scope.get("client")
    return str(client[0]) if client else None
