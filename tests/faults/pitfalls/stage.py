"""The stage of a scenario: real servers on free loopback ports, HTTP and WebSocket peers, an environment to watch.

Knows uvicorn as everybody uses it and nothing of a package's inside; everything ends with the scenario.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from openenv.core.env_server.http_server import create_app

from .environment import Move, Seen, Watch, Watched

PATIENCE_S = float(os.environ.get("PITFALLS_PATIENCE_S", "5"))
"""How long what should happen is waited for: long where it does, briefly where it is known not to."""


class Stage:
    """Where one scenario plays."""

    def __init__(self) -> None:
        self.watch = Watch()
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.release()
        self._cleanup.close()

    def factory(self, env_cls: type[Watched] = Watched) -> Callable[[], Watched]:
        """A factory of environments that this stage watches."""
        return functools.partial(env_cls, self.watch)

    def app(self, env_cls: type[Watched] = Watched, **options: Any) -> Any:
        """An application of watched environments; 8 sessions unless said otherwise."""
        if "concurrency_config" not in options:
            options.setdefault("max_concurrent_envs", 8)
        return create_app(self.factory(env_cls), Move, Seen, **options)

    def serve(self, app: Any) -> Server:
        """Serve an application as `uvicorn package:app` does."""
        server = Server(app)
        self._cleanup.callback(server.stop)
        return server

    def socket(self, server: Server, path: str = "/ws", **options: Any) -> Socket:
        """Open a WebSocket."""
        url = f"ws://127.0.0.1:{server.port}{path}"
        connection = connect(url, proxy=None, max_size=None, close_timeout=1, **options)
        one = Socket(self._cleanup.enter_context(connection))
        self._cleanup.callback(one.vanish)
        return one

    def thread(self, work: Callable[[], Any]) -> threading.Thread:
        """Do something beside the scenario, whatever comes of it."""

        def run() -> None:
            with contextlib.suppress(Exception):
                work()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._cleanup.callback(thread.join, 10)
        self._cleanup.callback(self.watch.release)
        return thread


class Server:
    """A server on a thread of its own."""

    def __init__(self, app: Any) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=3)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        assert until(lambda: self._server.started)

    @property
    def thread(self) -> int | None:
        """The thread of its event loop."""
        return self._thread.ident

    def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = 30, **headers: str) -> Answer:
        """Make one HTTP request."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            link.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json", **headers},
            )
            answer = link.getresponse()
            return Answer(answer.status, answer.read(), answer.getheader("Set-Cookie"))
        finally:
            link.close()

    def stop(self) -> None:
        """End it and wait for the end."""
        self._server.should_exit = True
        self._thread.join(20)


class Answer:
    """What a request came to."""

    def __init__(self, status: int, content: bytes, cookie: str | None) -> None:
        self.status = status
        self.content = content
        self.cookie = (cookie or "").split(";")[0]

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.content)


class Socket:
    """A WebSocket that speaks JSON and can vanish."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    def ask(self, frame: Any, timeout_s: float = 30) -> Any:
        """Send a frame and return the reply."""
        self.send(frame)
        return self.receive(timeout_s)

    def send(self, frame: Any) -> None:
        """Send a frame, if the connection is still open."""
        with contextlib.suppress(ConnectionClosed):
            self._connection.send(frame if isinstance(frame, str) else json.dumps(frame))

    def receive(self, timeout_s: float = 30) -> Any:
        """Return the next frame, or that there is none any more."""
        try:
            return json.loads(self._connection.recv(timeout_s))
        except ConnectionClosed as closed:
            return {"type": "closed", "data": {"code": str(closed)}}

    def step(self, **fields: Any) -> Any:
        """Take a step."""
        return self.ask({"type": "step", "data": fields})

    def vanish(self) -> None:
        """Go without a word."""
        with contextlib.suppress(OSError):
            self._connection.socket.shutdown(socket.SHUT_RDWR)


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Wait for a condition and say whether it came true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def result(frame: Any) -> str:
    """Say what a frame is: its type, or the code of its error."""
    return str(frame["data"].get("code") if frame["type"] == "error" else frame["type"])
