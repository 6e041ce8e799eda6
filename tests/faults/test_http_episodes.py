"""Episodes over plain HTTP: they go on where they were, end in time, and their requests carry what they need to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dict_client import DictHTTPClient
from openenv.errors import ExecutionError, RequestTimeout, SessionLost
from openenv.server.sessions.lifetime import SessionLimits
from openenv.types import ConcurrencyConfig
from servers import Serve

HEADER = "X-OpenEnv-Session"


def test_an_http_episode_continues_from_request_to_request(serve: Serve, probe: Any, http: Any) -> None:
    """W1: `/reset`, `/step` and `/state` of one session share one environment."""
    client = http(serve(probe.app()).url)
    opened = client.post("/reset", headers={HEADER: "new"})
    named = {HEADER: opened.headers[HEADER]}
    counts = [client.post("/step", json={"action": {}}, headers=named).json()["observation"]["count"] for _ in range(3)]
    assert counts == [1, 2, 3]
    assert client.get("/state", headers=named).json()["step_count"] == 3
    assert probe.count("built") == 1


def test_two_http_sessions_do_not_see_each_other(serve: Serve, probe: Any, http: Any) -> None:
    """W1: each named session has an environment of its own."""
    client = http(serve(probe.app()).url)
    names = [client.post("/reset", headers={HEADER: "new"}).headers[HEADER] for _ in range(2)]
    client.post("/step", json={"action": {}}, headers={HEADER: names[0]})
    states = [client.get("/state", headers={HEADER: name}).json()["step_count"] for name in names]
    assert states == [1, 0]


def test_a_client_that_keeps_cookies_continues_its_episode(serve: Serve, probe: Any, http: Any) -> None:
    """W1: the legacy way, a plain `/reset` and then plain `/step`s, plays one episode."""
    client = http(serve(probe.app(max_concurrent_envs=1)).url)
    client.post("/reset")
    counts = [client.post("/step", json={"action": {}}).json()["observation"]["count"] for _ in range(3)]
    assert counts == [1, 2, 3]


def test_the_http_client_plays_an_episode(serve: Serve, probe: Any) -> None:
    """W1: our own client over HTTP is stateful by default."""
    with DictHTTPClient(serve(probe.app()).url) as client:
        client.reset()
        assert [client.step({}).reward for _ in range(3)] == [1.0, 2.0, 3.0]
        assert client.state()["step_count"] == 3
        client.reset()
        assert client.step({}).reward == 1.0


def test_a_soft_session_never_makes_another_client_fail(serve: Serve, probe: Any, http: Any, peer: Any) -> None:
    """W1, W6: a session that only a cookie keeps gives its slot to a client that needs it and then reports its loss."""
    server = serve(probe.app(max_concurrent_envs=1))
    client = http(server.url)
    client.post("/reset")
    assert server.manager.active == 1
    assert peer(server.port).reset()["type"] == "observation"
    answer = client.post("/step", json={"action": {}})
    assert answer.status_code == 410
    assert answer.json()["code"] == "SESSION_LOST"


def test_an_unused_http_session_gives_its_slot_back(
    serve: Serve, probe: Any, http: Any, wait_for: Callable[..., None], clock: Any
) -> None:
    """W4, W6: a client that vanished holds its slot for the idle time only; coming back is a typed error."""
    app = probe.app(concurrency_config=ConcurrencyConfig(max_concurrent_envs=1, session_timeout=0.3))
    app.state.openenv_server.manager._clock = clock
    server = serve(app)
    client = http(server.url)
    name = client.post("/reset", headers={HEADER: "new"}).headers[HEADER]
    assert client.post("/reset", headers={HEADER: "new"}).status_code == 503
    clock.now += 1
    wait_for(lambda: probe.alive == 0)
    late = client.post("/step", json={"action": {}}, headers={HEADER: name})
    assert (late.status_code, late.json()["code"], late.json()["reason"]) == (410, "SESSION_LOST", "expired")
    assert client.post("/reset", headers={HEADER: "new"}).status_code == 200


def test_http_sessions_expire_by_default() -> None:
    """W6: there is an idle limit by default."""
    assert 0 < SessionLimits().idle_s <= 3600


def test_the_http_client_reports_an_expired_session_until_reset(
    serve: Serve, probe: Any, wait_for: Callable[..., None], clock: Any
) -> None:
    """W4, W26: steps after the end of a session raise `SessionLost`; `reset` starts over."""
    app = probe.app(concurrency_config=ConcurrencyConfig(max_concurrent_envs=1, session_timeout=0.2))
    app.state.openenv_server.manager._clock = clock
    server = serve(app)
    with DictHTTPClient(server.url) as client:
        client.reset()
        client.step({})
        clock.now += 1
        wait_for(lambda: probe.alive == 0)
        for _ in range(2):
            with pytest.raises(SessionLost):
                client.step({})
        client.reset()
        assert client.step({}).reward == 1.0


def test_a_failed_reset_does_not_revive_a_lost_episode(serve: Serve, probe: Any) -> None:
    """W26: after a timeout only a reset that worked lets steps through, over HTTP too."""
    with DictHTTPClient(serve(probe.app()).url, request_timeout_s=1.5) as client:
        client.reset()
        probe.hold("step")
        with pytest.raises(RequestTimeout):
            client.step({})
        probe.release("step")
        with pytest.raises(SessionLost):
            client.step({})
        probe.fail["reset"] = RuntimeError("no level")
        with pytest.raises((ExecutionError, RequestTimeout)):
            client.reset()
        with pytest.raises(SessionLost):
            client.step({})


def test_a_session_name_that_never_was_is_not_found(serve: Serve, probe: Any, http: Any) -> None:
    """W1: a wrong name is an error and never a fresh environment."""
    client = http(serve(probe.app()).url)
    answer = client.post("/step", json={"action": {}}, headers={HEADER: "no-such-session"})
    assert (answer.status_code, answer.json()["code"]) == (404, "SESSION_NOT_FOUND")
    assert probe.count("built") == 0


def test_a_step_carries_time_limit_request_id_and_keywords(serve: Serve, probe: Any, http: Any) -> None:
    """W12: what a step request holds beside the action reaches the environment."""
    client = http(serve(probe.app()).url)
    body = {"action": {}, "timeout_s": 2.5, "request_id": "r1", "hint": "left"}
    metadata = client.post("/step", json=body).json()["metadata"]
    assert metadata == {"timeout_s": 2.5, "request_id": "r1", "hint": "left"}


def test_state_and_schema_show_the_subclass(serve: Serve, probe: Any, http: Any, peer: Any) -> None:
    """W23: fields of the environment's own state class are on every surface without being asked for."""
    server = serve(probe.app())
    client = http(server.url)
    assert client.get("/state").json()["secret"] == 42
    assert "secret" in client.get("/schema").json()["state"]["properties"]
    assert peer(server.port).ask({"type": "state"})["data"]["secret"] == 42
    assert "secret" in str(client.get("/openapi.json").json()["components"]["schemas"]["Inner"])


def test_an_environment_that_fails_over_http_keeps_its_session(serve: Serve, probe: Any, http: Any) -> None:
    """W1, W15: an exception in a step is reported as such, and the episode goes on."""
    client = http(serve(probe.app()).url)
    named = {HEADER: client.post("/reset", headers={HEADER: "new"}).headers[HEADER]}
    client.post("/step", json={"action": {}}, headers=named)
    failed = client.post("/step", json={"action": {"fail": "no such door"}}, headers=named)
    assert (failed.status_code, failed.json()["code"], failed.json()["detail"]) == (
        500,
        "EXECUTION_ERROR",
        "no such door",
    )
    assert client.post("/step", json={"action": {}}, headers=named).json()["observation"]["count"] == 2
