"""Copies of a worker by fork(2): exact, C state included; what copies would share is refused, by name."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forked_environments import Bookkeeper, Careless, Go, Librarian, Locked, Native, Seen, Walker, go
from openenv import GenericEnvClient
from openenv.errors import NotForkable, SessionLost
from openenv.server.app import create_app
from servers import RunningServer, Serve


@pytest.fixture
def start(serve: Serve) -> Callable[..., RunningServer]:
    """Serve an environment in worker processes, by default with one session in each."""

    def start(env_cls: type[Any] = Native, **options: Any) -> RunningServer:
        options = {"sessions_per_process": 1, "env_processes": 1, "max_concurrent_envs": 8, **options}
        return serve(create_app(env_cls, Go, Seen, runner="process", **options))

    return start


@pytest.fixture
def client() -> Iterator[Callable[..., Any]]:
    """Make blocking clients, which are closed when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda server, **options: stack.enter_context(GenericEnvClient(server.url, **options).sync())


def children_of(pid: int) -> dict[int, str]:
    """The living and dead children of a process, and the state of each."""
    listed = subprocess.run(["ps", "-o", "pid=,stat=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return {int(line.split()[0]): line.split()[1] for line in listed.splitlines()}


def test_a_copy_of_a_process_goes_on_with_everything_that_has_a_state(
    start: Callable[..., Any], client: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    server = start()
    client(server).reset()  # so that the next process is one too many, and ends with its session
    env = client(server)
    parent = env.reset(seed=3).observation
    go(env, 1, 2)
    forks = env.fork(3)
    first = [one.step({"by": 4}).observation for one in forks]
    assert len({parent["pid"], *(seen["pid"] for seen in first)}) == 4
    assert {seen["thread"] for seen in first} == {parent["thread"]}  # C libraries know their threads by that
    ways = [go(one, 5, 6) for one in forks]
    assert [(seen["at"], seen["luck"]) for seen in first] == go(env, 4) * 3
    assert ways == [go(env, 5, 6)] * 3
    (grandchild,) = forks[0].fork(1)
    assert go(grandchild, 7) == go(forks[0], 7) == go(env, 7)
    workers = server.manager.runner.workers
    assert [worker.original is not None for worker in workers] == [False, False, True, True, True, True]
    env.close()  # its process stays, to ask for the status of copies that end
    forks[0].close()
    eventually(lambda: server.manager.active == 4)
    eventually(lambda: len(children_of(parent["pid"])) == 3 and "Z" not in str(children_of(parent["pid"])))
    assert go(grandchild, 8) == go(forks[1], 7, 8)[1:]
    for one in (*forks, grandchild):
        one.close()
    eventually(lambda: not Path(f"/proc/{parent['pid']}").exists())


@pytest.mark.slow
def test_a_session_is_restored_from_a_copy_of_a_process(
    start: Callable[..., Any], client: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    server = start()
    env = client(server)
    old = env.reset(seed=3).observation["pid"]
    go(env, 1)
    snapshot = env.snapshot()
    ways = []
    for _ in range(3):
        env.restore(snapshot)
        ways.append(go(env, 2, 3))
    assert ways == [ways[0]] * 3
    # The session's, the snapshot's, and the ancestor of both, which is free for another session.
    eventually(lambda: len(server.manager.runner.workers) == 3)
    assert client(server).reset().observation["pid"] == old
    snapshot.close()


def test_what_copies_would_share_or_lose_is_refused_by_name(
    start: Callable[..., Any], client: Callable[..., Any]
) -> None:
    reasons = {
        "connect": "socket",
        "start_thread": "my-thread",
        "start_process": "sleep",
        "share_memory": "shared memory",
        "write_file": "open for writing",
        "make_folder": "temporary folder",
    }
    env = client(start())
    env.reset(seed=3)
    for what, why in reasons.items():
        env.step({"what": what})
        with pytest.raises(NotForkable, match=rf"{why}.*snapshot\(\) and restore\(\)"):
            env.fork(1)
        env.step({"what": "drop"})
    env.step({"what": "log"})  # lines of all copies go to one file: that is no state
    (child,) = env.fork(1)
    assert go(child, 2) == go(env, 2)
    child.close()


@pytest.mark.slow
@pytest.mark.parametrize("env_cls", [Walker, Bookkeeper])
def test_environments_that_share_a_process_are_copied_by_their_state(
    start: Callable[..., Any], client: Callable[..., Any], env_cls: type[Any]
) -> None:
    server = start(env_cls, sessions_per_process=None, env_processes=1)
    env, neighbour = client(server), client(server)
    assert env.reset(seed=3).observation["pid"] == neighbour.reset().observation["pid"]
    go(env, 1)
    forks = env.fork(2)
    assert [go(one, 5, 6) for one in forks] == [go(env, 5, 6)] * 2
    go(env, 9)
    env.restore(forks[0])
    assert go(env, 7) == go(forks[0], 7)
    for one in forks:
        one.close()


@pytest.mark.slow
def test_what_shares_a_process_and_cannot_be_pickled_says_what_to_do(
    start: Callable[..., Any], client: Callable[..., Any]
) -> None:
    server = start(Locked, sessions_per_process=None, env_processes=1)
    env, neighbour = client(server), client(server)
    env.reset(seed=3)
    neighbour.reset()
    with pytest.raises(NotForkable, match="--sessions-per-process 1"):
        env.fork(1)
    neighbour.close()
    server.wait_for(lambda: server.manager.active == 1)
    (child,) = env.fork(1)
    assert go(child, 2) == go(env, 2)
    child.close()


@pytest.mark.slow
def test_external_state_is_never_copied_with_the_process(start: Callable[..., Any], client: Callable[..., Any]) -> None:
    careless = client(start(Careless))
    careless.reset()
    with pytest.raises(NotForkable, match="HAS_EXTERNAL_STATE"):
        careless.fork(1)
    env = client(start(Librarian))
    env.reset(seed=3)
    (child,) = env.fork(1)
    assert go(child, 2) == go(env, 2)
    child.close()


def test_a_copy_that_dies_loses_its_own_session_alone(
    start: Callable[..., Any], client: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    server = start()
    env = client(server)
    parent = env.reset(seed=3).observation["pid"]
    one, other = env.fork(2)
    with pytest.raises(SessionLost) as caught:
        one.step({"what": "die"})
    assert caught.value.reason == "worker crashed"
    assert go(other, 1) == go(env, 1)
    eventually(lambda: server.manager.active == 2)
    eventually(lambda: len(children_of(parent)) == 1)
    one.close()
    other.close()


@pytest.mark.slow
def test_copies_live_on_when_their_original_is_killed(
    start: Callable[..., Any], client: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    server = start()
    env = client(server)
    parent = env.reset(seed=3).observation["pid"]
    one, other = env.fork(2)
    os.kill(parent, signal.SIGKILL)
    with pytest.raises(SessionLost):
        env.step({"by": 1})
    assert go(one, 1, 2) == go(other, 1, 2)
    assert len(one.fork(1)[0].fork(1)) == 1
    for client_ in (one, other):
        client_.close()
    eventually(lambda: server.manager.active == 0)


def test_a_worker_that_is_killed_while_it_forks_loses_its_session_and_leaves_nothing(
    start: Callable[..., Any], client: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    server = start()
    env = client(server)
    parent = env.reset(seed=3).observation["pid"]
    os.kill(parent, signal.SIGSTOP)  # it takes the request, and dies with it
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {parent}"])
    with pytest.raises(SessionLost):
        env.fork(3)
    killer.wait()
    eventually(lambda: server.manager.active == 0)
    assert env.reset(seed=3).observation["pid"] != parent
    eventually(lambda: server.manager.active == 1)


@pytest.mark.slow
def test_a_parent_that_is_closed_while_it_is_forked_leaves_nothing(
    start: Callable[..., Any], client: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    server = start()
    env = client(server)
    parent = env.reset(seed=3).observation["pid"]
    (session,) = server.manager.sessions()
    os.kill(parent, signal.SIGSTOP)

    def close_it() -> None:
        session.close("closed by a test")
        os.kill(parent, signal.SIGCONT)

    session.loop.call_soon_threadsafe(lambda: session.loop.call_later(0.3, close_it))
    try:
        forks = env.fork(3)
    except SessionLost:
        forks = []
    for one in forks:
        one.close()
    eventually(lambda: server.manager.active == 0)
    eventually(lambda: not Path(f"/proc/{parent}").exists() or not children_of(parent))


@pytest.mark.slow
def test_a_chain_of_copies_is_as_long_as_one_likes(start: Callable[..., Any], eventually: Callable[..., Any]) -> None:
    server = start()
    env = GenericEnvClient(server.url).sync()
    ancestor = env.reset(seed=3).observation["pid"]
    for step in range(120):  # each copy of a copy: neither the stack nor the descriptors may grow
        (child,) = env.fork(1)
        env.close()
        env = child
        assert go(env, 1)[0][0] == step + 1
    pid = env.step({"by": 0}).observation["pid"]
    assert len(os.listdir(f"/proc/{pid}/fd")) < 40
    eventually(lambda: set(children_of(ancestor)) == {pid})
    env.close()
    eventually(lambda: not children_of(ancestor))


@pytest.mark.slow
def test_all_copies_end_with_the_server(serve: Serve, eventually: Callable[..., Any]) -> None:
    server = serve(
        create_app(Native, Go, Seen, runner="process", sessions_per_process=1, env_processes=1, max_concurrent_envs=8)
    )
    env = GenericEnvClient(server.url).sync()
    env.reset(seed=3)
    forks = env.fork(3)
    pids = [one.step({}).observation["pid"] for one in (env, *forks)]
    began = time.monotonic()
    server.server.should_exit = True
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert time.monotonic() - began < 30
    for one in (env, *forks):
        with contextlib.suppress(Exception):
            one.close()
