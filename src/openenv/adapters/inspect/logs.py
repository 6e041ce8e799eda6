"""Stored rollouts as logs of Inspect AI, and its logs as stored rollouts. Needs inspect-ai.

RolloutStore  ──write_inspect_logs──>  .eval / .json, which `inspect view` shows
RolloutStore  <──import_inspect_log──  any log; one of ours comes back as it was
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from openenv._lazy import load_package_version
from openenv.errors import StoreError, install_command
from openenv.rollout.capture.export import turns
from openenv.rollout.capture.records import FILE, Call, Recorder, Recording, read
from openenv.rollout.capture.transcript import answer, question, transcript
from openenv.rollout.store.exports import recording
from openenv.rollout.store.outcome import Outcome, Status
from openenv.rollout.store.rollout_index import RolloutFilter
from openenv.rollout.store.store import Record, RolloutStore
from openenv.rollout.tasks.checks import AS_STORED
from openenv.rollout.tasks.task import Task

try:
    from inspect_ai.event import ModelEvent
    from inspect_ai.log import (
        EvalConfig,
        EvalDataset,
        EvalError,
        EvalLog,
        EvalMetric,
        EvalResults,
        EvalSample,
        EvalScore,
        EvalSpec,
        EvalStats,
        read_eval_log,
        write_eval_log,
    )
    from inspect_ai.model import ChatCompletionChoice, ChatMessageUser, GenerateConfig, ModelOutput, ModelUsage
    from inspect_ai.scorer import value_to_float

    from .messages import (
        Json,
        from_inspect_message,
        from_inspect_output,
        from_inspect_tool,
        stop_reason,
        to_inspect_tools,
        transcript_to_inspect,
    )
    from .tasks import STORE_KEY, is_failed, reward_score
except ImportError as exc:
    raise ModuleNotFoundError(f"inspect-ai is required: {install_command('inspect')}", name=exc.name) from exc

SCORER = "env_reward"
# Inspect requires a model name even if none was called, as for a played script.
_NO_MODEL = "none/none"
# Characters that are unsafe in file names on some systems.
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]")


# -- rollouts to logs -------------------------------------------------------------------------------------------------


def write_inspect_logs(store: RolloutStore, target: str | Path, where: RolloutFilter | None = None) -> int:
    """Write stored rollouts as logs of Inspect; return how many.

    A rollout is a sample: its id is the task's, its epoch counts the rollouts of that task. Infrastructure failures are
    errors there, not scores.

    Args:
        store: The rollouts to export.
        target: A file (`.eval` or `.json`), for rollouts of one agent with one model; or a folder, which gets a log for
            each agent and model.
        where: Which rollouts; by default all.

    Raises:
        StoreError: Nothing is there to export, a record cannot be read, the file cannot be written, or a single file is
            named for several agents or models.
    """
    # A log of Inspect has one model and one solver, so rollouts are grouped by agent and model.
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in store.records(where):
        groups[record.outcome.agent, record.outcome.model].append(record)
    target = Path(target)
    is_file = target.suffix in (".eval", ".json")
    if not groups:
        # An empty log would look like a successful export.
        raise StoreError(f"There are no such rollouts in {store.root}")
    if is_file and len(groups) > 1:
        names = "; ".join(f"{agent or 'no agent'} with {model or 'no model'}" for agent, model in groups)
        raise StoreError(
            f"A log of Inspect has one agent and one model, and there are {len(groups)}: {names}. "
            "Choose with --agent and --model, or name a folder in place of a file."
        )
    try:
        if not is_file:
            target.mkdir(parents=True, exist_ok=True)
        for (agent, model), records in groups.items():
            log = _log(store, agent, model, records)
            name = _NOT_IN_IDS.sub("-", f"{log.eval.created}_{agent or 'rollouts'}_{model or 'no-model'}")
            write_eval_log(log, str(target if is_file else target / f"{name}.eval"))
    except OSError as exc:
        raise StoreError(f"{target} cannot be written: {exc}") from exc
    return sum(map(len, groups.values()))


def _log(store: RolloutStore, agent: str, model: str, records: Sequence[Record]) -> Any:
    # Inspect numbers repetitions of a sample as epochs; a group of rollouts of one task is the same idea.
    epochs: Counter[str] = Counter()
    samples = []
    for record in records:
        epochs[record.task.task_id] += 1
        samples.append(_sample(record, recording(store, record), epochs[record.task.task_id]))
    # Old records lack a start time; the time of storing is the best substitute.
    began = min(record.outcome.started_at or record.stored_at for record in records)
    ended = max(record.stored_at for record in records)
    spec = EvalSpec(
        created=_moment(began),
        task="rollouts",
        task_args={"agent": agent},
        task_id=_NOT_IN_IDS.sub("-", f"{agent}-{model}"),
        eval_id=records[0].record_id,
        run_id=records[0].record_id,
        solver="openenv/play_env" if agent == "play" else "openenv/run_agent",
        solver_args={"agent": agent},
        dataset=EvalDataset(name=store.root.name, samples=len(epochs), sample_ids=[str(name) for name in epochs]),
        model=model or _NO_MODEL,
        config=EvalConfig(epochs=max(epochs.values())),
        packages={"openenv": load_package_version()},
        metadata={"agent": agent, "store": str(store.root)},
    )
    # Usage objects add up field by field.
    usage: dict[str, Any] = {}
    for sample in samples:
        for name, one in sample.model_usage.items():
            usage[name] = usage[name] + one if name in usage else one
    return EvalLog(
        status="success",
        eval=spec,
        results=_results(samples),
        stats=EvalStats(started_at=_moment(began), completed_at=_moment(ended), model_usage=usage),
        samples=samples,
    )


def _results(samples: Sequence[Any]) -> Any:
    # Unscored samples have NaN as their value, which would make every mean NaN.
    values = [float(score.value) for sample in samples for score in (sample.scores or {}).values()]
    rewards = [value for value in values if not math.isnan(value)]
    metrics = {}
    if rewards:
        # The standard error of the mean needs at least two values.
        spread = statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
        summary = {"mean": statistics.fmean(rewards), "stderr": spread}
        metrics = {name: EvalMetric(name=name, value=value) for name, value in summary.items()}
    completed = sum(sample.error is None for sample in samples)
    score = EvalScore(
        name=SCORER,
        scorer=SCORER,
        scored_samples=len(rewards),
        unscored_samples=len(samples) - len(rewards),
        metrics=metrics,
    )
    return EvalResults(total_samples=len(samples), completed_samples=completed, scores=[score])


def _sample(record: Record, captured: Recording | None, epoch: int) -> Any:
    outcome, task = record.outcome, record.task
    # Calls were recorded only if the rollout ran behind the capture proxy.
    calls = [] if captured is None else captured.calls
    main = _main_call(captured)
    messages = [ChatMessageUser(content=task.instruction)]
    output = ModelOutput(model=outcome.model)
    if main is not None:
        output = _output(main, outcome.model)
        messages = [*transcript_to_inspect(question(main)), output.message]
    # A failed environment is an error in Inspect, and its sample is not completed. A failed agent is completed.
    failed = is_failed(outcome.status)
    error = EvalError(message=f"{outcome.status}: {outcome.reason}", traceback="", traceback_ansi="")
    ended = outcome.started_at + outcome.wall_s
    events = [_event(call, outcome) for call in calls]
    usages = [event.output.usage for event in events if event.output.usage is not None]
    return EvalSample(
        id=task.task_id or outcome.rollout_id,
        epoch=epoch,
        input=task.instruction,
        target="",
        messages=messages,
        output=output,
        scores=None if failed else {SCORER: reward_score(outcome, answer=output.completion or None)},
        error=error if failed else None,
        # The whole outcome travels in the sample's store, so that an import restores it exactly.
        metadata={"status": outcome.status, "reason": outcome.reason, "group": record.group, **outcome.metadata},
        store={
            STORE_KEY: {
                "outcome": outcome.model_dump(mode="json", exclude={"turns"}),
                "task": task.model_dump(mode="json"),
            }
        },
        events=events,
        # `sum` needs a start value, and Usage has no zero.
        model_usage={outcome.model: sum(usages[1:], usages[0])} if usages else {},
        uuid=outcome.rollout_id,
        started_at=_moment(outcome.started_at) if outcome.started_at else None,
        completed_at=_moment(ended) if outcome.started_at else None,
        total_time=outcome.wall_s,
    )


def _main_call(captured: Recording | None) -> Call | None:
    """Return the call that ends the agent's own conversation."""
    if captured is None:
        return None
    # Subagents and helpers have branches too; the sample shows the agent's main conversation.
    turns_of_agent = [turn for turn in transcript(captured).turns if turn.branch in ("main", "compaction")]
    calls = {call.number: call for call in captured.calls if call.sampled}
    return next((calls[turn.number] for turn in reversed(turns_of_agent) if turn.number in calls), None)


