"""The fast path under a uvicorn that somebody else has started, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from environments import Heard, Parrot, Say
from openenv.server.app import create_app
from openenv.server.ws import WsEndpoint
from servers import Serve
from waiting import wait_until

APP = """
import gc
import resource

from environments import Heard, Parrot, Say
from openenv.server.app import create_app
from openenv.server.ws import WsEndpoint

gc.freeze()  # Python 3.12 begins with frozen objects, too
Parrot.gate.set()
seen = []
begin = WsEndpoint.begin


def watching(endpoint, scope, socket, subprotocol):
    seen.append(type(socket).__name__)
    return begin(endpoint, scope, socket, subprotocol)


WsEndpoint.begin = watching


def build():
    app = create_app(Parrot, Say, Heard, max_concurrent_envs=8)

    @app.get("/seen")
    def sockets():
        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        return {"sockets": seen, "threshold": gc.get_threshold()[0], "files": files}

    return app


app = build()

if __name__ == "__main__":
    import sys

    import uvicorn

    uvicorn.run(app, port=int(sys.argv[1]), log_level="info")
"""
UVICORN = (sys.executable, "-m", "uvicorn")
WAYS: dict[str, tuple[str, ...]] = {
    "uvicorn module:app": (*UVICORN, "served:app"),
    "--factory": (*UVICORN, "served:build", "--factory"),
    "--lifespan off": (*UVICORN, "served:app", "--lifespan", "off"),
    "--reload": (*UVICORN, "served:app", "--reload"),
    "--workers 2": (*UVICORN, "served:app", "--workers", "2"),
    "--loop asyncio": (*UVICORN, "served:app", "--loop", "asyncio"),
    "uvicorn.run": (sys.executable, "served.py"),
}


@contextlib.contextmanager
def server(command: tuple[str, ...], folder: Path, **environ: str) -> Iterator[tuple[int, Path]]:
    """Run a command that serves the application; yields its port and its log."""
    (folder / "served.py").write_text(APP)
    log = folder / "log"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    arguments = [*command, str(port)] if command[-1].endswith(".py") else [*command, "--port", str(port)]
    paths = [str(folder), str(Path(__file__).parents[2] / "support")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environ}
    with log.open("wb") as out:
        process = subprocess.Popen(arguments, cwd=folder, env=variables, stdout=out, stderr=out)
    try:
        wait_until(lambda: _answers(port) or process.poll() is not None, 120)
        assert process.poll() is None, log.read_text()
        yield port, log
    finally:
        process.terminate()
        process.wait(20)


def _answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    return False


def step(port: int, query: str = "") -> str:
    """Make a step on a new connection that offers compression, as clients do by default."""
    with connect(f"ws://127.0.0.1:{port}/ws{query}", proxy=None) as ws:
        ws.send(json.dumps({"type": "step", "data": {"message": "a"}}))
        text: str = json.loads(ws.recv(timeout=20))["data"]["observation"]["text"]
        return text


IN_THIS_PROCESS: dict[str, tuple[str, dict[str, Any]]] = {
    "uvicorn's defaults": ("FrameSocket", {}),
    "httptools": ("FrameSocket", {"http": "httptools"}),
    "h11": ("FrameSocket", {"http": "h11"}),
    "no lifespan": ("FrameSocket", {"lifespan": "off"}),
    "another WebSocket protocol": ("AsgiSocket", {"ws": "websockets-sansio"}),
    "another ping interval": ("AsgiSocket", {"ws_ping_interval": 5.0}),
}


@pytest.mark.parametrize("case", IN_THIS_PROCESS)
def test_the_fast_path_is_taken_unless_an_option_of_uvicorn_asks_for_another(
    case: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    begin = WsEndpoint.begin

    def watching(endpoint: Any, scope: Any, socket: Any, subprotocol: Any) -> Any:
        seen.append(type(socket).__name__)
        return begin(endpoint, scope, socket, subprotocol)

    monkeypatch.setattr(WsEndpoint, "begin", watching)
    Parrot.gate.set()
    expected, options = IN_THIS_PROCESS[case]
    running = serve(create_app(Parrot, Say, Heard), **{"http": "auto", "ws": "auto", **options})
    assert httpx.get(f"{running.url}/health").status_code == 200  # without a lifespan, the first request installs it
    assert [step(running.port), step(running.port)] == ["a", "a"]
    assert seen == [expected] * 2


def test_a_fast_connection_is_listed_in_the_log_of_a_plain_uvicorn(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    Parrot.gate.set()
    settings = {"http": "auto", "ws": "auto", "access_log": True, "log_level": "info", "log_config": None}
    with caplog.at_level("INFO", "uvicorn.error"):
        step(serve(create_app(Parrot, Say, Heard), **settings).port, "?a=b")
    assert any('"WebSocket /ws?a=b" [accepted]' in line for line in caplog.messages)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_fast_path_is_taken_however_uvicorn_was_started(way: str, tmp_path: Path) -> None:
    with server(WAYS[way], tmp_path) as (port, _):
        assert [step(port), step(port), step(port)] == ["a", "a", "a"]
        if way == "--workers 2":
            return  # each request reaches another process
        shown = httpx.get(f"http://127.0.0.1:{port}/seen").json()
    late = way == "--lifespan off"  # the request for /health installs it, and no connection comes before
    assert shown["sockets"] == ["FrameSocket"] * 3
    assert (shown["threshold"] > 700) is not late
    assert late or shown["files"][0] == shown["files"][1]
