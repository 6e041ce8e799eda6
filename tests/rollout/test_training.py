"""What trainers get: strict turns and traces, and the parameters with which a model samples its own distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest

from openenv.core.harness import TraceEntry, TrainableSession, TrainingTrace, TrainingTurn
from openenv.core.harness.capture.upstream import training_sampling
from openenv.rollout.capture.training_trace import check_turn, validate_training_turn


def turn(**changes: Any) -> TrainingTurn:
    """A turn of two prompt and three completion tokens, one of which is masked."""
    fields: dict[str, Any] = {
        "node_id": "agent",
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3, 4, 5],
        "per_token_logps": [-0.1, -0.2, 0.0],
        "loss_mask": [0, 0, 1, 0, 1],
        **changes,
    }
    return TrainingTurn(**fields)


def test_a_trace_comes_back_from_json_as_it_was() -> None:
    trace = TrainingTrace(turns=[turn(), turn(node_id="context", loss_mask=[0] * 5)])
    assert TrainingTrace.model_validate_json(trace.model_dump_json()) == trace
    assert trace.schema_version == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"per_token_logps": []}, "logprob_misalign"),
        ({"per_token_logps": [-0.1, -0.2]}, "logprob_misalign"),
        ({"per_token_logps": [-0.1, math.nan, -0.3]}, "invalid_logprob"),
        ({"per_token_logps": [-0.1, -math.inf, -0.3]}, "invalid_logprob"),
        ({"per_token_logps": [-0.1, 1e-9, -0.3]}, "positive_logprob"),
        ({"per_token_logps": [-0.1, 0.5, -0.3], "loss_mask": [0] * 5}, "positive_logprob"),
        ({"per_token_logps": [-0.1, None, -0.3]}, "valid number"),
        ({"per_token_logps": [-0.1, True, -0.3]}, "valid number"),
        ({"loss_mask": [1, 0, 1]}, "length_mismatch"),
        ({"loss_mask": [1, 0, 1, 0, 1]}, "trainable_prompt"),
        ({"loss_mask": [0, 0, 2, 0, 1]}, "invalid_loss_mask"),
        ({"loss_mask": [0, 0, True, 0, 1]}, "valid integer"),
        ({"loss_mask": None}, "valid list"),
        ({"prompt_token_ids": [], "loss_mask": [1, 0, 1]}, "no_prompt_ids"),
        ({"prompt_token_ids": [1, -2]}, "invalid_token_id"),
        ({"completion_token_ids": [3, -4, 5]}, "invalid_token_id"),
        ({"completion_token_ids": [3, "4", 5]}, "valid integer"),
        ({"node_id": ""}, "at least 1 character"),
        ({"advantage": 1.0}, "not permitted"),
    ],
)
def test_a_turn_that_cannot_be_trained_on_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        turn(**changes)


def test_a_turn_in_which_nothing_was_sampled_is_context() -> None:
    empty = turn(completion_token_ids=[], per_token_logps=[], loss_mask=[0, 0])
    assert sum(empty.loss_mask) == 0


def test_nothing_is_inferred_of_entries() -> None:
    entries = TrainingTrace(turns=[turn(metadata={"node_id": "agent"})]).to_trace_entries()
    assert TrainingTrace.from_entries(entries).to_trace_entries() == entries
    extra = {**entries[0], "reward": 1.0, "completion_tokens": ["a", "b", "c"]}
    assert TrainingTrace.from_entries([extra]).turns[0].node_id == "agent"
    for name in TraceEntry.__annotations__:
        if name not in ("request", "response", "reward", "completion_tokens"):
            with pytest.raises(ValueError, match=f"trace entry 0 has no {name}"):
                TrainingTrace.from_entries([{key: value for key, value in entries[0].items() if key != name}])
    with pytest.raises(ValueError, match=r"no metadata\.node_id"):
        TrainingTrace.from_entries([{**entries[0], "metadata": {}}])


def test_an_entry_needs_no_request_and_no_response() -> None:
    (entry,) = TrainingTrace(turns=[turn(metadata={"node_id": "0"})]).to_trace_entries()
    bare: Any = {name: value for name, value in entry.items() if name not in ("request", "response")}
    (made,) = TrainingTrace.from_entries([bare]).turns
    assert (made.request, made.response, made.completion_token_ids) == ({}, {}, entry["completion_token_ids"])
    with pytest.raises(ValueError, match="valid dictionary"):
        TrainingTrace.from_entries([{**bare, "response": None}])


def test_no_call_is_trained_on_twice() -> None:
    with pytest.raises(ValueError, match="duplicate node_ids"):
        TrainingTrace(turns=[turn(), turn()])


def test_a_check_names_every_reason_at_once() -> None:
    report = check_turn([], [-1], [0.5, math.inf], finish_reason="length", index=3)
    codes = [finding.code for finding in report.findings]
    assert codes == ["no_prompt_ids", "invalid_token_id", "logprob_misalign", "invalid_logprob", "truncated_turn"]
    assert not report.ok
    assert "[WARN] truncated_turn: turn 3" in report.text()
    assert check_turn([1], [2], [-0.1]).text() == "all checks passed"
    assert [finding.code for finding in check_turn([1], [2], None).fatal] == ["no_logprobs"]
    with pytest.raises(ValueError, match=r"no_prompt_ids.*length_mismatch"):
        validate_training_turn([], [2], [-0.1], [0, 0])


def test_a_session_is_trainable_by_what_it_can_do() -> None:
    class Session:
        def wait_for_completion(self, timeout_s: float | None = None) -> int:
            return 0

        def fetch_training_trace(self) -> TrainingTrace:
            return TrainingTrace(turns=[])

    assert isinstance(Session(), TrainableSession)
    assert not isinstance(object(), TrainableSession)


# -- sampling -------------------------------------------------------------------------------------------------------


def test_the_parameters_for_training_are_complete() -> None:
    assert training_sampling({"temperature": 0.8, "top_k": 0, "min_p": None}) == {
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    assert training_sampling(None) == {}


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({}, "positive temperature"),
        *(({"temperature": value}, "positive temperature") for value in (0, -1, math.nan, math.inf, True, "1")),
        ({"temperature": 1.0, "top_p": 0.9}, "top_p=1.0, not 0.9"),
        ({"temperature": 1.0, "top_k": 20}, "top_k=-1, not 20"),
        ({"temperature": 1.0, "repetition_penalty": 1.1}, "repetition_penalty=1.0"),
        ({"temperature": 1.0, "max_tokens": 5, "seed": 1}, "unsupported training sampling fields: max_tokens, seed"),
    ],
)
def test_what_bends_the_distribution_is_refused(sampling: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        training_sampling(sampling)
