"""Recordings as trainers read them: turns, training sequences, documents, JSONL and Parquet.

A sampled token is trainable in one sequence at most, and on three conditions: the engine gave all IDs of the turn, the
engine gave the token's log-probability, and the policy chose it freely (`Call.not_trainable` is empty). Two calls give
one sequence if the second continues the first (`graph`):

    call 1: prompt [1 2 3], sampled [4 5]          call 2: prompt [1 2 3 4 5 6], sampled [7]

    input_ids  1  2  3   4    5   6   7
    loss_mask  0  0  0   1    1   0   1
    logprobs   0  0  0 -.1  -.2   0 -.3
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..tasks.model_parameters import NEUTRAL_SAMPLING, SAMPLING_PARAMETERS
from .dialects.dialect import LOGPROBS, TOKEN_IDS
from .encoding import Json, dumps
from .graph import CallGraph, CallNode, build, setting_of
from .records import SHARED, Call, Recording
from .routed_experts import CallExperts, align
from .training_trace import (
    Finding,
    Role,
    RolloutTurn,
    Sequence,
    Severity,
    TokenCounts,
    TraceEntry,
    TrainingTrace,
    TrainingTurn,
    VersionSpan,
)

Level = Literal["tokens", "logprobs", "text"]
"""The capture level: IDs and log-probabilities, log-probabilities only, or neither."""

TRUNCATING = {
    "top_p": 1,
    "top_k": (-1, 0),
    "min_p": 0,
    "typical_p": 1,
    "top_n_sigma": -1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "repeat_penalty": 1,
    "mirostat": 0,
    "xtc_probability": 0,
    "dry_multiplier": 0,
    "dynatemp_range": 0,
}
"""Parameters that change the sampled distribution, and the values that switch each of them off."""

_ROWS = 256  # of one Arrow table: a row may have a million tokens
SAMPLING_COLUMNS = ("temperature", *NEUTRAL_SAMPLING)
"""The sampling parameters of a row; empty if the calls of a sequence differ."""
_SAMPLING = ("unasked_sampling", "unknown_sampling")
"""Findings that exclude one sequence, not the other sequences of the rollout."""
_TURN = ("no_prompt_ids", "no_token_ids", "missing_tokens", "id_mismatch", "positive_logprob", "no_logprobs")
"""Findings that exclude one turn, not the other turns of its sequence."""


def turns(recording: Recording) -> list[RolloutTurn]:
    """Return all calls in the form for trainers."""
    return [turn(call) for call in recording.calls]


def turn(call: Call) -> RolloutTurn:
    """Return one call in the form for trainers.

    The three token lists have equal lengths, with two exceptions: `completion_token_ids` is empty if any ID is missing,
    and `per_token_logps` is empty if all log-probabilities are missing. A single missing log-probability is None.
    """
    sampled = call.completion.sampled
    return RolloutTurn(
        turn=call.number,
        finish_reason=call.completion.finish_reason,
        completion_tokens=list(sampled.texts),
        completion_token_ids=[token for token in sampled.ids if token is not None] if sampled.has_ids else [],
        per_token_logps=list(sampled.logprobs) if sampled.has_logprobs else [],
        latency_s=call.latency_s,
        timestamp=call.started_at,
        upstream_status=call.status,
        upstream_error=call.error,
        not_trainable=[*call.not_trainable, *(f"{name}: the endpoint's default" for name in call.unknown_sampling)],
        constraints=call.constraints,
    )


def token_counts(turns: Iterable[RolloutTurn], sequences: Iterable[Sequence]) -> TokenCounts:
    """Return the numbers of sampled, trained and excluded tokens of a rollout.

    Args:
        turns: All calls of the rollout.
        sequences: Its training sequences.
    """
    counts = TokenCounts()
    listed: set[int] = set()
    for item in sequences:
        listed.update(item.node_ids)
        counts.add(item.tokens())
    # A call without IDs is in no sequence.
    missing = sum(len(turn.completion_tokens) for turn in turns if turn.turn not in listed)
    counts.add(TokenCounts(missing, 0, {"no_token_ids": missing} if missing else {}))
    return counts


def sequences(recording: Recording) -> list[Sequence]:
    """Return the training sequences: first the agent's, last the discarded answers."""
    return graph_sequences(build(recording.calls))


