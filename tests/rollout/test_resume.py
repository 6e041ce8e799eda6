"""Rollouts whose processes are killed continue: no answer is sampled twice, and the outcomes are the same."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asking_agent import AskingAgent
from openenv.errors import RolloutError, StoreError
from openenv.rollout import (
    Cancellation,
    Engine,
    EngineOptions,
    Model,
    Outcome,
    Progress,
    RolloutStore,
    Sampling,
    Task,
    resume_rollouts,
    run_many,
    run_rollout,
)
from openenv.rollout.agents.base import AgentRun, Launch, LoopTools
from openenv.rollout.agents.builtin import Shell
from openenv.rollout.agents.shell_chat import ShellChat
from openenv.rollout.capture.records import FILE, JournalFull, Recorder, read, read_events
from openenv.rollout.run.batch import RunFile
from openenv.rollout.run.phases import AGENT_PORT
from openenv.rollout.store.comparison import compare_stores
from openenv.sandboxes.base import Sandbox, Sandboxes
from openenv.testing import Script, ScriptedModel, Turn
from openenv.train import SampleGroup, rollouts
from waiting import wait_until

TURNS = tuple(Turn(text=f"step {number}, seed ${{seed}}") for number in range(4))
TASKS = [Task(instruction=f"Task {name}", verify=("test -s answers.txt",), task_id=name) for name in "abcabc"]
# The process that is killed: `python -c PROGRAM STORE MODEL`.
PROGRAM = """
import json, sys
from asking_agent import AskingAgent
from openenv.rollout import Model, RolloutStore, Sampling, run_many
from test_resume import TASKS
with RolloutStore(sys.argv[1]) as store:
    print("ready", flush=True)
    model = Model(**json.loads(sys.argv[2]), sampling=Sampling().parameters())
    run_many(TASKS, agent=AskingAgent(), model=model, store=store, seed=7, concurrency=3, sandbox="local", resume=True)
"""
STREAM = """
import asyncio, json, sys
from asking_agent import AskingAgent
from openenv.rollout import Model, RolloutStore
from openenv.train import rollouts
from test_resume import TASKS
async def run():
    with RolloutStore(sys.argv[1]) as store:
        print("ready", flush=True)
        options = {"agent": AskingAgent(), "model": Model(**json.loads(sys.argv[2])), "sandbox": "local"}
        async with rollouts(TASKS[:3], samples=2, concurrency=4, store=store, seed=7, **options) as stream:
            await stream.take(3)
asyncio.run(run())
"""


@pytest.fixture
def scripted() -> Iterator[ScriptedModel]:
    with ScriptedModel(Script(name="steps", turns=TURNS, ending="done ${seed}")) as server:
        yield server


def run(store: RolloutStore, model: ScriptedModel, local: Sandboxes, **options: Any) -> list[Outcome]:
    options = {"seed": 7, **options}
    endpoint = Model(**model.model(), sampling=Sampling().parameters())
    return run_many(TASKS, agent=AskingAgent(), model=endpoint, sandbox=local, store=store, **options)


def killed_run(store: Path, model: ScriptedModel, until: Callable[[], bool], program: str = PROGRAM) -> None:
    """Run the batch in another process until a condition holds, then kill it."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "support")])
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(store), json.dumps(model.model())],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until(
            lambda: until() or process.poll() is not None, 60, lambda: "the run did not come so far", every_s=0.002
        )
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def answers_in(store: RolloutStore, rollout_id: str) -> int:
    """Return how many whole answers were sampled for a rollout, in all its runs."""
    file = store.captures / rollout_id / FILE
    return file.read_bytes().count(b'"how":"complete"') if file.exists() else 0


