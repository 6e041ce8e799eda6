"""The ends of workers: killed, drained, stopped together; and starts that fail."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import http_calls
from openenv import GenericEnvClient, VectorEnv
from openenv.errors import SessionLost
from openenv.server.runners import cores, has_affinity
from waiting import holds_for, wait_until
from worker_servers import APP, WorkersServer

Start = Callable[..., WorkersServer]
pytestmark = pytest.mark.slow  # the quick ones are in `test_one_server`


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_drain_finishes_running_steps_in_all_workers_and_closes_every_environment(
    start: Start, tmp_path: Path
) -> None:
    server = start("--workers", "2", CLOSED_IN=str(tmp_path))
    clients = [server.client() for _ in range(4)]
    pids = {client.reset().observation["pid"] for client in clients}
    assert len(pids) == 2
    url, statuses = server.url, []
    with ThreadPoolExecutor(4) as pool:
        steps = [pool.submit(client.step, {"by": 7, "sleep_s": 2.5}) for client in clients]
        holds_for(0.3, lambda: not any(step.done() for step in steps))  # all of them are with a worker
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http_calls.get(f"{url}/ready").status_code == 503, 2)
        for _ in range(4):
            statuses.append(http_calls.get(f"{url}/ready").status_code)
        assert [step.result(60).observation["total"] for step in steps] == [7, 7, 7, 7]
    assert statuses == [503] * 4
    assert server.process.wait(60) == 0
    assert len(list(tmp_path.iterdir())) == 4
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.skipif(cores() < 2 or not has_affinity(), reason="needs two cores to bind processes to")
def test_pinned_workers_stay_on_cores_of_their_own(start: Start) -> None:
    server = start("--workers", "2", "--pin-workers")
    clients = [server.client() for _ in range(2)]
    pids = [client.reset().observation["pid"] for client in clients]
    threads = [{thread.name for thread in Path(f"/proc/{pid}/task").iterdir()} for pid in pids]
    bound = [{frozenset(os.sched_getaffinity(int(thread))) for thread in of_one} for of_one in threads]
    assert [len(of_one) for of_one in bound] == [1, 1]
    assert bound[0].isdisjoint(bound[1])


def test_sessions_of_all_workers_may_finish_after_sigterm(start: Start) -> None:
    server = start("--workers", "2", "--drain-timeout", "60")
    clients = [server.client() for _ in range(4)]
    assert len({client.reset().observation["pid"] for client in clients}) == 2
    url = server.url
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(lambda: http_calls.get(f"{url}/ready").status_code == 503)
    for turn in range(1, 4):
        assert [client.step({"by": 1}).observation["total"] for client in clients] == [turn] * 4
    for _ in range(4):  # in any worker
        refused = http_calls.post(f"{url}/sessions", json={})
        assert (refused.status_code, "shutting down" in refused.text) == (503, True)
    assert server.process.poll() is None
    for client in clients:
        client.close()
    assert server.process.wait(30) == 0


def test_the_time_to_finish_ends_and_a_second_sigterm_ends_it_at_once(start: Start) -> None:
    server = start("--workers", "2", "--drain-timeout", "1")
    client = server.client()
    client.reset()
    assert server.stop() == 0
    with pytest.raises(SessionLost):
        client.step({"by": 1})
    server = start("--workers", "2", "--drain-timeout", "300")
    client = server.client()
    client.reset()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(lambda: http_calls.get(f"{server.url}/ready").status_code == 503)
    holds_for(0.6, lambda: server.process.poll() is None)  # sooner, it is taken for the same signal
    assert server.stop() == 0
    with pytest.raises(SessionLost):
        client.step({"by": 1})


@pytest.mark.parametrize("runner", ["inline", "thread", "process"])
def test_each_runner_serves_behind_workers(start: Start, runner: str) -> None:
    server = start("--workers", "3", "--runner", runner, "--max-sessions", "12")
    with VectorEnv[Any, Any](server.url, 12) as vector:
        first = vector.reset()
        assert len({name[-4:] for name in vector.sessions if name is not None}) == 3
        pids = {seen["pid"] for seen in first.observations if seen is not None}
        assert len(pids) >= 3
        for turn in range(1, 4):
            result = vector.step([{"by": 1}] * 12)
            assert [seen["total"] for seen in result.observations if seen is not None] == [turn] * 12
    assert server.stop() == 0
    assert not any(is_running(pid) for pid in pids)


def test_a_supervisor_that_is_killed_leaves_no_worker(start: Start) -> None:
    server = start("--workers", "2")
    pids = [server.client().reset().observation["pid"] for _ in range(2)]
    server.process.kill()
    server.process.wait(20)
    server.wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_a_worker_that_is_asked_to_stop_is_replaced_and_its_sessions_end_typed(start: Start) -> None:
    server = start("--workers", "2")
    client = server.client()
    pid = client.reset().observation["pid"]
    os.kill(pid, signal.SIGTERM)
    server.wait_for(lambda: not is_running(pid))
    with pytest.raises(SessionLost):
        client.step({"by": 1})
    server.wait_for(lambda: server.metric("openenv_workers") == 2)
    assert client.reset().observation["pid"] != pid
    client.close()


def test_workers_that_die_again_and_again_never_stop_the_others(start: Start) -> None:
    server = start("--workers", "3", "--max-sessions", "30")
    stop = threading.Event()
    kept = server.client()
    own = kept.reset().observation["pid"]

    def kill() -> None:
        while not stop.wait(0.4):
            with GenericEnvClient(server.url).sync() as victim:
                try:
                    pid = victim.reset().observation["pid"]
                except SessionLost:
                    continue
                if pid != own:
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    turns = itertools.count(1)

    def is_kept_until_three_were_killed() -> bool:
        assert kept.step({"by": 1}).observation["total"] == next(turns)
        return server.output.count("was killed by signal 9") >= 3

    wait_until(is_kept_until_three_were_killed, 60, every_s=0.02)
    stop.set()
    killer.join()
    assert server.output.count("was killed by signal 9") >= 3
    server.wait_for(lambda: server.metric("openenv_workers") == 3)
    kept.close()
    assert server.stop() == 0


def test_a_start_that_fails_is_reported_once_and_leaves_nothing(start: Start, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('no such board')\n")
    server = start("--workers", "2", target=str(broken))
    assert server.process.wait(60) == 1
    server.wait_for(lambda: "no such board" in server.output)
    assert server.output.count("Traceback") == 1
    plain = tmp_path / "plain.py"
    plain.write_text("async def app(scope, receive, send): ...\n")
    server = start("--workers", "2", target=f"{plain}:app")
    assert server.process.wait(60) == 1
    server.wait_for(lambda: "was not made by create_app" in " ".join(server.output.split()))
    server = start("--workers", "2", target=f"{APP}:app", OPENENV_FAST="0")
    assert server.process.wait(60) == 1
    server.wait_for(lambda: "unset OPENENV_FAST" in " ".join(server.output.split()))


def test_the_setting_and_auto_start_workers_and_ctrl_c_ends_them(start: Start) -> None:
    server = start(OPENENV_WORKERS="2")
    server.wait_for(lambda: "2 processes" in server.output)
    assert server.stop(signal.SIGINT) == 130
    server = start("--workers", "auto")
    assert server.url
    cores = len(os.sched_getaffinity(0))
    assert ("processes, which share" in server.output) == (cores > 1)
    assert server.stop(signal.SIGINT) == 130


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_without_a_cookie_never_continues_in_a_fresh_episode_of_another_worker(
    start: Start, number: signal.Signals
) -> None:
    server = start("--workers", "3", "--web")

    def post(path: str, body: Any) -> Any:
        with http_calls.Client(base_url=server.url) as http:  # any worker may get the connection
            return http.post(f"/web/{path}", json=body)

    move = {"action": {"by": 1}}
    assert post("step", move).json()["observation"]["total"] == 1  # no episode is lost: the contract allows this
    for _ in range(2):
        begun = post("reset", {})
        assert begun.status_code == 200
        pid = begun.json()["observation"]["pid"]
        assert [post("step", move).json()["observation"]["total"] for _ in range(2)] == [1, 2]
        os.kill(pid, number)
        wait_until(lambda pid=pid: not is_running(pid), 60)
        with http_calls.Client(base_url=server.url) as http:
            lost = [http.post("/web/step", json=move), http.get("/web/state"), http.post("/web/step", json=move)]
        assert [(reply.status_code, reply.json()["code"]) for reply in lost] == [(410, "SESSION_LOST")] * 3
    assert post("reset", {}).status_code == 200
    assert post("step", move).json()["observation"]["total"] == 1
