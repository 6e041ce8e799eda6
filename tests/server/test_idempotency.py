"""Over HTTP too, a request that is repeated under its key is answered as before, and not run again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

import environments
from environments import Button, Pushed
from openenv.errors import ServerError
from openenv.server.app import create_fastapi_app
from servers import Serve


class Push(environments.Push):
    other_server_fails: bool = False


class Client(Button):
    """An environment may be a client itself."""

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Pushed:
        pushed = super().step(action)
        if action.other_server_fails:
            raise ServerError("an environment may be a client itself")
        return pushed


@pytest.fixture
def http(serve: Serve) -> Iterator[httpx2.Client]:
    server = serve(create_fastapi_app(Client, Push, Pushed, max_concurrent_envs=2))
    with httpx2.Client(base_url=server.url, trust_env=False, timeout=20) as client:
        opened = client.post("/reset", headers={"X-OpenEnv-Session": "new"})
        client.headers["X-OpenEnv-Session"] = opened.headers["X-OpenEnv-Session"]
        yield client


def push(http: httpx2.Client, key: str | None = None, **action: Any) -> httpx2.Response:
    return http.post("/step", json={"action": action}, headers={"Idempotency-Key": key} if key else {})


def pushes(http: httpx2.Client) -> int:
    count: int = http.get("/state").json()["step_count"]
    return count


def test_a_repeated_key_is_answered_and_not_run_again(http: httpx2.Client) -> None:
    first = push(http, "a")
    assert push(http, "a").content == first.content
    assert push(http, "b").json()["observation"]["count"] == 2
    assert pushes(http) == 2


def test_the_request_id_of_the_body_is_a_key_as_well(http: httpx2.Client) -> None:
    body = {"action": {}, "request_id": "one"}
    assert http.post("/step", json=body).content == http.post("/step", json=body).content
    assert pushes(http) == 1


def test_without_a_key_each_request_runs(http: httpx2.Client) -> None:
    push(http)
    push(http)
    assert pushes(http) == 2


def test_a_failure_is_repeated_and_not_tried_again(http: httpx2.Client) -> None:
    first = push(http, "a", fail=True)
    assert first.status_code == 500
    assert push(http, "a", fail=True).content == first.content
    assert pushes(http) == 1


def test_a_repeated_request_waits_for_the_one_that_runs(http: httpx2.Client) -> None:
    answers: list[bytes] = []
    askers = [threading.Thread(target=lambda: answers.append(push(http, "a", pause_s=0.4).content)) for _ in range(3)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(20)
    assert len(answers) == 3
    assert len(set(answers)) == 1
    assert pushes(http) == 1


def test_a_session_can_be_opened_before_its_first_episode(http: httpx2.Client) -> None:
    opened = http.post("/sessions", json={"wait_s": 0.1})
    assert opened.status_code == 201
    session = opened.json()["session_id"]
    assert session == opened.headers["X-OpenEnv-Session"]
    refused = http.post("/sessions")
    assert (refused.status_code, refused.json()["code"]) == (503, "CAPACITY_REACHED")
    assert int(refused.headers["Retry-After"]) >= 1
    assert http.post("/reset", headers={"X-OpenEnv-Session": session}).status_code == 200
    assert http.delete(f"/sessions/{session}").status_code == 200
    assert http.post("/sessions", json={"wait_s": -1}).status_code == 422
    assert http.post("/sessions", json={"surprise": 1}).status_code == 422
    assert http.post("/sessions", json={"wait_s": 5}).status_code == 201


def test_a_failure_of_another_server_is_kept_too(http: httpx2.Client) -> None:
    first = push(http, "a", other_server_fails=True)
    assert (first.status_code, first.json()["code"]) == (500, "SERVER_ERROR")
    assert push(http, "a", other_server_fails=True).content == first.content
    assert pushes(http) == 1
