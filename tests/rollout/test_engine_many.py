"""Many rollouts at once: none mixed up, nothing left behind, also when the engine is killed in the middle."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv.errors import StoreError, TrustError
from openenv.rollout import (
    Cancellation,
    Engine,
    EngineOptions,
    Model,
    Outcome,
    Progress,
    RolloutStore,
    Task,
    reverify,
    run_many,
    run_many_async,
)
from openenv.rollout.agents import Shell
from openenv.sandboxes.base import Sandboxes, backend
from openenv.testing import Script, ScriptedModel, Turn
from waiting import wait_until

ASK = (
    'python3 -c "import json, os, re, urllib.request as u; '
    "number = re.search('number ([0-9]+)', open('/home/user/workdir/task.txt').read())[1]; "
    "reply = json.load(u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps({'model': "
    "'m', 'messages': [{'role': 'user', 'content': 'The task is number ' + number}]}).encode(), "
    "{'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}), timeout=60)); "
    "open('answer.txt', 'w').write(reply['choices'][0]['message']['content'])\""
)
"""An agent that sends its task to the model and writes the answer to a file."""


def numbered(number: int) -> Task:
    return Task(
        instruction=f"The task is number {number}",
        files={"task.txt": f"number {number}\n"},
        verify=(f"grep -qx 'the answer is {number}' answer.txt",),
        solution=(f"echo the answer is {number} > answer.txt",),
        task_id=f"task-{number}",
        agent_timeout_s=90,
    )


def test_a_task_with_a_weaker_check_than_asked_for_is_refused_before_anything_runs(
    local: Sandboxes, tmp_path: Path
) -> None:
    weak = Task(instruction="x", verify=("make test",), task_id="weak")
    with RolloutStore(tmp_path / "store") as store:
        with pytest.raises(TrustError, match="Check 1 of task 'weak' is shared"):
            run_many([numbered(1), weak], agent="oracle", sandbox=local, store=store, min_trust="isolated")
        assert store.find() == []
        assert store.interrupted() == []
        [outcome] = run_many([numbered(1)], agent="oracle", sandbox=local, store=store, min_trust="isolated")
        assert (outcome.reward, outcome.trust, outcome.verify_results[0].trust) == (1.0, "isolated", "isolated")
        with pytest.raises(TrustError, match="judged is required"):
            reverify(store, outcome.rollout_id, task=numbered(1).model_copy(update={"min_trust": "judged"}))
        again = reverify(store, outcome.rollout_id, lines=["sh check.sh"], verify_files={"check.sh": "./a.out"})
        assert again.trust == "shared"
        assert [record.outcome.trust for record in store.history(outcome.rollout_id)] == ["shared", "isolated"]
    processes = backend("process", i_know_there_is_no_isolation=True)
    assert run_many([numbered(1)], agent="oracle", sandbox=processes)[0].trust == "shared"
    assert run_many([numbered(1)], agent="oracle", sandbox=processes, verify_sandbox=local)[0].trust == "shared"
    with pytest.raises(TrustError, match="isolate nothing"):
        run_many([numbered(1)], agent="oracle", sandbox=processes, min_trust="isolated")


@pytest.fixture
def model() -> Iterator[Model]:
    script = Script(name="numbers", turns=(Turn(text="the answer is ${task:number ([0-9]+)}"),))
    with ScriptedModel(script) as server:
        yield Model(**server.model())


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_twenty_rollouts_at_once_are_not_mixed_up(
    local: Sandboxes, model: Model, tmp_path: Path, leftovers: Callable[[], None]
) -> None:
    events: list[Progress] = []
    with RolloutStore(tmp_path / "store") as store:
        outcomes = run_many(
            [numbered(n) for n in range(20)],
            agent=Shell([ASK], dialect="openai_chat"),
            sandbox=local,
            model=model,
            store=store,
            concurrency=20,
            on_progress=events.append,
        )
        assert [outcome.task_id for outcome in outcomes] == [f"task-{n}" for n in range(20)]
        assert [(outcome.status, outcome.reward) for outcome in outcomes] == [("ok", 1.0)] * 20
        for number, outcome in enumerate(outcomes):
            assert outcome.files["/home/user/workdir/answer.txt"] == f"the answer is {number}"
            assert "".join(outcome.turns[0].completion_tokens).startswith(f"the answer is {number}")
        assert len({outcome.rollout_id for outcome in outcomes}) == 20
        assert {event.rollout_id for event in events} == {outcome.rollout_id for outcome in outcomes}
        assert len(store.find(status="ok")) == 20
    leftovers()


def test_warm_sandboxes_are_used_once_and_nothing_is_left(local: Sandboxes, leftovers: Callable[[], None]) -> None:
    tasks = [numbered(number) for number in range(8)]
    outcomes = run_many(tasks, agent="oracle", sandbox=local, concurrency=2, warm_sandboxes=2)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 8
    used = [*(each.sandbox_id for each in outcomes), *(each.metadata["verify_sandbox_id"] for each in outcomes)]
    assert len(set(used)) == 16
    leftovers()


def test_a_negative_number_of_warm_sandboxes_is_refused() -> None:
    with pytest.raises(ValueError, match="warm_sandboxes"):
        Engine(EngineOptions(agent="noop", warm_sandboxes=-1))


def test_no_more_rollouts_run_at_once_than_the_concurrency(local: Sandboxes, leftovers: Callable[[], None]) -> None:
    running: set[str] = set()
    most: list[int] = []

    def on_progress(event: Progress) -> None:
        if event.phase == "done":
            running.discard(event.rollout_id)
        else:
            running.add(event.rollout_id)
        most.append(len(running))

    taken: list[int] = []

    def tasks() -> Iterator[Task]:
        for number in range(6):
            taken.append(number)
            yield numbered(number)

    came: list[int] = []
    outcomes = run_many(
        tasks(),
        agent="oracle",
        sandbox=local,
        concurrency=2,
        on_progress=on_progress,
        on_outcome=lambda number, outcome: came.append(number),
    )
    assert [outcome.reward for outcome in outcomes] == [1.0] * 6
    assert max(most) <= 2
    assert sorted(came) == list(range(6))
    with pytest.raises(ValueError, match="at least 1"):
        run_many([], agent="noop", sandbox=local, concurrency=0)
    leftovers()


def test_cancelling_ends_all_and_begins_none(local: Sandboxes, leftovers: Callable[[], None]) -> None:
    cancel = Cancellation()

    def on_progress(event: Progress) -> None:
        if event.phase == "agent":
            threading.Thread(target=cancel.cancel).start()

    outcomes = run_many(
        [numbered(n) for n in range(8)],
        agent=Shell(["sleep 60"]),
        sandbox=local,
        concurrency=2,
        cancel=cancel,
        on_progress=on_progress,
    )
    assert [outcome.status for outcome in outcomes] == ["cancelled"] * 8
    leftovers()


def test_a_generator_is_not_drained_after_a_cancel(local: Sandboxes) -> None:
    def endless() -> Iterator[Task]:
        while True:
            yield numbered(1)

    cancel = Cancellation()
    outcomes = run_many(
        endless(), agent="noop", sandbox=local, cancel=cancel, on_outcome=lambda number, outcome: cancel.cancel()
    )
    assert 1 <= len(outcomes) < 20


def test_a_store_that_fails_ends_all_with_its_error(
    local: Sandboxes, tmp_path: Path, leftovers: Callable[[], None]
) -> None:
    class Full(RolloutStore):
        def add(self, outcome: Outcome, *args: Any, **kwargs: Any) -> Any:
            raise StoreError("the disk is full", outcome=outcome)

    with Full(tmp_path / "store") as store, pytest.raises(StoreError, match="full"):
        run_many([numbered(n) for n in range(6)], agent="noop", sandbox=local, store=store, concurrency=2)
    leftovers()


@pytest.mark.anyio
async def test_many_rollouts_run_off_the_loop(local: Sandboxes) -> None:
    outcomes = await run_many_async([numbered(1), numbered(2)], agent="oracle", sandbox=local)
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0]


ENGINE = """
import sys
from pathlib import Path
from openenv.rollout import Model, RolloutStore, Task, run_many
from openenv.rollout.agents import Shell
tasks = [Task(instruction=f"number {n}", files={"task.txt": f"number {n}"}, verify=("true",)) for n in range(20)]
def on_progress(event):
    if event.phase == "agent":
        print(event.rollout_id, flush=True)
