"""`serve`: run an environment or an application on a free port, to test clients and packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openenv.server.loading import as_app
from openenv.server.run import ServeOptions, uvicorn_settings
from openenv.server.thread_server import ThreadServer


@dataclass(frozen=True, slots=True)
class Served:
    """A running server; pass its `url` to clients as `base_url`."""

    url: str
    port: int
    app: Any
    """The ASGI application, for tests of its internals."""


@contextmanager
def serve(env_or_app: Any, *, port: int = 0, log_level: str = "warning") -> Iterator[Served]:
    """Serve on a loopback port while the block runs, like `openenv serve`, in a thread of this process.

    Args:
        env_or_app: An environment class, an ASGI application such as the result of `create_app`, or a function without
            arguments that returns an environment or an application according to its annotation.
        port: The port to bind; 0 binds a free one.
        log_level: The log level of the server.

    Raises:
        TargetError: The target is of another type; the message says what is missing.
        OSError: The port is taken.
        RuntimeError: The application did not start.
    """
    label = getattr(env_or_app, "__name__", type(env_or_app).__name__)
    app = as_app(env_or_app, label)
    settings = uvicorn_settings(ServeOptions(log_level=log_level, drain_s=5))
    server = ThreadServer(app, **{**settings, "port": port})
    server.start()
    try:
        yield Served(server.url, server.port, app)
    finally:
        server.close()