def graph_sequences(graph: CallGraph) -> list[Sequence]:
    """Return the training sequences of linked calls."""
    main = main_setting(graph)
    # The path from the root to a leaf is one sequence: the leaf's prompt holds the tokens of all calls before it.
    #
    #     1 --+-- 2 (discarded)        sequences: [1 3 5] agent, [4] auxiliary, [1 2] discarded
    #         +-- 3 -- 5
    #     4
    leaves = [leaf for leaf in graph.leaves if leaf.has_tokens]
    order = {"agent": 0, "auxiliary": 1, "discarded": 2}
    ranked = sorted(((_role(leaf, main), leaf) for leaf in leaves), key=lambda pair: (order[pair[0]], pair[1].number))
    # Call 1 is on two paths. `used` gives its tokens to the first, so the agent's sequences come first.
    used: set[int] = set()
    return [_sequence(role, leaf, used) for role, leaf in ranked]


def _sequence(role: Role, leaf: CallNode, used: set[int]) -> Sequence:
    path = leaf.path()
    done = leaf.call.completion
    ids = [*(done.prompt_ids or ()), *(token or 0 for token in done.sampled.ids)]
    mask, logprobs = [0] * len(ids), [0.0] * len(ids)
    validation: list[Finding] = []
    excluded: Counter[str] = Counter()
    for node in path:
        findings = _call_findings(node.call)
        validation += [_softened(finding) for finding in findings]
        sampled = node.call.completion.sampled
        if node.number in used:
            continue
        used.add(node.number)
        reason = _turn_exclusion(node.call, findings)
        if reason is not None:
            excluded[reason] += len(sampled)
            continue  # its tokens stay in `input_ids`: later calls had them in their prompts
        # The prompt of a call is a prefix of `ids`, so its length is the position of the first sampled token.
        start = len(node.call.completion.prompt_ids or ())
        for offset, value in enumerate(sampled.logprobs):
            if value is not None:
                mask[start + offset] = 1
                logprobs[start + offset] = value
        excluded["missing_logprobs"] += sampled.logprobs.count(None)
    return Sequence(
        role=role,
        root_id=path[0].number,
        node_ids=[node.number for node in path],
        prompt_len=len(path[0].call.completion.prompt_ids or ()),
        turn_lengths=[len(node.call.completion.sampled) for node in path],
        turn_starts=[len(node.call.completion.prompt_ids or ()) for node in path],
        input_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        policy_versions=[node.call.policy_version for node in path],
        version_spans=_version_spans(path),
        sampling=[sampling_of(node.call) for node in path],
        constraints=[node.call.constraints for node in path],
        validation=validation,
        routed_experts=align([_experts_of(node.call) for node in path], len(ids)),
        excluded={reason: count for reason, count in excluded.items() if count},
    )


def _version_spans(path: Iterable[CallNode]) -> list[VersionSpan]:
    """Return the versions of the sampled tokens of a sequence: by the engine's spans, else by call."""
    spans: list[VersionSpan] = []
    for node in path:
        done, start = node.call.completion, len(node.call.completion.prompt_ids or ())
        version = node.call.policy_version
        of_call = done.version_spans
        if len(of_call) < 2:  # the trainer's own name for the version counts more than the engine's
            of_call = () if version is None else (VersionSpan(version, 0, len(done.sampled)),)
        for span in of_call:
            last = spans[-1] if spans else None
            moved = VersionSpan(span.version, start + span.start, start + span.end)
            if last is not None and (last.version, last.end) == (moved.version, moved.start):
                spans[-1] = replace(last, end=moved.end)
            else:
                spans.append(moved)
    return spans


def _experts_of(call: Call) -> CallExperts:
    done = call.completion
    return CallExperts(done.routed_experts, len(done.prompt_ids or ()) + len(done.sampled))


