"""Rollouts on a real Ray cluster: two nodes on this machine, killed, cancelled and broken."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from failing_sandboxes import VARIABLE, opened
from openenv.errors import RolloutError, SandboxUnavailable
from openenv.rollout import (
    Cancellation,
    EngineOptions,
    Model,
    Outcome,
    Progress,
    RayCluster,
    RolloutStore,
    Sampling,
    Task,
    run_many,
)
from openenv.rollout.agents import Shell
from openenv.rollout.agents.shell_chat import ShellChat
from openenv.rollout.capture.records import FILE
from openenv.rollout.run.ray_engine import RayEngine
from openenv.rollout.store.exports import recording
from openenv.sandboxes.base import Sandboxes
from openenv.testing import Script, ScriptedModel, Turn
from openenv.train import SampleGroup, engine_of, rollouts, updating_weights
from ray_nodes import RayNodes, processes_with, ray_nodes
from vllm_double import SglangDouble, check_tokens
from waiting import holds_for_async, wait_until, wait_until_async

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SUPPORT = str(Path(__file__).parents[1] / "support")
ASK = """python3 -c "
import json, os, urllib.request
body = {'model': 'm', 'messages': [{'role': 'user', 'content': 'hello'}]}
request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps(body).encode())
request.add_header('Authorization', 'Bearer ' + os.environ['OPENAI_API_KEY'])
request.add_header('Content-Type', 'application/json')
answer = json.load(urllib.request.urlopen(request))
open('answer.txt', 'w').write(answer['choices'][0]['message']['content'])
"
"""


@pytest.fixture(scope="module")
def nodes(local: Sandboxes) -> Iterator[RayNodes]:
    """Two nodes of two processors each; a test that kills one adds another."""
    with ray_nodes(2) as running:
        yield running


@pytest.fixture
def cluster(nodes: RayNodes) -> RayCluster:
    return RayCluster(nodes.address)


def numbered(number: int, *, seconds: float = 0.0) -> Task:
    return Task(
        instruction=f"The task is number {number}",
        files={"task.txt": f"number {number}\n"},
        verify=(f"grep -qx 'the answer is {number}' answer.txt",),
        solution=(f"sleep {seconds}", f"echo the answer is {number} > answer.txt"),
        task_id=f"task-{number}",
        agent_timeout_s=90,
    )


def where(outcome: Outcome) -> dict[str, Any]:
    notes: dict[str, Any] = outcome.metadata["ray"]
    return notes


def test_sixty_four_rollouts_over_two_nodes_survive_the_loss_of_one(
    nodes: RayNodes, cluster: RayCluster, tmp_path: Path
) -> None:
    victim = nodes.nodes[0].node_id
    events: list[Progress] = []
    used: set[str] = set()

    def on_outcome(number: int, outcome: Outcome) -> None:
        used.add(where(outcome)["node_id"])
        if len(used) == 2 and victim in {node.node_id for node in nodes.nodes}:
            nodes.kill(victim)

    tasks = [numbered(n, seconds=1) for n in range(64)]
    with RolloutStore(tmp_path / "store") as store:
        outcomes = run_many(
            tasks,
            agent="oracle",
            store=store,
            on=cluster,
            concurrency=8,
            on_progress=events.append,
            on_outcome=on_outcome,
        )
        nodes.add()
        assert [outcome.task_id for outcome in outcomes] == [task.task_id for task in tasks]
        assert [(outcome.status, outcome.reward) for outcome in outcomes] == [("ok", 1.0)] * 64
        assert victim in used
        assert len(used) == 2
        # What ran on the lost node was run again elsewhere, and says so.
        again = [outcome for outcome in outcomes if "failed_attempts" in where(outcome)]
        assert 1 <= len(again) <= 4
        assert all("was lost" in where(outcome)["failed_attempts"][0] for outcome in again)
        assert victim not in {where(outcome)["node_id"] for outcome in again}
        # One store, written here: each rollout once, with its files.
        rows = store.find(latest=False)
        assert Counter(row.task_id for row in rows) == Counter(task.task_id for task in tasks)
        assert store.interrupted() == []
        for outcome in outcomes:
            assert outcome.files["/home/user/workdir/answer.txt"] == f"the answer is {outcome.task_id[5:]}\n"
            assert store.file(outcome.rollout_id, "worktree.tar") is not None
            assert store.file(outcome.rollout_id, "baseline.tar") is not None
    assert Counter(event.rollout_id for event in events if event.phase == "done") == Counter(
        outcome.rollout_id for outcome in outcomes
    )


def test_progress_and_outcomes_are_those_of_run_many_without_ray(cluster: RayCluster, tmp_path: Path) -> None:
    def run(folder: str, on: RayCluster | None) -> tuple[list[Outcome], list[tuple[str, str]], dict[str, Any]]:
        events: list[Progress] = []
        with RolloutStore(tmp_path / folder) as store:
            outcomes = run_many([numbered(7)], agent="oracle", store=store, on=on, on_progress=events.append)
            [record] = store.records()
            names = sorted(path.name for path in (store.root / "rollouts" / record.rollout_id).iterdir())
        stored = record.outcome.model_dump(exclude={"rollout_id", "started_at", "wall_s", "phase_s", "sandbox_id"})
        return outcomes, [(event.phase, event.message) for event in events], {**stored, "names": names}

    [here], events_here, stored_here = run("here", None)
    [there], events_there, stored_there = run("there", cluster)
    assert events_there == events_here
    assert events_here[-1] == ("done", "ok, reward 1.0")
    for stored in (stored_here, stored_there):
        notes = stored.pop("metadata")
        assert isinstance(notes["verify_sandbox_id"], str)
        for result in stored["verify_results"]:
            result.pop("duration_s")
    assert stored_there == stored_here
    assert there.phase_s.keys() == here.phase_s.keys()


def test_no_more_run_than_the_concurrency_and_a_generator_is_not_read_ahead(cluster: RayCluster) -> None:
    lock, taken, ended, most = threading.Lock(), 0, 0, 0

    def tasks() -> Iterator[Task]:
        nonlocal taken, most
        for number in range(12):
            with lock:
                taken += 1
                most = max(most, taken - ended)
            yield numbered(number, seconds=0.2)

    def on_outcome(number: int, outcome: Outcome) -> None:
        nonlocal ended
        with lock:
            ended += 1

    outcomes = run_many(tasks(), agent="oracle", on=cluster, concurrency=3, on_outcome=on_outcome)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 12
    assert most == 3


@pytest.fixture
def counting(cluster: RayCluster, tmp_path: Path) -> Callable[[], dict[str, int]]:
    """How often a sandbox was opened for each rollout; `counted` is the cluster whose workers count."""
    (tmp_path / "opened").mkdir()
    return lambda: opened(tmp_path / "opened")


@pytest.fixture
def counted(cluster: RayCluster, counting: Callable[[], dict[str, int]], tmp_path: Path) -> RayCluster:
    variables = {"PYTHONPATH": SUPPORT, VARIABLE: str(tmp_path / "opened")}
    return RayCluster(cluster.address, runtime_env={"env_vars": variables})


def test_only_a_failed_sandbox_is_tried_again_and_on_another_node(
    counted: RayCluster, counting: Callable[[], dict[str, int]], tmp_path: Path
) -> None:
    messages: list[str] = []
    with RolloutStore(tmp_path / "store") as store:
        outcomes = run_many(
            [numbered(n) for n in range(4)],
            agent="oracle",
            sandbox="failing_sandboxes:FailingOnce",
            on=counted,
            store=store,
            on_progress=lambda event: messages.append(event.message),
        )
        assert [(outcome.status, outcome.reward) for outcome in outcomes] == [("ok", 1.0)] * 4
        assert len(store.find(latest=False)) == 4
    assert set(counting().values()) == {2}
    assert all(len(where(outcome)["failed_attempts"]) == 1 for outcome in outcomes)
    assert "attempt 1 of 3 failed: no sandbox at attempt 1; running it again" in messages


def test_a_sandbox_that_always_fails_is_given_up_and_nothing_else_is_repeated(
    counted: RayCluster, counting: Callable[[], dict[str, int]]
) -> None:
    [failed] = run_many([numbered(1)], agent="oracle", sandbox="failing_sandboxes:FailingAlways", on=counted, retries=1)
    assert (failed.status, failed.reward, failed.reason) == ("sandbox_failed", None, "no sandbox at attempt 2")
    broken = numbered(2).model_copy(update={"setup": ("exit 3",)})
    outcomes = run_many(
        [numbered(3), broken],
        agent=Shell(["exit 4"]),
        sandbox="failing_sandboxes:CountedSandboxes",
        on=counted,
    )
    assert [outcome.status for outcome in outcomes] == ["policy_failed", "env_failed"]
    counts = counting()
    assert counts.pop(failed.rollout_id) == 2
    assert list(counts.values()) == [1, 1]


def test_model_calls_are_captured_where_the_agent_runs_and_stored_here(cluster: RayCluster, tmp_path: Path) -> None:
    task = Task(instruction="ask", verify=("grep -q forty-two answer.txt",))
    script = Script(name="numbers", turns=(Turn(text="forty-two"),))
    with ScriptedModel(script) as server, RolloutStore(tmp_path / "store") as store:
        outcomes = run_many(
            [task] * 4,
            agent=Shell([ASK], dialect="openai_chat"),
            model=Model(**server.model()),
            on=cluster,
            store=store,
            concurrency=4,
        )
        assert [(outcome.status, outcome.reward) for outcome in outcomes] == [("ok", 1.0)] * 4
        for record in store.records():
            assert "".join(record.outcome.turns[0].completion_tokens).startswith("forty-two")
            captured = recording(store, record)
            assert captured is not None
            assert len(captured.calls) == 1


def test_a_pause_of_a_stream_holds_the_calls_of_all_workers(cluster: RayCluster) -> None:
    begun: list[str] = []

    async def run(model: Model, played: Callable[[], int]) -> list[float | None]:
        tasks = [Task(instruction=f"ask {number}", verify=("grep -q forty answer.txt",)) for number in range(4)]
        options: dict[str, Any] = {"agent": Shell([ASK], dialect="openai_chat"), "model": model, "on": cluster}
        async with rollouts(
            tasks,
            samples=1,
            concurrency=4,
            on_progress=lambda event: begun.append(event.rollout_id) if event.phase == "agent" else None,
            **options,
        ) as stream:
            stream.pause()  # before the workers are ready
            taking = asyncio.ensure_future(stream.take(4))
            await wait_until_async(lambda: len(set(begun)) == 4, timeout_s=120)
            await holds_for_async(1.0, lambda: played() == 0)
            stream.resume()
            await wait_until_async(lambda: played() > 0)
            async with stream.paused():
                stream.policy_version = 1
            return [reward for group in await taking for reward in group.rewards]

    script = Script(name="numbers", turns=(Turn(text="forty-two"),), ending="forty-two")
    with ScriptedModel(script) as server:
        rewards = asyncio.run(asyncio.wait_for(run(Model(**server.model()), lambda: len(server.played())), 240))
    assert rewards == [1.0] * 4


def test_an_update_in_flight_changes_the_tokens_of_calls_on_other_nodes(cluster: RayCluster) -> None:
    tasks = [Task(instruction=f"ask {number}", verify=("grep -q forty answer.txt",)) for number in range(4)]

    async def train(double: SglangDouble) -> list[SampleGroup]:
        model = Model(base_url=double.url, name="m", engine="sglang", sampling=Sampling())
        engine, options = engine_of(model), {"groups_per_update": 2, "max_staleness": 1}
        agent = ShellChat(max_turns=2, ends_after="success")
        async with rollouts(tasks, agent=agent, model=model, on=cluster, samples=1, concurrency=2, **options) as stream:
            taking = asyncio.ensure_future(stream.take(2))
            await wait_until_async(lambda: double.update_at is None, timeout_s=120)  # an answer waits for the update
            async with updating_weights(stream, engine, version=1, mode="in_flight"):
                await engine.load("/checkpoints/step-1")
            return [*await taking, *await stream.take(2)]

    with SglangDouble(lambda prompt: "echo forty-two > answer.txt", update_at=5) as double:
        groups = asyncio.run(asyncio.wait_for(train(double), 240))
    assert [group.rewards for group in groups] == [[1.0]] * 4
    sequences = [each for group in groups for sample in group.samples for each in sample.trainable]
    versions = [check_tokens(sequence, {"default": 0, "1": 1}) for sequence in sequences]
    assert {"default", "1"} in versions  # the answer that was under way
    assert versions[-2:] == [{"1"}] * 2


@pytest.mark.parametrize("stored", [True, False])
def test_a_worker_can_run_a_rollout_again_whose_model_calls_it_was_to_capture(
    counted: RayCluster, tmp_path: Path, stored: bool
) -> None:
    task = Task(instruction="ask", verify=("grep -q forty-two answer.txt",))
    script = Script(name="numbers", turns=(Turn(text="forty-two"),))
    with ScriptedModel(script) as server, RolloutStore(tmp_path / "store") as store:
        [outcome] = run_many(
            [task],
            agent=Shell([ASK], dialect="openai_chat"),
            model=Model(**server.model()),
            sandbox="failing_sandboxes:FailingOnce",
            on=counted,
            store=store if stored else None,
            concurrency=1,  # so there is one worker
        )
        assert (outcome.status, outcome.reward, len(outcome.turns)) == ("ok", 1.0, 1)
        assert len(where(outcome)["failed_attempts"]) == 1
        captured = [recording(store, record) for record in store.records()]
        assert [one is not None and len(one.calls) for one in captured] == [1] * stored


def test_a_lost_rollout_continues_with_its_recorded_answers(cluster: RayCluster, tmp_path: Path) -> None:
    task = Task(instruction="Count.", verify=("test $(wc -l < log.txt) = 6",))
    lines = tuple(Turn(text=f"sleep 0.3; echo {number} >> log.txt; exit 1") for number in range(6))
    with (
        ScriptedModel(Script(name="lines", turns=lines, ending="exit")) as server,
        RolloutStore(tmp_path / "store") as store,
    ):
        model = Model(**server.model(), sampling=Sampling().parameters())
        options = EngineOptions(agent=ShellChat(max_turns=9), model=model, store=store)
        with RayEngine(options, cluster=cluster, concurrency=1) as engine:

            def kill_worker() -> None:
                wait_until(
                    lambda: sum(path.read_bytes().count(b'"k":"end"') for path in engine._folder.rglob(FILE)) > 1
                )
                place = engine._workers[0].place
                assert place is not None
                os.kill(place.pid, signal.SIGKILL)

            killer = threading.Thread(target=kill_worker)
            killer.start()
            outcome = engine.run(task)
            killer.join()
        assert (outcome.status, outcome.reward) == ("ok", 1.0), outcome.reason
        assert outcome.metadata["replayed"] >= 2
        assert len(where(outcome)["failed_attempts"]) == 1
        assert 7 <= len(server.played()) <= 7 + 3  # answers of the last moment had not arrived
        [record] = store.records()
        captured = recording(store, record)
        assert captured is not None
        assert [call.number for call in captured.calls] == [1, 2, 3, 4, 5, 6, 7]
        assert record.outcome.start is None


def test_rollouts_that_run_at_once_in_a_worker_share_their_setup(nodes: RayNodes) -> None:
    task = numbered(1).model_copy(update={"setup": ("sleep 1",)})
    cluster = RayCluster(nodes.address, cpus=2)  # one worker on each node
    shared = run_many([task] * 4, agent="oracle", on=cluster, concurrency=4)
    assert sum("setup_rollout_id" in outcome.metadata for outcome in shared) == 2
    assert [outcome.reward for outcome in shared] == [1.0] * 4
    alone = run_many([task] * 4, agent="oracle", on=cluster, concurrency=4, share_setup=False)
    assert not any("setup_rollout_id" in outcome.metadata for outcome in alone)


def test_a_cancellation_reaches_every_node_and_frees_everything(
    cluster: RayCluster, tmp_path: Path, scratch_is_empty: None
) -> None:
    cancel = Cancellation()
    mark = f"{os.getpid()}{time.monotonic_ns() % 10**6}"
    tasks = [numbered(n, seconds=float(mark)) for n in range(8)]
    reached: list[int] = []

    def cancel_when_all_run() -> None:
        wait_until(lambda: len(processes_with(f"sleep\0{float(mark)}")) >= 4, 120)
        reached.append(1)
        cancel.cancel("enough")

    threading.Thread(target=cancel_when_all_run, daemon=True).start()
    with RolloutStore(tmp_path / "store") as store:
        outcomes = run_many(tasks, agent="oracle", on=cluster, store=store, concurrency=4, cancel=cancel)
        assert reached
        assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("cancelled", "enough")] * 8
        assert [outcome.phase for outcome in outcomes] == ["agent"] * 4 + ["sandbox"] * 4
        assert store.interrupted() == []
    assert processes_with(f"sleep\0{float(mark)}") == []
    wait_until(lambda: processes_with("ray::RolloutWorker") == [])


@pytest.fixture
def scratch_is_empty(nodes: RayNodes) -> Iterator[None]:
    """Workers leave no scratch folder behind."""
    yield
    wait_until(lambda: not list(nodes.folder.glob("openenv-rollouts-*/*")), 60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_command_leaves_nothing_in_the_cluster(
    nodes: RayNodes, tmp_path: Path, number: signal.Signals
) -> None:
    seconds = f"{30_000 + os.getpid()}.{number}"
    task = numbered(1, seconds=float(seconds))
    (tmp_path / "task.json").write_text(task.model_dump_json())
    command = [sys.executable, "-m", "openenv", "rollouts", "run", "task.json", "--samples", "8", "--agent", "oracle"]
    process = subprocess.Popen(
        [*command, "--ray", nodes.address, "--store", "store"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # A program that a shell starts in the background ignores SIGINT, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: len(processes_with(f"sleep\0{seconds}")) >= 4, 120)  # one for each free processor
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    wait_until(lambda: processes_with(f"sleep\0{seconds}") == [])
    wait_until(lambda: processes_with("ray::RolloutWorker") == [])
    assert process.returncode != 0
    with RolloutStore(tmp_path / "store") as store:
        if number == signal.SIGINT:
            assert {row.status for row in store.find()} <= {"cancelled"}
            assert store.interrupted() == []
        else:
            assert len(store.interrupted()) == 4
        assert "starting oracle" in errors


def test_the_command_runs_them_and_prints_their_outcomes(nodes: RayNodes, tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text(numbered(5).model_dump_json())
    command = [sys.executable, "-m", "openenv", "rollouts", "run", "task.json", "--samples", "3", "--agent", "oracle"]
    done = subprocess.run(
        [*command, "--ray", nodes.address, "--store", "store"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok  reward 1") == 3
    assert "3 of 3 done" in done.stderr


def test_nodes_that_cannot_run_sandboxes_are_named_by_the_error(counted: RayCluster) -> None:
    with pytest.raises(SandboxUnavailable, match="not installed on this node"):
        run_many([numbered(1)], agent="oracle", sandbox="failing_sandboxes:Missing", on=counted)


def test_a_worker_that_finds_no_place_is_an_error_that_says_what_it_needs(cluster: RayCluster) -> None:
    picky = RayCluster(cluster.address, resources={"sandboxes": 1}, start_timeout_s=2)
    with pytest.raises(RolloutError, match=r"started no worker for . s. One needs .*'sandboxes': 1"):
        run_many([numbered(1)], agent="oracle", on=picky)


def test_what_cannot_be_sent_to_the_nodes_is_refused(cluster: RayCluster) -> None:
    agent = Shell(["true"])
    agent.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Ray cannot send the agent"):
        run_many([numbered(1)], agent=agent, on=cluster)


def test_a_process_stays_with_the_cluster_that_it_is_connected_to(cluster: RayCluster) -> None:
    with RayEngine(EngineOptions(agent="oracle"), cluster=cluster, concurrency=1) as engine:
        assert engine.run(numbered(3)).reward == 1.0
    with pytest.raises(ValueError, match=f"connected to the Ray cluster at {cluster.address}"):
        run_many([numbered(1)], agent="oracle", on=RayCluster("192.0.2.1:6379"))
    assert run_many([numbered(1)], agent="oracle", on="ray", concurrency=1)[0].reward == 1.0


def test_the_snippet_prints_what_it_should(nodes: RayNodes) -> None:
    snippet = Path(__file__).parents[2] / "docs_src" / "use_ray.py"
    done = subprocess.run(
        [sys.executable, str(snippet)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "RAY_ADDRESS": nodes.address},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8.0 8\n['node', 'node_id']\n"
