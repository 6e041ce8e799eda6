"""Environments in worker processes behave as in threads: threads, keywords, values, errors, tasks, placement."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import pytest
from websockets.sync.client import connect as dial

from openenv.errors import ConcurrencyConfigurationError, ExecutionError
from openenv.server.app import create_app
from openenv.server.runners import NotSendable
from openenv.types import Action, Observation
from servers import Serve


def test_all_calls_of_a_session_run_on_one_thread_and_those_of_another_on_another(
    perilous: Callable[..., Any], connect: Callable[..., Any]
) -> None:
    server = perilous(env_processes=1)
    one, other = connect(server), connect(server)
    threads = {one.reset().observation["thread"], one.step({}).observation["thread"]}
    one.state()
    assert one.step({"what": "threads"}).observation["value"] == 1
    assert len(threads) == 1
    assert other.reset().observation["thread"] not in threads


def test_a_class_that_needs_one_thread_has_one_in_each_process(
    perilous: Callable[..., Any], connect: Callable[..., Any], envs: ModuleType
) -> None:
    for factory in (envs.OneThread, partial(envs.make, envs.OneThread)):
        server = perilous(factory, env_processes=1)
        seen = [connect(server).reset().observation for _ in range(3)]
        assert len({(observation["pid"], observation["thread"]) for observation in seen}) == 1


def test_a_session_that_hangs_does_not_delay_others(
    perilous: Callable[..., Any], connect: Callable[..., Any], tmp_path: Path
) -> None:
    server = perilous(env_processes=1)
    hanging, other = connect(server), connect(server)
    assert hanging.reset().observation["pid"] == other.reset().observation["pid"]
    go = tmp_path / "go"
    answers: list[Any] = []
    action = {"what": "wait for file", "value": str(go)}
    thread = threading.Thread(target=lambda: answers.append(hanging.step(action)))
    thread.start()
    try:
        for count in range(1, 6):
            assert other.step({}).observation["count"] == count
        assert connect(server).reset().observation["count"] == 0
        assert answers == []
    finally:
        go.touch()
        thread.join(30)
    assert answers[0].observation["count"] == 1


def test_coroutines_run_on_one_loop_of_the_process(
    perilous: Callable[..., Any], connect: Callable[..., Any], envs: ModuleType
) -> None:
    server = perilous(envs.Awaiting, env_processes=1)
    one, other = connect(server), connect(server)
    assert one.reset(seed=4).observation["value"]["seed"] == 4
    other.reset()
    threads = {one.step({}).observation["thread"], other.step({}).observation["thread"]}
    assert len(threads) == 1
    with pytest.raises(ExecutionError, match="gone"):
        one.step({"what": "raise", "value": "gone"})
    assert one.state()["step_count"] == 2


def test_keywords_reach_reset_and_step_as_far_as_they_take_them(
    perilous: Callable[..., Any], connect: Callable[..., Any]
) -> None:
    server = perilous()
    seen = connect(server).reset(seed=3, episode_id="e", level=2, unknown=1).observation["value"]
    assert seen == {"seed": 3, "episode_id": "e", "level": 2}
    with httpx2.Client(base_url=server.url, timeout=30) as http:
        body = {"action": {"what": "keywords"}, "timeout_s": 2.5, "extra": "more", "unknown": 1}
        seen = http.post("/step", json=body).json()["observation"]["value"]
    assert seen == {"timeout_s": 2.5, "extra": "more"}


ACTIONS: list[dict[str, Any]] = [
    {"what": "look", "value": {"deep": [1, None, "ü"]}},
    {"what": "array"},
    {"what": "bytes"},
    {"what": "raise", "value": "text"},
    {"what": "raise unpicklable"},
    {"what": "raise local"},
    {"what": "raise exit"},
    {"what": 7},
]


def test_frames_are_the_same_as_with_threads_values_and_errors_alike(
    perilous: Callable[..., Any], serve: Serve, envs: ModuleType
) -> None:
    def frames(server: Any) -> list[Any]:
        answers = []
        with dial(server.url.replace("http", "ws") + "/ws") as socket:
            for action in ACTIONS:
                socket.send(json.dumps({"type": "step", "data": action}))
                answers.append(json.loads(socket.recv(timeout=30)))
            socket.send(json.dumps({"type": "state"}))
            answers.append(json.loads(socket.recv(timeout=30)))
        for answer in answers:
            for name in ("pid", "thread"):
                answer["data"].get("observation", {}).pop(name, None)
        return answers

    threads = serve(create_app(envs.Perilous, envs.Do, envs.Saw, runner="thread"))
    assert frames(perilous()) == frames(threads)


def test_arrays_and_bytes_cross_raw_over_msgpack(perilous: Callable[..., Any], connect: Callable[..., Any]) -> None:
    client = connect(perilous())
    client.reset()
    for size in (10, 3_000_000):
        text = "x" * size
        assert client.step({"what": "look", "value": text}).observation["value"] == text
    assert client.step({"what": "look"}).reward == 0.75  # the rubric's


def test_metadata_and_tasks_come_from_a_worker(perilous: Callable[..., Any]) -> None:
    server = perilous(env_name="perils")
    with httpx2.Client(base_url=server.url, timeout=30) as http:
        assert http.get("/metadata").json()["description"].startswith("process ")
        assert http.get("/perils/splits").json() == [{"name": "train", "type": "train"}]
        tasks = http.post("/perils/tasks", json={"split": "train"}).json()["tasks"]
        assert tasks == [{"number": number} for number in range(3)]
        assert http.post("/perils/tasks", json={"split": "test"}).status_code == 400
        assert http.post("/perils/num_tasks", json={"split": "train"}).json() == {"num_tasks": 3}
        assert http.post("/perils/task", json={"split": "train", "index": 0}).status_code == 501
        assert "history" in http.get("/schema").json()["state"]["properties"]


def test_what_a_worker_prints_goes_to_stderr_and_what_it_logs_to_the_servers_log(
    perilous: Callable[..., Any],
    connect: Callable[..., Any],
    eventually: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    client = connect(perilous())
    client.reset()
    client.step({"what": "print", "value": "printed over there"})
    client.step({"what": "log", "value": "logged over there"})
    eventually(lambda: "logged over there" in caplog.text)
    out, err = capfd.readouterr()
    assert "printed over there" in err
    assert "printed over there" not in out


def test_a_failure_is_logged_with_its_place_in_the_environment(
    perilous: Callable[..., Any], connect: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    client = connect(perilous())
    client.reset()
    with pytest.raises(ExecutionError):
        client.step({"what": "raise", "value": "where was it"})
    assert "in a worker process" in caplog.text
    assert "environments.py" in caplog.text


@pytest.mark.slow
def test_sessions_are_spread_and_a_full_process_takes_no_more(
    perilous: Callable[..., Any], connect: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    server = perilous(env_processes=2, sessions_per_process=2)
    clients = [connect(server) for _ in range(6)]
    pids = [client.reset().observation["pid"] for client in clients]
    assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2, 2]
    for client in clients:
        client.close()
    eventually(lambda: server.manager.active == 0)
    eventually(lambda: len(server.manager.runner.workers) == 2)  # as many as are kept for the next ones


def test_the_rule_about_concurrent_sessions_holds(perilous: Callable[..., Any], envs: ModuleType) -> None:
    with pytest.raises(ConcurrencyConfigurationError):
        perilous(envs.NotShared, sessions=2)
    server = perilous(partial(envs.make, envs.NotShared), sessions=1)
    assert httpx2.post(server.url + "/reset", json={}, timeout=30).status_code == 200


def test_a_factory_that_says_nothing_of_its_class_is_learnt_from_the_worker(
    perilous: Callable[..., Any], connect: Callable[..., Any], envs: ModuleType
) -> None:
    server = perilous(envs.make)
    assert server.manager.env_cls is None
    connect(server).reset()
    assert server.manager.env_cls is envs.Perilous


def test_a_factory_that_cannot_be_sent_is_refused_when_the_application_is_made(envs: ModuleType) -> None:
    class Local(envs.Perilous):  # type: ignore[name-defined,misc]
        pass

    for factory in (Local, lambda: envs.Perilous(), partial(envs.make, threading.Lock())):
        with pytest.raises(NotSendable, match="top level of a module"):
            create_app(factory, Action, Observation, runner="process")
    with pytest.raises(ValueError, match="at least one"):
        create_app(envs.Perilous, Action, Observation, runner="process", env_processes=0)


def test_a_cancelled_step_is_waited_for_and_the_session_goes_on(
    perilous: Callable[..., Any], envs: ModuleType, tmp_path: Path
) -> None:
    server = perilous()
    go = tmp_path / "go"
    with dial(server.url.replace("http", "ws") + "/ws", subprotocols=["openenv.v2.json"]) as socket:

        def ask(**message: Any) -> Any:
            socket.send(json.dumps(message))
            return json.loads(socket.recv(timeout=30))

        session = ask(type="open", id=1)["session"]
        step = {"type": "step", "id": 2, "session": session, "data": {"what": "wait for file", "value": str(go)}}
        socket.send(json.dumps(step))
        assert ask(type="cancel", id=3, session=session, request=2)["found"] is True
        go.touch()
        assert json.loads(socket.recv(timeout=30))["data"]["observation"]["count"] == 1
        answer = ask(type="step", id=4, session=session, data={"what": "look"})
        assert answer["data"]["observation"]["count"] == 2


def test_a_cancelled_coroutine_is_cancelled_in_its_process(perilous: Callable[..., Any], envs: ModuleType) -> None:
    server = perilous(envs.Awaiting)
    with dial(server.url.replace("http", "ws") + "/ws", subprotocols=["openenv.v2.json"]) as socket:

        def ask(**message: Any) -> Any:
            socket.send(json.dumps(message))
            return json.loads(socket.recv(timeout=30))

        session = ask(type="open", id=1)["session"]
        ask(type="reset", id=2, session=session, data={})
        socket.send(json.dumps({"type": "step", "id": 3, "session": session, "data": {"what": "sleep", "value": 3600}}))
        answers = [ask(type="cancel", id=4, session=session, request=3), json.loads(socket.recv(timeout=30))]
        codes = [answer["data"]["code"] for answer in answers if answer["type"] == "error"]
        assert codes == ["CANCELLED"]
        answer = ask(type="step", id=5, session=session, data={"what": "look"})
        assert answer["data"]["observation"]["count"] == 1


def test_an_environment_of_gymnasiums_can_be_served_so(serve: Serve, connect: Callable[..., Any]) -> None:
    from openenv.server.loading import load_app

    app = load_app("gymnasium:CartPole-v1")
    app.state.openenv_server.reconfigure(runner="process", env_processes=1)
    client = connect(serve(app))
    first = client.reset(seed=7).observation["observation"]
    assert client.reset(seed=7).observation["observation"] == first
    assert client.step({"action": 1}).reward == 1.0
