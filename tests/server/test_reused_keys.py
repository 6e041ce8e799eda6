"""A key or id that was used for another request is refused, and never answered with the other reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from websockets.sync.client import ClientConnection, connect

from environments import Button, Push, Pushed
from openenv.server.app import create_fastapi_app
from servers import RunningServer, Serve


@pytest.fixture
def server(serve: Serve) -> RunningServer:
    return serve(create_fastapi_app(Button, Push, Pushed, max_concurrent_envs=2))


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, trust_env=False, timeout=20) as client:
        client.headers["X-OpenEnv-Session"] = client.post("/sessions").json()["session_id"]
        yield client


@pytest.fixture
def peer(server: RunningServer) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{server.port}/ws", subprotocols=["openenv.v2.json"], proxy=None) as connection:  # type: ignore[list-item]
        yield connection


def test_the_key_of_a_reset_is_not_taken_for_a_step(http: httpx2.Client) -> None:
    key = {"Idempotency-Key": "of my episode"}
    assert http.post("/reset", headers=key).status_code == 200
    refused = http.post("/step", json={"action": {}}, headers=key)
    assert (refused.status_code, refused.json()["code"]) == (422, "KEY_REUSED")
    assert refused.headers["Idempotency-Key"] == "of my episode"
    assert http.get("/state").json()["step_count"] == 0
    assert http.post("/reset", headers=key).status_code == 200  # its own request is still answered


def test_the_key_of_a_step_is_not_taken_for_another_step(http: httpx2.Client) -> None:
    first = {"action": {"force": 1}}
    assert http.post("/step", json=first, headers={"Idempotency-Key": "k"}).json()["observation"]["count"] == 1
    refused = http.post("/step", json={"action": {"force": 5}}, headers={"Idempotency-Key": "k"})
    assert (refused.status_code, refused.json()["code"]) == (422, "KEY_REUSED")
    assert http.post("/step", json=first, headers={"Idempotency-Key": "k"}).json()["observation"]["count"] == 1
    assert http.get("/state").json()["step_count"] == 1


def test_a_request_id_in_the_body_is_a_key_like_any_other(http: httpx2.Client) -> None:
    assert http.post("/step", json={"action": {"force": 1}, "request_id": "a"}).json()["observation"]["count"] == 1
    assert http.post("/step", json={"action": {"force": 1}, "request_id": "a"}).json()["observation"]["count"] == 1
    assert http.post("/step", json={"action": {"force": 2}, "request_id": "a"}).status_code == 422
    assert http.post("/step", json={"action": {"force": 2}, "request_id": "b"}).json()["observation"]["count"] == 3


def test_a_new_session_whose_first_reset_is_repeated_differently_is_reported_and_stays(http: httpx2.Client) -> None:
    del http.headers["X-OpenEnv-Session"]
    opening = {"X-OpenEnv-Session": "new", "Idempotency-Key": "a-key-that-nobody-guesses"}
    opened = http.post("/reset", headers=opening)
    name = {"X-OpenEnv-Session": opened.headers["X-OpenEnv-Session"]}
    assert http.post("/reset", json={"seed": 7}, headers=opening).status_code == 422
    assert http.post("/step", json={"action": {}}, headers=name).json()["observation"]["count"] == 1
    assert http.post("/reset", headers=opening).headers["X-OpenEnv-Session"] == name["X-OpenEnv-Session"]


def ask(peer: ClientConnection, **message: Any) -> dict[str, Any]:
    peer.send(json.dumps(message))
    answer: dict[str, Any] = json.loads(peer.recv(timeout=30))
    return answer


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "in a batch"])
def test_the_id_of_a_request_is_not_taken_for_one_of_another_type(peer: ClientConnection, batched: bool) -> None:
    name = ask(peer, type="open", id=1)["session"]
    ask(peer, type="reset", id=1)
    if batched:
        ask(peer, type="batch", id=2, requests=[{"type": "step", "id": 2, "session": name, "data": {}}])
    else:
        ask(peer, type="step", id=2, data={})
    for kind, request_id in (("step", 1), ("state", 2), ("close", 2), ("reset", 2)):
        extra = {"data": {}} if kind == "step" else {}
        refused = ask(peer, type=kind, id=request_id, **extra)
        assert (refused["type"], refused["data"]["code"]) == ("error", "VALIDATION_ERROR"), (kind, refused)
    assert ask(peer, type="step", id=2, data={})["data"]["observation"]["count"] == 1
    assert ask(peer, type="step", id=3, data={})["data"]["observation"]["count"] == 2
