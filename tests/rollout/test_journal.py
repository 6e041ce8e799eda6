"""A rollout has one journal from its first moment: its task and its options are in it, with or without model calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenv.errors import CaptureError, StoreError
from openenv.rollout import Engine, EngineOptions, Model, Progress, RolloutStore, Task, resume_rollouts
from openenv.rollout.capture.records import FILE, Recorder, read, read_entries
from openenv.sandboxes.base import Sandboxes
from stored_rollouts import Talk

PHASES = ("sandbox", "setup", "agent", "collect", "verify", "store")
TASK = Task(instruction="Wait.", setup=("echo 1 > one",), verify=('[ "$PWD" = /srv/me/workdir ] && test -s one',))
# One process runs a rollout for each phase. When each has reached its phase, the process is killed.
PROGRAM = """
import os, signal, sys, threading
from openenv.rollout import Engine, EngineOptions, RolloutStore
from test_journal import PHASES, TASK
store = RolloutStore(sys.argv[1])
barrier = threading.Barrier(len(PHASES), lambda: os.kill(os.getpid(), signal.SIGKILL))
def run(phase):
    def stop(event):
        if event.phase == phase:
            barrier.wait()
    with Engine(EngineOptions(agent="noop", sandbox="local", home="/srv/me", store=store)) as engine:
        engine.run(TASK, rollout_id=phase, metadata={"of": phase}, on_progress=stop)
for phase in PHASES:
    threading.Thread(target=run, args=(phase,)).start()
