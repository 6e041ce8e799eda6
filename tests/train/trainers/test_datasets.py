"""A store as a `datasets.Dataset`; the package comes with TRL's environment (see `test_trl.py`)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from openenv.rollout import Outcome, RolloutStore
from stored_rollouts import SQUARE, Talk

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, sys
from openenv.rollout import RolloutStore
with RolloutStore(sys.argv[1], create=False) as store:
    data = store.to_dataset(status="ok")
    print(type(data).__module__.split(".")[0], store.to_dataset(status="cancelled").num_rows)
    print(json.dumps([{name: row[name] for name in sys.argv[2:]} for row in data]))
"""


def fill(store: RolloutStore) -> None:
    """Store a rollout that is `ok` with two calls, and one that is `truncated`."""
    for number, status in enumerate(("ok", "truncated")):
        rollout_id = f"r{number}"
        talk = Talk(store.captures / rollout_id, rollout_id)
        user = {"role": "user", "content": "Square 3."}
        answer, ids = talk.call([user], [1, 2], "It is nine.")
        talk.call([user, answer, {"role": "user", "content": "Sure?"}], [*ids, 3], "Yes.")
        labels = {"group": "g", "sample": number, "attempt": 0}
        outcome = Outcome(rollout_id=rollout_id, task_id="t", status=status, reward=0.5, metadata=labels)  # type: ignore[arg-type]
        store.add(outcome, SQUARE)


@pytest.mark.slow
def test_a_dataset_has_a_row_per_sequence(tmp_path: Path) -> None:
    python = Path(os.environ.get("OPENENV_TRL_PYTHON") or ROOT / ".clients" / "trl" / "bin" / "python")
    if not python.exists():
        pytest.skip(f"no datasets: {python} is not there; make a virtual environment with trl and aiohttp there")
    with RolloutStore(tmp_path) as store:
        fill(store)
        (sequence,) = store.get("r0").outcome.sequences
    names = ("group", "sample", "task_id", "reward", "status", "trainable", "temperature", "input_ids", "loss_mask")
    done = subprocess.run(
        [str(python), "-c", PROGRAM, str(tmp_path), *names],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    about, _, rows = done.stdout.partition("\n")
    assert about == "datasets 0"
    known = {"group": "g", "sample": 0, "task_id": "t", "reward": 0.5, "status": "ok", "trainable": True}
    tokens = {"temperature": 1.0, "input_ids": sequence.input_ids, "loss_mask": sequence.loss_mask}
    assert json.loads(rows) == [{**known, **tokens}]


def test_without_the_package_it_says_what_to_install(tmp_path: Path) -> None:
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        with RolloutStore(tmp_path) as store, pytest.raises(ImportError, match="pip install datasets"):
            store.to_dataset()
    else:
        pytest.skip("datasets is installed here")


def test_the_columns_of_parquet_are_those_of_the_store(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an optional dependency")
    from openenv.rollout.store.exports import export_rollouts

    with RolloutStore(tmp_path / "store") as store:
        fill(store)
        assert export_rollouts(store, tmp_path / "all.parquet") == 2
    rows = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    labels = [(row["group"], row["sample"], row["attempt"], row["status"], row["reward"]) for row in rows]
    assert labels == [("g", 0, 0, "ok", 0.5), ("g", 1, 0, "truncated", 0.5)]
    assert {row["trainable"] for row in rows} == {True}