def test_a_killed_run_continues_until_it_equals_an_undisturbed_one(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path
) -> None:
    with RolloutStore(tmp_path / "whole") as whole:
        expected = run(whole, scripted, local)
    before = len(scripted.played())
    assert before == 30
    for calls in (4, 11, 19):
        killed_run(tmp_path / "killed", scripted, lambda: len(scripted.played()) - before >= calls)  # noqa: B023
    with RolloutStore(tmp_path / "killed") as store, RolloutStore(tmp_path / "whole") as whole:
        outcomes = run(store, scripted, local, resume=True)
        assert [each.status for each in outcomes] == ["ok"] * 6
        assert [each.reward for each in outcomes] == [each.reward for each in expected]
        assert sum(each.metadata.get("replayed", 0) for each in outcomes) >= 4
        comparison = compare_stores(whole, store)
        assert comparison.differences == []
        assert comparison.digests[0] == comparison.digests[1]
        for one, other in zip(expected, outcomes, strict=True):
            assert [each.turn for each in one.turns] == [each.turn for each in other.turns]
        assert (store.interrupted(), store.running()) == ([], [])
        # Only an answer that was under way at a kill is sampled again, at most 3 of them per kill.
        assert {answers_in(store, each.rollout_id) for each in outcomes} == {5}
        assert len(scripted.played()) - before <= 30 + 3 * 3
        again = run(store, scripted, local, resume=True)
        assert [each.rollout_id for each in again] == [each.rollout_id for each in outcomes]


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_continues_its_interrupted_samples(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path, processes: int | None
) -> None:
    killed_run(tmp_path, scripted, lambda: len(scripted.played()) >= 9, STREAM)

    async def resumed(store: RolloutStore) -> list[SampleGroup]:
        options: dict[str, Any] = {"agent": AskingAgent(), "model": Model(**scripted.model()), "store": store}
        options |= {"seed": 7, "resume": True, "processes": processes}
        async with rollouts(TASKS[:3], samples=2, concurrency=4, **options) as stream:
            return await stream.take(3)

    with RolloutStore(tmp_path) as store:
        begun = {each.rollout_id: answers_in(store, each.rollout_id) for each in store.running()}
        assert any(begun.values())
        groups = asyncio.run(asyncio.wait_for(resumed(store), 120))
        samples = [sample for group in groups for sample in group.samples]
        replayed = {each.outcome.rollout_id: each.outcome.metadata.get("replayed", 0) for each in samples}
        assert len(replayed) == 6
        assert {each: replayed[each] for each in begun} == begun
        assert {answers_in(store, each) for each in replayed} == {5}
        assert store.interrupted() == []


def test_an_engine_resumes_a_rollout_by_its_id(local: Sandboxes, scripted: ScriptedModel, tmp_path: Path) -> None:
    interrupted, answers = _interrupted(tmp_path, scripted)
    with RolloutStore(tmp_path) as store:
        options = EngineOptions(
            agent=AskingAgent(), model=Model(**scripted.model()), sandbox=local, store=store, seed=7
        )
        with Engine(options) as engine:
            outcome = engine.resume(interrupted)
            assert (outcome.rollout_id, outcome.status, outcome.reward) == (interrupted, "ok", 1.0)
            assert outcome.metadata["replayed"] == answers
            with pytest.raises(StoreError, match="it has ended"):
                engine.resume(interrupted)
            with pytest.raises(StoreError, match="does not exist"):
                engine.resume("nothing")
        assert store.get(interrupted).outcome == outcome
    with Engine(EngineOptions(agent="noop", sandbox=local)) as engine, pytest.raises(ValueError, match="pass store"):
        engine.resume("nothing")


class KilledAgent(AskingAgent):
    """Writes three answers down; after the second one its sandbox is killed, so many times."""

    def __init__(self, kills: int) -> None:
        self.kills = kills

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        def loop(tools: LoopTools) -> int:
            messages = [{"role": "user", "content": run.task.instruction}]
            for number in range(3):
                answer = tools.ask({"messages": messages})["choices"][0]["message"]
                if number == 1 and self.kills > 0:
                    self.kills -= 1
                    sandbox.kill()
                tools.run(f"echo '{answer['content']}' >> answers.txt", timeout_s=60.0, max_output=1000)
                messages += [answer, {"role": "user", "content": f"result {number}"}]
            return 0

        return Launch(loop=loop)