run_many(tasks, agent=Shell([sys.argv[3], "(setsid sleep 300 &)", "sleep 300"], dialect="openai_chat"), sandbox="local",
         model=Model(base_url=sys.argv[2], name="scripted/numbers"), store=RolloutStore(sys.argv[1]), concurrency=20,
         on_progress=on_progress)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_engine_leaves_nothing_that_the_next_one_does_not_clear(
    local: Sandboxes, model: Model, tmp_path: Path, own_temporary_folder: Path
) -> None:
    store_folder = tmp_path / "store"
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(store_folder), model.base_url, ASK], stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    began = {line.strip() for line in _lines(engine, 20)}
    children = _tree(engine.pid)
    assert len(children) > 20
    engine.send_signal(signal.SIGKILL)
    engine.wait(timeout=30)
    engine.stdout.close()
    wait_until(lambda: not any(_alive(pid, born) for pid, born in children.items()))
    with RolloutStore(store_folder) as store:
        assert len(began) == 20
        assert set(store.interrupted()) == began
        assert store.find() == []
        after = run_many(
            [numbered(n) for n in range(3)],
            agent=Shell([ASK], dialect="openai_chat"),
            sandbox="local",
            model=model,
            store=store,
            concurrency=3,
        )
        assert [(outcome.status, outcome.reward) for outcome in after] == [("ok", 1.0)] * 3
        assert set(store.interrupted()) == began
    assert list(own_temporary_folder.iterdir()) == []
    groups = {f"{folder}/{name}" for folder, names, _ in os.walk("/sys/fs/cgroup") for name in names}
    assert not [group for group in groups if re.search(rf"/openenv[^/]*[_-]{engine.pid}[_-][^/]*$", group)]
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def _lines(engine: subprocess.Popen[str], distinct: int) -> set[str]:
    assert engine.stdout is not None
    seen: set[str] = set()
    while len(seen) < distinct:
        line = engine.stdout.readline()
        assert line, "the engine ended"
        seen.add(line)
    return seen


