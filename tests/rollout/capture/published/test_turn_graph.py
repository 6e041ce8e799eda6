"""Graphs that grow call by call, and what is made of them; `test_scenarios` compares them with the published ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from openenv.core.harness.capture import RolloutGraph, TurnNode, to_trace_entries, to_training_trace, to_turn_records
from openenv.core.harness.capture.compat import ParamFix, diagnose
from openenv.core.harness.capture.export import check_sequence, export_session, summarise
from openenv.core.harness.capture.sessions import Session


def node(name: str, prompt: list[int], sampled: list[int], **fields: Any) -> TurnNode:
    """A call with tools, and a log-probability for each sampled token."""
    return TurnNode(name, prompt, sampled, [-token / 100 for token in sampled], **{"n_tools": 1, **fields})


def graph_of(*nodes: TurnNode) -> RolloutGraph:
    graph = RolloutGraph()
    for each in nodes:
        graph.add_turn(each)
    return graph


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_calls_are_linked_whatever_their_order(order: tuple[int, ...]) -> None:
    calls = [node("a", [1], [2]), node("b", [1, 2, 3], [4]), node("c", [1, 2, 3, 4, 5], [6])]
    graph = graph_of(*(calls[place] for place in order))
    assert {each.node_id: each.parent_id for each in graph.nodes()} == {"a": None, "b": "a", "c": "b"}
    [sequence] = graph.sequences()
    assert (sequence.node_ids, sequence.input_ids) == (["a", "b", "c"], [1, 2, 3, 4, 5, 6])
    assert sequence.loss_mask == [0, 1, 0, 1, 0, 1]
    assert (sequence.turn_lengths(), sequence.n_trainable) == ([1, 1, 1], 3)


def test_an_answer_that_the_agent_did_not_go_on_from_is_discarded() -> None:
    graph = graph_of(node("a", [1], [2]), node("b", [1], [3]), node("c", [1, 3, 4], [5]), node("d", [1, 3, 4], [6]))
    assert [each.node_id for each in graph.discarded_nodes()] == ["a"]
    assert graph.forks() == [("b", ["c", "d"])]
    document = export_session(Session("s1", graph=graph))
    assert [row["role"] for row in document["sequences"]] == ["agent", "agent"]
    whole = export_session(Session("s1", graph=graph), include_discarded=True)
    assert sorted(row["role"] for row in whole["sequences"]) == ["agent", "agent", "discarded"]
    assert [turn.node_id for turn in to_training_trace(graph, document).turns] == ["b", "c", "d"]  # each once
    assert "discarded: 1" in summarise(document)


def test_an_answer_with_other_tokens_in_the_next_prompt_is_not_discarded() -> None:
    question = {"role": "user", "content": "list the files"}
    call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "a.txt"}
    first = node("a", [1], [2], request_messages=[question], response_message=answer)
    # The template writes the arguments with a space: [2] comes back as [22], and then as [23].
    second = node("b", [1, 22, 3], [4], request_messages=[question, answer, result], response_message=answer)
    third = node("c", [1, 22, 3, 4, 5], [6], request_messages=[question, answer, result, answer, result])
    retried = node("d", [1], [7], request_messages=[question], response_message={"content": "no"})
    graph = graph_of(first, retried, second, third)
    assert [each.node_id for each in graph.discarded_nodes()] == ["d"]
    again = node("e", [1, 7, 8], [9], request_messages=[question, {"role": "assistant", "content": "no"}, question])
    graph.add_turn(again)
    assert (again.parent_id, [each.node_id for each in graph.discarded_nodes()]) == ("d", [])
    unused = node("f", [1], [3], request_messages=[question], response_message={"content": "maybe"})
    graph.add_turn(unused)
    assert [each.node_id for each in graph.discarded_nodes()] == ["f"]


def test_a_call_without_logprobs_or_with_a_forced_tool_is_context() -> None:
    forced = node("b", [1, 2, 3], [4], trainable=False)
    unscored = TurnNode("c", [1, 2, 3, 4, 5], [6], None, n_tools=1)
    graph = graph_of(node("a", [1], [2]), forced, unscored, node("d", [1, 2, 3, 4, 5, 6, 7], [8]))
    document = export_session(Session("s1", graph=graph))
    [row] = document["sequences"]
    assert row["loss_mask"] == [0, 1, 0, 0, 0, 0, 0, 1]
    assert check_sequence(graph.sequences()[0]).ok
    entries = to_trace_entries(graph, document)
    assert [sum(entry["loss_mask"]) for entry in entries] == [1, 0, 1]
    assert len(to_turn_records(graph, document)) == 2
    with pytest.raises(ValueError, match="missing or invalid engine tokens"):
        to_training_trace(graph, document)


def test_masks_that_a_trainer_changed_count() -> None:
    graph = graph_of(node("a", [1], [2, 3]))
    document = export_session(Session("s1", graph=graph))
    document["sequences"][0]["loss_mask"][1] = 0
    [entry] = to_trace_entries(graph, document)
    assert entry["loss_mask"] == [0, 0, 1]
    with pytest.raises(ValueError, match="partial masks"):
        to_turn_records(graph, document)
    document["validation"].append("[FATAL] lost: something")
    with pytest.raises(ValueError, match="fatal validation findings"):
        to_training_trace(graph, document)


def test_calls_beside_the_agents_work_are_not_trained_on() -> None:
    graph = graph_of(node("title", [9], [8], n_tools=0), node("a", [1], [2]))
    document = export_session(Session("s1", graph=graph))
    assert [(row["role"], row["trainable"]) for row in document["sequences"]] == [("auxiliary", False), ("agent", True)]
    assert [entry["metadata"]["node_id"] for entry in to_trace_entries(graph, document)] == ["a"]


def test_calls_without_ids_are_linked_by_their_messages() -> None:
    question, answer = {"role": "user", "content": "hi"}, {"content": "yes"}
    again = [{"role": "user", "content": [{"type": "text", "text": "hi "}]}, {"role": "assistant", "content": "yes"}]
    first = TurnNode(
        "a", [], [], request_messages=[{"role": "system", "content": "1"}, question], response_message=answer
    )
    second = TurnNode("b", [], [], request_messages=[{"role": "system", "content": "2"}, *again, question])
    assert graph_of(first, second).get("b").parent_id == "a"


def test_an_error_asks_for_one_change_or_for_none() -> None:
    body = {"max_tokens": 5, "messages": []}
    fix = diagnose({"error": {"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."}})
    assert fix == ParamFix("max_tokens", "max_completion_tokens")
    assert fix.apply(body)
    assert body == {"max_completion_tokens": 5, "messages": []}
    assert diagnose({"error": {"message": "Unsupported parameter: 'messages'"}}) is None
    assert diagnose({"error": {"message": "at the same time is not supported"}}) is None
