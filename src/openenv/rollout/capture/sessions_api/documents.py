"""The exports of a captured session: the document of a rollout, trace entries, training traces, turn records.

    session.graph -- export_session --> document -- to_trace_entries(graph, document) --> entries with its masks

Nothing is tokenised, filled in or repaired: a capture that cannot be trained on raises an error.
"""

# An agent asks, gets a title from a second call, and repeats its third call with another answer:
#
#   call 1 --> call 2 --> call 3a        path 1-2-3a   discarded: 3a has a sibling that the agent continued
#                     \-> call 3b --> 4  path 1-2-3b-4 agent
#   call t                               path t        auxiliary: no tools, while others have some
#
# Each path to a leaf is a row of the document. Calls 1 and 2 are on two paths, but `to_trace_entries` exports each call
# once, with the mask that all its rows agree on.

from __future__ import annotations

import json
import logging
from typing import Any, Protocol

from ..encoding import Json
from ..export import RolloutDocument
from ..training_trace import CaptureReport, TraceEntry, TrainingTrace, check_turn, validate_training_turn
from .capture_checks import check_rollout, check_sequence
from .capture_sessions import CaptureSession, is_trainable
from .turn_graph import RolloutGraph, TrainingSequence, TurnNode, common_prefix_len

log = logging.getLogger("openenv.rollout.capture")

AGENT, AUXILIARY, DISCARDED = "agent", "auxiliary", "discarded"


def export_session(
    session: CaptureSession,
    *,
    include_discarded: bool = False,
    include_messages: bool = False,
    capture_level: str = "tokens",
) -> Json:
    """Return a session's rollout as plain values: turns, training examples, figures and findings.

    Args:
        session: The session.
        include_discarded: Add examples for discarded answers, too.
        include_messages: Add messages and tools to the turns.
        capture_level: The capture level of the endpoint; only `tokens` can be trained on.
    """
    graph = session.graph
    trainable = is_trainable(session.purpose, capture_level)
    stops = session.budget_stop_count
    report = check_rollout(graph, capture_level=capture_level, budget_stop_count=stops)
    discarded = {node.node_id for node in graph.discarded_nodes()}
    sequences = graph.sequences()
    roles = _roles(graph, sequences, discarded, is_captured=trainable)
    rows = [
        _row(sequence, role, trainable)
        for sequence, role in zip(sequences, roles, strict=True)
        if include_discarded or role != DISCARDED
    ]
    chosen = [row for row in rows if row["trainable"]]
    return RolloutDocument(
        session_id=session.session_id,
        metadata=session.metadata,
        budget_stop_count=stops,
        turns=[_turn(graph, node, node.node_id in discarded, include_messages) for node in graph.nodes()],
        graph=graph.stats(),
        n_sequences=len(rows),
        trained=[row["n_trainable"] for row in chosen],
        sequences=rows,
        validation=[*map(str, report.findings), *session.findings],
        trainable=bool(chosen) and report.ok,
        capture_level=capture_level,
        is_training=trainable,
    ).json()


def _roles(
    graph: RolloutGraph, sequences: list[TrainingSequence], discarded: set[str], *, is_captured: bool
) -> list[str]:
    """Return the role of each path: the agent at work, an auxiliary call (for a title), or a discarded answer."""
    # Agents send their tools with each call, and auxiliary calls have none. If no call has tools, all belong to the
    # agent: some agents read commands from texts.

    def has_tools(sequence: TrainingSequence) -> bool:
        return any(graph.get(node_id).n_tools for node_id in sequence.node_ids)

    live = [sequence for sequence in sequences if sequence.node_ids[-1] not in discarded]
    by_tools = any(map(has_tools, live))
    roles = []
    for sequence in sequences:
        if sequence.node_ids[-1] in discarded:
            roles.append(DISCARDED)
        else:
            is_agent = has_tools(sequence) if by_tools else not is_captured or sequence.n_trainable > 0
            roles.append(AGENT if is_agent else AUXILIARY)
    return roles


def _row(sequence: TrainingSequence, role: str, trainable: bool) -> Json:
    # An evaluation has no tokens to check; its masks are zero, so that no trainer uses it by mistake.
    report = check_sequence(sequence) if trainable else CaptureReport()
    return {
        "role": role,
        "root_id": sequence.root_id,
        "node_ids": sequence.node_ids,
        "n_turns": sequence.n_turns,
        "prompt_len": sequence.prompt_len,
        "n_trainable": sequence.n_trainable if trainable else 0,
        "turn_lengths": sequence.turn_lengths(),
        "input_ids": sequence.input_ids,
        "loss_mask": sequence.loss_mask if trainable else [0] * len(sequence.input_ids),
        "logprobs": sequence.logprobs,
        "trainable": trainable and report.ok and role == AGENT,
        "validation": [str(finding) for finding in report.findings],
    }


