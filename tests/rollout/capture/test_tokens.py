"""Ids, log-probabilities and texts in the shapes of every engine: aligned one to one, or reported as misaligned."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from openenv.rollout.capture.dialects import DIALECTS
from openenv.rollout.capture.dialects.dialect import TokenLog
from openenv.rollout.capture.encoding import EventSplitter, event_data


def entry(token: str, logprob: float | None, **more: Any) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, **more}


def completion(choice: dict[str, Any], **top: Any) -> Any:
    return DIALECTS["openai_chat"].completion({"choices": [{"index": 0, "finish_reason": "stop", **choice}], **top})


def test_vllm_names_the_prompt_at_the_top_and_the_completion_in_the_choice() -> None:
    logprobs = {"content": [entry("a", -0.1), entry("b", -0.2)]}
    done = completion({"token_ids": [1, 2], "logprobs": logprobs}, prompt_token_ids=[7, 8, 9])
    assert done.prompt_ids == (7, 8, 9)
    assert done.sampled.ids == (1, 2)
    assert done.sampled.logprobs == (-0.1, -0.2)
    assert done.sampled.texts == ("a", "b")


def test_sglang_names_both_in_the_choice_or_in_its_extension() -> None:
    logprobs = {"content": [entry("a", -0.1)]}
    done = completion({"token_ids": [1], "prompt_token_ids": [7, 8], "logprobs": logprobs})
    assert (done.prompt_ids, done.sampled.ids) == ((7, 8), (1,))
    extension = {"prompt_token_ids": [7, 8], "completion_token_ids": [[1]]}
    done = completion({"logprobs": logprobs}, sglext=extension)
    assert (done.prompt_ids, done.sampled.ids) == ((7, 8), (1,))


def test_llama_cpp_names_the_tokens_in_the_entries() -> None:
    logprobs = {"content": [entry("I", -2.2, id=57, bytes=[73]), entry("'m", -0.1, id=5248, bytes=[39, 109])]}
    done = completion({"logprobs": logprobs})
    assert (done.sampled.ids, done.prompt_ids) == ((57, 5248), None)


def test_tokens_that_are_written_as_ids_are_ids() -> None:
    done = completion({"logprobs": {"content": [entry("token_id:42", -0.1), entry("token_id:7", -0.2)]}})
    assert done.sampled.ids == (42, 7)
    done = completion(
        {"token_ids": [42, 8], "logprobs": {"content": [entry("token_id:42", -0.1), entry("token_id:7", 0)]}}
    )
    assert done.sampled.problems == ("id_mismatch",)


def test_an_engine_without_ids_gives_none_for_each_token() -> None:
    done = completion({"logprobs": {"content": [entry("a", -0.1), entry("b", -0.2)]}})
    assert done.sampled.ids == (None, None)
    assert not done.sampled.has_ids


def test_a_log_probability_that_is_missing_keeps_its_token() -> None:
    logprobs = {"content": [entry("a", None), entry("b", -0.2), entry("c", float("-inf"))]}
    done = completion({"token_ids": [1, 2, 3], "logprobs": logprobs})
    assert done.sampled.ids == (1, 2, 3)
    assert done.sampled.logprobs == (None, -0.2, None)
    assert done.sampled.problems == ()


def test_a_chunk_whose_lists_differ_leaves_a_gap_and_shifts_nothing() -> None:
    log = TokenLog()
    log.add([1], [entry("a", -0.1)])
    log.add([2, 3], [entry("b", -0.2)])
    log.add([4], [entry("d", -0.4)])
    done = log.sampled()
    assert done.ids == (1, 2, 3, 4)
    assert done.logprobs == (-0.1, None, None, -0.4)
    assert done.problems == ("logprob_misalign",)


def test_ids_and_log_probabilities_of_different_chunks_are_aligned() -> None:
    log = TokenLog()
    log.add(None, [entry("a", -0.1)])
    log.add(None, [entry("b", -0.2)])
    log.add([1, 2], None)
    assert log.sampled().ids == (1, 2)
    assert log.sampled().logprobs == (-0.1, -0.2)


def test_a_log_probability_above_zero_is_a_problem() -> None:
    assert completion({"token_ids": [1], "logprobs": {"content": [entry("a", 0.5)]}}).sampled.problems == (
        "positive_logprob",
    )


PIECES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 10), max_size=3),
        st.lists(st.one_of(st.none(), st.builds(entry, st.text(max_size=3), st.floats(-5, 0))), max_size=3),
    ),
    max_size=6,
)


@settings(deadline=None)
@given(PIECES)
def test_the_three_lists_have_one_length_for_any_input(pieces: Any) -> None:
    log = TokenLog()
    for ids, entries in pieces:
        log.add(ids, entries)
    done = log.sampled()
    assert len(done.ids) == len(done.logprobs) == len(done.texts)
    all_ids = [token for ids, _ in pieces for token in ids]
    if all_ids:
        assert [token for token in done.ids if token is not None][: len(all_ids)] == all_ids or None in done.ids


EVENTS = [
    b"data: {}\n\n",
    b": ping\n\n",
    b"event: x\r\ndata: 1\r\n\r\n",
    "data: ä\n\n".encode(),
    b"data: a\ndata: b\n\n",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.data())
def test_events_are_the_same_however_the_bytes_are_cut(events: list[bytes], data: Any) -> None:
    whole = b"".join(events) + b"data: half"
    splitter = EventSplitter()
    cut: list[bytes] = []
    position = 0
    while position < len(whole):
        size = data.draw(st.integers(1, 12))
        cut += splitter.feed(whole[position : position + size])
        position += size
    assert cut == events
    assert splitter.rest() == b"data: half"


def test_the_data_of_an_event_is_its_lines_together() -> None:
    assert event_data(b"event: x\ndata: a\ndata:b\n\n") == b"a\nb"
    assert event_data(b"data: [DONE]\n\n") == b"[DONE]"
    assert event_data(b": comment\n\n") is None