def _turn_exclusion(call: Call, findings: Iterable[Finding]) -> str | None:
    """Return the reason to exclude a turn from training; None for a trainable turn."""
    if SHARED in call.not_trainable:
        return "shared_turn"
    if call.not_trainable:
        return "unasked_sampling" if call.unasked_sampling else "steered_turn"
    return next((finding.code for finding in findings if finding.code in _TURN), None)


def _softened(finding: Finding) -> Finding:
    """Return a finding about one turn as a warning: its sequence can be trained on without the turn."""
    return replace(finding, severity="WARN") if finding.code in _TURN else finding


_SAMPLING_NAMES = sorted({*SAMPLING_PARAMETERS, "seed"})


def sampling_of(call: Call) -> Json:
    """Return the sampling parameters of a call."""
    sent = call.sent_parameters
    return {name: sent[name] for name in _SAMPLING_NAMES if sent.get(name) is not None}


def main_setting(graph: CallGraph) -> bytes | None:
    """Return the agent's setting: its system text and tools.

    It is the setting of the first call. If the first call only made a title, it is the setting of the first call with
    tools.

    A program in the sandbox can call the model too, with any text and tools, any number of times. But it can run only
    after the agent's first call. So the order of calls decides, never their number.
    """
    nodes = sorted(graph.nodes, key=lambda node: node.number)
    if not nodes:
        return None
    first = setting_of(nodes[0].call)
    with_tools = next((node for node in nodes if node.call.sent_parameters.get("tools")), None)
    # Agents without tools read commands from the text and continue the conversation. No call continues a title.
    if with_tools is None or any(node.children for node in nodes if setting_of(node.call) == first):
        return first
    return setting_of(with_tools.call)


def _role(leaf: CallNode, main: bytes | None) -> Role:
    if leaf.discarded:
        return "discarded"
    return "agent" if setting_of(leaf.path()[0].call) == main else "auxiliary"


def level(calls: Iterable[Call]) -> Level:
    """Return the lowest capture level of the calls that sampled tokens."""
    sampled = [call for call in calls if call.sampled]
    levels: set[Level] = {_level(call) for call in filter(_counts, sampled)} or {_level(call) for call in sampled}
    if "text" in levels or not levels:
        return "text"
    return "logprobs" if "logprobs" in levels else "tokens"


def _level(call: Call) -> Level:
    done = call.completion
    if not done.sampled.has_logprobs:
        return "text"
    return "tokens" if done.prompt_ids is not None and done.sampled.has_ids else "logprobs"


# An agent can hang up before the first token, or make the model answer nothing. The engine then reports less: llama.cpp
# sends the prompt's IDs at the end of an answer. An aborted call must not exclude the whole rollout from training.


def _is_empty(call: Call) -> bool:
    """Return whether no token was sampled, except perhaps the one that ends an answer."""
    if len(call.completion.sampled) or call.reader.completion_tokens({"usage": call.completion.usage}) > 1:
        return False
    return call.ended != "complete" or call.reader.text_size(call.answer or {}) == 0


def _counts(call: Call) -> bool:
    """Return whether the engine is to blame for missing tokens; if not, the agent ended the call early."""
    return call.sampled and not _is_empty(call) and (call.ended == "complete" or _level(call) == "tokens")


def _call_findings(call: Call) -> list[Finding]:
    if _is_empty(call):
        message = f"nothing was sampled: {call.ended or 'the proxy was killed'}"
        return [Finding("INFO", "empty_turn", message, call.number)]
    findings = _engine_findings(call)
    findings += _sampling_findings(call)
    if call.completion.finish_reason == "length":
        findings.append(Finding("INFO", "truncated_turn", "the limit of tokens ended this turn", call.number))
    if call.policy_changed:
        message = "the weights changed during this answer, and the engine does not say at which token"
        findings.append(Finding("WARN", "unknown_version", message, call.number))
    if call.ended != "complete":
        message = f"the answer did not come whole: {call.ended or 'the proxy was killed'}"
        findings.append(Finding("WARN", "incomplete_turn", message, call.number))
    sent = call.sent_parameters
    truncating = [name for name, off in TRUNCATING.items() if not _is_off(sent.get(name), off)]
    if truncating:
        message = f"sampled with {', '.join(truncating)}: not the model's own distribution"
        findings.append(Finding("WARN", "truncated_sampling", message, call.number))
    return findings


