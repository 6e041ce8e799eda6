"""Servers on a real Ray cluster: a server per node, spread sessions, a killed node, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv import GenericEnvClient, VectorEnv
from openenv.errors import AccessDenied, ProviderError, ProviderUnavailable, ServerDied, SessionLost, Unschedulable
from openenv.providers import RayCluster, RayProvider
from openenv.providers.inventory import take_inventory
from ray_nodes import RayNodes, processes_with, ray_nodes
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
TARGET = str(ROOT / "envs" / "gridworld_env")
VARIABLES = {"OPENENV_MAX_SESSIONS": "256"}


def test_without_ray_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ProviderUnavailable, match=r"pip install 'ray\[default\]>="):
        RayProvider(TARGET).start()


@pytest.mark.parametrize("arguments", [{}, {"target": "a", "command": ["b"]}, {"target": "a", "servers": 0}])
def test_options_that_are_not_possible_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Give either|at least 1"):
        RayProvider(**arguments)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Two nodes of two processors each; a test that kills one adds another."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "envs"))  # what runs on the nodes has their variables
        with ray_nodes(2) as running:
            yield running


@pytest.fixture
def cluster(nodes: RayNodes) -> RayCluster:
    return RayCluster(nodes.address, start_timeout_s=60)


def serving(token: str) -> list[int]:
    """Return the server processes that were started with a token."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"OPENENV_TOKEN={token}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hundred_and_fifty_six_sessions_over_two_nodes_survive_the_loss_of_one(
    nodes: RayNodes, cluster: RayCluster
) -> None:
    with RayProvider(TARGET, cluster=cluster, env_vars=VARIABLES) as provider:
        urls = provider.urls()
        assert len(set(urls)) == 2
        moves = [{"move": "right"}] * 256
        with VectorEnv(
            provider.urls, 256, token=provider.token, on_failure="mask", reconnect_s=2, retry_refused_s=0.2
        ) as env:
            env.reset(seed=0)
            first = env.step(moves)
            assert all(first.ok)
            states = provider._states(5)
            assert len({state.node_id for state in states.values()}) == 2
            victim = states[0].node_id
            nodes.kill(victim)
            result = env.step(moves)
            # Typed losses in the slots of the lost node; the others have gone on.
            assert Counter(map(bool, result.ok)) == {True: 128, False: 128}
            assert {type(error) for error in result.errors.values()} == {SessionLost}
            ended = {slot for slot in range(256) if first.dones[slot] or result.dones[slot]}  # and began again
            live = [slot for slot in range(256) if slot not in result.errors and slot not in ended]
            assert len(live) > 64
            assert {state["step_count"] for slot, state in enumerate(env.states()) if slot in live} == {2}
            # Its capacity comes back on the node that is left: a server of its own, with an address of its own.
            provider.wait_for_ready(60)
            [new_url] = set(provider.urls()) - set(urls)
            assert {state.node_id for state in provider._states(5).values()} == {states[1].node_id}
            lost = sorted(result.errors)
            assert len(lost) == 128
            assert all(env.reset(slots=lost).ok)
            again = env.step(moves)
            assert all(again.ok)
            counts = [state["step_count"] for state in env.states()]
            assert {counts[slot] for slot in live} == {3}
            assert {counts[slot] for slot in lost} == {1}
            where = Counter(slot.shared.address.url for slot in env._pool.slots)
            assert sorted(where.values()) == [128, 128]
            assert any(new_url.rpartition(":")[2] in url for url in where)
        items = [item for item in take_inventory(("process",)).items if "gridworld_env" in item.what]
        assert len(items) == 2
        assert not any(item.is_leftover for item in items)
    nodes.add()
    assert serving(provider.token) == []
    wait_until(lambda: processes_with("ray::ServerActor") == [])
    assert provider.urls() == []
    provider.stop()


@pytest.mark.slow
def test_a_server_that_ends_is_started_again_and_clients_need_the_token(cluster: RayCluster) -> None:
    with RayProvider(TARGET, cluster=cluster, servers=1, env_vars=VARIABLES) as provider:
        [url] = provider.urls()
        with GenericEnvClient(url, token=provider.token).sync() as env:
            assert not env.reset().done
        with pytest.raises(AccessDenied), GenericEnvClient(url, token="wrong").sync() as env:
            env.reset()
        assert "Uvicorn running" in provider.log()
        for pid in serving(provider.token):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: provider.urls() not in ([], [url]))
        provider.wait_for_ready(60)
        with pytest.raises(ProviderError, match="already running"):
            provider.start()


@pytest.mark.slow
def test_a_server_that_does_not_start_is_a_typed_error_and_leaves_nothing(cluster: RayCluster) -> None:
    broken = RayProvider(command=[sys.executable, "-c", "raise SystemExit('no such maze')"], cluster=cluster)
    with pytest.raises(ServerDied, match="no such maze"):
        broken.start()
    assert broken.urls() == []
    picky = RayProvider(TARGET, cluster=RayCluster(cluster.address, resources={"maze": 1}))
    with pytest.raises(Unschedulable, match="'maze': 1"):
        picky.start()
    crowd = RayProvider(TARGET, cluster=RayCluster(cluster.address, cpus=2, start_timeout_s=1), servers=3)
    crowd.ready_timeout_s = 14
    with pytest.raises(Unschedulable, match="1 of 3 servers have found no place"):
        crowd.start()
    with pytest.raises(ValueError, match="Unsupported kwargs for RayProvider: replicas"):
        crowd.start(replicas=2)
    wait_until(lambda: processes_with("ray::ServerActor") == [])


PROGRAM = """
import signal, sys
from openenv.providers import RayProvider
with RayProvider(sys.argv[1], cluster=sys.argv[2], token=sys.argv[3]) as provider:
    print(*provider.urls(), flush=True)
    signal.pause()
"""


@pytest.mark.slow
def test_servers_end_with_a_program_that_is_killed(nodes: RayNodes) -> None:
    token = f"of-{os.getpid()}"
    arguments = [sys.executable, "-c", PROGRAM, TARGET, nodes.address, token]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "envs")}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environ) as program:
        assert program.stdout is not None
        assert len(program.stdout.readline().split()) == 2
        assert serving(token)
        program.kill()
    wait_until(lambda: serving(token) == [])


@pytest.mark.slow
def test_the_snippet_prints_what_it_should(nodes: RayNodes) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs_src" / "use_ray_servers.py")],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "RAY_ADDRESS": nodes.address},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 16\n"
