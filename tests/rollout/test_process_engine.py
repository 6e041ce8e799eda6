"""Rollouts in worker processes: outcomes as in one process, typed losses that are repeated once, and no survivors."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asking_agent import AskingAgent
from openenv.errors import AgentUnavailable, RolloutError, StoreError
from openenv.rollout import (
    Agent,
    AgentRun,
    Cancellation,
    Launch,
    Model,
    Outcome,
    Progress,
    RolloutStore,
    Task,
    run_many,
)
from openenv.rollout.agents import Shell
from openenv.rollout.agents.base import Installation
from openenv.sandboxes.base import Sandbox, Sandboxes
from openenv.testing import Script, ScriptedModel, Turn
from openenv.train import rollouts
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("local")


class Missing(Agent):
    """An agent that no worker can install."""

    name = "missing"
    dialect = None

    def install(self, cache: Path, report: Any) -> Installation:
        raise AgentUnavailable("this agent exists nowhere")

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        return Launch(argv=("true",))


class Dying(Missing):
    """An agent that ends the process in which it is installed."""

    def install(self, cache: Path, report: Any) -> Installation:
        os._exit(7)


def task(number: int, **fields: Any) -> Task:
    fields = {"verify": ("grep -q done answer.txt",), **fields}
    return Task(task_id=f"task-{number}", instruction=f"Do {number}.", **fields)


def workers(parent: int | None = None) -> list[int]:
    """Return the worker processes of a process, by default of this one."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit() or b"process_engine" not in (folder / "cmdline").read_bytes():
                continue
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == (parent or os.getpid()) and fields[0] != "Z":
            found.append(int(folder.name))
    return sorted(found)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def killer(phase: str, times: int = 1) -> Iterator[tuple[list[int], Any]]:
    """Yield the killed processes, and a callback that kills all workers when a rollout reaches a phase."""
    killed: list[int] = []

    def on_progress(event: Progress) -> None:
        nonlocal times
        if event.phase == phase and times:
            times -= 1
            killed.extend(workers())
            for pid in workers():
                os.kill(pid, signal.SIGKILL)

    yield killed, on_progress


def test_outcomes_order_and_counts_are_those_of_one_process(tmp_path: Path) -> None:
    agent = Shell(["echo done > answer.txt"])
    tasks = [task(number, verify=(("true", "false")[number % 2],)) for number in range(6)]
    ended: list[int] = []
    events: list[Progress] = []
    with RolloutStore(tmp_path) as store:
        outcomes = run_many(
            tasks,
            agent=agent,
            store=store,
            processes=2,
            concurrency=4,
            metadata={"run": "a"},
            on_outcome=lambda number, outcome: ended.append(number),
            on_progress=events.append,
        )
        rows = store.find()
        ids = {outcome.rollout_id for outcome in outcomes}
        assert {row.rollout_id for row in rows} == ids == {event.rollout_id for event in events}
        assert all(store.get(each).outcome.metadata["run"] == "a" for each in ids)
    same = run_many(tasks, agent=agent)
    facts = [(each.task_id, each.status, each.reward, each.trust, each.agent) for each in outcomes]
    assert facts == [(each.task_id, each.status, each.reward, each.trust, each.agent) for each in same]
    assert sorted(ended) == list(range(6))
    assert {event.phase for event in events} >= {"sandbox", "agent", "verify", "done"}
    assert workers() == []


def test_rollouts_of_a_killed_worker_continue_under_their_ids(tmp_path: Path) -> None:
    with RolloutStore(tmp_path) as store, killer("agent") as (killed, on_progress):
        outcomes = run_many(
            [task(number) for number in range(6)],
            agent=Shell(["sleep 0.2; echo done > answer.txt"]),
            store=store,
            processes=2,
            concurrency=4,
            on_progress=on_progress,
        )
        records = [store.read(row).outcome for row in store.find()]
    assert len(killed) == 2
    assert [(each.task_id, each.status, each.reward) for each in outcomes] == [
        (f"task-{number}", "ok", 1.0) for number in range(6)
    ]
    assert sorted(each.rollout_id for each in records) == sorted(each.rollout_id for each in outcomes)
    assert workers() == []


@pytest.mark.slow  # three processes start, one after the other
def test_a_rollout_that_loses_two_workers_is_not_repeated_again() -> None:
    with killer("agent", times=2) as (killed, on_progress):
        (outcome,) = run_many([task(1)], agent=Shell(["sleep 5"]), processes=1, on_progress=on_progress)
    assert len(killed) == 2
    assert (outcome.status, outcome.reward) == ("sandbox_failed", None)
    assert "ended with signal SIGKILL" in str(outcome.reason)
    assert len(outcome.metadata["lost_rollouts"]) == 1


