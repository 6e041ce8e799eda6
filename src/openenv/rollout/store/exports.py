"""Exports of a store: JSON lines for tools, rows for trainers. Reads stores and captures only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from openenv.errors import CaptureError, RolloutError, StoreError
from openenv.rollout.store.rollout_index import RolloutFilter, RolloutRow
from openenv.rollout.store.store import Record, RolloutStore

if TYPE_CHECKING:
    from openenv.rollout.capture.records import Recording
    from openenv.rollout.capture.transcript import Conversation

Format = Literal["jsonl", "parquet", "sft", "preferences"]
"""The rows of an export:

- `jsonl`: a rollout with its outcome, turns and sequences.
- `parquet`: a training sequence with its tokens.
- `sft`: a conversation as chat messages, of a rollout with a reward.
- `preferences`: a prompt with a better and a worse continuation, of two rollouts of one group or task.
"""
_ABOUT = ("task_id", "group", "agent", "model", "status", "reason", "reward", "trust", "verdict")
"""The description of each rollout in exports: keys of a JSON line, columns of a Parquet file."""


def export_rollouts(
    store: RolloutStore,
    target: str | Path,
    *,
    kind: Format | None = None,
    messages: bool = False,
    where: RolloutFilter | None = None,
    on_excluded: Callable[[list[str]], None] | None = None,
    **conditions: Any,
) -> int:
    """Write stored rollouts into a file, oldest first; return the number of lines or rows.

    Every line and every row has the keys `task_id`, `group`, `agent`, `model`, `status`, `reason`, `reward`, `trust`
    and `verdict`.

    Args:
        store: The store to export.
        target: The file.
        kind: The format; by default the suffix of the file decides between `jsonl` and `parquet`. `sft` and
            `preferences` are JSON lines, in the conversational formats of TRL.
        messages: Also write complete requests and responses (`jsonl`).
        where: The rollouts to export.
        on_excluded: Called with the reasons of each rollout that is excluded from training.
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
                return write_parquet(target, _recordings(store, chosen, on_excluded))
            except ImportError as exc:
                raise RolloutError(str(exc)) from exc
        lines = json_lines(store, chosen, messages=messages, on_excluded=on_excluded)
        if kind in ("sft", "preferences"):
            lines = map(_line, sft_rows(store, chosen) if kind == "sft" else preference_rows(store, chosen))
        count = 0
        with target.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(line)
                count += 1
        return count
    except OSError as exc:
        raise StoreError(f"{target} cannot be written: {exc}") from exc


def _recordings(
    store: RolloutStore, where: RolloutFilter, on_excluded: Callable[[list[str]], None] | None
) -> Iterator[Recording]:
    """Yield the captured rollouts."""
    for record in store.records(where):
        captured = recording(store, record)
        if captured is not None:
            _report(captured, on_excluded)
            yield captured


def _report(captured: Recording, on_excluded: Callable[[list[str]], None] | None) -> None:
    from openenv.rollout.capture.export import exclusions

    if on_excluded is not None and captured.calls and (reasons := exclusions(captured)):
        on_excluded(reasons)


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
    if not captured.model:
        return None
    captured.about = about(record)
    names = ("task_id", "status", "reward", "trust", "agent")
    captured.metadata = {**captured.metadata, **{name: captured.about[name] for name in names}}
    return captured


def about(record: Record) -> dict[str, Any]:
    """Return the description of a rollout for exports."""
    outcome = record.outcome
    labels = {name: value for name in ("sample", "attempt") if isinstance(value := outcome.metadata.get(name), int)}
    return {name: getattr(record if name in ("group", "verdict") else outcome, name) for name in _ABOUT} | labels


def json_lines(
    store: RolloutStore,
    where: RolloutFilter,
    *,
    messages: bool = False,
    on_excluded: Callable[[list[str]], None] | None = None,
) -> Iterator[str]:
    """Yield rollouts as lines of JSON with newlines: outcome, task, turns and sequences.

    Args:
        store: The store to export.
        where: The rollouts to export.
        messages: Also write complete requests and responses.
        on_excluded: Called with the reasons of each rollout that is excluded from training.
    """
    from openenv.rollout.capture.export import document

    for record in store.records(where):
        captured = recording(store, record)
        if captured is not None:
            _report(captured, on_excluded)
        calls = None if captured is None else document(captured, include_messages=messages)
        yield _line({**about(record), **record.model_dump(mode="json"), "capture": calls})


def _line(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False).encode().decode() + "\n"
    except UnicodeEncodeError:  # lone surrogates, which agents can send and UTF-8 cannot encode
        return json.dumps(value) + "\n"


# Tools are JSON text in both formats: a table would give every tool the parameters of all others.


def sft_rows(store: RolloutStore, where: RolloutFilter) -> Iterator[dict[str, Any]]:
    """Yield the conversations of rollouts with a reward: `messages` and `tools`, as TRL's `SFTTrainer` takes them.

    Choose good rollouts with the filter, such as `min_reward=1.0`.

    Args:
        store: The store to export.
        where: The rollouts to export.
    """
    for record in store.records(where):
        if record.outcome.reward is not None:
            for conversation in _conversations(store, record):
                yield {"messages": conversation.messages, "tools": _tools(conversation), **about(record)}


def preference_rows(store: RolloutStore, where: RolloutFilter) -> Iterator[dict[str, Any]]:
    """Yield pairs of rollouts with the same prompt and different rewards, as TRL's `DPOTrainer` takes them.

    Rollouts are compared within their group, or with others of their task if they have no group. The best one is paired
    with the worst, the second best with the second worst, and so on: each is in one pair at most. Rollouts with several
    conversations are left out, because no single one earned the reward.

    Args:
        store: The store to export.
        where: The rollouts to export.
    """
    groups: dict[str, list[RolloutRow]] = {}
    for row in reversed(store.find(where)):
        if row.reward is not None:
            groups.setdefault(row.group or row.task_id, []).append(row)
    for rows in groups.values():
        ranked = sorted(rows, key=lambda row: row.reward or 0.0, reverse=True)  # stable: older ones come first
        for better, worse in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if better.reward != worse.reward:
                pair = _preference(store, store.read(better), store.read(worse))
                if pair is not None:
                    yield pair


def _preference(store: RolloutStore, better: Record, worse: Record) -> dict[str, Any] | None:
    """Return two rollouts as a pair; None if they have no common prompt, or more than one conversation."""
    both = [_conversations(store, record) for record in (better, worse)]
    if [len(found) for found in both] != [1, 1]:
        return None
    (chosen,), (rejected,) = both
    prompt = chosen.messages[: chosen.opening]
    if prompt != rejected.messages[: rejected.opening] or chosen.tools != rejected.tools:
        return None
    described = about(better)
    return {
        "prompt": prompt,
        "chosen": chosen.messages[chosen.opening :],
        "rejected": rejected.messages[rejected.opening :],
        "tools": _tools(chosen),
        **{name: described[name] for name in ("task_id", "group", "agent", "model")},
        "chosen_rollout": better.rollout_id,
        "rejected_rollout": worse.rollout_id,
        "chosen_reward": better.outcome.reward,
        "rejected_reward": worse.outcome.reward,
    }


def _conversations(store: RolloutStore, record: Record) -> list[Conversation]:
    from openenv.rollout.capture.transcript import conversations

    captured = recording(store, record)
    return [] if captured is None else conversations(captured)


def _tools(conversation: Conversation) -> str | None:
    return json.dumps(conversation.tools) if conversation.tools else None