def test_a_rollout_whose_sandbox_is_killed_continues_in_a_fresh_one(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path
) -> None:
    """Once: an agent that kills its own sandbox does so again."""
    with RolloutStore(tmp_path) as store:
        common: dict[str, Any] = {"model": Model(**scripted.model()), "sandbox": local, "store": store, "seed": 7}
        expected = run_rollout(TASKS[0], agent=KilledAgent(0), **common)
        for kills, replayed, status in ((1, 2, "ok"), (2, 2, "policy_failed")):
            before = len(scripted.played())
            outcome = run_rollout(TASKS[0], agent=KilledAgent(kills), **common)
            assert (outcome.status, outcome.metadata["replayed"]) == (status, replayed)
            assert outcome.reward == (1.0 if status == "ok" else 0.0)
            assert (outcome.files == expected.files) == (status == "ok")
            assert len(scripted.played()) - before == (3 if status == "ok" else 2), "no answer is sampled twice"
            assert answers_in(store, outcome.rollout_id) == len(outcome.turns)
        assert store.interrupted() == []


def _interrupted(folder: Path, scripted: ScriptedModel) -> tuple[str, int]:
    """Return a rollout whose engine was killed, and the number of its answers."""
    killed_run(folder, scripted, lambda: len(scripted.played()) >= 7)
    with RolloutStore(folder) as store:
        answers = {each: answers_in(store, each) for each in store.interrupted()}
    return max(answers.items(), key=lambda pair: pair[1])


def test_the_time_of_an_agent_counts_once(local: Sandboxes, scripted: ScriptedModel, tmp_path: Path) -> None:
    """A resumed agent has the rest of its time, although its first answers come at once."""
    rollout_id = "late"
    task = TASKS[0].model_copy(update={"agent_timeout_s": 60.0})
    with RolloutStore(tmp_path) as store:
        options = EngineOptions(agent=AskingAgent(), model=Model(**scripted.model()), sandbox=local, store=store)
        with Engine(options) as engine:
            assert engine.run(task, rollout_id=rollout_id).status == "ok"
        _interrupt(store, rollout_id)
        file = store.captures / rollout_id / FILE
        data = re.sub(rb'"c":"[0-9a-f]{8}",', b"", file.read_bytes())
        file.write_bytes(re.sub(rb'"seconds":[01]\.', b'"seconds":59.', data))
        began = time.monotonic()
        with Engine(replace(options, agent=SlowAgent())) as engine:
            outcome = engine.resume(rollout_id)
        assert outcome.status == "truncated"
        assert "agent timeout" in str(outcome.reason)
        assert time.monotonic() - began < 40


class SlowAgent(AskingAgent):
    """Works for a minute after its last answer."""

    def prepare(self, sandbox: Sandbox, run: Any) -> Launch:
        launch = super().prepare(sandbox, run)
        return Launch(argv=("/bin/sh", "-c", f"python3 {run.home}/agent.py; sleep 50"), envs=launch.envs)


def _interrupt(store: RolloutStore, rollout_id: str) -> None:
    """Make of a finished rollout one whose engine was killed just before it stored the outcome."""
    for shard in (store.root / "shards").glob("*.jsonl"):
        shard.unlink()
    store.close()
    (store.root / "running" / rollout_id).touch()
    for index in store.root.glob("index.sqlite*"):
        index.unlink()


def test_a_journal_has_phases_setup_results_commands_calls_and_limits(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path
) -> None:
    task = TASKS[0].model_copy(update={"setup": ("echo ready",), "verify": ("true",)})
    with RolloutStore(tmp_path) as store:
        model = Model(**scripted.model())
        [outcome] = run_many([task], agent=ShellChat(max_turns=2), model=model, sandbox=local, store=store, seed=1)
        events = store.events(outcome.rollout_id)
        phases = list(dict.fromkeys(each["phase"] for each in events))
        assert phases == ["sandbox", "setup", "agent", "collect", "verify", "store", "done"]
        facts = [each["facts"] for each in events if "facts" in each]
        assert (facts[0]["cmd"], facts[0]["stdout"]) == ("echo ready", "ready\n")
        assert [each["cmd"][:6] for each in facts[1:]] == ["step 0", "step 1"]
        assert [each["exit_code"] for each in facts[1:]] == [127, 127]
        assert [each["turn"] for each in events if "turn" in each] == [1, 2]
        folder = store.captures / outcome.rollout_id
        assert [call.tokens for call in read(folder).calls] == [len(turn.completion_tokens) for turn in outcome.turns]
        assert all(call.spent_s > 0 for call in read(folder).calls)
        assert [path.name for path in folder.iterdir()] == [FILE], "there is one journal"