def _sampling_findings(call: Call) -> list[Finding]:
    """Return the differences between a call's sampling and the trainer's request.

    Three cases, from mild to serious:

    - steered: the agent forced a part of the answer. The turn has no loss, and stays as context of later turns.
    - unasked: the distribution differs from the trainer's. The whole sequence is excluded.
    - unknown: the endpoint's defaults decided a parameter. The whole sequence is excluded.
    """
    findings: list[Finding] = []
    steered = [reason for reason in call.not_trainable if reason not in (*call.unasked_sampling, SHARED)]
    if steered:
        message = f"not the policy's own choice, so not trained on: {', '.join(steered)}"
        findings.append(Finding("WARN", "steered_turn", message, call.number))
    if call.unasked_sampling:
        message = f"not sampled as the trainer asked: {', '.join(call.unasked_sampling)}"
        findings.append(Finding("FATAL", "unasked_sampling", message, call.number))
    if call.unknown_sampling:
        names = ", ".join(call.unknown_sampling)
        message = f"the endpoint's defaults decided about {names}: give the `Model` a `Sampling`, which names them all"
        findings.append(Finding("FATAL", "unknown_sampling", message, call.number))
    return findings


def _engine_findings(call: Call) -> list[Finding]:
    """Return findings about the tokens that the engine did not report."""
    done, sampled = call.completion, call.completion.sampled
    findings: list[Finding] = []

    def add(severity: Severity, code: str, message: str) -> None:
        findings.append(Finding(severity, code, message, call.number))

    # The agent can end any call early, and must not be able to discard a rollout that way: then only a warning.
    serious: Severity = "FATAL" if _counts(call) else "WARN"
    if done.prompt_ids is None:
        add(serious, "no_prompt_ids", "the engine did not name the tokens of the prompt")
    if call.prompt_ids_asked:
        add("INFO", "prompt_ids_asked", "the engine named the tokens of the prompt apart from its answer")
    if len(sampled) and not sampled.has_ids:
        add(serious, "no_token_ids", "the engine did not name the sampled tokens")
    missing = _missing_tokens(call)
    if missing:
        add(serious, "missing_tokens", f"the engine sampled {missing} tokens that it did not name")
    if not sampled.has_logprobs:
        add(serious, "no_logprobs", "the engine gave no log-probabilities")
    elif None in sampled.logprobs:
        missing = sum(value is None for value in sampled.logprobs)
        add("WARN", "missing_logprobs", f"{missing} sampled tokens have no log-probability and are not trainable")
    for problem in sampled.problems:
        severity: Severity = "WARN" if problem == "logprob_misalign" else "FATAL"
        add(severity, problem, _PROBLEMS[problem])
    return findings


def _missing_tokens(call: Call) -> int:
    """Return the number of tokens that the usage counts without an ID; one end-of-text token may be missing."""
    done = call.completion
    if not done.sampled.has_ids or call.endpoint_dialect != "openai_chat":
        return 0
    counted = call.reader.completion_tokens({"usage": done.usage})
    missing = counted - len(done.sampled)
    # The usage counts the end-of-text token, and engines may omit its ID. An answer cut by the token limit has no such
    # token.
    unnamed = 0 if done.finish_reason == "length" else 1
    return missing if missing > unnamed else 0


_PROBLEMS = {
    "logprob_misalign": "ids and log-probabilities of some chunks differ in number; those tokens are not trainable",
    "id_mismatch": "the log-probabilities name other tokens than the ids",
    "positive_logprob": "a log-probability is above 0",
}


def _is_off(value: Any, off: Any) -> bool:
    return value is None or value in (off if isinstance(off, tuple) else (off,))


