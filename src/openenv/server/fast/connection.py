"""The base of our uvicorn protocol classes: a connection that uvicorn lists, counts and shuts down.

Uvicorn builds a protocol with its configuration, its state and the lifespan's state, and then expects it in
`server_state.connections` for as long as it is open. `LimitedHttpProtocol` is the exception: it extends uvicorn's own
HTTP protocol, which does the same. Must not know requests.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState


class ListedConnection(asyncio.Protocol):
    """A connection in the list of a uvicorn server.

    Args:
        config: The server's configuration, with the application.
        server_state: The server's connections and tasks.
        app_state: The lifespan's state.
        _loop: The connection's loop, if it does not run yet. Uvicorn uses this name.
    """

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
        self._transport = cast(asyncio.Transport, None)  # set by `connection_made`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Enter the server's list."""
        self._transport = cast(asyncio.Transport, transport)
        self._state.connections.add(self)  # type: ignore[arg-type]  # uvicorn lists its own classes only

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the server's list."""
        self._state.connections.discard(self)

    def shutdown(self) -> None:
        """Close: the server shuts down, and no request waits for a reply."""
        self._transport.close()