def test_nothing_in_the_sandbox_of_a_loop_reaches_the_model(local: Sandboxes) -> None:
    line = f"(echo > /dev/tcp/127.0.0.1/{AGENT_PORT}) 2> /dev/null && echo open || echo closed"
    with ScriptedModel(Script(name="curious", turns=(Turn(text=f"bash -c '{line}' > port.txt"),))) as server:
        task = Task(instruction="Look.", verify=("grep -qx closed port.txt",))
        outcome = run_rollout(task, agent=ShellChat(max_turns=1), model=Model(**server.model()), sandbox=local)
    assert (outcome.status, outcome.reward) == ("ok", 1.0), outcome.reason


def test_a_run_that_was_cancelled_continues_with_its_answers(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path
) -> None:
    cancel = Cancellation()

    def stop(event: Progress) -> None:
        if event.turn == 3:
            cancel.cancel("Ctrl-C")

    with RolloutStore(tmp_path) as store:
        first = run(store, scripted, local, concurrency=1, cancel=cancel, on_progress=stop)
        assert {each.status for each in first} <= {"cancelled", "ok"}
        asked = len(scripted.played())
        outcomes = run(store, scripted, local, resume=True)
        assert [each.status for each in outcomes] == ["ok"] * 6
        [continued] = [each for each in outcomes if each.start is not None]
        assert not continued.start.is_branch
        assert continued.metadata["replayed"] >= 2
        assert len(scripted.played()) - asked <= 30 - continued.metadata["replayed"]
        assert sum(sum(each.loss_mask) for each in continued.sequences) == sum(
            len(turn.completion_token_ids) for turn in continued.turns
        ), "its answers are its own: all of them are trained on"


def test_a_full_disk_loses_events_and_no_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path / "r" / FILE)
    recorder.create({"rollout_id": "r"})
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", _full)
        recorder.event(Progress(rollout_id="r", phase="setup", message="lost"))
        with pytest.raises(JournalFull, match="No space left"):
            recorder.note("stop", limit="calls")
    assert "No space left" in str(recorder.failure)
    recorder.event(Progress(rollout_id="r", phase="agent", message="kept"))
    assert [each["message"] for each in read_events(tmp_path / "r")] == ["kept"]