def test_a_stream_continues_the_samples_of_a_killed_worker(tmp_path: Path) -> None:
    async def run(store: RolloutStore, on_progress: Any) -> None:
        with ScriptedModel(Script(name="w", turns=(Turn(text="Looking."),), ending="All done.")) as server:
            options: dict[str, Any] = {"agent": AskingAgent(), "model": Model(**server.model()), "store": store}
            tasks = [task(number, verify=("grep -q done answers.txt",)) for number in range(3)]
            async with rollouts(
                tasks, samples=2, concurrency=2, processes=2, on_progress=on_progress, **options
            ) as stream:
                groups = {group.name: group async for group in stream}
                assert stream.counts.failed == 0
        assert {name: group.rewards for name, group in groups.items()} == {
            f"task-{number}": [1.0, 1.0] for number in range(3)
        }
        assert all(sample.trainable for group in groups.values() for sample in group.samples)
        replayed = [sample.outcome.metadata.get("replayed", 0) for group in groups.values() for sample in group.samples]
        assert sum(replayed) >= 1, "a killed worker's answers are not sampled again"
        assert len(store.find()) == 6

    with RolloutStore(tmp_path) as store, killer("verify") as (_, on_progress):
        asyncio.run(asyncio.wait_for(run(store, on_progress), 120))
    assert workers() == []


def test_a_pause_of_a_stream_holds_the_calls_of_all_workers() -> None:
    async def run() -> None:
        with ScriptedModel(Script(name="w", turns=[Turn(text="no")] * 4, ending="All done.")) as server:
            options: dict[str, Any] = {"agent": AskingAgent(), "model": Model(**server.model())}
            tasks = [task(number, verify=("grep -q done answers.txt",)) for number in range(4)]
            async with rollouts(tasks, samples=1, concurrency=4, processes=2, **options) as stream:
                first = asyncio.ensure_future(stream.take(4))
                await asyncio.to_thread(wait_until, lambda: len(server.played()) >= 2)
                async with stream.paused():
                    before = len(server.played())
                    await asyncio.sleep(0.3)
                    assert len(server.played()) == before
                assert [group.rewards for group in await first] == [[1.0]] * 4

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_cancellation_ends_the_rollouts_of_all_workers() -> None:
    cancel, running = Cancellation(), Counter[str]()
    outcomes: list[Outcome] = []

    def on_progress(event: Progress) -> None:
        running[event.phase] += 1
        if running["agent"] == 3:
            threading.Thread(target=cancel.cancel).start()

    began = time.monotonic()
    outcomes = run_many(
        [task(number) for number in range(8)],
        agent=Shell(["sleep 60"]),
        processes=2,
        concurrency=3,
        cancel=cancel,
        on_progress=on_progress,
    )
    assert {each.status for each in outcomes} == {"cancelled"}
    assert len(outcomes) == 8
    assert time.monotonic() - began < 50
    assert workers() == []


PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests were started in the background
from openenv.rollout import Task, run_many
from openenv.rollout.agents import Shell
tasks = [Task(task_id=str(number), instruction="x", verify=("true",)) for number in range(4)]
report = lambda event: print(event.phase, flush=True)
run_many(tasks, agent=Shell(["sleep 300"]), processes=2, concurrency=4, on_progress=report)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "agent":
            assert process.poll() is None
        children = workers(process.pid)
        assert len(children) == 2
        process.send_signal(number)
        wait_until(lambda: not any(map(is_running, children)))
        process.stdout.read()
        assert process.wait(30) != 0


def test_an_outcome_that_a_worker_cannot_store_raises_as_in_one_process(tmp_path: Path) -> None:
    def on_progress(event: Progress) -> None:
        if event.phase == "agent":
            (tmp_path / "shards").rmdir()

    with RolloutStore(tmp_path) as store, pytest.raises(StoreError) as raised:
        run_many([task(1)], agent=Shell(["sleep 1"]), store=store, processes=1, on_progress=on_progress)
    assert isinstance(raised.value.outcome, Outcome)
    assert workers() == []


@pytest.mark.slow  # a process that dies is started three times
def test_errors_of_all_workers_are_raised() -> None:
    with pytest.raises(AgentUnavailable, match="exists nowhere"):
        run_many([task(1)], agent=Missing(), processes=2)
    with pytest.raises(RolloutError, match=r"before they are ready.*exit code 7"):
        run_many([task(1)], agent=Dying(), processes=1)
    assert workers() == []


def test_options_that_cannot_work_are_refused(local: Sandboxes) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        run_many([task(1)], agent="noop", processes=0)
    with pytest.raises(ValueError, match="either processes or on"):
        run_many([task(1)], agent="noop", processes=2, on="ray")

    class Local(Missing):
        pass

    with pytest.raises(ValueError, match="cannot be sent"):
        run_many([task(1)], agent=Local(), processes=2)
