"""`WS /harness` behind several workers: conversations are spread over them, and share their limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from openenv.server.workers.board import place_of
from worker_servers import WorkersServer

SUPPORT = Path(__file__).resolve().parents[2] / "support"


@pytest.mark.slow
def test_conversations_are_spread_over_workers(start: Callable[..., WorkersServer]) -> None:
    server = start("--workers", "2", "--max-sessions", "3", target=f"{SUPPORT / 'talking_server.py'}:app")
    url = f"{server.url.replace('http', 'ws')}/harness"
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(url, open_timeout=60)) for _ in range(3)]
        started = [json.loads(connection.recv(timeout=60)) for connection in connections]
        places = [place_of(frame["data"]["session_id"]) for frame in started]
        assert len({place.index for place in places if place is not None}) == 2
        for number, connection in enumerate(connections):
            connection.send(json.dumps({"type": "message", "content": f"echo {number}"}))
        for number, connection in enumerate(connections):
            frames: list[Any] = [json.loads(connection.recv(timeout=60)) for _ in range(2)]
            assert frames[-1]["data"]["response"] == str(number)
        with connect(url) as fourth:
            assert json.loads(fourth.recv(timeout=60))["data"]["code"] == "CAPACITY_REACHED"
