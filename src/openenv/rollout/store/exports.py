"""Exports of a store: JSON lines for tools, Parquet rows for trainers. Reads stores and captures only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from openenv.errors import CaptureError, RolloutError, StoreError
from openenv.rollout.store.rollout_index import RolloutFilter
from openenv.rollout.store.store import Record, RolloutStore

if TYPE_CHECKING:
    from openenv.rollout.capture.records import Recording

Format = Literal["jsonl", "parquet"]
_ABOUT = ("task_id", "group", "agent", "model", "status", "reason", "reward", "trust", "verdict")
"""The description of each rollout in exports: keys of a JSON line, columns of a Parquet file."""


def export_rollouts(
    store: RolloutStore,
    target: str | Path,
    *,
    kind: Format | None = None,
    messages: bool = False,
    where: RolloutFilter | None = None,
    **conditions: Any,
) -> int:
    """Write stored rollouts into a file, oldest first; return the number of lines or rows.

    Every line and every row has the keys `task_id`, `group`, `agent`, `model`, `status`, `reason`, `reward`, `trust`
    and `verdict`.

    Args:
        store: The store to export.
        target: The file.
        kind: `jsonl` (one rollout per line: outcome, turns and sequences) or `parquet` (one training sequence per row);
            by default the suffix of the file decides.
        messages: Also write complete requests and responses (`jsonl`).
        where: The rollouts to export.
        conditions: More fields of `RolloutFilter`, such as `task_id`, `status`, `min_trust` or `verdict`.

    Raises:
        ValueError: a condition does not exist.
        StoreError: a record cannot be read, or the file cannot be written.
        RolloutError: the file is Parquet and pyarrow is not installed.
    """
    target = Path(target)
    chosen = (where or RolloutFilter()).having({name: value for name, value in conditions.items() if value is not None})
    if chosen.verdict is not None:
        chosen = chosen.having({"verdict": store.resolve_verdict(chosen.verdict)})
    try:
        if (kind or ("parquet" if target.suffix == ".parquet" else "jsonl")) == "parquet":
            from openenv.rollout.capture.export import write_parquet  # JSON lines do not need it

            try:
                recordings = (recording(store, record) for record in store.records(chosen))
                return write_parquet(target, filter(None, recordings))
            except ImportError as exc:
                raise RolloutError(str(exc)) from exc
        count = 0
        with target.open("w", encoding="utf-8") as file:
            for line in json_lines(store, chosen, messages=messages):
                file.write(line)
                count += 1
        return count
    except OSError as exc:
        raise StoreError(f"{target} cannot be written: {exc}") from exc


def recording(store: RolloutStore, record: Record) -> Recording | None:
    """Return the captured model calls of a rollout, or None if it made no calls."""
    from openenv.rollout.capture.records import read

    folder = store.captures / record.rollout_id
    if not folder.is_dir():
        return None
    try:
        captured = read(folder)
    except CaptureError as exc:
        raise StoreError(f"The model calls of rollout '{record.rollout_id}' cannot be read: {exc}") from exc
    captured.about = about(record)
    names = ("task_id", "status", "reward", "trust", "agent")
    captured.metadata = {**captured.metadata, **{name: captured.about[name] for name in names}}
    return captured


def about(record: Record) -> dict[str, Any]:
    """Return the description of a rollout for exports."""
    outcome = record.outcome
    labels = {name: value for name in ("sample", "attempt") if isinstance(value := outcome.metadata.get(name), int)}
    return {name: getattr(record if name in ("group", "verdict") else outcome, name) for name in _ABOUT} | labels


def json_lines(store: RolloutStore, where: RolloutFilter, *, messages: bool = False) -> Iterator[str]:
    """Yield rollouts as lines of JSON with newlines: outcome, task, turns and sequences.

    Args:
        store: The store to export.
        where: The rollouts to export.
        messages: Also write complete requests and responses.
    """
    from openenv.rollout.capture.export import document

    for record in store.records(where):
        captured = recording(store, record)
        calls = None if captured is None else document(captured, include_messages=messages)
        line = {**about(record), **record.model_dump(mode="json"), "capture": calls}
        try:
            yield json.dumps(line, ensure_ascii=False).encode().decode() + "\n"
        except UnicodeEncodeError:  # lone surrogates, which agents can send and UTF-8 cannot encode
            yield json.dumps(line) + "\n"