def _event(call: Call, outcome: Outcome) -> Any:
    # Only this dialect has the tools in the form that Inspect's parser reads.
    tools = call.sent.get("tools") if call.endpoint_dialect == "openai_chat" else None
    return ModelEvent(
        model=str(call.sent.get("model") or outcome.model),
        input=transcript_to_inspect(question(call)),
        tools=to_inspect_tools(tools if isinstance(tools, list) else []),
        tool_choice="auto",
        config=GenerateConfig(),
        # A call without a completion failed; its error is shown instead.
        output=_output(call, outcome.model) if call.sampled else ModelOutput(model=outcome.model),
        error=None if call.error is None else str(call.error.get("message") or call.error),
        timestamp=_when(call.started_at),
        completed=_when(call.started_at + call.latency_s),
        working_start=max(0.0, call.started_at - outcome.started_at),
        working_time=call.latency_s,
    )


def _output(call: Call, model: str) -> Any:
    (message,) = transcript_to_inspect([answer(call)])
    usage = call.completion.usage or {}
    # Providers name token counts differently; recorded token IDs are the last resort.
    sent = int(usage.get("prompt_tokens") or usage.get("input_tokens") or len(call.completion.prompt_ids or ()))
    sampled = len(call.completion.sampled) or call.reader.completion_tokens({"usage": usage})
    return ModelOutput(
        model=model,
        choices=[ChatCompletionChoice(message=message, stop_reason=stop_reason(call.completion.finish_reason))],
        usage=ModelUsage(input_tokens=sent, output_tokens=sampled, total_tokens=sent + sampled),
        time=call.latency_s,
    )


