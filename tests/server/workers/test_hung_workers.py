"""A worker whose event loop has stopped gets no new sessions and is replaced; one that is merely busy is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import http_calls
from openenv import GenericEnvClient
from openenv.errors import SessionLost
from openenv.server.run import HeartbeatOptions
from openenv.server.workers.board import SERVING, place_of
from openenv.server.workers.supervisor import SupervisorBoard
from worker_servers import WorkersServer

Start = Callable[..., WorkersServer]
APP = Path(__file__).resolve().parents[2] / "support" / "hanging_app.py"
QUICK = ("--heartbeat-timeout", "0.5", "--replace-timeout", "2")


@pytest.fixture
def serve(start: Start) -> Callable[..., WorkersServer]:
    """Start servers of the hanging environment."""

    def begin(*arguments: str, workers: int = 2, **options: Any) -> WorkersServer:
        return start("--workers", str(workers), "--max-sessions", "400", *arguments, target=f"{APP}:app", **options)

    return begin


def worker_of(name: str) -> int:
    place = place_of(name)
    assert place is not None
    return place.index


def one_client_each(server: WorkersServer, workers: int) -> dict[int, Any]:
    """Return one client per worker, by process id, each with an episode."""
    clients: dict[int, Any] = {}
    while len(clients) < workers:
        client = server.client()
        pid = client.reset().observation["pid"]
        if clients.setdefault(pid, client) is not client:
            client.close()
    return clients


def visitor_of(server: WorkersServer, index: int) -> Any:
    """Return a browser whose visitor belongs to a worker."""
    while True:
        browser = http_calls.Client(base_url=server.url)
        assert browser.get("/web/").status_code == 200
        if worker_of(browser.cookies["openenv_visitor"]) == index:
            return browser
        assert browser.post("/web/reset", json={}).status_code == 200  # loads this worker: the next one differs


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def pid_of_worker(server: WorkersServer, index: int) -> int:
    """Return the process of a worker, as its sessions report it."""
    with http_calls.Client(base_url=server.url) as http:
        while True:
            opened = http.post("/reset", json={}, headers={"X-OpenEnv-Session": "new"})
            if worker_of(opened.headers["x-openenv-session"]) == index:
                return int(opened.json()["observation"]["pid"])


def await_detection(server: WorkersServer) -> None:
    """Wait until the supervisor reports a hung worker. It logs this; until then any request may reach that worker."""
    server.wait_for(lambda: "has not responded" in server.output)


def play(server: WorkersServer) -> None:
    """Play a short episode as a new client."""
    with GenericEnvClient(server.url).sync() as client:
        client.reset()
        assert [client.step({"by": 1}).observation["total"] for _ in range(3)] == [1, 2, 3]


@pytest.mark.slow_but_for("0")
@pytest.mark.parametrize("index", [0, 1])
def test_a_stopped_worker_is_detected_and_replaced_and_its_sessions_end_with_a_typed_error(
    serve: Callable[..., WorkersServer], index: int
) -> None:
    server = serve(*QUICK)
    clients = one_client_each(server, 2)
    stopped = pid_of_worker(server, index)
    visitor = visitor_of(server, index)
    visitor.post("/web/reset", json={})
    os.kill(stopped, signal.SIGSTOP)
    await_detection(server)
    for _ in range(4):  # whichever connection
        ready = server.ready
        assert (ready["status"], ready["workers"], ready["hung_workers"]) == ("ready", 2, 1)
    assert server.metric("openenv_workers_hung") == 1
    for _ in range(4):
        play(server)
    visitor = http_calls.Client(base_url=server.url, cookies=visitor.cookies)  # its connection ends with the worker
    lost = visitor.post("/web/step", json={"action": {"by": 1}})
    assert (lost.status_code, lost.json()["code"]) == (410, "SESSION_LOST")
    assert visitor.post("/web/reset", json={}).status_code == 200
    for turn in range(1, 4):
        assert visitor.post("/web/step", json={"action": {"by": 1}}).json()["observation"]["total"] == turn
    server.wait_for(lambda: server.metric('openenv_workers_replaced_total{reason="hung"}') == 1)
    assert not is_running(stopped)
    server.wait_for(lambda: server.metric("openenv_workers") == 2)
    assert server.ready["hung_workers"] == 0
    with pytest.raises(SessionLost):
        clients[stopped].step({"by": 1})
    assert clients[stopped].reset().observation["total"] == 0
    (other,) = clients.keys() - {stopped}
    assert clients[other].step({"by": 1}).observation["total"] == 1
    assert visitor.post("/web/step", json={"action": {"by": 1}}).json()["observation"]["total"] == 4  # it stays
    visitor.close()
    for client in clients.values():
        client.close()


def test_code_that_blocks_the_event_loop_counts_as_hung(serve: Callable[..., WorkersServer]) -> None:
    server = serve("--runner", "inline", *QUICK)
    clients = one_client_each(server, 2)
    blocked, free = clients
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(clients[blocked].step, {"sleep_s": 600.0})
        await_detection(server)
        assert server.ready["hung_workers"] == 1
        assert clients[free].step({"by": 1}).observation["total"] == 1
        with pytest.raises(SessionLost):
            step.result(60)
    assert not is_running(blocked)
    server.wait_for(lambda: server.metric("openenv_workers") == 2)


def test_a_worker_that_responds_again_keeps_its_sessions(serve: Callable[..., WorkersServer]) -> None:
    server = serve("--heartbeat-timeout", "0.5", "--replace-timeout", "0")
    clients = one_client_each(server, 2)
    stopped = next(iter(clients))
    clients[stopped].step({"by": 5})
    os.kill(stopped, signal.SIGSTOP)
    await_detection(server)
    assert server.ready["hung_workers"] == 1
    os.kill(stopped, signal.SIGCONT)
    server.wait_for(lambda: server.ready["hung_workers"] == 0)
    assert clients[stopped].step({"by": 1}).observation["total"] == 6
    more = one_client_each(server, 2)
    assert stopped in more  # it gets new sessions again
    assert server.metric('openenv_workers_replaced_total{reason="hung"}') == 0


def test_a_busy_worker_is_not_hung(serve: Callable[..., WorkersServer]) -> None:
    server = serve()  # with the default limit of 2.5 s
    clients = one_client_each(server, 2)
    with ThreadPoolExecutor(2) as pool:
        steps = [pool.submit(client.step, {"hold_lock_s": 1.0}) for client in clients.values()]
        assert [step.result(60).observation["pid"] for step in steps] == list(clients)
        steps = [pool.submit(client.step, {"compute_s": 3.0}) for client in clients.values()]
        assert [step.result(60).observation["pid"] for step in steps] == list(clients)
    assert "has not responded" not in server.output
    assert server.metric('openenv_workers_replaced_total{reason="hung"}') == 0


def test_a_worker_that_stops_with_the_lock_of_all_workers_is_killed_alone(
    serve: Callable[..., WorkersServer],
) -> None:
    server = serve("--heartbeat-timeout", "1", "--replace-timeout", "30")
    clients = one_client_each(server, 2)
    stopped, other = clients
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(clients[stopped].step, {"freezes_with_lock": True})
        server.wait_for(lambda: not is_running(stopped))
        with pytest.raises(SessionLost):
            step.result(60)
    assert clients[other].step({"by": 1}).observation["total"] == 1
    play(server)
    server.wait_for(lambda: server.metric('openenv_workers_replaced_total{reason="hung"}') == 1)
    assert is_running(other)


def test_a_shutdown_does_not_wait_for_a_stopped_worker(serve: Callable[..., WorkersServer]) -> None:
    server = serve(*QUICK)
    stopped = next(iter(one_client_each(server, 2)))
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 20
    assert not is_running(stopped)


def test_the_supervisor_has_a_frozen_holder_of_the_lock_killed() -> None:
    killed: list[int] = []
    program = (
        "import fcntl, os, signal, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX); print(flush=True); "
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )

    def kill(pid: int) -> None:
        killed.append(pid)
        os.kill(pid, signal.SIGKILL)

    board = SupervisorBoard(2, 0.2, kill)
    assert board.lock_holder() is None
    with subprocess.Popen(
        [sys.executable, "-c", program, str(board.fd)], pass_fds=[board.fd], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert board.lock_holder() == holder.pid
        with board:
            assert set(killed) == {holder.pid}
    board.close()


@pytest.mark.parametrize(("timeout_s", "replace_s"), [(0.0, 6.0), (2.0, 1.0), (float("nan"), 0.0), (1.0, float("inf"))])
def test_limits_of_heartbeats_are_checked(timeout_s: float, replace_s: float) -> None:
    with pytest.raises(ValueError, match="timeout must be"):
        HeartbeatOptions(timeout_s, replace_s)


class Load:
    """Clients that play against a server until the test ends, and what went wrong."""

    def __init__(self, server: WorkersServer, clients: int) -> None:
        self._url = server.url
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.episodes = 0
        self.losses: list[tuple[float, str]] = []
        self.failures: list[tuple[float, str]] = []  # of clients, by the time when they were opened
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                with GenericEnvClient(self._url).sync() as client:
                    client.reset()
                    for turn in range(1, 20):
                        assert client.step({"by": 1}).observation["total"] == turn
            except SessionLost as exc:
                with self._lock:
                    self.losses.append((began, exc.reason))
            except Exception as exc:
                with self._lock:
                    self.failures.append((began, repr(exc)))
            else:
                with self._lock:
                    self.episodes += 1

    def stop(self) -> None:
        """Let all clients finish their episode."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 2])