@dataclass(frozen=True, slots=True)
class RolloutDocument:
    """The fields that all documents of a rollout share: ours, and those of the published capture API."""

    session_id: str
    metadata: Json
    budget_stop_count: int
    turns: list[Json]
    graph: Mapping[str, int]
    """Numbers of turns, roots, leaves, forks and discarded answers."""
    n_sequences: int
    trained: list[int]
    """The number of tokens to train on of each trainable sequence."""
    sequences: list[Json]
    validation: list[Any]
    trainable: bool
    capture_level: str
    is_training: bool

    def json(self) -> Json:
        """Return the document."""
        return {
            "session_id": self.session_id,
            "metadata": self.metadata,
            "budget_stop_count": self.budget_stop_count,
            "turns": self.turns,
            "stats": {
                **self.graph,
                "n_sequences": self.n_sequences,
                "n_trainable_sequences": len(self.trained),
                "n_trainable_tokens": sum(self.trained),
            },
            "sequences": self.sequences,
            "validation": self.validation,
            "trainable": self.trainable,
            "capture_level": self.capture_level,
            "rollout_type": "train" if self.is_training else "eval",
        }


def document(recording: Recording, *, include_discarded: bool = True, include_messages: bool = False) -> Json:
    """Return a whole rollout as plain values: turns, sequences, figures and findings."""
    graph = build(recording.calls)
    all_sequences = graph_sequences(graph)
    findings = rollout_findings(recording, graph, all_sequences)
    captured = level(recording.calls)
    trainable = not any(finding.severity == "FATAL" for finding in findings)
    discarded = {node.number for node in graph.nodes if node.discarded}
    listed = [item for item in all_sequences if include_discarded or item.role != "discarded"]
    parents = {node.number: node.parent.number if node.parent else None for node in graph.nodes}
    shared = RolloutDocument(
        session_id=recording.rollout_id,
        metadata=recording.metadata,
        budget_stop_count=len(recording.stops),
        turns=[
            _turn_document(call, parents, discarded, include_messages)
            for call in recording.calls
            if include_discarded or call.number not in discarded
        ],
        graph=graph.stats(),
        n_sequences=len(all_sequences),
        trained=[item.n_trainable for item in all_sequences if item.trainable],
        sequences=[item.document() for item in listed],
        validation=[asdict(finding) for finding in findings],
        trainable=trainable,
        capture_level=captured,
        is_training=trainable,
    )
    counts = token_counts(turns(recording), all_sequences)
    return {**shared.json(), "model": recording.model, "tokens": asdict(counts)}


def _turn_document(call: Call, parents: Mapping[int, int | None], discarded: set[int], messages: bool) -> Json:
    done = call.completion
    fields: Json = {
        **turn(call).model_dump(),
        "node_id": call.number,
        "parent_id": parents.get(call.number),
        "prompt_ids": list(done.prompt_ids) if done.prompt_ids is not None else None,
        "discarded": call.number in discarded,
        "ended": call.ended,
        "model": call.sent.get("model"),
        "usage": done.usage,
        "policy_version": call.policy_version,
        "removed": list(call.removed),
    }
    if messages:
        fields["request"], fields["response"] = call.sent, call.response
    return fields


def rollout_findings(recording: Recording, graph: CallGraph, all_sequences: list[Sequence]) -> list[Finding]:
    """Return the findings about the rollout, and about each call that sampled tokens."""
    findings: list[Finding] = []
    if not graph.nodes:
        findings.append(Finding("FATAL", "no_turns", "nothing was sampled"))
    is_trainable = any(item.trainable for item in all_sequences)
    # A discarded answer is in no trained sequence, so its findings do not matter.
    for finding in (each for node in graph.nodes if not node.discarded for each in _call_findings(node.call)):
        # Excluded turns and sequences are fatal for the rollout only if nothing else is trainable.
        is_partial = is_trainable and finding.code in (*_SAMPLING, *_TURN)
        findings.append(replace(finding, severity="WARN") if is_partial else finding)
    roots = [root for root in graph.roots if not root.discarded]
    # Several roots are normal: sub-agents, titles, and the conversation after a compaction.
    if len(roots) > 1:
        findings.append(Finding("INFO", "multiple_roots", f"{len(roots)} conversations"))
    # No links at all: the agent rewrites its history, or the chat template does. Each call is trained on alone.
    if len(graph.nodes) > 1 and len(graph.roots) == len(graph.nodes):
        findings.append(Finding("WARN", "per_turn_capture_only", "no call continues another token for token"))
    discarded = sum(node.discarded for node in graph.nodes)
    if discarded:
        findings.append(Finding("INFO", "discarded_turns", f"the agent discarded {discarded} answers"))
    if graph.nodes and not is_trainable:
        findings.append(Finding("FATAL", "nothing_trainable", "no sequence may be trained on"))
    if recording.stops:
        findings.append(Finding("INFO", "budget_stop", f"{len(recording.stops)} calls were answered by the budget"))
    if recording.torn_bytes:
        message = f"{recording.torn_bytes} bytes at the end of the records are not whole: the proxy was killed"
        findings.append(Finding("WARN", "torn_records", message))
    for note in recording.notes:
        # An entry could not be written, for example to a full disk: a sequence may lack a call.
        if note.get("what") == "failed":
            findings.append(Finding("FATAL", "records_missing", str(note.get("reason"))))
    return findings


