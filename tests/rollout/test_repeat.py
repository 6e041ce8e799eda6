"""Runs with one seed are equal, at any concurrency; a comparison of two runs names the first difference."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asking_agent import AskingAgent
from openenv.rollout import EngineOptions, Model, Outcome, RolloutStore, Sampling, Task, run_many, run_rollout
from openenv.rollout.agents import Shell
from openenv.rollout.capture.normalise import RequestDigests, normalised
from openenv.rollout.capture.records import read
from openenv.rollout.store.comparison import compare_rollouts, compare_stores, steps
from openenv.rollout.tasks.model_parameters import derived_seed
from openenv.sandboxes.base import Sandboxes
from openenv.testing import Script, ScriptedModel, Turn

TASKS = [
    Task(instruction=f"Task {name}", verify=("test -s answers.txt",), task_id=name)
    for name in ("a", "b", "a", "b", "a", "b")
]


@pytest.fixture
def model() -> Iterator[Model]:
    turns = (Turn(text="I drew ${seed}"), Turn(text="and ${seed}"), Turn(text="done ${seed}"))
    with ScriptedModel(Script(name="seeds", turns=turns)) as server:
        yield Model(**server.model())


def run(store: RolloutStore, model: Model, local: Sandboxes, **options: Any) -> list[Outcome]:
    return run_many(TASKS, agent=AskingAgent(), model=model, sandbox=local, store=store, **options)


def test_runs_with_one_seed_are_equal_at_any_concurrency(local: Sandboxes, model: Model, tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "one") as one, RolloutStore(tmp_path / "other") as other:
        first = run(one, model, local, seed=7, concurrency=1)
        second = run(other, model, local, seed=7, concurrency=6)
        result = compare_stores(one, other)
        assert (result.equal, result.differences) == (6, [])
        assert result.digests[0] == result.digests[1]
        for outcome, repeated in zip(first, second, strict=True):
            assert outcome.sequences
            assert [each.input_ids for each in outcome.sequences] == [each.input_ids for each in repeated.sequences]
            assert [each.logprobs for each in outcome.sequences] == [each.logprobs for each in repeated.sequences]
        seeds = [[call.sent["seed"] for call in read(one.captures / each.rollout_id).calls] for each in first]
        assert len({seed for each in seeds for seed in each}) == 18  # each call of each rollout has its own
        with RolloutStore(tmp_path / "third") as third:
            run(third, model, local, seed=8, concurrency=6)
            different = compare_stores(one, third)
            assert (different.equal, len(different.differences)) == (0, 6)
            assert different.differences[0].place == "sampling of call 1"


def test_the_seed_of_a_call_is_documented() -> None:
    assert derived_seed(7, "sum", 0) == 459928521
    assert derived_seed(derived_seed(7, "sum", 0), 1) == 576933541
    assert all(0 <= derived_seed(number) < 2**31 for number in range(200))


def test_a_run_without_a_seed_sends_none(local: Sandboxes, model: Model, tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "store") as store:
        for outcome in run(store, model, local):
            assert all("seed" not in call.sent for call in read(store.captures / outcome.rollout_id).calls)
            assert "sample" not in outcome.metadata


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the clock is fixed for programs of x86-64 only")
def test_a_fixed_clock_is_that_of_all_commands(local: Sandboxes) -> None:
    waits = """python3 -c "
import asyncio, threading, time
began = time.monotonic()
time.sleep(0.05); threading.Event().wait(0.05); asyncio.run(asyncio.sleep(0.05))
assert time.monotonic() - began > 0.14
print(time.time(), time.time_ns())" > python.txt"""
    node = "command -v node > /dev/null || exit 0; node -p 'Date.now()' > node.txt"
    lines = ["date -u +%FT%T.%N > date.txt; timeout 0.1 sleep 60 || sleep 0.1", waits, node]
    task = Task(instruction="What time is it?", verify=("test $(date +%Y) != 2001",))
    outcome = run_rollout(task, agent=Shell(lines), sandbox=local, clock="2001-02-03 04:05:06")
    assert (outcome.status, outcome.reward) == ("ok", 1.0), outcome.reason
    files = {path.rpartition("/")[2]: text.strip() for path, text in outcome.files.items()}
    assert files["date.txt"] == "2001-02-03T04:05:06.000000000"
    assert files["python.txt"] == "981173106.0 981173106000000000"
    assert files.get("node.txt", "981173106000") == "981173106000"
    assert set(files) <= {"date.txt", "python.txt", "node.txt"}


