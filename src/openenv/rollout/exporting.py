"""Exports of a store: outcomes together with the model calls that were captured.

Knows the store and the capture's own exports. JSON lines hold a rollout each, Parquet a training sequence per row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from openenv.errors import CaptureError, RolloutError, StoreError
from openenv.rollout.store import Record, RolloutStore

if TYPE_CHECKING:
    from openenv.rollout.capture.records import Recording

Format = Literal["jsonl", "parquet"]


def export_rollouts(
    store: RolloutStore,
    target: str | Path,
    *,
    kind: Format | None = None,
    messages: bool = False,
    status: str | None = None,
    task_id: str | None = None,
    agent: str | None = None,
) -> int:
    """Write stored rollouts, each as its newest record has it, into a file; return how many lines or rows.

    Args:
        store: What to export.
        target: The file.
        kind: `jsonl` (a rollout per line: outcome, turns and sequences) or `parquet` (a training sequence per row, the
            reward in its metadata); by default what the file's name ends in.
        messages: Write the requests and responses in full, too (`jsonl`).
        status, task_id, agent: Only such rollouts.

    Raises:
        StoreError: a record cannot be read, or the file cannot be written.
        RolloutError: Parquet is asked for and pyarrow is not installed.
    """
    target = Path(target)
    records = store.records(status=status, task_id=task_id, agent=agent)
    try:
        if (kind or ("parquet" if target.suffix == ".parquet" else "jsonl")) == "parquet":
            from openenv.rollout.capture.export import write_parquet  # the capture proxy's part is not always needed

            try:
                return write_parquet(target, _recordings(store, records))
            except ImportError as exc:
                raise RolloutError(str(exc)) from exc
        return _write_jsonl(store, records, target, messages=messages)
    except OSError as exc:
        raise StoreError(f"{target} cannot be written: {exc}") from exc


def recording(store: RolloutStore, record: Record) -> Recording | None:
    """Return the captured model calls of a rollout, or None when it made none."""
    from openenv.rollout.capture.records import read

    folder = store.captures / record.rollout_id
    if not folder.is_dir():
        return None
    try:
        found = read(folder)
    except CaptureError as exc:
        raise StoreError(f"The model calls of rollout '{record.rollout_id}' cannot be read: {exc}") from exc
    outcome = record.outcome
    about = {"task_id": outcome.task_id, "status": outcome.status, "reward": outcome.reward, "agent": outcome.agent}
    found.metadata = {**found.metadata, **about}
    return found


def _recordings(store: RolloutStore, records: Iterator[Record]) -> Iterator[Recording]:
    for record in records:
        found = recording(store, record)
        if found is not None:
            yield found


def _write_jsonl(store: RolloutStore, records: Iterator[Record], target: Path, *, messages: bool) -> int:
    from openenv.rollout.capture.export import document

    count = 0
    with target.open("w", encoding="utf-8") as file:
        for record in records:
            found = recording(store, record)
            captured = None if found is None else document(found, include_messages=messages)
            line = {
                "rollout_id": record.rollout_id,
                "record_id": record.record_id,
                "kind": record.kind,
                "stored_at": record.stored_at,
                "task": record.task.model_dump(mode="json"),
                "outcome": record.outcome.model_dump(mode="json"),
                "capture": captured,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    return count