def exclusions(recording: Recording) -> list[str]:
    """Return the reasons why a rollout is excluded from training; empty for a rollout to train on."""
    graph = build(recording.calls)
    findings = rollout_findings(recording, graph, graph_sequences(graph))
    reasons = [finding for finding in findings if finding.severity == "FATAL"]
    # "nothing trainable" follows from the others.
    causes = [finding for finding in reasons if finding.code != "nothing_trainable"] or reasons
    return list(dict.fromkeys(finding.message for finding in causes))


def training_trace(recording: Recording) -> TrainingTrace:
    """Return the agent's calls for a trainer: each once, by conversation, with a mask over its tokens.

    Three kinds of calls are left out: calls of other conversations, such as one for a title; answers that the agent
    discarded; and calls with a missing log-probability. Their tokens remain context of later calls.

    Raises:
        ValueError: The rollout is not trainable; the message gives the reasons.
    """
    graph = build(recording.calls)
    listed = graph_sequences(graph)
    reasons = [finding for finding in rollout_findings(recording, graph, listed) if finding.severity == "FATAL"]
    if reasons:
        texts = dict.fromkeys(f"{finding.code}: {finding.message}" for finding in reasons)
        raise ValueError(f"this rollout is not trainable: {'; '.join(texts)}")
    # The agent has several sequences after a compaction; `dict.fromkeys` keeps the order and drops repeated calls.
    mine = [item for item in listed if item.role == "agent"]
    numbers = dict.fromkeys(number for item in mine for number in item.node_ids)
    context = {number for item in mine if not item.trainable for number in item.node_ids}
    calls = {node.number: node.call for node in graph.nodes}
    return TrainingTrace(
        turns=[
            _training_turn(recording, calls[number], is_context=number in context)
            for number in numbers
            if None not in calls[number].completion.sampled.logprobs
        ]
    )


def _training_turn(recording: Recording, call: Call, *, is_context: bool) -> TrainingTurn:
    done, sampled = call.completion, call.completion.sampled
    prompt_ids = list(done.prompt_ids or ())
    value = int(_turn_exclusion(call, _call_findings(call)) is None and not is_context)
    return TrainingTurn(
        node_id=str(call.number),
        prompt_token_ids=prompt_ids,
        completion_token_ids=[token for token in sampled.ids if token is not None],
        per_token_logps=[logprob for logprob in sampled.logprobs if logprob is not None],
        loss_mask=[0] * len(prompt_ids) + [value] * len(sampled),
        request=call.sent,
        response=call.reader.strip_response(call.response or {}, frozenset((LOGPROBS, TOKEN_IDS))),
        metadata={
            **recording.metadata,
            "node_id": str(call.number),
            "index": call.number,
            "turn": call.number,
            "model": call.sent.get("model"),
            "n_tools": len(call.sent.get("tools") or ()),
            "sampling_params": sampling_of(call),
            "policy_version": call.policy_version,
            "not_trainable": list(call.not_trainable),
            "constraints": call.constraints,
        },
    )


def trace_entries(recording: Recording) -> list[TraceEntry]:
    """Return the agent's calls as trace entries for a trainer, with full requests.

    Raises:
        ValueError: The rollout is not trainable; the message gives the reasons.
    """
    return training_trace(recording).to_trace_entries()


