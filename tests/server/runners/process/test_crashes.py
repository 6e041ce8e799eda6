"""A worker that dies takes its own sessions with it, each with a typed error, and no others."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import pytest

from openenv.errors import EnvironmentFactoryError, SessionLost

DEATHS = ("kill", "exit", "segfault")


def apart(server: Any, connect: Callable[..., Any], protocol: str = "v2") -> tuple[Any, Any]:
    """Two clients whose environments are in different processes."""
    one, other = connect(server, protocol), connect(server)
    assert one.reset().observation["pid"] != other.reset().observation["pid"]
    return one, other


@pytest.mark.slow_but_for("kill")
@pytest.mark.parametrize("death", DEATHS)
def test_a_step_that_kills_its_process_loses_its_session_and_no_other(
    perilous: Callable[..., Any], connect: Callable[..., Any], eventually: Callable[..., Any], death: str
) -> None:
    server = perilous()
    one, other = apart(server, connect)
    other.step({"what": "look"})
    with pytest.raises(SessionLost) as caught:
        one.step({"what": death})
    assert caught.value.reason == "worker crashed"
    assert other.step({"what": "look"}).observation["count"] == 2
    eventually(lambda: server.manager.active == 1)
    with pytest.raises(SessionLost):
        one.step({"what": "look"})
    assert one.reset().observation["count"] == 0


def test_all_sessions_of_a_process_are_lost_with_it(
    perilous: Callable[..., Any], connect: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    server = perilous(env_processes=1)
    clients = [connect(server) for _ in range(3)]
    assert len({client.reset().observation["pid"] for client in clients}) == 1
    with pytest.raises(SessionLost):
        clients[0].step({"what": "kill"})
    for client in clients[1:]:
        with pytest.raises(SessionLost) as caught:
            client.step({"what": "look"})
        assert caught.value.reason == "worker crashed"
    eventually(lambda: server.manager.active == 0)


@pytest.mark.slow
def test_a_client_of_v1_gets_the_typed_error_too(perilous: Callable[..., Any], connect: Callable[..., Any]) -> None:
    one, other = apart(perilous(), connect, "v1")
    with pytest.raises(SessionLost) as caught:
        one.step({"what": "kill"})
    assert caught.value.reason == "worker crashed"
    assert other.step({"what": "look"}).observation["count"] == 1


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_a_process_that_dies_between_requests_is_noticed_at_once(
    perilous: Callable[..., Any],
    connect: Callable[..., Any],
    eventually: Callable[..., Any],
    kill: Callable[[int], None],
    protocol: str,
) -> None:
    server = perilous()
    client = connect(server, protocol)
    pid = client.reset().observation["pid"]
    kill(pid)
    eventually(lambda: server.manager.active == 0)
    with pytest.raises(SessionLost) as caught:
        client.step({"what": "look"})
    assert caught.value.reason == "worker crashed"


@pytest.mark.slow
def test_the_same_over_http(
    perilous: Callable[..., Any], eventually: Callable[..., Any], kill: Callable[[int], None]
) -> None:
    server = perilous()
    with httpx2.Client(base_url=server.url, timeout=30) as http:
        names = []
        for _ in range(2):
            answer = http.post("/reset", headers={"X-OpenEnv-Session": "new"}, json={})
            names.append(answer.headers["X-OpenEnv-Session"])
        died = http.post("/step", headers={"X-OpenEnv-Session": names[0]}, json={"action": {"what": "kill"}})
        assert (died.status_code, died.json()["code"], died.json()["reason"]) == (410, "SESSION_LOST", "worker crashed")
        answer = http.post("/step", headers={"X-OpenEnv-Session": names[1]}, json={"action": {"what": "look"}})
        kill(answer.json()["observation"]["pid"])
        eventually(lambda: server.manager.active == 0)
        for name in names:
            gone = http.get("/state", headers={"X-OpenEnv-Session": name})
            assert (gone.status_code, gone.json()["code"]) == (410, "SESSION_LOST")
            assert gone.json()["reason"] == "worker crashed"


@pytest.mark.slow
def test_a_process_that_dies_in_a_reset_loses_the_session(
    perilous: Callable[..., Any], connect: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    server = perilous()
    client = connect(server)
    client.reset()
    with pytest.raises(SessionLost) as caught:
        client.reset(die_by="kill")
    assert caught.value.reason == "worker crashed"
    eventually(lambda: server.manager.active == 0)
    assert client.reset().observation["count"] == 0


@pytest.mark.slow
def test_a_process_that_dies_in_close_gives_the_slot_back(
    perilous: Callable[..., Any], connect: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    server = perilous(sessions=1)
    client = connect(server)
    client.reset()
    client.step({"what": "die in close", "value": "kill"})
    client.close()
    eventually(lambda: server.manager.active == 0)
    assert connect(server).reset().observation["count"] == 0


def test_calls_that_wait_for_their_turn_get_the_error_as_well(
    perilous: Callable[..., Any], eventually: Callable[..., Any], tmp_path: Path
) -> None:
    server = perilous()
    with httpx2.Client(base_url=server.url, timeout=60) as http:
        opened = http.post("/reset", headers={"X-OpenEnv-Session": "new"}, json={})
        headers = {"X-OpenEnv-Session": opened.headers["X-OpenEnv-Session"]}
        answers: list[Any] = []

        def step(action: dict[str, Any]) -> None:
            answers.append(http.post("/step", headers=headers, json={"action": action}))

        waiting = [threading.Thread(target=step, args=({"what": "wait for file", "value": str(tmp_path / "go")},))]
        waiting += [threading.Thread(target=step, args=({"what": "look"},)) for _ in range(2)]
        session = server.manager.sessions()[0]
        waiting[0].start()
        eventually(lambda: not session.is_idle)
        for thread in waiting[1:]:
            thread.start()
        eventually(lambda: len(session._waiting) == 2)
        server.manager.runner.workers[0].kill()
        for thread in waiting:
            thread.join(30)
    assert [answer.status_code for answer in answers] == [410] * 3
    assert {answer.json()["reason"] for answer in answers} == {"worker crashed"}


@pytest.mark.slow
def test_a_constructor_that_kills_its_process_is_a_factory_error_and_a_loop_of_them_is_slowed_down(
    perilous: Callable[..., Any],
    connect: Callable[..., Any],
    envs: ModuleType,
    eventually: Callable[..., Any],
    tmp_path: Path,
) -> None:
    from functools import partial

    marker = tmp_path / "broken"
    marker.touch()
    server = perilous(partial(envs.NeverBuilt, str(marker)), sessions=2)
    reasons: list[str] = []
    refused = "worker processes died before they answered anything"
    while not (reasons and refused in reasons[-1]) and len(reasons) < 20:  # pauses grow, so one is met in the end
        with pytest.raises(EnvironmentFactoryError) as caught:
            connect(server).reset()
        reasons.append(caught.value.reason or "")
    assert "killed by SIGKILL" in reasons[0]
    assert refused in reasons[-1]
    eventually(lambda: server.manager.active == 0)
    marker.unlink()

    def works() -> bool:
        try:
            return connect(server).reset().observation["count"] == 0
        except EnvironmentFactoryError:
            return False

    assert eventually(works)


def test_a_crash_is_counted_and_logged_and_the_process_is_replaced(
    perilous: Callable[..., Any],
    connect: Callable[..., Any],
    eventually: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = perilous()
    one, _ = apart(server, connect)
    before = {worker.pid for worker in server.manager.runner.workers}
    with pytest.raises(SessionLost):
        one.step({"what": "kill"})
    eventually(lambda: server.manager.active == 1)
    metrics = httpx2.get(server.url + "/metrics", timeout=30).text
    assert 'openenv_sessions_closed_total{reason="worker crashed"} 1' in metrics
    assert 'openenv_errors_total{code="SESSION_LOST"} 1' in metrics
    assert re.search(r"worker process \d+ died \(killed by SIGKILL\); 1 session", caplog.text)
    now = eventually(lambda: [pid for pid in (w.pid for w in server.manager.runner.workers) if pid not in before])
    assert len(now) == 1
    assert one.reset().observation["pid"] == now[0]
