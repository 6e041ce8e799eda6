"""`serve`: an environment or an application on a free port, for tests of clients and of whole packages."""

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
    """A running server: the `url` is what clients take as `base_url`."""

    url: str
    port: int
    app: Any
    """The ASGI application, for tests that look inside."""


@contextmanager
def serve(env_or_app: Any, *, port: int = 0, log_level: str = "warning") -> Iterator[Served]:
    """Serve on a loopback port while the block runs, in a thread of this process and as `openenv serve` does.

    Args:
        env_or_app: An environment class; a function without arguments whose annotation says which environment or
            application it returns; or an ASGI application, such as the result of `create_app`.
        port: The port to bind; 0 is any free one.
        log_level: What the server logs.

    Raises:
        TargetError: It is nothing of that kind; the text says what is missing.
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
