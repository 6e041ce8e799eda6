"""An ASGI application that a thread of this process serves.

Knows uvicorn and sockets; must not know the application. Tests and the tools of turn-based agents use it.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import uvicorn

_START_S = 20.0
_STOP_S = 20.0
_POLL_S = 0.005


class ThreadServer:
    """Serve an application until closed; the port accepts connections as soon as this exists.

    Args:
        app: The ASGI application.
        host: The address to bind.
        port: The port to bind; 0 is any free one.
        settings: More settings of `uvicorn.Config`.

    Raises:
        OSError: The port is taken.
    """

    def __init__(self, app: Any, *, host: str = "127.0.0.1", port: int = 0, **settings: Any) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Given the protocol, asyncio turns Nagle's algorithm off, which would delay small replies by 40 ms.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(2048)
        except OSError:
            self._socket.close()
            raise
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._server = uvicorn.Server(uvicorn.Config(app, **{"log_config": None, "access_log": False, **settings}))
        self._thread = threading.Thread(target=self._run, name=f"server-{self.port}", daemon=True)

    @property
    def url(self) -> str:
        """The address, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def start(self, timeout_s: float = _START_S) -> None:
        """Start the thread; return once requests are answered.

        Args:
            timeout_s: How long that may take.

        Raises:
            RuntimeError: The application did not start.
        """
        self._thread.start()
        deadline = time.monotonic() + timeout_s
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not self._server.started:
            self.close()
            raise RuntimeError(f"the server on port {self.port} did not start")

    def close(self, timeout_s: float = _STOP_S) -> None:
        """Stop serving; return once the port is closed.

        Args:
            timeout_s: How long connections may take to end.
        """
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._socket.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])
