"""Checks of captured values: one call, one sequence, one rollout, or an endpoint's response.

Values only. `training_trace` checks single calls for training.
"""

# Severities, and who reads them:
#
#   FATAL   excludes the call, sequence or rollout from training      no log-probabilities, lengths that differ
#   WARN    trainable, but probably not as intended                   a single call, several conversations
#   INFO    a fact for the reader of a document                       truncated, forks, certain tokens
#
# The codes are published: dashboards and tests of other packages filter by them.

from __future__ import annotations

from typing import Any

from ..dialects.dialect import as_dict, as_list, dicts_in
from ..encoding import Json
from ..training_trace import FATAL, INFO, WARN, CaptureReport, validate_training_turn
from .turn_graph import RolloutGraph, TrainingSequence


def check_turn_eval(response_message: Any, *, finish_reason: str | None = None, index: int = 0) -> CaptureReport:
    """Check a call without token IDs: the model must say something or call a tool.

    Args:
        response_message: The message of the answer.
        finish_reason: Why the call ended.
        index: The call's number, for the texts.
    """
    report = CaptureReport()
    message = as_dict(response_message)
    if not str(message.get("content") or "").strip() and not message.get("tool_calls"):
        text = f"turn {index}: the model neither said anything nor called a tool (finish={finish_reason})"
        report.add(WARN, "empty_completion", text)
    if finish_reason == "length":
        report.add(INFO, "truncated_turn", f"turn {index}: the token limit ended it")
    return report


# A sequence is three lists of one length. These checks repeat the checks of single calls on purpose: a bug in the graph
# could join valid calls to an invalid sequence.
def check_sequence(seq: TrainingSequence, *, min_trainable: int = 1) -> CaptureReport:
    """Check a training example: lengths, ids, mask, log-probabilities.

    Args:
        seq: The example.
        min_trainable: The minimum number of tokens to train on.
    """
    report = CaptureReport()
    sizes = {"input_ids": len(seq.input_ids), "loss_mask": len(seq.loss_mask), "logprobs": len(seq.logprobs)}
    if len(set(sizes.values())) > 1:
        report.add(FATAL, "length_mismatch", " ".join(f"{name}={size}" for name, size in sizes.items()))
        return report
    start, pairs = seq.prompt_len, list(zip(seq.loss_mask, seq.logprobs, strict=True))
    try:
        validate_training_turn(seq.input_ids[:start], seq.input_ids[start:], seq.logprobs[start:], seq.loss_mask)
    except ValueError as exc:
        report.add(FATAL, "invalid_training_sequence", str(exc))
        return report
    trainable = sum(seq.loss_mask)
    if trainable < min_trainable:
        text = f"{trainable} of {len(pairs)} tokens can be trained on, {min_trainable} are needed"
        report.add(FATAL, "nothing_trainable", text)
    scored = sum(not mask and logprob != 0 for mask, logprob in pairs)
    if scored:
        report.add(FATAL, "masked_has_logprob", f"{scored} tokens of the context have a log-probability")
    if start >= len(pairs):
        report.add(FATAL, "empty_response", f"all {len(pairs)} tokens are prompt")
    certain = sum(bool(mask) and logprob == 0 for mask, logprob in pairs)
    if certain:
        report.add(INFO, "certain_tokens", f"{certain} of {trainable} tokens to train on have a probability of 1")
    return report


def check_rollout(
    graph: RolloutGraph,
    *,
    expect_single_root: bool = False,
    capture_level: str = "tokens",
    budget_stop_count: int = 0,
) -> CaptureReport:
    """Check the shape of a rollout: how many calls, conversations, retries.

    Args:
        graph: Its calls.
        expect_single_root: Whether more than one conversation is an error.
        capture_level: The capture level of the endpoint.
        budget_stop_count: The number of calls that the budget answered.
    """
    # A coding agent has one conversation with many calls. Other shapes usually mean that its history is not what the
    # endpoint saw: the agent rewrote or dropped messages between two calls.
    report = CaptureReport()
    stats = graph.stats()
    turns, roots = stats["n_turns"], stats["n_roots"]
    if not turns:
        report.add(
            FATAL, "no_turns", "no model call was captured: the agent did not reach the proxy, or its key is wrong"
        )
        return report
    if roots == turns > 1 and capture_level == "tokens":
        text = f"none of {turns} calls continues another token for token: each is an example of its own"
        report.add(WARN, "per_turn_capture_only", text)
    elif roots == turns > 1:
        text = f"none of {turns} calls continues another message for message: the trace is one of single calls"
        report.add(INFO, "per_turn_trace_only", text)
    elif roots > 1:
        report.add(WARN, "multiple_roots", f"{roots} conversations in {turns} calls")
    if expect_single_root and roots > 1:
        report.add(FATAL, "root_count", f"{roots} conversations where one is expected")
    if turns == 1 and budget_stop_count <= 0:
        report.add(WARN, "degenerate_rollout", "the agent made a single model call")
    if stats["n_discarded"]:
        report.add(
            WARN, "discarded_turns", f"the agent discarded {stats['n_discarded']} answers; they are not trained on"
        )
    if stats["n_forks"]:
        report.add(INFO, "forks", f"{stats['n_forks']} calls have several continuations")
    return report


def check_upstream_response(payload: Json) -> CaptureReport:
    """Check a chat completion for training: IDs of prompt and completion, and log-probabilities.

    Args:
        payload: The endpoint's response, after `normalize_response`.
    """
    report = CaptureReport()
    choices = dicts_in(payload.get("choices"))
    if not choices:
        report.add(FATAL, "no_choices", "the response has no choice")
        return report
    ids = as_list(choices[0].get("token_ids"))
    entries = as_list(as_dict(choices[0].get("logprobs")).get("content"))
    hint = "; start vLLM with --return-tokens-as-token-ids"
    if not payload.get("prompt_token_ids"):
        report.add(FATAL, "no_prompt_token_ids", f"the endpoint does not send the IDs of the prompt{hint}")
    if not ids:
        report.add(FATAL, "no_completion_token_ids", f"the endpoint does not send the IDs of sampled tokens{hint}")
    if not entries:
        report.add(FATAL, "no_logprobs", "the endpoint gives no log-probabilities")
        return report
    if ids and len(ids) != len(entries):
        report.add(FATAL, "logprob_misalign", f"{len(entries)} log-probabilities for {len(ids)} sampled ids")
    # Without the flag, two tokens with one text look equal, and their IDs cannot be checked against the list.
    token = as_dict(entries[0]).get("token", "")
    if not str(token).startswith("token_id:"):
        text = (
            f"log-probabilities name tokens by their text ({token!r}): --return-tokens-as-token-ids is not set, and"
            " --logprobs-mode processed_logprobs may not be either; without that, vLLM's are those before temperature"
        )
        report.add(WARN, "token_strings", text)
    return report
