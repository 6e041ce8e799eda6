"""`VectorEnv` in processes of this machine: the same results and failures as on a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from local_environments import (
    DIE,
    END,
    FAIL,
    FINE,
    HANG,
    INFORM,
    NAN,
    Broken,
    Coroutines,
    FaultyEnvironment,
    NestedEnvironment,
    Private,
    Scribe,
)
from openenv import AsyncVectorEnv, VectorEnv
from openenv.client.env_client import GenericEnvClient
from openenv.errors import (
    ClientModeError,
    ConcurrencyConfigurationError,
    EnvironmentFactoryError,
    ExecutionError,
    NonFiniteReward,
    NotForkable,
    RequestTimeout,
    RequestValidationError,
    SessionLost,
    SlotsFailed,
)
from openenv.server.runners import allowed_cores
from openenv.server.vectors import memory, pool
from waiting import holds_for, wait_until


def vector(env: Any = FaultyEnvironment, n: int = 4, workers: Any = 2, **options: Any) -> VectorEnv[Any, Any]:
    return VectorEnv(env, n, workers=workers, **options)


@pytest.fixture(scope="module")
def shared() -> Iterator[VectorEnv[Any, Any]]:
    """Four environments in two processes, for tests that leave them as they are: starting costs a second of a core."""
    with vector() as envs:
        yield envs


@pytest.fixture(scope="module")
def scribes() -> Iterator[VectorEnv[Any, Any]]:
    """The same with observations that are no arrays."""
    with vector(Scribe) as envs:
        yield envs


def acts(*actions: int) -> dict[str, Any]:
    return {"action": np.array(actions)}


def processes(envs: VectorEnv[Any, Any]) -> list[int]:
    return [worker.process.pid for worker in envs._pool.workers]  # type: ignore[attr-defined]


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# -- steps ------------------------------------------------------------------------------------------------------------


def test_arrays_of_actions_give_arrays_of_results(shared: VectorEnv[Any, Any]) -> None:
    began = shared.reset(seed=3)
    assert began.rewards.tolist() == [0, 0, 0, 0]
    result = shared.step(acts(FINE, END, FINE, INFORM))
    assert result.rewards.tolist() == [1, 1, 1, 1]
    assert result.terminated.tolist() == [False, True, False, False]
    assert result.columns is not None
    assert result.columns.observations[0].tolist() == [[1.0] * 3] * 4
    assert result.observations[2]["observation"].tolist() == [1.0] * 3
    assert result.infos == [{}, {}, {}, {"steps": 1}]


def test_a_worker_whose_slots_all_begin_an_episode_ends_none_of_them() -> None:
    with vector() as envs:
        envs.reset()
        envs.step(acts(FINE, FINE, END, END))
        began = envs.step(acts(FINE, FINE, FINE, FINE))
        assert began.terminated.tolist() == [False] * 4
        assert envs.step(acts(FINE, FINE, FINE, FINE)).rewards.tolist() == [1.0] * 4


def test_single_actions_may_be_given_instead_of_arrays(shared: VectorEnv[Any, Any]) -> None:
    shared.reset()
    result = shared.step([{"action": FINE}] * 4)
    assert result.columns is not None
    some = shared.step({1: {"action": FINE}, 3: {"action": INFORM}})
    assert some.slots == [1, 3]
    assert [fields["observation"][0] for fields in some.observations] == [2.0, 2.0]
    assert some.infos[1] == {"steps": 2}


def test_values_of_any_kind_reach_the_caller_as_from_a_server(scribes: VectorEnv[Any, Any]) -> None:
    (first, *_) = scribes.reset(seed=5).observations
    assert first["text"] == "seed 5"
    assert first["data"] == b"\x00\xff"
    assert first["numbers"] == {"a": [1, 2]}
    result = scribes.step([{"do": "a"}, {"do": "b"}, {"do": "end"}, {"do": "d"}])
    assert [fields["text"] for fields in result.observations] == ["a 1", "b 1", "end 1", "d 1"]
    assert result.dones.tolist() == [False, False, True, False]
    assert scribes.step([{"do": "x"}] * 4).observations[2]["text"] == "seed None"
    assert len({fields["pid"] for fields in scribes.reset().observations}) == 2


def test_a_client_class_gets_json_types() -> None:
    with vector(Scribe, client=GenericEnvClient) as envs:
        assert isinstance(envs.reset().observations[0]["data"], str)


def test_coroutines_run_on_a_loop() -> None:
    with vector(Coroutines, on_failure="mask") as envs:
        assert [fields["text"] for fields in envs.reset().observations] == ["began"] * 4
        result = envs.step([{"do": "a"}, {"do": "fail"}, {"do": "c"}, {"do": "d"}])
        assert result.ok.tolist() == [True, False, True, True]
        assert isinstance(result.errors[1], ExecutionError)


def test_a_function_makes_environments_if_workers_are_given() -> None:
    with VectorEnv(partial(Scribe), 2, workers=1) as envs:
        assert envs.reset(seed=1).observations[1]["text"] == "seed 2"


def test_values_of_several_parts_have_an_array_each() -> None:
    actions = {"action": {"go": np.array([-1, 1]), "how": np.array([[0.5, 0], [0, 1]], np.float32)}}
    with vector(NestedEnvironment, 2) as envs:
        envs.reset()
        result = envs.step(actions)
        assert result.columns is not None
        assert result.rewards.tolist() == [-1, 1]
        (go, how), bits = result.observations[1]["observation"]["pair"], result.observations[1]["observation"]["bits"]
        assert (int(go), how.tolist(), bits.tolist()) == (1, [0.0, 1.0], [0, 0, 0, 1])


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_a_finished_episode_is_followed_as_the_mode_says(autoreset: Any) -> None:
    with vector(autoreset=autoreset) as envs:
        envs.reset(options={"word": 1})
        ended = envs.step(acts(FINE, END, FINE, FINE))
        following = envs.step(acts(FINE, FINE, FINE, FINE))
    assert ended.terminated.tolist() == [False, True, False, False]
    assert ended.rewards.tolist() == [1, 1, 1, 1]
    seen = following.columns.observations[0][:, 0].tolist()  # type: ignore[union-attr]
    if autoreset == "same_step":
        assert ended.finals[1].observation["observation"].tolist() == [1.0] * 3  # type: ignore[union-attr]
        assert ended.infos[1] == {"options": {"word": 1}}
        assert ended.columns.observations[0][1].tolist() == [0.0] * 3  # type: ignore[union-attr]
        assert seen == [2, 1, 2, 2]
    elif autoreset == "next_step":
        assert ended.columns.observations[0][1].tolist() == [1.0] * 3  # type: ignore[union-attr]
        assert seen == [2, 0, 2, 2]
        assert following.rewards.tolist() == [1, 0, 1, 1]
        assert following.infos[1] == {"options": {"word": 1}}
    else:
        assert seen == [2, 2, 2, 2]


def test_the_first_slots_that_are_ready_come_first() -> None:
    with vector(Scribe, workers=4) as envs:
        envs.reset()
        envs.step_async([{"do": "nap"}, {"do": "b"}, {"do": "c"}, {"do": "d"}], each=True)
        ready = envs.step_wait(k=3)
        assert ready.slots == [1, 2, 3]
        envs.step_async({1: {"do": "again"}})
        assert envs.step_wait(k=1).slots == [1]
        assert envs.step_wait().slots == [0]


def test_results_of_a_step_in_columns_can_be_taken_in_parts() -> None:
    with vector(workers=4) as columns:
        columns.reset()
        columns.step_async(acts(FINE, FINE, FINE, FINE))
        taken: list[int] = []
        while len(taken) < 4:
            taken += columns.step_wait(k=1).slots
        assert sorted(taken) == [0, 1, 2, 3]
        assert columns.step(acts(FINE, FINE, FINE, FINE)).rewards.tolist() == [1, 1, 1, 1]


def test_states_come_from_the_environments(shared: VectorEnv[Any, Any]) -> None:
    shared.reset()
    shared.step(acts(FINE, FINE, FINE, FINE))
    assert [state["step_count"] for state in shared.states()] == [1, 1, 1, 1]


@pytest.mark.anyio
async def test_an_async_vector_takes_environments_too() -> None:
    async with AsyncVectorEnv(FaultyEnvironment, 2, workers=1) as envs:
        await envs.reset()
        assert (await envs.step(acts(FINE, FINE))).rewards.tolist() == [1, 1]


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_killed_worker_is_an_error_in_its_slots_and_no_fresh_episode() -> None:
    with vector(on_failure="mask") as envs:
        envs.reset()
        result = envs.step(acts(FINE, DIE, FINE, FINE))
        assert result.ok.tolist() == [False, False, True, True]
        assert all(isinstance(result.errors[slot], SessionLost) for slot in (0, 1))
        assert "SIGKILL" in str(result.errors[0])
        assert np.isnan(result.rewards[:2]).all()
        later = envs.step(acts(FINE, FINE, FINE, FINE))
        assert later.ok.tolist() == [False, False, True, True]
        again = envs.reset(slots=[0, 1])
        assert again.ok.all()
        last = envs.step(acts(FINE, FINE, FINE, FINE))
        assert last.columns.observations[0][:, 0].tolist() == [1, 1, 3, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize("env", [FaultyEnvironment, Scribe])
def test_a_worker_killed_between_steps_is_an_error_in_its_slots(env: Any) -> None:
    action = {"action": FINE} if env is FaultyEnvironment else {"do": "x"}
    with vector(env, on_failure="restart") as envs:
        envs.reset()
        os.kill(processes(envs)[0], signal.SIGKILL)
        result = envs.step([action] * 4)
        assert [isinstance(result.errors.get(slot), SessionLost) for slot in range(4)] == [True, True, False, False]
        assert [one.restarted for one in result.by_slot] == [True, True, False, False]
        assert envs.step([action] * 4).ok.all()


def test_an_exception_in_a_step_is_an_error_in_its_slot(shared: VectorEnv[Any, Any]) -> None:
    shared.reset()
    with pytest.raises(SlotsFailed) as caught:
        shared.step(acts(FINE, FAIL, FINE, NAN))
    errors = caught.value.errors
    assert list(errors) == [1, 3]
    assert isinstance(errors[1], ExecutionError)
    assert "as told" in str(errors[1])
    assert errors[1].details["exception"] == "RuntimeError"
    assert isinstance(errors[3], NonFiniteReward)
    assert caught.value.result.rewards[[0, 2]].tolist() == [1, 1]


def test_a_refused_action_changes_nothing(shared: VectorEnv[Any, Any]) -> None:
    shared.reset()
    with pytest.raises(SlotsFailed) as caught:
        shared.step(acts(FINE, 7, FINE, -1))
    assert {type(error) for error in caught.value.errors.values()} == {RequestValidationError}
    assert list(caught.value.errors) == [1, 3]
    assert shared.step(acts(FINE, FINE, FINE, FINE)).columns.observations[0][:, 0].tolist() == [2, 1, 2, 1]  # type: ignore[union-attr]
    with pytest.raises(SlotsFailed) as caught:
        shared.step([{"action": FINE}, {"other": 1}, {"action": "x"}, {"action": FINE}])
    assert list(caught.value.errors) == [1, 2]
    with pytest.raises(ValueError, match="one for each of the 4 slots"):
        shared.step({"action": np.array([0, 0])})


def test_a_hanging_step_respects_the_timeout_and_the_others_answer() -> None:
    with vector() as envs:
        envs.reset()
        envs.step_async(acts(FINE, FINE, FINE, HANG))
        with pytest.raises(RequestTimeout):
            envs.step_wait(0.3)
        with pytest.raises(ClientModeError):
            envs.step_async(acts(FINE, FINE, FINE, FINE))
        assert envs.step_wait(k=2).slots == [0, 1]
        os.kill(processes(envs)[1], signal.SIGKILL)
        with pytest.raises(SlotsFailed) as caught:
            envs.step_wait(20)
        assert {type(error) for error in caught.value.errors.values()} == {SessionLost}
        assert envs.reset().ok.all()


def test_a_reset_that_fails_is_an_error_in_its_slot() -> None:
    with vector(autoreset="same_step", on_failure="mask") as envs:
        assert envs.reset(options={"fail": True}, slots=[1]).errors.keys() == {1}
        envs.reset(slots=[0, 2, 3])
        with pytest.raises(SlotsFailed):
            VectorEnv(FaultyEnvironment, 1, workers=1).reset(options={"fail": True})


def test_a_constructor_that_fails_says_why() -> None:
    with pytest.raises(EnvironmentFactoryError) as caught:
        vector(Broken).connect()
    assert caught.value.reason is not None
    assert "no disk" in caught.value.reason


def test_environments_that_may_share_state_get_a_process_each() -> None:
    with vector(Private, 3, workers="auto") as envs:
        assert len({fields["pid"] for fields in envs.reset().observations}) == 3
    with pytest.raises(ConcurrencyConfigurationError):
        vector(Private, 3, workers=2)


@pytest.mark.parametrize(
    ("cores", "n", "workers"),
    [(16, 1, 1), (16, 4, 3), (16, 8, 4), (16, 32, 8), (16, 128, 14), (16, 4096, 14), (2, 8, 1), (2, 32, 2)],
)
def test_short_steps_get_fewer_processes_than_cores(
    cores: int, n: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Quick(FaultyEnvironment):
        RUNS_INLINE = True

    monkeypatch.setattr(pool, "allowed_cores", lambda: cores)
    monkeypatch.setattr(pool, "can_watch", lambda: True)
    for cls, expected in ((Quick, workers), (FaultyEnvironment, min(n, cores))):
        places = pool._places(cls, cls, n, "auto")
        assert len(places) == expected
        assert [slot for some in places for slot in some] == list(range(n))
    assert len(pool._places(Quick, Quick, n, n)) == n


@pytest.mark.parametrize(("limit", "expected"), [("max 100000", 8), ("250000 100000", 2), ("10000 100000", 1)])
def test_a_containers_quota_limits_the_cores(
    limit: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    groups, own = tmp_path / "groups", tmp_path / "root" / "a" / "b"
    groups.write_text("0::/a/b\n")
    own.mkdir(parents=True)
    (own / "cpu.max").write_text("max 100000\n")
    (own.parent / "cpu.max").write_text(f"{limit}\n")
    assert allowed_cores(groups, tmp_path / "root") == expected
    assert allowed_cores(tmp_path / "missing", tmp_path / "root") == 8


def test_options_of_servers_are_refused() -> None:
    with pytest.raises(ValueError, match="token: only for servers"):
        vector(token="secret")
    with pytest.raises(ValueError, match="workers"):
        VectorEnv("http://localhost:1", 2, workers=2)
    with pytest.raises(ValueError, match="unknown kind of environment 'nothing'"):
        VectorEnv("nothing:Here", 2)


def test_local_environments_cannot_be_forked(shared: VectorEnv[Any, Any]) -> None:
    shared.reset()
    with pytest.raises(NotForkable):
        shared.fork(0, 2)


# -- watching instead of sleeping --------------------------------------------------------------------------------------


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes look at shared memory before they sleep, as if this machine had a core for each of them."""
    if not memory.can_watch():
        pytest.skip("processes of this platform do not watch")
    monkeypatch.setattr(pool, "allowed_cores", lambda: 64)


