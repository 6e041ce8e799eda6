"""Texts of exceptions, kept from clients on request."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from websockets.sync.client import connect

from environments import Idle, Shelf
from openenv.errors import ServerError
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.app import create_app
from openenv.types import Action, Observation
from servers import Serve


class Failing(Idle):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        if seed == 13:
            raise RuntimeError("password=hunter2")
        if seed == 14:  # it may be a client itself
            raise ServerError("password=hunter2")
        return Observation()

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise RuntimeError("password=hunter2")


def failing_app(**kwargs: Any) -> FastAPI:
    return create_app(Failing, Action, Observation, max_concurrent_envs=8, redact_errors=True, **kwargs)


def http(url: str, **headers: str) -> httpx2.Client:
    return httpx2.Client(base_url=url, headers=headers, trust_env=False, timeout=20)


@contextmanager
def socket(url: str, **kwargs: Any) -> Iterator[Callable[[Any], Any]]:
    """Connect; gives a function that asks a question and returns the answer."""
    with connect(f"ws{url.removeprefix('http')}/ws", proxy=None, **kwargs) as connection:

        def ask(frame: Any) -> Any:
            connection.send(json.dumps(frame))
            return json.loads(connection.recv(timeout=10))

        yield ask


def rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def test_a_redacted_failure_is_an_id_to_the_client_and_a_traceback_in_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    url = serve(failing_app(), log_config=None).url
    replies: list[Any] = []
    with http(url, **{"X-OpenEnv-Session": "new"}) as client:
        replies.append(client.post("/reset", json={"seed": 13}).json())
        replies.append(client.post("/reset", json={"seed": 14}).json())
        session = client.post("/reset", json={}).headers["X-OpenEnv-Session"]
        replies.append(client.post("/step", json={"action": {}}, headers={"X-OpenEnv-Session": session}).json())
    with socket(url) as ask:
        replies.append(ask({"type": "step", "data": {}})["data"])
    with socket(url, subprotocols=["openenv.v2.json"]) as ask:
        ask({"type": "open", "id": 1})
        replies.append(ask({"type": "step", "id": 1, "data": {}})["data"])
    assert "hunter2" not in json.dumps(replies)
    assert len({failure["error_id"] for failure in replies}) == len(replies)
    for failure in replies:
        assert failure["code"] == "EXECUTION_ERROR"
        assert failure["error_id"] in failure.get("detail", failure.get("message"))
        record = next(record for record in caplog.records if failure["error_id"] in record.getMessage())
        assert record.exc_info is not None
        assert "hunter2" in str(record.exc_info[1])


def test_why_an_environment_could_not_be_built_is_redacted_too(serve: Serve) -> None:
    def broken() -> Failing:
        raise RuntimeError("password=hunter2")

    url = serve(create_app(broken, Action, Observation, redact_errors=True)).url
    with http(url, **{"X-OpenEnv-Session": "new"}) as client:
        replies = [
            client.post("/reset", json={}).text,
            client.post("/sessions", json={}).text,
            client.post("/mcp", json=rpc("openenv/session/create")).text,
        ]
    with connect(f"ws{url.removeprefix('http')}/ws", proxy=None) as connection:
        replies.append(str(connection.recv(timeout=10)))
    assert all("log has more under" in text and "hunter2" not in text for text in replies)


def test_what_a_tool_says_to_its_agent_is_never_redacted(serve: Serve) -> None:
    url = serve(create_app(Shelf, CallToolAction, CallToolObservation, redact_errors=True)).url
    with http(url) as client:
        answer = client.post("/mcp", json=rpc("tools/call", name="drop", arguments={})).json()
    assert "the shelf is too high" in answer["error"]["message"]
