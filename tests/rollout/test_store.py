"""The store: nothing lost, nothing half written, whatever dies in between and however many write at once."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from openenv.errors import CaptureError, StoreError
from openenv.rollout import Outcome, RolloutStore, Task
from openenv.rollout.capture import records
from openenv.rollout.store import store as store_module
from openenv.rollout.store.exports import export_rollouts
from stored_rollouts import write_square

TASK = Task(instruction="write it", verify=("true",), task_id="t")


def outcome(rollout_id: str, **fields: Any) -> Outcome:
    return Outcome.model_validate({"rollout_id": rollout_id, "status": "ok", "reward": 1.0, "agent": "noop", **fields})


@pytest.fixture
def store(tmp_path: Path) -> RolloutStore:
    return RolloutStore(tmp_path / "store")


def shards(store: RolloutStore) -> list[Path]:
    return sorted((store.root / "shards").glob("*.jsonl"))


def test_what_was_stored_is_found_again(store: RolloutStore, tmp_path: Path) -> None:
    tree = tmp_path / "tree.tar"
    tree.write_bytes(b"tar")
    store.add(outcome("one", task_id="t"), TASK, worktree=tree, baseline=tmp_path / "not there")
    with RolloutStore(store.root) as again:
        record = again.get("one")
        assert record.outcome.reward == 1.0
        assert record.task == TASK
        kept = again.file("one", "worktree.tar")
        assert kept is not None
        assert kept.read_bytes() == b"tar"
        assert again.file("one", "baseline.tar") is None


def test_rows_can_be_filtered_by_status_task_and_agent(store: RolloutStore) -> None:
    store.add(outcome("one", task_id="a"), TASK)
    store.add(outcome("two", task_id="b", status="truncated", reward=None), TASK)
    assert [row.rollout_id for row in store.find()] == ["two", "one"]
    assert [row.rollout_id for row in store.find(status="truncated")] == ["two"]
    assert [row.rollout_id for row in store.find(task_id="a", agent="noop")] == ["one"]
    assert len(store.find(limit=1)) == 1
    with pytest.raises(ValueError, match="no such column"):
        store.find(reward="1")


def test_rows_and_exports_can_be_limited_to_rewards_that_can_be_trusted(store: RolloutStore, tmp_path: Path) -> None:
    for name in ("judged", "isolated", "shared", None):
        store.add(outcome(str(name), trust=name), TASK)
    ids = [row.rollout_id for row in store.find(min_trust="isolated")]
    assert ids == ["isolated", "judged"]
    assert len(store.find(min_trust="shared")) == 3  # a record of before trust was stored reaches no minimum
    assert [row.trust for row in store.find(trust="shared")] == ["shared"]
    assert [record.outcome.trust for record in store.records(min_trust="judged")] == ["judged"]
    assert export_rollouts(store, tmp_path / "out.jsonl", min_trust="judged") == 1
    assert json.loads((tmp_path / "out.jsonl").read_text())["outcome"]["trust"] == "judged"


def test_records_of_before_trust_was_stored_are_read(store: RolloutStore) -> None:
    store.add(outcome("old"), TASK)
    [shard] = shards(store)
    record = json.loads(shard.read_text())
    del record["outcome"]["trust"], record["task"]["min_trust"]
    shard.write_text(json.dumps(record) + "\n")
    store.rebuild()
    assert store.find()[0].trust is None
    assert store.get("old").outcome.trust is None


def test_an_index_of_an_older_version_is_built_again(store: RolloutStore) -> None:
    store.add(outcome("one", trust="judged"), TASK)
    assert store.count() == 1
    store.close()
    with sqlite3.connect(store.root / "index.sqlite") as db:
        db.executescript("DROP INDEX of_first; DROP INDEX of_last; ALTER TABLE records DROP COLUMN trust;")
        db.execute("PRAGMA user_version=1")
    with RolloutStore(store.root) as again:
        assert [row.trust for row in again.find()] == ["judged"]


def test_the_beginning_of_an_id_is_enough_when_it_is_the_only_one(store: RolloutStore) -> None:
    store.add(outcome("abc1"), TASK)
    store.add(outcome("abd2"), TASK)
    assert store.get("abc").rollout_id == "abc1"
    with pytest.raises(StoreError, match="several"):
        store.get("ab")
    with pytest.raises(StoreError, match="no rollout"):
        store.get("x")


def test_an_id_is_used_once(store: RolloutStore) -> None:
    store.add(outcome("one"), TASK)
    with pytest.raises(StoreError, match="already"):
        store.add(outcome("one", reward=0.0), TASK)
    assert store.get("one").outcome.reward == 1.0


@pytest.mark.parametrize("rollout_id", ["../x", "", ".hidden", "a/b"])
def test_an_id_that_is_a_path_is_refused(store: RolloutStore, rollout_id: str) -> None:
    with pytest.raises(StoreError, match="no id"):
        store.begin(rollout_id, TASK)


def test_a_later_verification_is_added_and_the_first_stays(store: RolloutStore) -> None:
    first = store.add(outcome("one"), TASK)
    later = store.add_verification(outcome("one", reward=0.5), TASK)
    assert [record.outcome.reward for record in store.history("one")] == [0.5, 1.0]
    assert store.get("one", record_id=first.record_id).outcome.reward == 1.0
    assert store.get("one", record_id=later.record_id).outcome.reward == 0.5
    assert len(store.find(latest=False)) == 2
    with pytest.raises(StoreError, match="no rollout"):
        store.add_verification(outcome("two"), TASK)


def test_the_first_verdict_is_reported_until_another_is_asked_for(store: RolloutStore, tmp_path: Path) -> None:
    store.add(outcome("one"), TASK)
    store.add(outcome("two"), TASK)
    store.add_verification(outcome("one", reward=0.5, status="truncated"), TASK, verdict="strict")
    store.add_verification(outcome("two", reward=0.4), TASK, verdict="strict")
    newest = store.add_verification(outcome("one", reward=0.25), TASK)
    assert store.get("one").outcome.reward == 1.0
    assert [row.reward for row in store.find()] == [1.0, 1.0]
    assert [record.outcome.reward for record in store.records()] == [1.0, 1.0]
    assert store.find(status="truncated") == []
    assert store.stats()[0].mean == 1.0
    assert store.get("one", verdict="last").outcome.reward == 0.25
    assert store.get("one", verdict=newest.verdict[:5]).outcome.reward == 0.25
    assert {row.rollout_id: row.reward for row in store.find(verdict="last")} == {"one": 0.25, "two": 0.4}
    assert {row.rollout_id: row.reward for row in store.find(latest=True)} == {"one": 0.25, "two": 0.4}
    assert {row.rollout_id: row.reward for row in store.find(verdict="strict")} == {"one": 0.5, "two": 0.4}
    assert [row.rollout_id for row in store.find(verdict=newest.verdict)] == ["one"]

    def exported(**options: Any) -> list[tuple[object, object]]:
        export_rollouts(store, tmp_path / "out.jsonl", **options)
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert all(line["reward"] == line["outcome"]["reward"] for line in lines)
        return [(line["verdict"], line["reward"]) for line in lines]

    assert exported() == [("first", 1.0), ("first", 1.0)]
    assert exported(verdict="stri") == [("strict", 0.5), ("strict", 0.4)]
    assert sorted(exported(verdict="last")) == sorted([("strict", 0.4), (newest.verdict, 0.25)])
    with pytest.raises(StoreError, match="There is no verdict 'lenient'"):
        exported(verdict="lenient")
    with pytest.raises(StoreError, match="no verdict 'x'"):
        store.get("one", verdict="x")
    with pytest.raises(StoreError, match="a verdict 'strict' already"):
        store.add_verification(outcome("one"), TASK, verdict="strict")
    for name in ("first", "last", "", "a b", "../x"):
        with pytest.raises(StoreError, match="cannot be called"):
            store.add_verification(outcome("one"), TASK, verdict=name)


def test_the_last_verdict_is_known_after_the_index_was_rebuilt_and_shards_went(store: RolloutStore) -> None:
    store.add(outcome("one"), TASK)
    with RolloutStore(store.root) as other:
        other.add_verification(outcome("one", reward=0.5), TASK)
    assert [row.reward for row in store.find(verdict="last")] == [0.5]
    store.rebuild()
    assert [row.reward for row in store.find(verdict="last")] == [0.5]
    next(shard for shard in shards(store) if '"reverify"' in shard.read_text()).unlink()
    assert [row.reward for row in store.find(verdict="last")] == [1.0]


def test_a_clock_that_is_set_back_does_not_change_the_order_of_verdicts(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([3000.0, 2000.0, 1000.0, 1000.0])
    clock = SimpleNamespace(time=lambda: next(times), strftime=time.strftime, gmtime=time.gmtime)
    store.begin("one", TASK)
    monkeypatch.setattr(store_module, "time", clock)
    store.add(outcome("one"), TASK)
    for reward in (0.75, 0.5, 0.25):
        with RolloutStore(store.root) as other:  # as on another machine
            other.add_verification(outcome("one", reward=reward), TASK)
    for _ in range(2):
        assert [record.outcome.reward for record in store.history("one")] == [0.25, 0.5, 0.75, 1.0]
        assert [record.sequence for record in store.history("one")] == [3, 2, 1, 0]
        assert store.get("one", verdict="first").outcome.reward == 1.0
        assert store.get("one", verdict="last").outcome.reward == 0.25
        assert [row.reward for row in store.find(verdict="last")] == [0.25]
        store.rebuild()


def test_verdicts_that_are_added_at_once_have_numbers_of_their_own(store: RolloutStore) -> None:
    store.add(outcome("one"), TASK)
    refused: list[StoreError] = []

    def add(number: int) -> None:
        with RolloutStore(store.root) as other:
            other.add_verification(outcome("one", reward=number / 8), TASK)
            try:
                other.add_verification(outcome("one"), TASK, verdict="same")
            except StoreError as exc:
                refused.append(exc)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = store.history("one")
    assert [record.sequence for record in history] == list(range(9, -1, -1))
    assert sum(record.verdict == "same" for record in history) == 1
    assert len(refused) == 7


def test_records_of_before_verdicts_had_names_are_read(store: RolloutStore) -> None:
    store.add(outcome("old"), TASK)
    store.add_verification(outcome("old", reward=0.0), TASK)
    [shard] = shards(store)
    records = [json.loads(line) for line in shard.read_text().splitlines()]
    for record in records:
        del record["verdict"], record["sequence"]
    shard.write_text("".join(json.dumps(record) + "\n" for record in records))
    store.rebuild()
    assert store.get("old").verdict == "first"
    assert store.get("old", verdict="last").verdict == records[1]["record_id"]
    assert [row.verdict for row in store.find(latest=False)] == [records[1]["record_id"], "first"]
    assert store.add_verification(outcome("old", reward=0.5), TASK).sequence == 2
    assert [row.reward for row in store.find(verdict="last")] == [0.5]


def test_tasks_that_are_refused_today_are_still_read(store: RolloutStore) -> None:
    store.add(outcome("old"), Task.model_construct(instruction="", verify=("", "# later"), task_id="t"))
    assert store.get("old").task.verify == ("", "# later")


def test_rollouts_are_selected_by_group_model_reward_time_and_text(store: RolloutStore) -> None:
    store.add(outcome("one", model="small", reward=0.0, metadata={"group": "g1"}), TASK)
    store.add(outcome("two", model="large", reward=0.5, reason="it said 100%"), TASK)
    grouped = Task(instruction="x", metadata={"group": "g2"})
    between = store.add(outcome("three", model="large", reward=1.0, task_id="Sort_it"), grouped).stored_at

    def ids(**conditions: Any) -> list[str]:
        return [row.rollout_id for row in store.find(order="oldest", **conditions)]

    assert ids(model="large") == ["two", "three"]
    assert ids(group="g1") == ["one"]
    assert ids(group=("g1", "g2")) == ["one", "three"]
    assert ids(min_reward=0.5) == ["two", "three"]
    assert ids(max_reward=0.5) == ["one", "two"]
    assert ids(since=between) == ["three"]
    assert ids(until=between) == ["one", "two"]
    assert ids(text="SORT_") == ["three"]
    assert ids(text="0%") == ["two"]
    assert ids(text="_wo") == []
    assert ids(limit=1, offset=1) == ["two"]
    assert [row.rollout_id for row in store.find(order="reward")] == ["three", "two", "one"]
    assert store.count(model="large") == 2


def test_figures_tell_tasks_apart_and_leave_out_what_has_no_reward(store: RolloutStore) -> None:
    for number, reward in enumerate((1.0, 1.0, 0.0, None)):
        store.add(outcome(f"a{number}", task_id="a", reward=reward, wall_s=number), TASK)
    store.add(outcome("b", task_id="b", reward=0.5), TASK)
    first, second = store.stats(by="task_id")
    assert (first.name, first.rollouts, first.scored, first.passed) == ("a", 4, 3, 2)
    assert first.pass_rate == pytest.approx(2 / 3)
    assert first.mean == pytest.approx(2 / 3)
    assert first.deviation == pytest.approx(0.57735, abs=1e-4)
    assert first.interval == (pytest.approx(0.2077, abs=1e-4), pytest.approx(0.9385, abs=1e-4))
    assert first.wall_s == 1.5
    assert (second.name, second.passed, second.deviation) == ("b", 0, None)
    [whole] = store.stats()
    assert (whole.rollouts, whole.scored, whole.lowest, whole.highest) == (5, 4, 0.0, 1.0)
    assert store.stats(task_id="none") == []


def test_the_index_is_rebuilt_from_the_shards(store: RolloutStore) -> None:
    store.add(outcome("one"), TASK)
    assert store.count() == 1
    store.close()
    for path in store.root.glob("index.sqlite*"):
        path.unlink()
    assert [row.rollout_id for row in RolloutStore(store.root).find()] == ["one"]


def test_a_broken_index_is_rebuilt(store: RolloutStore) -> None:
    store.add(outcome("one"), TASK)
    store.close()
    for path in store.root.glob("index.sqlite-*"):
        path.unlink()
    (store.root / "index.sqlite").write_bytes(b"this is no database" * 1000)
    again = RolloutStore(store.root)
    assert [row.rollout_id for row in again.find()] == ["one"]
    again.add(outcome("two"), TASK)
    assert {row.rollout_id for row in RolloutStore(store.root).find()} == {"one", "two"}


def test_torn_and_foreign_lines_are_left_out(store: RolloutStore) -> None:
    store.add(outcome("one"), TASK)
    store.close()
    whole = shards(store)[0].read_bytes()
    (store.root / "shards" / "torn.jsonl").write_bytes(whole[: len(whole) // 2])
    (store.root / "shards" / "odd.jsonl").write_bytes(b"\0\0\0\n[1]\n{}\n" + whole.replace(b'"one"', b'"two"', 9)[:-1])
    again = RolloutStore(store.root)
    assert [row.rollout_id for row in again.find()] == ["one"]
    again.rebuild()
    assert [row.rollout_id for row in again.find()] == ["one"]


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": {"reason": {"a": 1}}},
        {"outcome": {"reward": [1]}},
        {"outcome": {"reward": 10**400}},
        {"outcome": {"task_id": "\ud800"}},
        {"outcome": {"turns": [1]}},
        {"stored_at": "never"},
        {"outcome": None},
    ],
)
def test_lines_with_values_of_other_types_are_skipped(store: RolloutStore, change: dict[str, Any]) -> None:
    store.add(outcome("one"), TASK)
    (shard,) = shards(store)
    record = json.loads(shard.read_text().splitlines()[0])
    record |= {"record_id": "other", "rollout_id": "other"}
    for name, value in change.items():
        record[name] = {**record[name], **value} if isinstance(value, dict) else value
    shard.with_name("other.jsonl").write_text(json.dumps(record) + "\n" + "[" * 200_000 + "\n")
    store.add(outcome("two"), TASK)
    assert [row.rollout_id for row in store.find()] == ["two", "one"]
    assert store.count() == 2


def test_links_to_nothing_among_the_shards_are_skipped(store: RolloutStore) -> None:
    store.add(outcome("one"), TASK)
    (store.root / "shards" / "gone.jsonl").symlink_to("nowhere")
    (store.root / "shards" / "itself.jsonl").symlink_to("itself.jsonl")
    (store.root / "shards" / "folder.jsonl").mkdir()
    os.mkfifo(store.root / "shards" / "pipe.jsonl")
    (store.root / "shards" / "device.jsonl").symlink_to("/dev/zero")
    with RolloutStore(store.root) as again:
        assert [row.rollout_id for row in again.find()] == ["one"]


def test_an_index_with_damaged_pages_is_rebuilt_by_a_reader(store: RolloutStore) -> None:
    for number in range(200):
        store.add(outcome(f"r{number}", task_id=f"t{number}" * 20), TASK)
    assert store.count() == 200
    store.close()
    file = store.root / "index.sqlite"
    data = bytearray(file.read_bytes())
    data[8192:] = b"\xff" * (len(data) - 8192)  # the first pages, with the schema, stay
    file.write_bytes(data)
    with RolloutStore(store.root) as again:
        assert len(again.find()) == 200
        assert again.count() == 200


def test_an_index_with_damaged_texts_is_rebuilt_by_a_reader(store: RolloutStore) -> None:
    store.add(outcome("one"), TASK)
    assert store.count() == 1
    (shard,) = shards(store)
    store.close()
    file = store.root / "index.sqlite"
    file.write_bytes(file.read_bytes().replace(shard.name.encode(), b"\xad" * len(shard.name)))
    with RolloutStore(store.root) as again:
        assert [row.rollout_id for row in again.find()] == ["one"]


def test_a_folder_in_place_of_the_index_is_a_typed_error(store: RolloutStore) -> None:
    store.add(outcome("one"), TASK)
    store.close()
    (store.root / "index.sqlite").unlink(missing_ok=True)
    (store.root / "index.sqlite").mkdir()
    with RolloutStore(store.root) as again:
        assert [row.rollout_id for row in again.find()] == ["one"]  # in memory
        with pytest.raises(StoreError, match="is a folder"):
            again.rebuild()


def test_records_of_calls_that_are_no_file_are_a_typed_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(CaptureError, match="not an ordinary file"):
            records.read(tmp_path / name)


def test_damaged_records_of_calls_are_a_typed_error(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    folder.mkdir()
    write_square(folder, "one")
    (file,) = [each for each in folder.rglob("*") if each.is_file()]
    whole = file.read_bytes()
    assert records.read(file).calls
    random = Random(1)
    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(5):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        file.write_bytes(damaged)
        with contextlib.suppress(CaptureError):
            assert records.read(file) is not None


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(store: RolloutStore) -> None:
    store.add(outcome("one"), TASK)
    line = shards(store)[0].read_bytes()
    record = json.loads(line) | {"record_id": "other", "rollout_id": "two"}
    text = json.dumps(record).encode() + b"\n"
    growing = store.root / "shards" / "growing.jsonl"
    growing.write_bytes(text[:100])
    assert len(store.find()) == 1
    growing.write_bytes(text)
    assert {row.rollout_id for row in store.find()} == {"one", "two"}


def test_a_shard_that_was_removed_is_forgotten(store: RolloutStore) -> None:
    store.add(outcome("one"), TASK)
    assert len(store.find()) == 1
    shards(store)[0].unlink()
    assert store.find() == []


def test_a_store_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        RolloutStore(tmp_path / "file" / "store")


def test_threads_write_to_one_store_at_once(store: RolloutStore) -> None:
    threads = [threading.Thread(target=store.add, args=(outcome(f"r{n}"), TASK)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {row.rollout_id for row in store.find()} == {f"r{n}" for n in range(24)}
    assert len(shards(store)) == 1


WRITER = """
import sys
from openenv.rollout import Outcome, RolloutStore, Task
store = RolloutStore(sys.argv[1])
for n in range(int(sys.argv[3])):
    store.add(Outcome(rollout_id=f"{sys.argv[2]}-{n}", status="ok"), Task(instruction="x"))
