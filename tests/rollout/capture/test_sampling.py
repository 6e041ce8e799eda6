"""Sampling is the trainer's: what it asks for is enforced, recorded, and trained on; replicas of a model; pauses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from openenv.rollout import Model, Outcome, Sampling
from openenv.rollout.capture import CaptureServer, export
from openenv.rollout.tasks.model_parameters import Dialect, Engine, unknown_sampling
from openenv.train import EpisodeSample, SampleGroup

NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


def test_a_sampling_is_complete_whatever_the_agent_asks_for(open_agent: Any, engine: Any) -> None:
    agent = open_agent(sampling=Sampling(temperature=0.7, seed=3))
    agent.chat(temperature=0.1, top_p=0.2, repetition_penalty=1.3)
    agent.post(
        "/messages", {"model": "m", "max_tokens": 9, "temperature": 0.1, "messages": [{"role": "user", "content": "x"}]}
    )
    agent.post("/responses", {"model": "m", "temperature": 0.1, "input": "x"})
    wanted = {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.0, **NEUTRAL}
    calls = agent.capture.calls()
    assert [call.dialect for call in calls] == ["openai_chat", "anthropic", "openai_responses"]
    for call in calls:
        assert {name: call.sent.get(name) for name in wanted} == wanted
        assert call.not_trainable == ()
    sequence = agent.capture.sequences()[0]
    assert sequence.sampled_with("temperature") == 0.7
    assert export.training_trace(agent.capture.recording()).turns[0].metadata["sampling_params"]["temperature"] == 0.7


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({"engine": "openai"}, {"temperature": 1.0, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}),
        ({"engine": "llamacpp"}, {"temperature": 1.0, "repeat_penalty": 1.0, **NEUTRAL}),
        ({"dialect": "openai_responses"}, {"temperature": 1.0, "top_p": 1.0}),
        ({"dialect": "anthropic"}, {"temperature": 1.0}),
    ],
)
def test_each_endpoint_gets_the_names_that_it_knows(fields: dict[str, Any], parameters: dict[str, Any]) -> None:
    assert Model(base_url="http://x", name="m", sampling=Sampling(), **fields).sampling == parameters


def test_a_value_that_an_endpoint_cannot_be_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k=20 cannot be sent to openai"):
        Model(base_url="http://x", name="m", engine="openai", sampling=Sampling(top_k=20))
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature=-1)


def test_a_turn_that_was_sampled_otherwise_is_not_trained_on(open_agent: Any, engine: Any) -> None:
    agent = open_agent(sampling=Sampling(), agent_may_set=("temperature", "repetition_penalty"))
    agent.chat(messages=[{"role": "user", "content": "a", "ids": [7]}], temperature=1.0)
    agent.chat(messages=[{"role": "user", "content": "b", "ids": [8]}], temperature=0.3, repetition_penalty=1.2)
    first, second = agent.capture.calls()
    assert first.not_trainable == ()
    assert second.not_trainable == (
        "repetition_penalty: 1.2, not 1.0 as the trainer asked",
        "temperature: 0.3, not 1.0 as the trainer asked",
    )
    assert [sequence.trainable for sequence in agent.capture.sequences()] == [True, False]


def test_a_sequence_with_one_such_turn_is_not_trained_on_and_others_are(
    open_agent: Any, engine: Any, fake: Any
) -> None:
    agent = open_agent(sampling=Sampling(), agent_may_set=("temperature",))
    engine.respond = fake.vllm([1, 2])
    first = [{"role": "user", "content": "a", "ids": [7]}]
    answer = {"role": "assistant", "content": "t1 t2 ", "ids": [1, 2]}
    agent.chat(messages=first)
    agent.chat(messages=[*first, answer, {"role": "user", "content": "b", "ids": [8]}], temperature=0.3)
    agent.chat(messages=[{"role": "user", "content": "c", "ids": [9]}])
    recording = agent.capture.recording()
    two_turns, other = sorted(export.sequences(recording), key=lambda one: -one.n_turns)
    assert (two_turns.trainable, other.trainable) == (False, True)
    assert two_turns.not_trainable == [
        "not sampled as the trainer asked: temperature: 0.3, not 1.0 as the trainer asked"
    ]
    assert [sum(turn.loss_mask) for turn in export.training_trace(recording).turns] == [0, 0, 2]
    document = export.document(recording)
    assert document["trainable"]
    assert document["stats"]["n_trainable_sequences"] == 1


@pytest.mark.parametrize("fields", [{}, {"sampling": {"temperature": 0.7}}])
def test_a_model_without_a_sampling_or_with_a_part_of_one_can_be_trained_on(open_agent: Any, fields: Any) -> None:
    agent = open_agent(**fields)
    agent.chat(temperature=0.1, top_p=0.5)
    (sequence,) = export.sequences(agent.capture.recording())
    assert (sequence.trainable, sequence.not_trainable) == (True, [])
    temperature = fields.get("sampling", {}).get("temperature", 1.0)
    assert sequence.sampling[0] == Sampling(temperature=temperature).parameters()


def test_a_partial_sampling_is_completed_by_the_endpoints_names() -> None:
    def sampling(**fields: Any) -> Any:
        return dict(Model(base_url="http://x", name="m", **fields).sampling)

    assert sampling(engine="llamacpp", sampling={"top_k": 20})["repeat_penalty"] == 1.0
    assert sampling(engine="openai") == {
        "temperature": 1.0, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0
    }  # fmt: skip
    assert sampling(dialect="anthropic") == {"temperature": 1.0}
    assert sampling(dialect="anthropic", sampling={"top_p": 0.9}) == {"top_p": 0.9}
    assert sampling(sampling={}) == {}
    model = Model(base_url="http://x", name="m", sampling={})
    assert Model.model_validate(model.model_dump()).sampling == {}
    with pytest.raises(ValueError, match="valid dictionary"):
        sampling(sampling=3)


_UNKNOWN = "Unrecognized request argument supplied: "


@pytest.mark.parametrize("kind", ["one", "all"])
def test_an_endpoint_without_a_parameter_gets_requests_without_its_neutral_value(
    open_agent: Any, engine: Any, fake: Any, kind: str
) -> None:
    lacks = ("top_k", "min_p", "repetition_penalty")

    def respond(request: Any) -> Any:
        unknown = [name for name in lacks if name in request.body]
        if not unknown:
            return fake.vllm([1])(request)
        text = _UNKNOWN + (", ".join(unknown) if kind == "all" else unknown[0])
        return fake.Answer.json({"error": {"message": text}}, 400)

    engine.respond = respond
    agent = open_agent()
    assert agent.chat().status_code == 200
    assert not set(lacks) & set(engine.requests[-1].body)
    count = len(engine.requests)
    assert agent.chat().status_code == 200
    assert len(engine.requests) == count + 1  # the rollout remembers
    assert [call.not_trainable for call in agent.capture.calls()] == [(), ()]
    refused = open_agent(sampling={"top_k": 5})
    assert refused.chat().status_code == 400


def test_sampling_that_nothing_names_is_not_trained_on_and_all_exports_say_why(open_agent: Any, tmp_path: Path) -> None:
    unknown = "frequency_penalty, min_p, presence_penalty, repetition_penalty, temperature, top_k, top_p"
    agent = open_agent(sampling={})
    agent.chat()
    recording = agent.capture.recording()
    (sequence,) = export.sequences(recording)
    (reason,) = sequence.not_trainable
    assert reason.startswith(f"the endpoint's defaults decided about {unknown}: ")
    assert not sequence.trainable
    assert export.turns(recording)[0].not_trainable == [
        f"{name}: the endpoint's default" for name in unknown.split(", ")
    ]
    document = export.document(recording)
    assert not document["trainable"]
    assert document["sequences"][0]["not_trainable"] == [reason]
    with pytest.raises(ValueError, match="unknown_sampling"):
        export.training_trace(recording)
    sample = EpisodeSample(Outcome(rollout_id="r", status="ok", reward=1.0), [sequence])
    with pytest.raises(ValueError, match="the endpoint's defaults decided about"):
        SampleGroup("g", {}, [sample]).collate()
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an optional dependency")
    export.write_parquet(tmp_path / "all.parquet", [recording])
    [row] = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert (row["trainable"], row["not_trainable"]) == (False, [reason])


@pytest.mark.parametrize("engine_name", [None, *get_args(Engine)])
@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_a_sampling_names_all_that_an_endpoint_has(engine_name: Engine | None, dialect: Dialect) -> None:
    parameters = Sampling().parameters(dialect, engine_name)
    assert unknown_sampling(parameters, parameters, dialect, engine_name) == ()


def test_sampling_is_in_columns_of_parquet(open_agent: Any, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an optional dependency")
    agent = open_agent(sampling=Sampling(temperature=0.5, top_k=40, seed=9))
    agent.chat()
    export.write_parquet(tmp_path / "all.parquet", [agent.capture.recording()])
    [row] = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert (row["temperature"], row["top_k"], row["top_p"], row["repetition_penalty"]) == (0.5, 40.0, 1.0, 1.0)
    assert (row["seed"], row["policy_version"], row["trainable"], row["not_trainable"]) == (9, None, True, [])


# -- replicas -------------------------------------------------------------------------------------------------------


def test_a_rollout_keeps_to_one_replica(open_agent: Any, engine: Any, fake: Any) -> None:
    with fake.FakeEngine() as other:
        used = set()
        for number in range(8):
            agent = open_agent(f"rollout-{number}", base_url=engine.url, base_urls=[other.url])
            before = len(engine.requests), len(other.requests)
            for _ in range(3):
                assert agent.chat().status_code == 200
            counts = len(engine.requests) - before[0], len(other.requests) - before[1]
            assert sorted(counts) == [0, 3]
            used.add(counts)
        assert len(used) == 2


def test_a_rollout_goes_on_with_another_replica_when_its_own_is_gone(open_agent: Any, engine: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    model = Model(base_urls=[gone, engine.url], name="m")
    assert model.replicas == (gone, engine.url)
    for number in range(4):
        agent = open_agent(f"rollout-{number}", base_url=gone, base_urls=[engine.url])
        assert agent.chat().status_code == 200


# -- updates of weights ---------------------------------------------------------------------------------------------


def test_a_pause_waits_for_calls_under_way_and_holds_new_ones_back(
    server: CaptureServer, open_agent: Any, engine: Any, fake: Any, wait_for: Callable[..., None]
) -> None:
    agent, answers = open_agent(), fake.vllm([1, 2])
    begun, go_on, order = threading.Event(), threading.Event(), []

    def respond(request: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        order.append("answered")
        return answers(request)

    engine.respond = respond
    first = threading.Thread(target=agent.chat)
    first.start()
    assert begun.wait(10)
    pausing = threading.Thread(target=lambda: (server.pause(), order.append("paused")))
    pausing.start()
    go_on.set()
    pausing.join(10)
    first.join(10)
    assert order == ["answered", "paused"]
    second = threading.Thread(target=agent.chat)
    second.start()
    wait_for(lambda: server.find(agent.capture.rollout_id).waiting == 1)
    assert order == ["answered", "paused"]
    order.append("updated")
    server.resume()
    second.join(10)
    assert order == ["answered", "paused", "updated", "answered"]
    with server.paused():
        pass
    assert agent.chat().status_code == 200


def test_the_models_own_address_is_asked_for_the_policys_version(open_agent: Any, engine: Any, fake: Any) -> None:
    with fake.FakeEngine() as policy:
        policy.respond = lambda request: fake.Answer.json({"policy_version": 12})
        agent = open_agent(policy_url=policy.url)
        agent.chat()
    assert agent.capture.calls()[0].policy_version == "12"
