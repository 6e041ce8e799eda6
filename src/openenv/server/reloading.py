"""`openenv serve --reload`: a process that watches the sources, and one that serves them and is started anew.

While the sources cannot be loaded, every request is answered at once with 503 and the reason: nobody waits for a server
that is not there. Knows uvicorn's reloader and the processes it starts; must not know how anything is shown.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing.connection
import select
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.supervisors import ChangeReload

from ..errors import message_of
from ..protocol.codec import encode
from .asgi import Receive, Scope, Send, respond
from .loading import MANIFEST, TargetFailed, split_target
from .run import ServeOptions, check_port, environment_server, log_config, prepare, run_app, uvicorn_settings

logger = logging.getLogger("uvicorn.error")

NOT_LOADED = "NOT_LOADED"
_REPORT_LINES = 15
_TURN_S = 0.1
_REAP_S = 10.0


def serve_reloading(target: str, options: ServeOptions, on_started: Callable[[Any, int], None]) -> None:
    """Serve until interrupted, and start anew whenever a source file changes.

    Args:
        target: What to serve.
        options: How.
        on_started: Called with the application and its port after each start, in the process that serves; it is
            pickled for that.

    Raises:
        TargetError: There is nothing to serve, or the port is taken.
    """
    check_port(options)
    gc.enable()
    server = environment_server(prepare(target, options))  # a mistake is told now and not by every reload
    tells_why = server is None or server.access.is_open
    config = uvicorn.Config(
        "",  # the process that serves finds its application by itself
        reload=True,
        reload_dirs=_watched(target),
        reload_includes=[MANIFEST],
        log_config=log_config(options),
        **uvicorn_settings(options),
    )
    serving = _Serving(target, options, on_started, tells_why)
    reloader = _Reloader(config, target=serving, sockets=[config.bind_socket()])
    reloader.run()
    if reloader.was_interrupted:
        raise KeyboardInterrupt


@dataclass(frozen=True)
class _Serving:
    """What the process does that serves. `tells_why`: clients may read why it cannot; nobody asks them for a token."""

    target: str
    options: ServeOptions
    on_started: Callable[[Any, int], None]
    tells_why: bool

    def __call__(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            app = prepare(self.target, self.options)
        except Exception as exc:
            reason = message_of(exc)
            report = _last_lines(exc.report()) if isinstance(exc, TargetFailed) else ""
            logger.error("%s%s", report, _waiting(reason))
            run_app(Unloadable(reason if self.tells_why else None), self.options, _say_nothing, sockets)
        else:
            run_app(app, self.options, self.on_started, sockets)


class Unloadable:
    """The application in place of one that cannot be loaded.

    Args:
        reason: Why, for clients to read; None where they have to show a token first.
    """

    def __init__(self, reason: str | None) -> None:
        text = "The environment cannot be loaded; the server's log says why" if reason is None else reason
        self._body = encode({"detail": text, "code": NOT_LOADED})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 503."""
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            await respond(send, 503, self._body)
        else:
            await receive()  # websocket.connect
            headers = [(b"content-type", b"application/json")]
            await send({"type": "websocket.http.response.start", "status": 503, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": self._body})


class _Reloader(ChangeReload):  # type: ignore[misc,valid-type]  # uvicorn picks the class when it is imported
    """Starts the serving process; when that dies by itself, turns clients away until the next start."""

    was_interrupted = False

    def signal_handler(self, sig: int, frame: FrameType | None) -> None:
        self.was_interrupted = self.was_interrupted or sig == signal.SIGINT
        super().signal_handler(sig, frame)

    def startup(self) -> None:
        super().startup()
        self._attend()

    def restart(self) -> None:
        self._dismiss()
        super().restart()
        self._attend()

    def shutdown(self) -> None:
        self._dismiss()
        super().shutdown()

    def _attend(self) -> None:
        self._expected = threading.Event()
        arguments = (self.process, self.sockets[0], self._expected)
        self._attendant = threading.Thread(target=_turn_away_after, args=arguments, daemon=True)
        self._attendant.start()

    def _dismiss(self) -> None:
        """The process will end now, as it should; leave the port to the next one."""
        self._expected.set()
        if not self.process.is_alive():
            self._attendant.join()


def _turn_away_after(process: BaseProcess, listening: socket.socket, expected: threading.Event) -> None:
    """Wait for the end of a process; if nobody expected that, answer in its place until somebody does."""
    multiprocessing.connection.wait([process.sentinel])
    if expected.is_set():
        return
    process.join(_REAP_S)  # its exit code is there a moment later
    reason = f"the process that serves has ended with exit code {process.exitcode}"
    logger.error("%s", _waiting(reason))
    body = encode({"detail": f"The server is down: {reason}", "code": NOT_LOADED})
    head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    while not expected.is_set():
        try:
            if select.select([listening], [], [], _TURN_S)[0]:
                _answer(listening, f"{head}connection: close\r\n\r\n".encode() + body)
        except OSError:  # it died before it listened: then clients are refused anyway
            expected.wait(_TURN_S)


def _answer(listening: socket.socket, reply: bytes) -> None:
    try:
        peer, _ = listening.accept()
    except BlockingIOError:
        return
    with peer, contextlib.suppress(OSError):
        peer.settimeout(_TURN_S)
        peer.recv(65_536)  # what is unread when a connection is closed would take the answer with it
        peer.sendall(reply)


def _waiting(reason: str) -> str:
    return f"{reason}\nClients are answered with 503 now; the next change of a source file starts it again."


def _last_lines(report: str) -> str:
    lines = report.splitlines(keepends=True)
    return "".join(["...\n", *lines[-_REPORT_LINES:]] if len(lines) > _REPORT_LINES else lines)


def _say_nothing(app: Any, port: int) -> None:
    """There is nothing to introduce."""


def _watched(target: str) -> list[str]:
    """The folders whose files are the user's: the working folder, and the target's own."""
    place = Path(split_target(target)[0])
    own = place if place.is_dir() else place.parent if place.is_file() else Path()
    return sorted({str(Path.cwd()), str(own.resolve())})