def _turn(graph: RolloutGraph, node: TurnNode, is_discarded: bool, include_messages: bool) -> Json:
    fields: Json = {
        "node_id": node.node_id,
        "index": node.index,
        "root_id": graph.root_of(node.node_id),
        "n_sampled": len(node.sampled_ids),
        "n_prompt": len(node.prompt_ids),
        "n_tools": node.n_tools,
        "finish_reason": node.finish_reason,
        "harness_session_id": node.harness_session_id,
        "sampling_params": node.sampling_params,
        "requested_sampling_params": node.requested_sampling_params,
        "sampled_logprobs": node.sampled_logprobs,
        "discarded": is_discarded,
    }
    if include_messages:
        fields["request_messages"] = node.request_messages
        fields["request_tools"] = node.request_tools
        fields["response_message"] = node.response_message
    return fields


def summarise(document: Json) -> str:
    """Return a document as a few readable lines."""
    stats = document["stats"]
    lines = [
        f"session {document['session_id']}  {document.get('rollout_type', 'train')}  trainable={document['trainable']}",
        f"  calls: {stats['n_turns']}, conversations: {stats['n_roots']}, forks: {stats['n_forks']},"
        f" discarded: {stats['n_discarded']}",
        f"  to train on: {stats['n_trainable_sequences']} sequences, {stats['n_trainable_tokens']} tokens",
    ]
    for row in document["sequences"]:
        lines.append(
            f"  {row['role']}: {row['n_turns']} turns, {len(row['input_ids'])} tokens ({row['prompt_len']} prompt,"
            f" {row['n_trainable']} to train on), turn lengths {row['turn_lengths']}"
        )
        lines += [f"    {finding}" for finding in row["validation"] if not finding.startswith("[INFO]")]
    lines += [f"  {finding}" for finding in document["validation"]]
    return "\n".join(lines)


# The exports for trainers. A node that several paths share is exported once.


def to_trace_entries(graph: RolloutGraph, document: Json) -> list[TraceEntry]:
    """Return the calls of the agent as trace entries, each with the document's mask over prompt and completion.

    Raises:
        ValueError: The rollout is an evaluation, or a mask does not fit.
    """
    nodes, masks = _trainable_turns(graph, document)
    usable = [node for node in nodes if _is_usable(node)]
    return [_entry(node, masks[node.node_id]) for node in usable]


def _entry(node: TurnNode, completion_mask: list[int]) -> TraceEntry:
    mask = [0] * len(node.prompt_ids) + completion_mask
    logprobs = node.sampled_logprobs or []
    validate_training_turn(node.prompt_ids, node.sampled_ids, logprobs, mask)
    return TraceEntry(
        request={"messages": node.request_messages, "tools": node.request_tools},
        response={"choices": [{"message": node.response_message, "finish_reason": node.finish_reason}]},
        prompt_token_ids=node.prompt_ids,
        completion_token_ids=node.sampled_ids,
        per_token_logps=logprobs,
        loss_mask=mask,
        metadata={
            "node_id": node.node_id,
            "index": node.index,
            "model": node.model,
            "n_tools": node.n_tools,
            "harness_session_id": node.harness_session_id,
            "sampling_params": dict(node.sampling_params),
            "requested_sampling_params": dict(node.requested_sampling_params),
        },
    )


def to_training_trace(graph: RolloutGraph, document: Json) -> TrainingTrace:
    """Return the calls of the agent as a checked trace.

    Raises:
        ValueError: The rollout has a fatal finding or is an evaluation, or a call has no valid tokens.
    """
    fatal = [finding for finding in document.get("validation", ()) if finding.startswith("[FATAL")]
    if fatal:
        raise ValueError(f"cannot train a capture with fatal validation findings: {'; '.join(fatal)}")
    nodes, _ = _trainable_turns(graph, document)
    bad = [node.node_id for node in nodes if not _is_usable(node)]
    if bad:
        raise ValueError(f"agent capture has missing or invalid engine tokens/logprobs: calls {', '.join(bad)}")
    return TrainingTrace.from_entries(to_trace_entries(graph, document))


def to_turn_records(graph: RolloutGraph, document: Json) -> list[tuple[list[int], list[int], list[float]]]:
    """Return prompt, completion and log-probabilities of the fully trainable calls of the agent.

    Raises:
        ValueError: The rollout is an evaluation, or a call is trainable in part only: use `to_trace_entries`.
    """
    nodes, masks = _trainable_turns(graph, document)
    if any(any(mask) and not all(mask) for mask in masks.values()):
        raise ValueError("to_turn_records cannot represent partial masks; use to_trace_entries")
    return [
        (node.prompt_ids, node.sampled_ids, node.sampled_logprobs or [])
        for node in nodes
        if _is_usable(node) and any(masks[node.node_id])
    ]