"""
ENGINE = {"agent": "noop", "sandbox": "local"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    with RolloutStore(tmp_path / "store") as opened:
        yield opened


def begin(store: RolloutStore, *rollout_ids: str) -> None:
    """Begin rollouts without a model that are interrupted at once."""
    for rollout_id in rollout_ids:
        store.begin(rollout_id, Task(instruction="x", verify=("true",)), about={"engine": ENGINE})
        store.release(rollout_id)


def test_a_rollout_without_a_model_that_is_killed_in_any_phase_is_resumed_from_its_journal(
    local: Sandboxes, store: RolloutStore
) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "support")])
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", PROGRAM, str(store.root)], env=environment, check=False, timeout=120)
    assert store.interrupted() == sorted(PHASES)
    assert {each: store.events(each)[-1]["phase"] for each in PHASES} == {each: each for each in PHASES}
    for folder in (store.root / "rollouts", store.root / "running"):
        assert not [path for path in folder.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl")]
    outcomes = resume_rollouts(store)
    assert {each.rollout_id: each.metadata["of"] for each in outcomes} == {each: each for each in PHASES}
    assert [(each.status, each.reward, each.agent) for each in outcomes] == [("ok", 1.0, "noop")] * len(PHASES)
    assert store.running() == []
    assert list((store.root / "running").iterdir()) == []
    for each in PHASES:
        assert store.task(each) == TASK
        assert [head["k"] for head, _ in read_entries(store.captures / each)].count("resume") == 1
        assert store.events(each)[-1]["phase"] == "done"


def test_a_beginning_that_was_cut_at_any_byte_ran_nothing(store: RolloutStore) -> None:
    begin(store, "cut", "whole")
    file = store.captures / "cut" / FILE
    data = file.read_bytes()
    for size in range(len(data)):
        file.write_bytes(data[:size])
        with pytest.raises(StoreError, match=r"cannot be resumed: .*calls\.log"):
            store.resume("cut")
    file.write_bytes(data)
    task, begun = store.resume("cut")
    assert (task.instruction, begun.engine) == ("x", ENGINE)
    store.release("cut")
    for size in (0, 1, data.index(b"\n") + 1, len(data) - 1):
        file.write_bytes(data[:size])
        assert store.interrupted() == ["cut", "whole"]
        assert not store.is_begun("cut")
        assert store.interrupted() == ["whole"]
        begin(store, "cut")
    assert [outcome.status for outcome in resume_rollouts(store)] == ["ok", "ok"]


def test_a_damaged_journal_hides_no_other_rollout(local: Sandboxes, store: RolloutStore) -> None:
    begin(store, "first", "beginning", "middle", "last")
    for rollout_id, words in (("beginning", b'"true"'), ("middle", b'"half"')):
        recorder = Recorder(store.captures / rollout_id / FILE)
        for message in ("half", "whole"):
            recorder.event(Progress(rollout_id=rollout_id, phase="setup", message=message))
        file = store.captures / rollout_id / FILE
        file.write_bytes(file.read_bytes().replace(words, words.upper(), 1))
    assert store.interrupted() == ["beginning", "first", "last", "middle"]
    assert {each.rollout_id: bool(each.damage) for each in store.running()}["beginning"]
    assert store.is_begun("beginning"), "a damaged journal is kept"
    with pytest.raises(StoreError, match="damaged: its first entry"):
        store.task("beginning")
    with pytest.raises(StoreError, match=r"1 rollouts .*beginning.*is damaged"):
        resume_rollouts(store)
    assert {each: store.get(each).outcome.status for each in ("first", "last")} == {"first": "ok", "last": "ok"}
    outcome = store.get("middle").outcome
    assert (outcome.status, outcome.reward) == ("env_failed", None)
    assert "no whole entry from byte" in str(outcome.reason)
    with pytest.raises(CaptureError, match="no whole entry"):
        read(store.captures / "middle")
    assert store.interrupted() == ["beginning"]
    with Engine(EngineOptions(agent="noop", sandbox=local, store=store)) as engine:
        assert engine.run(TASK.model_copy(update={"verify": ("true",)}), rollout_id="new").status == "ok"


def test_the_calls_of_another_machine_join_the_journal(store: RolloutStore, tmp_path: Path) -> None:
    begin(store, "far")
    store.resume("far")
    driver = Recorder(store.captures / "far" / FILE)
    worker = Recorder(tmp_path / "worker" / FILE)
    talk = Talk(tmp_path / "worker", "far")
    for event in (
        Progress(rollout_id="far", phase="agent", message="starting"),
        Progress(rollout_id="far", phase="agent", message="model call 1", turn=1),
    ):
        driver.event(event)
        worker.event(event)
    talk.call([{"role": "user", "content": "go"}], [1], "there")
    (tmp_path / "worker" / "files").mkdir()
    (tmp_path / "worker" / "files" / "3f2a").write_bytes(b"content")
    store.keep_capture("far", tmp_path / "worker")
    assert [each["message"] for each in store.events("far")] == ["starting", "model call 1"]
    recording = read(store.captures / "far")
    assert (recording.model["name"], [call.ended for call in recording.calls]) == ("tiny", ["complete"])
    assert (store.captures / "far" / "files" / "3f2a").read_bytes() == b"content"
    assert store.begun("far").engine == ENGINE


def test_the_calls_of_a_begun_rollout_are_described_once(store: RolloutStore) -> None:
    begin(store, "one")
    Talk(store.captures / "one", "one")
    with pytest.raises(CaptureError, match="already"):
        Talk(store.captures / "one", "one")
    with pytest.raises(StoreError, match="already"):
        begin(store, "one")


def test_the_description_of_an_engine_has_no_secrets(store: RolloutStore) -> None:
    headers = {"X-Api-Key": "a-second-secret-key"}
    model = Model(base_url="http://me:pass%2Fword-12@host/v1", name="m", api_key="sk-01234567", extra_headers=headers)
    engine = Engine(EngineOptions(agent="single-turn", model=model, budget=None))
    store.begin("one", TASK, about=engine.about(TASK, {"group": "g1"}))
    data = (store.captures / "one" / FILE).read_bytes()
    assert not [secret for secret in (b"sk-0123", b"word-12", b"second-secret") if secret in data]
    begun = store.begun("one")
    assert (begun.group, begun.agent, begun.model, begun.engine["model"]["name"]) == ("g1", "single-turn", "m", "m")
