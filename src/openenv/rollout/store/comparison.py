"""Two rollouts, or two stores, step by step: are they the same, and if not, where do they differ first?

A rollout is a list of steps: task, setup lines, model calls, files, checks, status and reward. Times, durations and
random IDs in texts do not count; tokens count exactly. Reads stores only.
"""

# Rollouts of two stores are paired by the labels that a run with a seed gives them:
#
#   metadata {"item": "sum", "sample": 2}   <->   metadata {"item": "sum", "sample": 2}
#
# Without labels, the n-th rollout of a task in one store is compared with the n-th in the other.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openenv.rollout.capture.normalise import digest, normalised
from openenv.rollout.store.exports import recording

if TYPE_CHECKING:
    from openenv.rollout.capture.records import Call
    from openenv.rollout.store.store import Record, RolloutStore

Step = tuple[str, Any]
"""A place in a rollout, such as `answer 3`, and its value."""


@dataclass(frozen=True, slots=True)
class RolloutDifference:
    """The first place where two rollouts differ; the value is None if one of them has no such step."""

    name: str
    """The task and the sample, such as `sum 2`."""
    place: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class StoreComparison:
    """The result of a comparison: the number of equal rollouts, all differences, and a digest of each side."""

    equal: int
    differences: list[RolloutDifference]
    digests: tuple[str, str]
    """Equal digests mean equal rollouts in an equal order."""


def compare_rollouts(first: tuple[RolloutStore, Record], second: tuple[RolloutStore, Record]) -> StoreComparison:
    """Compare two rollouts, each with its store."""
    return _compare({"rollout": first}, {"rollout": second})


def compare_stores(first: RolloutStore, second: RolloutStore) -> StoreComparison:
    """Compare the first verdicts of all rollouts of two stores."""
    return _compare(_named(first), _named(second))


def steps(store: RolloutStore, record: Record) -> Iterator[Step]:
    """Yield the steps of a rollout in their order.

    Raises:
        StoreError: its model calls cannot be read.
    """
    outcome = record.outcome
    yield "task", record.task.model_dump(mode="json", exclude={"metadata"})
    for number, line in enumerate(outcome.setup_results, 1):
        yield f"setup line {number}", normalised([line.cmd, line.exit_code, line.stdout, line.stderr])
    captured = recording(store, record)
    for number, call in enumerate([] if captured is None else captured.calls, 1):
        yield from _call_steps(number, call)
    yield "agent", [outcome.agent, outcome.agent_exit_code]
    yield "files", normalised({**outcome.files, **dict.fromkeys(outcome.files_extra, None)})
    for number, check in enumerate(outcome.verify_results, 1):
        yield f"check {number}", normalised([check.cmd, check.exit_code, check.stdout, check.stderr, check.score])
    yield "status", outcome.status
    yield "reward", outcome.reward


def _call_steps(number: int, call: Call) -> Iterator[Step]:
    request, sent, sampled = call.request, call.sent, call.completion.sampled
    for name, value in sorted(request.items()):
        items = value if isinstance(value, list) else [value]
        for index, item in enumerate(items, 1):
            yield f"request {number}, {name} {index}", normalised(item)
    added = {name: value for name, value in sent.items() if name not in request}
    yield f"sampling of call {number}", normalised(added)
    if len(sampled):
        yield f"answer {number}", "".join(sampled.texts)
        yield f"tokens of answer {number}", [list(sampled.ids), list(sampled.logprobs)]
    else:
        facts = {"id", "created", "created_at", "system_fingerprint"}
        answer = {name: value for name, value in (call.answer or {}).items() if name not in facts}
        yield f"answer {number}", normalised(answer)
    yield f"end of call {number}", call.ended


def _named(store: RolloutStore) -> dict[str, tuple[RolloutStore, Record]]:
    """Return the rollouts of a store by the names that they have in every run."""
    counts: Counter[str] = Counter()
    named = {}
    for record in store.records():
        labels = record.outcome.metadata
        item, sample = str(labels.get("item") or record.task.task_id or "task"), labels.get("sample")
        if sample is None:
            sample = counts[item]
            counts[item] += 1
        named[f"{item} {sample}"] = store, record
    return dict(sorted(named.items()))


def _compare(
    first: dict[str, tuple[RolloutStore, Record]], second: dict[str, tuple[RolloutStore, Record]]
) -> StoreComparison:
    differences = []
    digests: tuple[list[str], list[str]] = ([], [])
    for name in sorted({*first, *second}):
        one, other = (list(steps(*side[name])) if name in side else None for side in (first, second))
        for side, its_digests in zip((one, other), digests, strict=True):
            if side is not None:
                its_digests.append(digest([name, side]))
        if one is None or other is None:
            differences.append(
                RolloutDifference(name, "rollout", *("missing" if each is None else "" for each in (one, other)))
            )
        elif (place := _first_difference(one, other)) is not None:
            differences.append(RolloutDifference(name, *place))
    equal = len({*first, *second}) - len(differences)
    return StoreComparison(equal, differences, (digest(digests[0]), digest(digests[1])))


def _first_difference(first: list[Step], second: list[Step]) -> tuple[str, Any, Any] | None:
    values = dict(second)
    for place, value in first:
        if place not in values:
            return place, value, None
        if values[place] != value:
            return place, value, values[place]
    own = dict(first)
    return next(((place, None, value) for place, value in second if place not in own), None)
