"""`WS /ws/ui`: what happens to a visitor's episode, as it happens.

The page asks for the subprotocol `openenv.ui.v1` and gets increments; others get the contract's whole state after each
change. Whoever reads too slowly misses increments and then gets the whole again: nobody waits for a socket. Knows
sockets and frames; what they say is the visitor's business.
"""

from __future__ import annotations

from ..server.asgi import Receive, Scope, Send, cookie, header
from ..server.fast.frame_socket import open_socket
from ..server.sockets import Socket
from .visitors import COOKIE, Visitor, Visitors

PROTOCOL = "openenv.ui.v1"
_MAX_MESSAGE = 64 * 1024


class UiConnection:
    """One socket that looks on.

    Args:
        visitor: Whose episode it sees.
        socket: Where the frames go.
        is_whole: Whether it gets the contract's frames.
    """

    def __init__(self, visitor: Visitor, socket: Socket, *, is_whole: bool) -> None:
        self._visitor = visitor
        self._socket = socket
        self._is_whole = is_whole
        self._is_behind = False

    def begin(self) -> None:
        """Show what there is, and whatever comes after it."""
        self._visitor.watchers.add(self)
        self._show_all()

    def _show_all(self) -> None:
        self._is_behind = False
        self._socket.send(self._visitor.state_update() if self._is_whole else self._visitor.hello())

    # -- Watcher --------------------------------------------------------------------------------------------------

    def changed(self, visitor: Visitor, frame: bytes, *, is_state: bool) -> None:
        """Send a frame, unless the peer does not read."""
        if self._is_whole and not is_state:
            return
        if self._is_behind or self._socket.is_full:
            self._is_behind = True
        elif self._is_whole:
            self._socket.send(visitor.state_update())
        else:
            self._socket.send(frame)

    def leave(self, reason: str) -> None:
        """Hang up, since the server stops."""
        self._socket.close(1012, reason)

    # -- SocketHandler --------------------------------------------------------------------------------------------

    def on_message(self, payload: bytes) -> None:
        """What comes in is of no interest."""

    def on_binary(self, payload: bytes) -> None:
        """Neither is this."""

    def on_oversize(self, size: int) -> None:
        """Nobody who looks on has so much to say."""
        self._socket.close(1009, "too large")

    def on_writable(self) -> None:
        """Show the whole to a peer that has missed something."""
        if self._is_behind:
            self._show_all()

    def on_shutdown(self) -> None:
        """The server is going down."""
        self.leave("the server is shutting down")

    def on_lost(self) -> None:
        """Nobody looks on any more."""
        self._visitor.watchers.discard(self)


class UiEndpoint:
    """The ASGI endpoint of `/ws/ui`."""

    def __init__(self, visitors: Visitors) -> None:
        self._visitors = visitors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept, and tell what happens until the connection ends."""
        await receive()  # websocket.connect
        offered = [name.strip() for name in (header(scope, b"sec-websocket-protocol") or "").split(",")]
        is_page = PROTOCOL in offered
        await send({"type": "websocket.accept", "subprotocol": PROTOCOL if is_page else None})
        socket = open_socket(receive, send, max_size=_MAX_MESSAGE)
        connection = UiConnection(self._visitors.of(cookie(scope, COOKIE)), socket, is_whole=not is_page)
        socket.start(connection)
        connection.begin()
        try:
            await socket.wait_closed()
        finally:
            connection.on_lost()