def ticks(pids: list[int]) -> list[str]:
    """Return the processor time of processes."""
    return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]  # type: ignore[misc]


@pytest.mark.usefixtures("watching")
def test_watched_vectors_have_the_same_results_and_failures() -> None:
    with vector(on_failure="mask", workers=3) as envs:
        envs.reset()
        for count in range(1, 20):
            result = envs.step(acts(FINE, FINE, FINE, INFORM))
            assert result.columns is not None
            assert result.columns.observations[0][:, 0].tolist() == [count] * 4
            assert result.infos[3] == {"steps": count}
        refused = envs.step(acts(FINE, 7, FINE, FAIL))
        assert [type(refused.errors.get(slot)) for slot in (1, 3)] == [RequestValidationError, ExecutionError]
        killed = envs.step(acts(DIE, FINE, FINE, FINE))
        assert {slot: type(error) for slot, error in killed.errors.items() if slot < 2} == dict.fromkeys(
            (0, 1), SessionLost
        )
        envs.reset(slots=[0, 1, 3])
        last = envs.step(acts(FINE, FINE, FINE, FINE))
        assert last.columns.observations[0][:, 0].tolist() == [1, 1, 22, 1]  # type: ignore[union-attr]


@pytest.mark.usefixtures("watching")
def test_idle_vectors_sleep() -> None:
    with vector() as envs:
        envs.reset()
        for _ in range(20):
            envs.step(acts(FINE, FINE, FINE, FINE))
        words, pids = envs._pool._words, processes(envs)  # type: ignore[attr-defined]
        wait_until(lambda: all(words.words[places.sleeps] for places in words.places))
        before = ticks(pids)
        holds_for(0.5, lambda: ticks(pids) == before)


