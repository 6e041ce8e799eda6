"""Environment code stays off the event loop and on its session's thread, and threads stay few."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from environments import Idle
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.types import Action, Observation
from openenv.server.runners.thread import ThreadRunner
from servers import Serve
from waiting import wait_until

HEADER = "X-OpenEnv-Session"


@pytest.mark.parametrize("held", ["construct", "reset", "step", "state", "close"])
def test_a_slow_environment_does_not_stall_other_requests(
    serve: Serve, probe: Any, http: Any, peer: Any, held: str
) -> None:
    """W2: while any call of an environment hangs, `/health` answers and another session plays on."""
    server = serve(probe.app())
    client = http(server.url)
    other = peer(server.port)
    other.reset()
    probe.hold(held)
    slow = peer(server.port)
    slow.send({"type": "reset"})
    slow.send({"type": "step", "data": {}})
    slow.send({"type": "state"})
    slow.send({"type": "close"})
    probe.wait_entered(held)
    assert client.get("/health").json() == {"status": "healthy"}
    assert client.get("/schema").status_code == 200
    if held in ("construct", "close"):
        assert other.step()["data"]["observation"]["count"] == 1
    probe.release(held)


def test_stateless_requests_run_side_by_side(serve: Serve, probe: Any, http: Any) -> None:
    """W2: constructors of concurrent `/reset` requests overlap instead of queueing on the loop."""
    server = serve(probe.app(max_concurrent_envs=4))
    probe.hold("construct")
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(http(server.url).post, "/reset") for _ in range(4)]
        server.wait_for(lambda: probe.count("construct") == 4)
        probe.release("construct")
        assert [answer.result().status_code for answer in answers] == [200] * 4


@pytest.mark.parametrize(("method", "path"), [("POST", "/reset"), ("GET", "/state"), ("POST", "/step")])
def test_stateless_requests_keep_to_the_session_limit(
    serve: Serve, probe: Any, http: Any, method: str, path: str
) -> None:
    """W2: never are more environments alive for plain requests than the limit says; the others wait their turn."""
    server = serve(probe.app(max_concurrent_envs=2))
    probe.slow_s["construct"] = 0.03
    body = {"action": {}} if path == "/step" else None
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(http(server.url).request, method, path, json=body) for _ in range(8)]
        holds = []

        def all_answered() -> bool:
            holds.append(len(server.manager.slots._once))
            return all(answer.done() for answer in answers)

        wait_until(all_answered)
        most = max(holds)
        assert [answer.result().status_code for answer in answers] == [200] * 8
    assert 1 <= most <= 2


def test_metadata_is_asked_of_an_environment_once(serve: Serve, probe: Any, http: Any) -> None:
    """W2: `/metadata` builds an environment for the first request only."""
    client = http(serve(probe.app()).url)
    answers = [client.get("/metadata").json() for _ in range(3)]
    assert answers == [answers[0]] * 3
    assert probe.count("built") == 1


def test_all_code_of_a_session_runs_on_one_thread_of_its_own_side(
    serve: Serve, probe: Any, peer: Any, wait_for: Callable[..., None]
) -> None:
    """W11: constructor, reset, step, state and close of a session share one thread, and it is not the loop's."""
    server = serve(probe.app(max_concurrent_envs=64))
    peers = [peer(server.port) for _ in range(40)]
    for one in peers:
        one.reset()
    for _ in range(3):
        for one in peers:
            one.send({"type": "step", "data": {}})
            one.send({"type": "state"})
        for one in peers:
            assert one.receive()["type"] == "observation"
            assert one.receive()["type"] == "state"
    late = [peer(server.port) for _ in range(10)]  # by now the class is known to be fast, and these share a thread
    for one in late:
        one.reset()
        one.step()
        one.ask({"type": "state"})
    for one in (*peers, *late):
        one.send({"type": "close"})
    wait_for(lambda: probe.count("closed") == 50)
    names = {event.name for event in probe.events}
    assert {"construct", "reset", "step", "state", "close"} <= names
    assert all(len(probe.threads(env)) == 1 for env in range(1, 51))
    loop_threads = {thread.ident for thread in threading.enumerate() if thread.name == "test-server"}
    assert loop_threads
    assert not loop_threads & probe.threads()


def test_an_http_session_keeps_its_thread_too(serve: Serve, probe: Any, http: Any) -> None:
    """W11: the same over HTTP, where every request comes on a new task."""
    client = http(serve(probe.app()).url)
    named = {HEADER: client.post("/reset", headers={HEADER: "new"}).headers[HEADER]}
    for _ in range(5):
        client.post("/step", json={"action": {}}, headers=named)
        client.get("/state", headers=named)
    assert len(probe.threads(1)) == 1