def _when(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def _moment(seconds: float) -> str:
    return _when(seconds).isoformat(timespec="seconds")


# -- logs to rollouts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImportedLog:
    """What became of the samples of a log."""

    added: int
    known: int
    """How many the store has already."""


def import_inspect_log(path: str | Path, store: RolloutStore, *, scorer: str | None = None) -> ImportedLog:
    """Add the samples of an Inspect log to a store of rollouts; existing rollouts stay unchanged.

    Samples of `openenv/served_env`, `openenv/rollout` and of `write_inspect_logs` come back with their task and
    outcome. Those of other tasks become rollouts of the solver: an error is `env_failed`, without a reward; a limit is
    `truncated`. Model calls become records without tokens: logs do not have them.

    Args:
        path: The log.
        store: The store.
        scorer: Which score is the reward of other tasks' samples; by default the first.

    Raises:
        StoreError: The log cannot be read, has no such scorer, or the store cannot be written.
    """
    try:
        # Attachments hold long texts outside of the messages; without resolving they would be references.
        log = read_eval_log(str(path), resolve_attachments=True)
    except Exception as exc:  # Inspect raises many types for a file that is not a log
        raise StoreError(f"{path} cannot be read as a log of Inspect: {exc}") from exc
    if not log.samples:
        # Logs can be written without samples. Importing nothing must not look like success.
        raise StoreError(f"{path} has no samples: it was written with --no-log-samples, or has not begun")
    added = known = 0
    for sample in log.samples:
        outcome, task = _rollout(log, sample, scorer)
        # The identity is stable, so importing a log twice adds nothing.
        if store.count(rollout_id=outcome.rollout_id):
            known += 1
            continue
        # `begin` before the calls: if the import is interrupted, the store shows an unfinished rollout.
        store.begin(outcome.rollout_id, task)
        folder = store.captures / outcome.rollout_id
        events = [event for event in sample.events if event.event == "model" and event.output.choices]
        if events:
            _record(folder, outcome, events)
            outcome = outcome.model_copy(update={"turns": turns(read(folder))})
        store.add(outcome, task)
        added += 1
    return ImportedLog(added, known)


def _rollout(log: Any, sample: Any, scorer: str | None) -> tuple[Outcome, Task]:
    # Logs of our solvers contain the outcome and the task. Other logs are translated below.
    entry = sample.store.get(STORE_KEY)
    if isinstance(entry, Mapping):
        try:
            return (
                Outcome.model_validate(entry["outcome"]),
                Task.model_validate(entry["task"], context=AS_STORED),
            )
        except (ValueError, KeyError) as exc:
            raise StoreError(f"The sample {sample.id} has an outcome that cannot be read: {exc}") from exc
    # Other logs: error -> env_failed without reward; limit -> truncated with its score.
    status: Status = "ok"
    reason = reward = None
    if sample.error is not None:
        status, reason = "env_failed", sample.error.message
    else:
        reward = _reward(sample, scorer)
        if sample.limit is not None:
            status, reason = "truncated", f"{sample.limit.type} limit: {sample.limit.limit:g}"
    name = str(sample.id)
    began = _seconds(sample.started_at)
    identity = sample.uuid or f"{log.eval.eval_id}-{name}-{sample.epoch}"
    outcome = Outcome(
        rollout_id=_NOT_IN_IDS.sub("-", identity)[:128],
        task_id=name,
        status=status,
        reason=reason,
        reward=reward,
        agent=str(log.eval.solver or log.eval.task),
        model=log.eval.model,
        started_at=began,
        wall_s=sample.total_time or 0.0,
        metadata={"group": log.eval.task, "epoch": sample.epoch, "eval_id": log.eval.eval_id, **sample.metadata},
    )
    text = sample.input if isinstance(sample.input, str) else "\n\n".join(one.text for one in sample.input)
    return outcome, Task.model_validate({"task_id": name, "instruction": text}, context=AS_STORED)


def _reward(sample: Any, scorer: str | None) -> float | None:
    """Return a sample's score as a number; None without a score."""
    scores = sample.scores or {}
    if scorer is not None and scores and scorer not in scores:
        raise StoreError(f"The sample {sample.id} has no score '{scorer}'; it has {', '.join(scores)}")
    score = scores.get(scorer) if scorer is not None else next(iter(scores.values()), None)
    if score is None:
        return None
    if isinstance(score.value, (Mapping, list)):
        raise StoreError(f"The score of sample {sample.id} has several values: no single one is its reward")
    value = value_to_float()(score.value)
    return float(value) if math.isfinite(value) else None


def _record(folder: Path, outcome: Outcome, events: Iterable[Any]) -> None:
    """Write model calls as the capture proxy does."""
    recorder = Recorder(folder / FILE)
    about: Json = {"rollout_id": outcome.rollout_id, "metadata": outcome.metadata, "budget": {}}
    recorder.create({**about, "model": {"name": outcome.model, "dialect": "openai_chat"}})
    for event in events:
        body: Json = {"model": event.model, "messages": [from_inspect_message(one) for one in event.input]}
        if event.tools:
            body["tools"] = [from_inspect_tool(tool) for tool in event.tools]
        began = event.timestamp.timestamp()
        ended = event.completed.timestamp() if event.completed is not None else began
        facts: Json = {"dialect": "openai_chat", "to": "openai_chat", "path": "/v1/chat/completions"}
        facts |= {"stream": False, "not_trainable": ["imported: the log has no tokens"], "at": began}
        call = recorder.begin(facts, body, body)
        call.head(200, {"at": ended})
        call.body(json.dumps(from_inspect_output(event.output)).encode())
        call.end("complete", {"attempts": 1 + (event.retries or 0), "at": ended})


def _seconds(moment: Any) -> float:
    if not moment:
        return 0.0
    return datetime.fromisoformat(moment).timestamp() if isinstance(moment, str) else float(moment.timestamp())
