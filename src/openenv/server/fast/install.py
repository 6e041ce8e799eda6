"""Installs the fast path in a uvicorn server that somebody else has started: `uvicorn app:app`, `uvicorn.run(app)`,
`--factory`, `--reload`, a worker class of gunicorn.

Uvicorn reads the protocol classes of its configuration at each new connection. So the application replaces them while
it starts, in its lifespan; without a lifespan (`--lifespan off`) at its first request, and the next connection is the
first fast one. Options of uvicorn that our protocols do not have keep uvicorn's protocols:

    http  auto, httptools                         -> FirstRead       h11, a class: unchanged
    ws    auto, with the default pings            -> UpgradeProtocol anything else: unchanged

A process that only serves, with uvicorn in its main thread, also gets the settings of `openenv serve` for garbage
collection, freed memory and file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from openenv import settings
from openenv.protocol.redaction import redact_handlers
from openenv.sandboxes.host import raise_file_limit

from ..asgi import Receive
from ..process_tuning import keep_freed_memory, tuned_garbage_collection
from .frame_socket import INTERVAL_S, TIMEOUT_S


def config_of_request(receive: Receive) -> Any:
    """Return the configuration of the uvicorn server of a request; None for any other server."""
    maker: Any = getattr(receive, "__self__", None)
    transport: Any = getattr(maker, "transport", None)
    holder = transport.get_protocol() if hasattr(transport, "get_protocol") else maker
    return _config(getattr(holder, "config", None))


def config_of_lifespan() -> Any:
    """Return the configuration of the uvicorn server whose lifespan runs in this task; None for any other server."""
    task = asyncio.current_task()
    # Uvicorn runs a lifespan as the task of `LifespanOn.main`. Layers of the application may replace `receive`, which
    # would be another way to it.
    frame: Any = getattr(task.get_coro(), "cr_frame", None) if task is not None else None
    return _config(getattr(frame.f_locals.get("self"), "config", None)) if frame is not None else None


def _config(found: Any) -> Any:
    uvicorn = sys.modules.get("uvicorn.config")
    return found if uvicorn is not None and isinstance(found, uvicorn.Config) else None


def install(config: Any) -> None:
    """Replace the protocol classes of a uvicorn server, where its options allow it."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol  # it is there: uvicorn calls this

        from .http import FirstRead
        from .upgrade import UpgradeProtocol
    except ImportError:  # without httptools, uvicorn uses h11
        return

    if config.ws == "auto" and (config.ws_ping_interval, config.ws_ping_timeout) == (INTERVAL_S, TIMEOUT_S):
        config.ws_protocol_class = UpgradeProtocol
    if config.http in ("auto", "httptools") and config.http_protocol_class is HttpToolsProtocol:
        config.http_protocol_class = FirstRead


def serves(config: Any, app: Any) -> bool:
    """Return whether an application is what a uvicorn server serves, and not mounted in another one."""
    served = config.loaded_app
    while type(served).__module__.startswith("uvicorn.middleware."):
        served = served.app
    return served is app


@contextlib.contextmanager
def prepared_server(*, is_fast: bool) -> Iterator[None]:
    """Prepare the uvicorn server and the process of an application, for the duration of its lifespan."""
    config = config_of_lifespan()
    if config is None:
        yield
        return
    if is_fast:
        install(config)
    redact_handlers(("uvicorn", "uvicorn.access", "uvicorn.error"), settings.secret_values())
    if threading.current_thread() is not threading.main_thread():  # the process has other work
        yield
        return
    redact_handlers(("", "openenv"), settings.secret_values())
    raise_file_limit()
    keep_freed_memory()
    with tuned_garbage_collection():
        yield