def test_one_of_four_workers_hangs_for_a_minute_under_load(serve: Callable[..., WorkersServer], index: int) -> None:
    server = serve(workers=4)
    clients = one_client_each(server, 4)
    stopped = pid_of_worker(server, index)
    load = Load(server, 12)
    server.wait_for(lambda: load.episodes > 20)
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    await_detection(server)
    assert server.ready["hung_workers"] == 1
    detected = time.monotonic()
    with http_calls.Client(base_url=server.url) as visitor:
        turn = 0
        assert visitor.get("/web/").status_code == 200
        assert visitor.post("/web/reset", json={}).status_code == 200
        while server.ready["hung_workers"] or server.metric("openenv_workers") != 4:
            turn += 1
            assert visitor.get("/web/page").status_code == 200
            assert visitor.get("/web/sessions").status_code == 200
            assert visitor.post("/web/step", json={"action": {"by": 1}}).json()["observation"]["total"] == turn
        replaced = time.monotonic()
        while time.monotonic() - began < 60:
            play(server)
            turn += 1
            assert visitor.post("/web/step", json={"action": {"by": 1}}).json()["observation"]["total"] == turn
        assert visitor.get("/web/").status_code == 200
    load.stop()
    assert detected < replaced < began + 60, "the worker was replaced while it hung"
    assert [loss for loss in load.losses if loss[0] > detected] == []
    assert load.failures == []
    for pid, client in clients.items():
        if pid == stopped:
            with pytest.raises(SessionLost):
                client.step({"by": 1})
        else:
            assert client.step({"by": 1}).observation["total"] == 1
        client.close()
    assert server.metric('openenv_workers_replaced_total{reason="hung"}') == 1
    assert not is_running(stopped)


def test_a_hung_worker_gets_no_sessions_and_keeps_no_client_waiting() -> None:
    board = SupervisorBoard(3, 1.0, lambda pid: None)
    for index in range(3):
        board.begin(index)
        board.set_state(index, SERVING)
    assert board.shared(1) == 1
    board.publish_waiting(1, [5], 5)
    board.publish_waiting(2, [9], 9)
    board.mark_hung(1, is_hung=True)
    assert {board.place(here).place for here in range(3) for _ in range(5)} == {0, 2}
    assert board.others(0) == [2]
    assert board.first_waiting() == (9, 2)
    assert board.waiting_before(2, 9) == 0
    assert board.of_visitor("x-w1-1", 0) == board.of_visitor("x-w1-1", 2) != 1
    assert board.find("x-w1-1") == 1  # its sessions wait: it may recover
    shared = board.shared(2)
    assert shared == board.shared(0) != 1
    board.mark_hung(1, is_hung=False)
    assert board.shared(1) == shared  # the state moves once, not twice
    assert board.of_visitor("x-w1-1", 0) == 1
    board.close()
