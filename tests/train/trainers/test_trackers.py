"""wandb, trackio and TensorBoard as they are on PyPI, without a network; `make test-trainers` sets them up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="it has an environment of its own: make test-trainers")

from openenv.rollout.capture.training_trace import RolloutTurn
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.tasks.task import Task
from openenv.train import EpisodeSample, SampleGroup, TrackedRun, open_tracker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ANSWER = "a | b\n<script>*x*</script>"


def groups() -> list[SampleGroup]:
    turns = [RolloutTurn(turn=1, completion_tokens=[ANSWER])]
    outcome = Outcome(rollout_id="r", status="ok", reward=0.5, turns=turns)
    failed = Outcome(rollout_id="f", status="env_failed")
    return [SampleGroup("one", {}, [EpisodeSample(outcome), EpisodeSample(failed)], task=Task(instruction="Do it."))]


def recorded(name: str, folder: Path) -> None:
    """Record a run of three steps, and continue it from step 2 in another process' place."""
    for resume, steps in ((False, (1, 2, 3)), (True, (2, 3))):
        # wandb names its files by the second.
        place = folder / str(resume) if name == "wandb" else folder
        run = TrackedRun(name="first", project="tests", config={"lr": 0.1}, folder=place, resume=resume)
        with open_tracker(name, run) as tracker:
            for step in steps:
                tracker.log({"loss": step + 0.5 * resume, "reward/mean": float("nan")}, step)
            tracker.log_samples(groups(), steps[-1])


def test_tensorboard_shows_numbers_tables_and_hides_repeated_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    recorded("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "first" / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    losses = [(event.step, round(event.tensor_proto.float_val[0], 3)) for event in events.Tensors("loss")]
    assert losses == [(1, 1.0), (2, 2.5), (3, 3.5)]
    table = events.Tensors("samples")[-1].tensor_proto.string_val[0].decode()
    assert table.count("\n") == 3
    assert "a &#124; b<br>&lt;script&gt;\\*x\\*&lt;/script&gt;" in table
    assert "lr | 0.1" in events.Tensors("config")[0].tensor_proto.string_val[0].decode()


def test_trackio_keeps_runs_on_this_machine(tmp_path: Path) -> None:
    # In a process of its own, because trackio reads its folder when it is imported.
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from test_trackers import recorded\n"
        "recorded('trackio', Path(sys.argv[1]))\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "import json; print('ROWS ' + json.dumps(SQLiteStorage.get_logs('tests', 'first')))\n"
    )
    rows = printed(program, tmp_path, {"TRACKIO_DIR": str(tmp_path / "trackio")})
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(1, 1), (2, 2), (3, 3), (2, 2.5), (3, 3.5)]
    tables = [row["samples"] for row in rows if "samples" in row]
    assert [table["_type"] for table in tables] == ["trackio.table"] * 2


def test_wandb_writes_its_files_offline(tmp_path: Path) -> None:
    program = (
        "import sys, glob, json; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from test_trackers import history, recorded\n"
        "recorded('wandb', Path(sys.argv[1]))\n"
        "import wandb; wandb.teardown()  # its service may write the files of an ended run a moment later\n"
        "files = sorted(Path(sys.argv[1]).glob('*/first/wandb/offline-run-*/run-first.wandb'))\n"
        "print('ROWS ' + json.dumps([row for file in files for row in history(file.read_bytes())]))\n"
    )
    rows = printed(program, tmp_path, {"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert losses == [(1, 1), (2, 2), (3, 3), (2, 2.5), (3, 3.5)]
    assert [row["samples/_type"] for row in rows if "samples/_type" in row] == ["table-file"] * 2


def history(data: bytes) -> list[dict[str, Any]]:
    """Return the rows of a file of wandb: protobuf messages in the log format of LevelDB, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, message, rows = 7, b"", []
    while place < len(data):
        rest = 32768 - place % 32768
        if rest < 7:
            place += rest
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        message += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole message, or the last part of one
            record = Record()
            record.ParseFromString(message)
            message = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def printed(program: str, folder: Path, variables: dict[str, str]) -> list[dict[str, Any]]:
    """Run a program, and return the rows that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(Path(__file__).parent)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ROWS ")]
    rows: list[dict[str, Any]] = json.loads(line[5:])
    return rows