def _tree(root: int) -> dict[int, str]:
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = (int(fields[1]), fields[19])
    descendants: dict[int, str] = {}
    while True:
        more = {
            pid: born
            for pid, (parent, born) in parents.items()
            if (parent == root or parent in descendants) and pid not in descendants
        }
        if not more:
            return descendants
        descendants |= more


def _alive(pid: int, born: str) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return False
    return fields[0] not in ("Z", "X") and fields[19] == born


def test_the_look_for_leftovers_sees_a_sandbox(local: Sandboxes, leftovers: Callable[..., None]) -> None:
    with local.open() as sandbox:
        sandbox.start_bg("sleep 60")
        with pytest.raises(AssertionError, match=r"group .*openenv"):
            leftovers(timeout_s=0.1)
    leftovers()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_rollouts_that_are_cancelled_at_odd_moments_leave_nothing(
    seed: int, local: Sandboxes, model: Model, tmp_path: Path, leftovers: Callable[[], None]
) -> None:
    chance = random.Random(seed)
    cancels = [Cancellation() for _ in range(12)]
    timers = [threading.Timer(chance.uniform(0, 1.0), cancel.cancel) for cancel in cancels]
    outcomes: list[Outcome] = []
    with (
        RolloutStore(tmp_path / "store") as store,
        Engine(
            EngineOptions(agent=Shell([ASK], dialect="openai_chat"), sandbox=local, model=model, store=store)
        ) as engine,
    ):
        threads = [
            threading.Thread(target=lambda n=n: outcomes.append(engine.run(numbered(n), cancel=cancels[n])))  # type: ignore[misc]
            for n in range(12)
        ]
        for each in (*threads, *timers):
            each.start()
        for each in (*threads, *timers):
            each.join()
        assert len(outcomes) == 12
        assert {outcome.status for outcome in outcomes} <= {"ok", "cancelled"}
        assert {outcome.reward for outcome in outcomes if outcome.status == "ok"} <= {1.0}
        assert len(store.find()) == 12
        assert store.interrupted() == []
    leftovers()