@pytest.mark.usefixtures("watching")
def test_a_stopped_worker_is_waited_for_without_looking_at_it_all_the_time() -> None:
    with vector() as envs:
        envs.reset()
        for _ in range(20):
            envs.step(acts(FINE, FINE, FINE, FINE))
        stopped = processes(envs)[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            envs.step_async(acts(FINE, FINE, FINE, FINE))
            used = time.process_time()
            with pytest.raises(RequestTimeout):
                envs.step_wait(0.5)
            assert time.process_time() - used < 0.25
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert envs.step_wait(20).rewards.tolist() == [1] * 4


@pytest.mark.usefixtures("watching")
def test_a_message_that_was_lost_on_the_way_to_a_sleeper_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with vector(n=1, workers=1) as envs:
        envs.reset()
        words = envs._pool._words  # type: ignore[attr-defined]
        wait_until(lambda: words.words[words.places[0].sleeps])
        with monkeypatch.context() as patched:  # as if the program was interrupted before it could send
            patched.setattr(envs._pool, "_send", lambda worker, data: None)
            envs.step_async(acts(FINE))
        assert envs.step_wait(20).rewards.tolist() == [1]


def test_a_step_whose_episodes_begin_and_fail_says_so() -> None:
    with vector(on_failure="mask") as envs:
        envs.reset(options={"word": 1})
        envs.step(acts(END, FINE, END, FINE))
        began = envs.step(acts(FINE, FINE, 7, FINE))  # the actions of beginnings are ignored
        assert [one.started for one in began.by_slot] == [True, False, True, False]
        assert [one.reward for one in began.by_slot] == [0, 1, 0, 1]
        assert began.results[0] is not None
        assert began.results[0].reward is None
        envs._pool.use_for_resets({"options": {"fail": True}})
        envs._pool.flush()
        envs.step(acts(FINE, END, FINE, FINE))
        failed = envs.step(acts(FINE, FINE, FINE, FINE))
        assert failed.errors.keys() == {1}
        assert "no beginning" in str(failed.errors[1])
        assert envs.step(acts(FINE, FINE, FINE, FINE)).errors.keys() == {1}


# -- ending -----------------------------------------------------------------------------------------------------------


def test_close_ends_the_workers_even_if_a_step_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenv.server.vectors.pool._CLOSE_S", 0.5)
    envs = vector()
    envs.reset()
    pids = processes(envs)
    envs.step_async(acts(FINE, FINE, FINE, HANG))
    envs.close()
    assert not any(map(is_running, pids))
    with pytest.raises(ClientModeError):
        envs.reset()


@pytest.mark.parametrize("state", ["idle", "hanging", "watching"])
def test_workers_end_with_a_killed_program_and_leave_no_memory(tmp_path: Path, state: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import os, signal, sys
            sys.path.insert(0, {str(Path(__file__).parents[2] / "support")!r})
            import numpy as np
            from local_environments import FaultyEnvironment
            from openenv import VectorEnv
            from openenv.server.vectors import pool

            if {state!r} == "watching":
                pool.allowed_cores = lambda: 64
            envs = VectorEnv(FaultyEnvironment, 2, workers=2)
            envs.reset()
            if {state!r} == "hanging":
                envs.step_async({{"action": np.array([3, 3])}})
            if os.fork() == 0:  # a child that keeps copies of all sockets
                signal.pause()
            print(*[worker.process.pid for worker in envs._pool.workers], flush=True)
            while {state!r} == "watching":
                envs.step({{"action": np.array([0, 0])}})
            signal.pause()
            """
        )
    )
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        try:
            assert len(pids) == 2
            assert all(map(is_running, pids))
            os.kill(run.pid, signal.SIGKILL)
            wait_until(lambda: not any(map(is_running, pids)), 30, "workers have outlived their program")
        finally:
            os.killpg(run.pid, signal.SIGKILL)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "openenv" in name}