def _trainable_turns(graph: RolloutGraph, document: Json) -> tuple[list[TurnNode], dict[str, list[int]]]:
    """Return the calls of the agent, and the mask of each completion.

    Raises:
        ValueError: The rollout is an evaluation, or a mask does not fit.
    """
    if document.get("rollout_type", "train") == "eval":
        level = document.get("capture_level") or "unknown"
        raise ValueError(
            f"this is an EVAL rollout (capture_level={level!r}): no token ids and log-probabilities were captured to"
            " train on; they come from vLLM with --return-tokens-as-token-ids --logprobs-mode processed_logprobs, or"
            " from SGLang"
        )
    # A row's mask covers its whole path, so the part of one call starts where its prompt ends.
    masks: dict[str, list[int]] = {}
    for row in document["sequences"]:
        if row["role"] != AGENT:
            continue
        mask = row.get("loss_mask") or graph.sequence_for(row["node_ids"][-1]).loss_mask
        for node_id in row["node_ids"]:
            node = graph.get(node_id)
            start = len(node.prompt_ids)
            part = list(mask[start : start + len(node.sampled_ids)])
            if len(part) != len(node.sampled_ids):
                raise ValueError(f"incomplete completion mask for node {node_id}")
            # Two paths share this call. A trainer gets it once, so both must agree on its mask.
            if masks.setdefault(node_id, part) != part:
                raise ValueError(f"inconsistent completion masks for shared node {node_id}")
    nodes = _agent_nodes(graph, document)
    left_out = [node.node_id for node in nodes if not _is_usable(node)]
    if left_out:
        log.warning("%d of %d calls have no valid tokens to train on: %s", len(left_out), len(nodes), left_out[:5])
    return nodes, masks


def _agent_nodes(graph: RolloutGraph, document: Json) -> list[TurnNode]:
    agent_ids = {node_id for row in document["sequences"] if row["role"] == AGENT for node_id in row["node_ids"]}
    return [node for node in graph.nodes() if node.node_id in agent_ids]


# A call without valid log-probabilities stays in documents, and is left out of trace entries with a warning.
def _is_usable(node: TurnNode) -> bool:
    logprobs = node.sampled_logprobs
    return bool(node.sampled_ids and logprobs) and check_turn(node.prompt_ids, node.sampled_ids, logprobs).ok


class ChatTokenizer(Protocol):
    """The part of a tokenizer that `measure_retokenization_skew` needs; the tokenizers of transformers have it."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return the token IDs of a conversation."""


def measure_retokenization_skew(
    graph: RolloutGraph,
    document: Json,
    tokenizer: ChatTokenizer,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Json | None = None,
) -> Json:
    """Compare the engine's prompts with a local chat template, call by call.

    Args:
        graph: The calls.
        document: Identifies the calls of the agent.
        tokenizer: The local tokenizer.
        chat_template: A template to replace the default of the tokenizer.
        chat_template_kwargs: More arguments of the template.
    """
    # Example: the engine's prompt [1 2 3 4 5 6], rebuilt as [1 2 3 9 5 6 7]. Then delta is 1, prefix_match 3, exact
    # False. A trainer that tokenises text itself would train on positions that the model never saw.
    turns: list[Json] = []
    for number, node in enumerate(_agent_nodes(graph, document)):
        try:
            rebuilt = list(
                tokenizer.apply_chat_template(
                    [_with_parsed_arguments(message) for message in node.request_messages],
                    tools=node.request_tools,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                    chat_template=chat_template,
                    **(chat_template_kwargs or {}),
                )
            )
        except Exception as exc:  # a template may raise anything, and its failure is a result
            error = f"{type(exc).__name__}: {str(exc)[:160]}"
            turns.append({"turn": number, "error": error, "engine_len": len(node.prompt_ids)})
            continue
        turns.append(
            {
                "turn": number,
                "engine_len": len(node.prompt_ids),
                "rebuilt_len": len(rebuilt),
                "delta": len(rebuilt) - len(node.prompt_ids),
                "prefix_match": common_prefix_len(node.prompt_ids, rebuilt),
                "exact": rebuilt == list(node.prompt_ids),
            }
        )
    # Fractions are about the calls that the template accepted; errors are counted apart.
    measured = [turn for turn in turns if "exact" in turn]
    shares = [turn["prefix_match"] / max(turn["engine_len"], 1) for turn in measured]
    return {
        "n_turns": len(turns),
        "n_errors": len(turns) - len(measured),
        "exact_match_frac": sum(turn["exact"] for turn in measured) / len(measured) if measured else 0.0,
        "max_abs_delta": max((abs(turn["delta"]) for turn in measured), default=0),
        "min_prefix_match_frac": min(shares, default=0.0),
        "turns": turns,
    }


def _with_parsed_arguments(message: Json) -> Json:
    """Return a message with the arguments of its tool calls as objects, for chat templates."""
    # {"arguments": "{\"path\": \"/tmp\"}"} -> {"arguments": {"path": "/tmp"}}: templates iterate over the arguments.
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function")
        holder = function or call
        if isinstance(holder.get("arguments"), str):
            try:
                arguments = json.loads(holder["arguments"])
            except (ValueError, RecursionError):
                arguments = {}
            holder = {**holder, "arguments": arguments}
        calls.append({**call, "function": holder} if function else holder)
    return {**message, "tool_calls": calls} if calls else message