def write_jsonl(path: Path | str, recordings: Iterable[Recording], *, include_messages: bool = False) -> int:
    """Write one document per line and rollout, and return their number."""
    count = 0
    with Path(path).open("wb") as file:
        for recording in recordings:
            file.write(dumps(document(recording, include_messages=include_messages)) + b"\n")
            count += 1
    return count


def write_parquet(path: Path | str, recordings: Iterable[Recording]) -> int:
    """Write one row per sequence, and return the number of rows. The outcome (`Recording.about`) is in columns.

    Raises:
        ImportError: pyarrow is not installed.
    """
    schema = _schema()  # first: its error names the package to install
    import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]

    count = 0
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for table in tables(recordings):
            writer.write_table(table)
            count += table.num_rows
    return count


def tables(recordings: Iterable[Recording]) -> Iterator[Any]:
    """Yield Arrow tables with one row per sequence; at least one table, so that an empty file has its columns.

    Each table has few rows: the sequences of a whole store may not fit into memory.

    Raises:
        ImportError: pyarrow is not installed.
    """
    schema = _schema()
    import pyarrow

    rows = (_row(recording, item) for recording in recordings for item in sequences(recording))
    yield pyarrow.Table.from_pylist(list(itertools.islice(rows, _ROWS)), schema=schema)
    while batch := list(itertools.islice(rows, _ROWS)):
        yield pyarrow.Table.from_pylist(batch, schema=schema)


def _schema() -> Any:
    try:
        import pyarrow
    except ImportError as exc:
        raise ImportError("Parquet needs pyarrow: pip install pyarrow") from exc
    # One row per sequence. The lists `input_ids`, `loss_mask` and `logprobs` have equal lengths; trainers read them as
    # they are. `metadata` is JSON text, because its keys differ between rollouts and a column needs one type.
    string, integer, number = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    return pyarrow.schema(
        {
            "rollout_id": string,
            **dict.fromkeys(("task_id", "group"), string),
            **dict.fromkeys(("sample", "attempt"), integer),
            **dict.fromkeys(("agent", "model", "status", "reason", "trust", "verdict"), string),
            "reward": number,
            "role": string,
            "trainable": pyarrow.bool_(),
            "not_trainable": pyarrow.list_(string),
            "node_ids": pyarrow.list_(integer),
            "prompt_len": integer,
            "input_ids": pyarrow.list_(integer),
            "loss_mask": pyarrow.list_(pyarrow.int8()),
            "logprobs": pyarrow.list_(number),
            "policy_version": string,
            "policy_versions": pyarrow.list_(string),
            "version_spans": pyarrow.list_(pyarrow.struct({"version": string, "start": integer, "end": integer})),
            **dict.fromkeys(SAMPLING_COLUMNS, number),
            "seed": integer,
            "constraints": string,
            "routed_experts": string,
            "routed_experts_shape": pyarrow.list_(integer),
            "metadata": string,
        }
    )


def _row(recording: Recording, item: Sequence) -> Json:
    """Return a sequence as the columns of a table."""
    about = recording.about
    fields = ("role", "trainable", "not_trainable", "node_ids", "prompt_len", "input_ids", "loss_mask", "logprobs")
    return {
        "rollout_id": recording.rollout_id,
        **{
            name: about.get(name)
            for name in ("task_id", "group", "agent", "model", "status", "reason", "trust", "verdict")
        },
        **{name: about.get(name) for name in ("sample", "attempt", "reward")},
        **{name: getattr(item, name) for name in (*fields, "policy_version", "policy_versions")},
        "version_spans": [asdict(span) for span in item.version_spans],
        **{name: item.sampled_with(name) for name in (*SAMPLING_COLUMNS, "seed")},
        "constraints": json.dumps(item.constraints),
        "routed_experts": item.routed_experts.data if item.routed_experts is not None else None,
        "routed_experts_shape": item.routed_experts.shape if item.routed_experts is not None else None,
        "metadata": json.dumps(recording.metadata),
    }