def test_a_clock_is_a_time() -> None:
    assert EngineOptions(clock="2026-01-01T13:00:00+01:00").clock is not None
    with pytest.raises(ValueError, match="clock must be a time"):
        EngineOptions(clock="noon")


def test_two_seeds_are_refused(local: Sandboxes, model: Model, tmp_path: Path) -> None:
    fixed = model.model_copy(update={"sampling": Sampling(seed=3).parameters()})
    with RolloutStore(tmp_path / "store") as store, pytest.raises(ValueError, match="pass either"):
        run(store, fixed, local, seed=7)
    with pytest.raises(ValueError, match="exclude each other"):
        Model(base_url="http://x", name="m", seed=1, sampling=Sampling(seed=2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Today's date: Thu Nov 19 2026", "Today's date: Fri Nov 20 2026"),
        ("at 2026-11-19T06:40:03.123Z", "at 2026-11-19 23:01:00+02:00"),
        ("4 passed in 0.03s", "4 passed in 12.5 seconds"),
        ("real 0m0.012s", "real 0m0.9s"),
        ("/tmp/tmpab12cd/x.py", "/tmp/tmpzz99yy/x.py"),
        ("session ses_6f3aK2mNQxx9Lw", "session ses_9a9aK2mNQxx1Qq"),
        ("0b5d94f8-8a4e-4a52-b6a5-4c2a4f0e0001", "1b5d94f8-8a4e-4a52-b6a5-4c2a4f0e0002"),
        ("msg_ba16d55a-2ebb-5b7c-9194-0123456789ab", "msg_0b5d94f8-8a4e-4a52-b6a5-4c2a4f0e0001"),
        ("call_7f8c3fec6211e2f2_0", "call_814b6b780d56fb77_0"),
        ("fc_scripted-827c5573c03b475a80c4000927cb3f28_0", "fc_scripted-026ee7cae69947cebae856fc3e7f0b31_0"),
        ("Recent commits:\nab12cd3 first", "Recent commits:\n1234567 first"),
        ("[main (root-commit) ab12cd3] first", "[main (root-commit) 1234567] first"),
        ("Chunk ID: df09a6\nWall time: 0.0512 seconds\n", "Chunk ID: abcdef\nWall time: 1.2 seconds\n"),
        ("Process running with session ID 4711", "Process running with session ID 81205"),
        ("Command running in background with ID: bq7k2m1.", "Command running in background with ID: x9p."),
        ("<object at 0x7f12ab34cd56>", "<object at 0x7f99ab34cd00>"),
        ("http://127.0.0.1:43121/v1", "http://127.0.0.1:51999/v1"),
        ("created 1794805356.7", "created 1794809999"),
        ("-rw-r--r-- 1 user user 12 Nov 19 06:36 a.txt", "-rw-r--r-- 1 user user 12 Nov 19 06:59 a.txt"),
    ],
)
def test_times_and_random_ids_do_not_count(one: str, other: str) -> None:
    assert one != other
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("the answer is 42", "the answer is 43"),
        ("3 failed", "4 failed"),
        ("def f(x): return x", "def g(x): return x"),
        ("line 12 of a.py", "line 13 of a.py"),
        ("score_12", "score_13"),
        ("user ID: 12", "user ID: 13"),
        ("total 1234567", "total 7654321"),
        ("0.1234567e5", "0.1234568e5"),
        ("version 1.2.3", "version 1.2.4"),
    ],
)
def test_everything_else_counts(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


def test_the_digest_of_a_request_ignores_the_order_of_keys_and_ids_of_sessions() -> None:
    digests = RequestDigests()
    first = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "user": "a"}
    second = {"user": "b", "messages": [{"content": "hi", "role": "user"}], "model": "m"}
    assert digests.of("openai_chat", first) == digests.of("openai_chat", second)
    assert digests.of("openai_chat", first) != digests.of("anthropic", first)
    assert digests.of("openai_chat", first) != digests.of("openai_chat", {**first, "messages": []})


def test_a_comparison_names_the_first_difference(local: Sandboxes, model: Model, tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "store") as store:
        first, second = run(store, model, local, seed=1)[:2]
        one, other = ((store, store.get(each.rollout_id)) for each in (first, second))
        assert compare_rollouts(one, one).differences == []
        [difference] = compare_rollouts(one, other).differences
        assert difference.place == "task"
        assert dict(steps(*one))["reward"] == 1.0
        assert json.dumps([difference.first, difference.second])