def test_hundreds_of_fast_sessions_need_few_threads(
    serve: Serve, probe: Any, peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W13: 500 sessions of a fast environment share fewer than 64 threads."""
    for bound in ("SLOW_S", "FAST_S"):
        monkeypatch.setattr(f"openenv.server.runners.dispatcher.{bound}", 1.0)  # fast, on a busy machine too
    server = serve(probe.app(max_concurrent_envs=500))
    peers = [peer(server.port) for _ in range(500)]
    for one in peers:
        one.send({"type": "reset"})
    for one in peers:
        assert one.receive()["type"] == "observation"
    for one in peers:
        one.send({"type": "step", "data": {}})
    assert [one.receive()["data"]["observation"]["count"] for one in peers] == [1] * 500
    assert server.manager.active == 500
    assert server.manager.runner.threads < 64
    assert len(probe.threads()) < 64


def test_sessions_of_an_environment_known_to_be_slow_run_side_by_side(serve: Serve, probe: Any, peer: Any) -> None:
    """W13: once steps have shown to be slow, new sessions get threads of their own."""
    server = serve(probe.app(max_concurrent_envs=64))
    scout = peer(server.port)
    scout.reset()
    for _ in range(3):
        scout.step(sleep_s=0.05)
    peers = [peer(server.port) for _ in range(40)]
    for one in peers:
        one.reset()
    before = probe.count("step")
    probe.hold("step")
    for one in peers:
        one.send({"type": "step", "data": {}})
    server.wait_for(lambda: probe.count("step") == before + 40)  # all at once, none behind another
    probe.release("step")
    assert all(one.receive()["type"] == "observation" for one in peers)
    assert len({event.thread for event in probe.events if event.name == "step" and event.env > 1}) == 40


def test_threads_of_slow_sessions_end_with_them(
    serve: Serve, probe: Any, peer: Any, wait_for: Callable[..., None]
) -> None:
    """W13: only a handful of threads is kept for later."""
    before = set(threading.enumerate())
    server = serve(probe.app(max_concurrent_envs=64))
    scout = peer(server.port)
    scout.step(sleep_s=0.05)
    peers = [peer(server.port) for _ in range(30)]
    for one in peers:
        one.step(sleep_s=0.02)
    assert server.manager.runner.threads >= 30
    for one in (*peers, scout):
        one.send({"type": "close"})
    wait_for(lambda: server.manager.active == 0)
    wait_for(lambda: server.manager.runner.threads <= 8)
    wait_for(lambda: len(set(threading.enumerate()) - before) <= 9)


def test_no_thread_is_made_per_step(serve: Serve, probe: Any, peer: Any) -> None:
    """W20: a hundred steps run on the thread that ran the first one."""
    server = serve(probe.app())
    one = peer(server.port)
    one.reset()
    before = {thread.ident for thread in threading.enumerate()}
    for _ in range(100):
        one.step()
    assert {thread.ident for thread in threading.enumerate()} <= before
    assert len(probe.threads(1)) == 1


def test_serving_makes_no_blocking_call_on_the_event_loop(serve: Serve, probe: Any, http: Any, peer: Any) -> None:
    """W2: with a guard that raises in the loop's thread, sessions, HTTP episodes and plain requests all work."""
    server = serve(probe.app(runner="thread"))
    assert isinstance(server.manager.runner, ThreadRunner)
    http(server.url).get("/openapi.json")  # imports and builds, once
    with blockbuster_ctx() as guard:
        # Only what a server could do by mistake; this test's own thread has no running loop and may block.
        assert guard.functions
        one, client = peer(server.port), http(server.url)
        one.reset()
        for number in range(20):
            assert one.step(number=number, sleep_s=0.001)["data"]["observation"]["number"] == number
        assert one.ask({"type": "state"})["data"]["step_count"] == 20
        assert one.step(fail="on purpose")["data"]["code"] == "EXECUTION_ERROR"
        assert one.step(number="x")["data"]["code"] == "VALIDATION_ERROR"
        named = {HEADER: client.post("/reset", headers={HEADER: "new"}).headers[HEADER]}
        assert client.post("/step", json={"action": {}}, headers=named).json()["observation"]["count"] == 1
        assert client.get("/state").json()["step_count"] == 0
        assert client.get("/metadata").status_code == 200
        assert client.get("/health").status_code == 200
        one.send({"type": "close"})
        with pytest.raises(ConnectionError):
            one.receive()


def test_the_guard_against_blocking_calls_would_notice(serve: Serve, peer: Any) -> None:
    """W2: the same guard catches an environment that sleeps on the loop, so the test above means something."""
    server = serve(_inline_sleeper_app())
    with blockbuster_ctx():
        answer = peer(server.port).reset()
    assert answer["data"]["code"] == "EXECUTION_ERROR"
    assert "Blocking call" in answer["data"]["message"]


def _inline_sleeper_app() -> Any:
    return create_app(Sleeper, Action, Observation, runner="inline")


class Sleeper(Idle):
    """Sleeps where it should not."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        time.sleep(0.01)

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        raise AssertionError

    @property
    def state(self) -> Any:
        return None