def _full(handle: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_batch_that_continues_needs_the_same_tasks(local: Sandboxes, tmp_path: Path) -> None:
    with RolloutStore(tmp_path) as store:
        agent = Shell(["true"])
        first = run_many(TASKS[:2], agent=agent, sandbox=local, store=store)
        same = run_many(TASKS[:3], agent=agent, sandbox=local, store=store, resume=True)
        assert [each.rollout_id for each in same[:2]] == [each.rollout_id for each in first]
        assert same[2].rollout_id not in {each.rollout_id for each in first}
        with pytest.raises(RolloutError, match="resume needs the same tasks"):
            run_many(TASKS[1:], agent=agent, sandbox=local, store=store, resume=True)
        other = run_many(TASKS[:1], agent=agent, sandbox=local, store=store)
        assert other[0].rollout_id not in {each.rollout_id for each in same}
        newest = run_many(TASKS[:1], agent=agent, sandbox=local, store=store, resume=True)
        assert newest[0].rollout_id == other[0].rollout_id
    with pytest.raises(ValueError, match="rollouts of this machine"):
        run_many(TASKS, agent="noop", on="ray", resume=True)


def test_rollouts_without_a_description_of_their_engine_need_an_agent(local: Sandboxes, tmp_path: Path) -> None:
    with RolloutStore(tmp_path) as store:
        store.begin("old", TASKS[0], about={"agent": "noop"})
        store.begin("new", TASKS[1], about={"agent": "noop", "engine": {"agent": "noop", "sandbox": "local"}})
        for rollout_id in ("old", "new"):
            store.release(rollout_id)
        with pytest.raises(StoreError, match=r"1 rollouts do not say how they were run.*old"):
            resume_rollouts(store)
        assert store.get("new").outcome.status == "ok"
        [outcome] = resume_rollouts(store, agent="noop", sandbox=local)
        assert (outcome.rollout_id, outcome.status) == ("old", "ok")


def test_two_processes_that_resume_a_store_share_its_rollouts(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path
) -> None:
    killed_run(tmp_path, scripted, lambda: len(scripted.played()) >= 4)
    options: dict[str, Any] = {"agent": AskingAgent(), "model": Model(**scripted.model()), "sandbox": local, "seed": 7}
    with RolloutStore(tmp_path) as one, RolloutStore(tmp_path) as other, ThreadPoolExecutor(2) as pool:
        waiting = sorted(each for each in one.interrupted() if one.is_begun(each))
        assert waiting
        both = [pool.submit(resume_rollouts, store, **options) for store in (one, other)]
        outcomes = [outcome for each in both for outcome in each.result(120)]
        assert sorted(each.rollout_id for each in outcomes) == waiting, "each is resumed once"
        assert {answers_in(one, each.rollout_id) for each in outcomes} == {5}
        assert {each.status for each in outcomes} == {"ok"}


def test_an_interrupted_store_continues_under_another_path(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path
) -> None:
    killed_run(tmp_path / "first", scripted, lambda: len(scripted.played()) >= 6)
    shutil.copytree(tmp_path / "first", tmp_path / "moved")
    shutil.rmtree(tmp_path / "first")
    before = sum(file.read_bytes().count(b'"how":"complete"') for file in tmp_path.glob(f"moved/captures/*/{FILE}"))
    with RolloutStore(tmp_path / "moved") as store:
        outcomes = run(store, scripted, local, resume=True)
        assert [each.status for each in outcomes] == ["ok"] * 6
        assert {answers_in(store, each.rollout_id) for each in outcomes} == {5}
        assert before >= 3


def test_a_damaged_journal_ends_its_rollout_without_a_reward(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path
) -> None:
    interrupted, _ = _interrupted(tmp_path, scripted)
    with RolloutStore(tmp_path) as store:
        file = store.captures / interrupted / FILE
        file.write_bytes(file.read_bytes().replace(b'"chat.completion"', b'"chat.completio2"', 1))
        before = len(scripted.played())
        options = EngineOptions(agent=AskingAgent(), model=Model(**scripted.model()), sandbox=local, store=store)
        with Engine(options) as engine:
            outcome = engine.resume(interrupted)
        assert (outcome.status, outcome.reward, len(scripted.played())) == ("env_failed", None, before)
        assert "calls.log is damaged" in str(outcome.reason)
        assert interrupted not in store.interrupted()


def test_the_newest_run_continues_although_the_clock_was_set_back(tmp_path: Path) -> None:
    with RolloutStore(tmp_path) as store:
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "29991231T235959-0000-9f3c.jsonl").touch()  # made before the clock was set back
        for number in range(12):
            with RunFile(store, resume=False) as run_file:
                run_file.begin(number, f"r{number}")
        with RunFile(store, resume=True) as newest:
            assert newest._rollouts == {11: "r11"}
            with pytest.raises(RolloutError, match="Another process runs the batch"):
                RunFile(store, resume=True)


def test_a_beginning_that_was_killed_leaves_nothing(local: Sandboxes, tmp_path: Path) -> None:
    with RolloutStore(tmp_path) as store:
        (tmp_path / "rollouts" / "half").mkdir()
        (tmp_path / "running" / "half").touch()
        assert store.interrupted() == ["half"]
        assert not store.is_begun("half")
        assert store.interrupted() == []
        with Engine(EngineOptions(agent="noop", sandbox=local, store=store)) as engine:
            assert engine.run(TASKS[0], rollout_id="half").status == "ok"
        assert store.is_begun("half")
