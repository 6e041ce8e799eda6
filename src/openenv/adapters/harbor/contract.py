"""What trainers take of a Harbor result: its turns as TRL's trace entries, as a `TrainingTrace`, or with an audit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openenv.rollout.capture.training_trace import TrainingTrace, TrainingTurn, validate_training_turn

from .models import HarborRolloutResult, HarborTurn

# The identity of a rollout, which a trainer's logs repeat.
_ABOUT = (
    *("task_id", "task_name", "dataset", "harness", "sandbox", "trial_name", "session_id"),
    *("reward", "rewards", "reward_key", "rollout_type", "capture_level"),
)


def to_trace_entries(result: HarborRolloutResult) -> list[dict[str, Any]]:
    """Return TRL's trace entries of the turns that may be trained on.

    Raises:
        ValueError: the endpoint did not name its tokens, a finding forbids training, or a turn's tokens do not fit.
    """
    _require_trainable(result)
    entries = []
    for turn in result.turns:
        # Helpers' calls, retries that were thrown away, and turns without tokens teach nothing.
        if turn.role != "agent" or turn.discarded or not turn.trainable or not turn.completion_token_ids:
            continue
        mask = turn.loss_mask
        # Results of older servers lack the mask. Every sampled token counted then.
        if mask is None:
            mask = [0] * len(turn.prompt_token_ids) + [1] * len(turn.completion_token_ids)
        # A wrong length would shift every label by some tokens, so it must raise here.
        validate_training_turn(turn.prompt_token_ids, turn.completion_token_ids, turn.per_token_logps, mask)
        entries.append(
            {
                "request": {"messages": list(turn.request_messages), "tools": turn.request_tools},
                "response": _response(turn),
                "prompt_token_ids": list(turn.prompt_token_ids),
                "completion_token_ids": list(turn.completion_token_ids),
                "per_token_logps": list(turn.per_token_logps),
                "loss_mask": list(mask),
                "metadata": {
                    "turn": turn.turn,
                    "node_id": turn.node_id,
                    "sampling_params": dict(turn.sampling_params),
                    "requested_sampling_params": dict(turn.requested_sampling_params),
                    "n_tools": turn.n_tools,
                    "finish_reason": turn.finish_reason,
                },
            }
        )
    return entries


def to_training_trace(result: HarborRolloutResult) -> TrainingTrace:
    """Return the turns as a trainer's trace; each must have its mask.

    Raises:
        ValueError: as for `to_trace_entries`, or a turn has no mask.
    """
    _require_trainable(result)
    turns = []
    for turn in result.turns:
        if turn.role != "agent" or turn.discarded or not turn.completion_token_ids:
            continue
        # The strict form has no default: a missing mask is a missing decision.
        if turn.loss_mask is None:
            raise ValueError("training capture requires an explicit loss_mask")
        # Two fields that contradict each other point to a bug in the capture.
        if not turn.trainable and any(turn.loss_mask):
            raise ValueError("ineligible capture contains supervised tokens")
        turns.append(
            TrainingTurn(
                node_id=turn.node_id,
                prompt_token_ids=turn.prompt_token_ids,
                completion_token_ids=turn.completion_token_ids,
                per_token_logps=turn.per_token_logps,
                loss_mask=turn.loss_mask,
                request={"messages": turn.request_messages, "tools": turn.request_tools},
                response=_response(turn),
                metadata={
                    "turn": turn.turn,
                    "sampling_params": turn.sampling_params,
                    "requested_sampling_params": turn.requested_sampling_params,
                },
            )
        )
    return TrainingTrace(turns=turns)


def export_training_contract(result: HarborRolloutResult) -> dict[str, Any]:
    """Return the training entries, and every turn with its loss mask.

    Raises:
        ValueError: as for `to_trace_entries`, or two turns have one number.
    """
    entries = to_trace_entries(result)
    # The number identifies a turn in the audit, so it must be unique.
    numbers = [turn.turn for turn in result.turns]
    if len(set(numbers)) != len(numbers):
        raise ValueError("duplicate turn identities in training contract")
    # Turn number to mask, for the turns that are trained on.
    chosen = {entry["metadata"]["turn"]: entry["loss_mask"] for entry in entries}
    return {
        # Consumers outside of this package read the document, so it has a version.
        "schema_version": 1,
        **{name: getattr(result, name) for name in _ABOUT},
        "n_trainable_tokens": sum(map(sum, chosen.values())),
        "trace_entries": entries,
        "turns": [_audit(turn, chosen.get(turn.turn)) for turn in result.turns],
    }


def _audit(turn: HarborTurn, mask: Sequence[int] | None) -> dict[str, Any]:
    # Turns that are not trained on appear with an empty mask, so that the audit is complete.
    nothing = [0] * (len(turn.prompt_token_ids) + len(turn.completion_token_ids))
    return {
        "turn": turn.turn,
        "node_id": turn.node_id,
        "prompt_token_ids": list(turn.prompt_token_ids),
        "completion_token_ids": list(turn.completion_token_ids),
        "per_token_logps": list(turn.per_token_logps),
        "loss_mask": nothing if mask is None else list(mask),
        "finish_reason": turn.finish_reason,
        "discarded": turn.discarded,
        "trainable": mask is not None and any(mask),
        "sampling_params": dict(turn.sampling_params),
        "requested_sampling_params": dict(turn.requested_sampling_params),
    }


def _require_trainable(result: HarborRolloutResult) -> None:
    # An evaluation samples differently; training on it would be off-policy.
    if result.rollout_type != "train":
        raise ValueError("eval-only rollout has no exact-token training contract")
    # A fatal finding means that tokens and text do not belong together.
    fatal = [finding for finding in result.findings if "[FATAL" in finding]
    if fatal:
        raise ValueError(f"cannot train a capture with fatal validation findings: {fatal[0]}")


def _response(turn: HarborTurn) -> dict[str, Any]:
    message = {"role": "assistant", "content": turn.text, "tool_calls": _openai_calls(turn.tool_calls) or None}
    return {"choices": [{"message": message, "finish_reason": turn.finish_reason}]}


def _openai_calls(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return calls as OpenAI has them: chat templates, and checks for tool calls, read that form only."""
    nested = []
    for number, call in enumerate(calls):
        # In OpenAI's form already.
        if call.get("function"):
            nested.append(call)
        elif call.get("name"):
            function = {"name": str(call["name"]), "arguments": call.get("arguments", "")}
            nested.append({"id": str(call.get("id") or f"call_{number}"), "type": "function", "function": function})
    return nested
