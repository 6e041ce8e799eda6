"""The experts of each token, from a double of vLLM and in SGLang's form, aligned with training sequences."""

from __future__ import annotations

import base64
import io
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy
import pytest

from openenv.rollout.capture import Capture, CaptureServer, export
from openenv.rollout.capture.routed_experts import UNKNOWN, CallExperts, align, decode
from openenv.rollout.tasks.task import Model, Sampling
from vllm_double import EXPERTS, LAYERS, TOP, VllmDouble, experts


def npy(values: Any, kind: Any = numpy.uint8) -> str:
    file = io.BytesIO()
    numpy.save(file, numpy.asarray(values, dtype=kind))
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def double() -> Iterator[VllmDouble]:
    with VllmDouble(lambda prompt: "the answer and no tool", routed_experts=True) as running:
        yield running


def play(server: CaptureServer, double: VllmDouble, turns: int, before_turn: Any = lambda number: None) -> Capture:
    model = Model(base_url=double.url, name="m", engine="vllm", sampling=Sampling(), routed_experts=True)
    capture = server.open("r1", model)
    messages = [{"role": "user", "content": "Begin."}]
    for number in range(turns):
        before_turn(number)
        body = {"model": "any", "messages": messages, "max_tokens": 50, "stream": number == 1}
        headers = {"authorization": f"Bearer {capture.key}"}
        with httpx2.Client(trust_env=False, timeout=30) as http:
            reply = http.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200
        assert "routed_experts" not in reply.text
        messages += [
            {"role": "assistant", "content": "the answer and no tool"},
            {"role": "user", "content": f"And then {number}?"},
        ]
    return capture


def test_each_token_has_the_experts_of_the_call_that_passed_it_first(server: CaptureServer, double: VllmDouble) -> None:
    def update(number: int) -> None:
        double.version = number

    capture = play(server, double, 3, update)
    (sequence,) = capture.sequences()
    assert sequence.n_turns == 3
    assert sequence.routed_experts is not None
    assert sequence.routed_experts.shape == [len(sequence.input_ids), LAYERS, TOP]
    start = 0
    for version, sample in enumerate(double.samples):
        expected = experts(sequence.input_ids, version)
        end = len(sample.prompt) + len(sample.ids) - 1
        for token in range(start, end):
            assert sequence.routed_experts.of(token) == expected[token].reshape(-1).tolist()
        start = end
    assert sequence.routed_experts.of(len(sequence.input_ids) - 1) is None
    assert sequence.routed_experts.n_known == len(sequence.input_ids) - 1


def test_tokens_of_a_call_without_experts_stay_unknown(server: CaptureServer, double: VllmDouble) -> None:
    def switch(number: int) -> None:
        double.routed_experts = number != 1

    capture = play(server, double, 3, switch)
    (sequence,) = capture.sequences()
    assert sequence.routed_experts is not None
    ends = [len(sample.prompt) + len(sample.ids) - 1 for sample in double.samples]
    unknown = [place for place in range(len(sequence.input_ids)) if sequence.routed_experts.of(place) is None]
    assert unknown == [*range(ends[0], ends[1]), ends[2]]


def test_experts_are_exported(server: CaptureServer, double: VllmDouble, tmp_path: Path) -> None:
    capture = play(server, double, 2)
    (sequence,) = capture.sequences()
    assert sequence.routed_experts is not None
    (listed,) = json.loads(json.dumps(export.document(capture.recording())))["sequences"]
    assert listed["routed_experts"]["shape"] == sequence.routed_experts.shape
    parquet = pytest.importorskip("pyarrow.parquet")
    export.write_parquet(tmp_path / "rows.parquet", [capture.recording()])
    (row,) = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert row["routed_experts_shape"] == sequence.routed_experts.shape
    values = numpy.frombuffer(base64.b64decode(row["routed_experts"]), "<i2").reshape(row["routed_experts_shape"])
    assert numpy.array_equal(values[:-1], experts(sequence.input_ids, 0))
    assert (values[-1] == UNKNOWN).all()


def test_a_dense_model_has_no_experts(server: CaptureServer, double: VllmDouble) -> None:
    double.routed_experts = False
    (sequence,) = play(server, double, 1).sequences()
    assert sequence.routed_experts is None


def test_integers_without_a_shape_as_sglang_sends_them() -> None:
    values = [number % EXPERTS for number in range(4 * LAYERS * TOP)]
    text = base64.b64encode(array("i", values).tobytes()).decode()
    one = align([CallExperts(text, 5)], 5)
    assert one is not None
    assert one.shape == [5, LAYERS * TOP]
    assert [one.of(0), one.of(4)] == [values[: LAYERS * TOP], None]


@pytest.mark.parametrize(
    "text",
    [
        "not base64!",
        "",
        npy(numpy.zeros((3, LAYERS, TOP))),  # of fewer tokens
        npy(numpy.zeros((5, LAYERS, TOP))),  # of more
        npy(numpy.full((4, LAYERS, TOP), -3), numpy.int32),
        npy(numpy.full((4, LAYERS, TOP), 40_000), numpy.int32),
        npy(numpy.zeros((4, LAYERS, TOP)), numpy.float32),
        npy(numpy.zeros(4)),
        npy(numpy.zeros((4, 0, TOP))),
        npy(numpy.asfortranarray(numpy.zeros((4, LAYERS, TOP)))),
        npy(numpy.zeros((4, LAYERS, TOP)))[:-8],
        base64.b64encode(b"\x93NUMPY\x01\x00\xff\xff{").decode(),
        base64.b64encode(b"\x93NUMPY").decode(),
        base64.b64encode(array("i", [1, 2, 3]).tobytes()).decode(),
    ],
)
def test_experts_that_do_not_fit_the_tokens_are_unknown(text: str) -> None:
    assert decode(text, 5) is None
    assert align([CallExperts(text, 5)], 5) is None


def test_calls_of_models_with_other_shapes_have_no_common_experts() -> None:
    one, other = npy(numpy.zeros((4, LAYERS, TOP))), npy(numpy.zeros((9, LAYERS, TOP + 1)))
    assert align([CallExperts(one, 5), CallExperts(other, 10)], 10) is None