print("done", flush=True)
"""


def writer(store: RolloutStore, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(store.root), name, str(count)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_processes_write_to_one_store_at_once(store: RolloutStore) -> None:
    processes = [writer(store, f"p{n}", 25) for n in range(4)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["done\n"] * 4
    assert len(store.find()) == 100
    assert len(shards(store)) == 4


def test_a_writer_that_is_killed_loses_nothing_that_it_had_stored(store: RolloutStore) -> None:
    process = writer(store, "p", 100_000)
    while len(store.find()) < 10:
        assert process.poll() is None
    process.kill()
    process.communicate(timeout=30)
    rows = store.find()
    whole = sum(path.read_bytes().count(b"\n") for path in shards(store))
    assert len(rows) == whole >= 10
    assert {store.read(row).outcome.status for row in rows} == {"ok"}
    numbers = sorted(int(row.rollout_id.split("-")[1]) for row in rows)
    assert numbers == list(range(len(rows)))
    store.add(outcome("after"), TASK)
    assert len(store.find()) == whole + 1


def test_a_rollout_whose_engine_died_is_distinguished_from_one_that_runs(store: RolloutStore) -> None:
    code = (
        "import os, sys; from openenv.rollout import RolloutStore, Task\n"
        "store = RolloutStore(sys.argv[1]); store.begin('lost', Task(instruction='x')); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(store.root)], check=False, timeout=60)
    store.begin("running", TASK)
    store.add(outcome("ended"), TASK)
    with RolloutStore(store.root) as other:
        assert other.interrupted() == ["lost"]


FULL = """
import resource, sys
from openenv.errors import CaptureError, StoreError
from openenv.rollout import Outcome, RolloutStore, Task
store = RolloutStore(sys.argv[1])
store.add(Outcome(rollout_id="first", status="ok"), Task(instruction="x"))
resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, resource.RLIM_INFINITY))
big = Outcome(rollout_id="big", status="ok", agent_log_tail="x" * 200_000)
try:
    store.add(big, Task(instruction="x"))
except StoreError as exc:
    print(exc, exc.outcome is big)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.add(Outcome(rollout_id="last", status="ok"), Task(instruction="x"))
print(sorted(row.rollout_id for row in store.find()), store.interrupted())
"""


def test_a_full_disk_is_a_typed_error_and_leaves_nothing_half_stored(store: RolloutStore) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(store.root)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "The rollout could not be stored: the disk is full True\n['first', 'last'] []\n", done.stderr
    assert all(json.loads(line) for path in shards(store) for line in path.read_text().splitlines())
    assert sorted(path.name for path in (store.root / "rollouts").iterdir()) == ["first", "last"]
