"""Vectors of Gymnasium environments equal `SyncVectorEnv` step by step: in shared memory, over sockets, with workers.

The random episodes of all environments are 1,000 for each way; a few of them are quick. A worker that is killed loses
the episodes of its slots, and no other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from openenv.adapters.gymnasium import GymnasiumVectorEnv
from openenv.errors import SessionLost, SlotsFailed
from openenv.server.vectors import pool
from waiting import wait_until
from worker_servers import WorkersServer

EPISODES = {"CartPole-v1": 300, "Blackjack-v1": 300, "FrozenLake-v1": 300, "Pendulum-v1": 50, "Taxi-v4": 50}
WAYS = ("memory", "watched memory", "socket", "workers")
SLOTS = 10


class Vectors:
    """Makes vectors of one kind; knows the processes behind the last one."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._servers: list[WorkersServer] = []
        self._envs: list[GymnasiumVectorEnv] = []

    def make(self, env_id: str, n: int = SLOTS, **options: Any) -> GymnasiumVectorEnv:
        """Make a vector."""
        target = f"gymnasium:{env_id}"
        if "memory" in self._way:
            envs = GymnasiumVectorEnv(target, n, workers=2, **options)
        else:
            count = 2 if self._way == "workers" else 1
            server = WorkersServer("--workers", str(count), "--max-sessions", "32", target=target)
            self._servers.append(server)
            server.wait_for(lambda: server.ready)
            envs = GymnasiumVectorEnv(server.url, n, reconnect_s=1.0, **options)
        self._envs.append(envs)
        return envs

    def processes(self) -> list[int]:
        """Return the processes that run the environments of the last vector."""
        if "memory" in self._way:
            return [worker.process.pid for worker in self._envs[-1]._env._pool.workers]  # type: ignore[attr-defined]
        supervisor = self._servers[-1].process.pid
        if self._way == "socket":
            return [supervisor]
        children = [
            int(pid) for file in Path(f"/proc/{supervisor}/task").glob("*/children") for pid in file.read_text().split()
        ]
        return [pid for pid in children if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes()] or children

    def close(self) -> None:
        """End everything."""
        for envs in self._envs:
            envs.close()
        for server in self._servers:
            server.end()


@pytest.fixture(params=WAYS)
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vectors]:
    if request.param == "watched memory":  # as on a machine with a core for each process
        monkeypatch.setattr(pool, "allowed_cores", lambda: 64)
    made = Vectors(request.param)
    yield made
    made.close()


def plain(env_id: str, n: int = SLOTS) -> Any:
    return gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(env_id)] * n)


def assert_equal(ours: Any, theirs: Any) -> None:
    """Compare observations or infos of any form."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_equal(ours[key], theirs[key])
    elif isinstance(theirs, tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    else:
        np.testing.assert_array_equal(ours, theirs)


def compare(ours: Any, theirs: Any, *, episodes: int, seed: int) -> None:
    """Step both vectors until that many episodes have ended, and compare every result."""
    theirs.action_space.seed(seed)
    assert_equal(ours.reset(seed=seed), theirs.reset(seed=seed))
    ended = 0
    while ended < episodes:
        actions = theirs.action_space.sample()
        one, other = ours.step(actions), theirs.step(actions)
        assert_equal(one, other)
        ended += int((other[2] | other[3]).sum())


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Blackjack-v1"])
def test_some_episodes_are_those_of_a_plain_vector(env_id: str) -> None:
    vectors = Vectors("memory")
    try:
        compare(vectors.make(env_id), plain(env_id), episodes=20, seed=3)
    finally:
        vectors.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("env_id", EPISODES)
def test_episodes_are_those_of_a_plain_vector(vectors: Vectors, env_id: str) -> None:
    assert sum(EPISODES.values()) == 1000
    compare(vectors.make(env_id), plain(env_id), episodes=EPISODES[env_id], seed=11)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_worker_loses_the_episodes_of_its_slots_only(vectors: Vectors) -> None:
    ours, theirs = vectors.make("CartPole-v1"), plain("CartPole-v1")
    ours.reset(seed=5)
    theirs.reset(seed=5)
    actions = np.zeros(SLOTS, np.int64)
    assert_equal(ours.step(actions), theirs.step(actions))
    processes = vectors.processes()
    os.kill(processes[-1], signal.SIGKILL)
    expected = theirs.step(actions)
    with pytest.raises(SlotsFailed) as caught:
        ours.step(actions)
    errors, result = caught.value.errors, caught.value.result
    assert {type(error) for error in errors.values()} == {SessionLost}
    assert len(errors) == SLOTS // len(processes)
    for slot in set(range(SLOTS)) - errors.keys():
        np.testing.assert_array_equal(result.by_slot[slot].result.observation["observation"], expected[0][slot])
        assert result.rewards[slot] == expected[1][slot]
    if len(processes) > 1:  # another process takes its place
        wait_until(lambda: _begins(ours), 60)
        compare(ours, plain("CartPole-v1"), episodes=20, seed=6)


def _begins(envs: GymnasiumVectorEnv) -> bool:
    try:
        envs.reset(seed=1)
    except SlotsFailed:
        return False
    return True
