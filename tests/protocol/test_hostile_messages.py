"""Messages that are made to harm: small ones that would grow, and names that would end the text they are put into."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv.protocol import binary_values as arrays
from openenv.protocol import json_values
from openenv.protocol.codec import JSON, MSGPACK, Codec
from openenv.protocol.json_values import TooManyValues, ValueLimit
from openenv.protocol.server_v1 import error_list
from openenv.protocol.server_v2 import WRITERS, Batch, RefusedRequest, Request, ServerProtocolV2
from openenv.types import Action

FEW = ValueLimit(values=400, containers=100)
MB = 1024 * 1024


class Say(Action):
    message: str = ""


def packed(shape: list[int], data: bytes = b"") -> bytes:
    array = msgpack.ExtType(1, msgpack.packb(["<f4", shape, data]))
    return msgpack.packb({"type": "step", "id": 1, "data": {"message": array}})


@pytest.mark.parametrize("shape", [[2**39, 0], [2**20, 2**20, 0], [1, 300, 0, 7], [257, 0]])
def test_an_array_without_values_that_would_be_many_empty_lists_is_refused(shape: list[int]) -> None:
    with pytest.raises(ValueError, match="without values"):
        MSGPACK.decode(packed(shape), binary=True)


@pytest.mark.parametrize("shape", [[0], [0, 84, 84, 3], [0, 2**30], [3, 0, 2], [16, 16, 0], [256, 0]])
def test_an_array_without_values_is_read_and_can_be_shown_as_lists(shape: list[int]) -> None:
    message = MSGPACK.decode(packed(shape), binary=True)
    assert message["data"]["message"].shape == tuple(shape)
    assert isinstance(ServerProtocolV2(Say).read(message), RefusedRequest)  # it is no text, and was looked at as lists


def test_without_numpy_the_same_arrays_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "numpy", None)
    with pytest.raises(ValueError, match="without values"):
        arrays.array_of(["<f4", [2**39, 0], b""])
    assert arrays.array_of(["<f4", [2, 0], b""]) == [[], []]


def test_an_environments_array_of_many_empty_rows_is_sent_as_what_the_other_side_reads() -> None:
    sent = MSGPACK.encode({"rows": np.zeros((1000, 0)), "few": np.zeros((0, 1000))})
    read = MSGPACK.decode(sent, binary=True)
    assert read["rows"] == [[]] * 1000
    assert read["few"].shape == (0, 1000)


@pytest.mark.parametrize("name", ['a"b', 'a","type":"observation', "a\nb", "a\\", "\u2028", "\x00", "ü"])
@pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=["json", "msgpack"])
def test_a_reply_names_the_session_that_was_named_whatever_is_in_the_name(codec: Any, name: str) -> None:
    writer = WRITERS[codec]
    reply = writer.message("error", 7, name, writer.data({"code": "SESSION_NOT_FOUND"}))
    message = codec.decode(reply, binary=codec.is_binary)
    assert message == {"type": "error", "id": 7, "session": name, "data": {"code": "SESSION_NOT_FOUND"}}


def test_a_reply_without_data_is_whole_too() -> None:
    assert json.loads(WRITERS[JSON].message("pong", 3, 'a"', None)) == {"type": "pong", "id": 3, "session": 'a"'}


@pytest.mark.parametrize("given", [10**400, -1, "5", True, [], -0.5])
def test_how_long_to_wait_has_to_be_a_number_of_seconds(given: Any) -> None:
    parsed = ServerProtocolV2(Say).read({"type": "open", "id": 1, "wait_s": given})
    assert isinstance(parsed, RefusedRequest)
    assert parsed.error["errors"][0]["loc"] == ["wait_s"]


@pytest.mark.parametrize("given", [None, 0, 0.0, 3, 86_400.5, float("inf")])
def test_numbers_of_seconds_are_taken(given: Any) -> None:
    assert not isinstance(ServerProtocolV2(Say).read({"type": "open", "id": 1, "wait_s": given}), RefusedRequest)


# -- what a message may hold ----------------------------------------------------------------------------------------

texts = st.text(alphabet='ab,[]{}":\\\\\n\u00e9\u2028', max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts, inner, max_size=6),
    max_leaves=40,
)


def counted(value: Any) -> tuple[int, int]:
    """Count values as the limit does: items and containers, and the containers among them."""
    if not isinstance(value, (list, dict)):
        return 0, 0
    items = list(value.values() if isinstance(value, dict) else value)
    inner = [counted(item) for item in items]
    commas = max(0, len(items) - 1)
    return 1 + commas + sum(one[0] for one in inner), 1 + sum(one[1] for one in inner)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(values, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([1, 2, 3, 7, 10_000]))
def test_values_are_counted_whatever_stands_in_strings(
    value: Any, ascii_only: bool, indent: int | None, piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_PIECE", piece)
        check_counts(value, ascii_only, indent)


def check_counts(value: Any, ascii_only: bool, indent: int | None) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    amount, containers = counted(value)
    ValueLimit(max(amount, containers), containers).check(raw)
    if containers and len(raw) > 2 * (containers - 1):
        with pytest.raises(TooManyValues):
            ValueLimit(10**6, containers - 1).check(raw)
    if amount and len(raw) > 2 * containers:
        with pytest.raises(TooManyValues):
            ValueLimit(amount - 1, containers).check(raw)


def test_long_text_full_of_punctuation_is_one_value() -> None:
    text = '[{"a": [1, 2, {}]}, "\\\\"]' * 20_000
    raw = json.dumps({"type": "step", "id": 1, "data": {"message": text}}).encode()
    FEW.check(raw)
    assert JSON.decode(raw, binary=False, limit=FEW)["data"]["message"] == text


MANY = {
    "empty objects": b"{}",
    "empty lists": b"[]",
    "numbers": b"0",
    "objects": b'{"a":1}',
    "text": b'"ab"',
    "punctuation": b'",[{"',
    "nested": b"[[[[]]]]",
}


@pytest.mark.slow_but_for("empty objects", "empty lists", "numbers", "objects", "text", "punctuation")
@pytest.mark.parametrize("item", MANY.values(), ids=MANY)
def test_a_message_of_very_many_values_is_refused_before_one_is_built(item: bytes) -> None:
    raw = b'{"type":"batch","id":1,"requests":[' + b",".join([item] * 300_000) + b"]}"
    limit = ValueLimit(values=100_000, containers=25_000)
    for payload, binary in ((raw, False), (zlib.compress(raw), True)):
        tracemalloc.start()
        try:
            # The ratio of a compressed message may refuse it before its values are counted.
            with pytest.raises(ValueError if binary else TooManyValues, match="more than"):
                JSON.decode(payload, binary=binary, limit=limit)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2 * len(raw) + 8 * MB  # copies of the text, and pieces of a part of it
    assert len(JSON.decode(raw, binary=False)["requests"]) == 300_000  # a client trusts its server


PACKED = {
    "empty maps": b"\x80",
    "empty lists": b"\x90",
    "maps": b"\x81\xa1a\x01",
    "numbers": b"\x01",
    "text": b"\xa2ab",
}


@pytest.mark.parametrize("item", PACKED.values(), ids=PACKED)
def test_a_packed_message_of_very_many_values_is_refused(item: bytes) -> None:
    count = 300_000
    inside = b"\xdd" + struct.pack(">I", count) + item * count
    raw = b"\x82\xa4type\xa5batch\xa8requests" + inside
    with pytest.raises(ValueError, match=r"more than|exceeds"):
        MSGPACK.decode(raw, binary=True, limit=ValueLimit(values=100_000, containers=25_000))
    nested = b"\x82\xa4type\xa5batch\xa8requests\x9f" + (b"\xdc" + struct.pack(">H", 20_000) + item * 20_000) * 15
    with pytest.raises(TooManyValues):
        MSGPACK.decode(nested, binary=True, limit=ValueLimit(values=100_000, containers=25_000))
    assert len(MSGPACK.decode(nested, binary=True)["requests"]) == 15


def test_lists_that_claim_more_than_there_is_cost_nothing() -> None:
    size = 200_000
    raw = b"\x82\xa1a" + (b"\xdd" + struct.pack(">I", size)) * 900 + bytes(size)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not MessagePack"):
            MSGPACK.decode(raw, binary=True, limit=ValueLimit.within(100 * MB))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(raw)  # 900 lists of that length are 1.4 GB


@pytest.mark.parametrize(
    "inside",
    [b"\x93" + b"\x90" * 3, b"\x93\xa3<f4\x90" + b"\x90", b"\xdd" + struct.pack(">I", 50_000) + b"\x90" * 50_000],
    ids=["lists", "a list for bytes", "very many lists"],
)
def test_the_inside_of_an_array_is_not_built_either(inside: bytes) -> None:
    array = msgpack.packb(msgpack.ExtType(1, inside))
    with pytest.raises(ValueError):
        MSGPACK.decode(b"\x81\xa1a" + array, binary=True, limit=FEW)


def test_an_array_that_would_be_very_many_lists_is_not_made_into_them() -> None:
    protocol = ServerProtocolV2(Say, limit=FEW)
    for array in (np.zeros((101, 1), dtype="u1"), np.zeros(401, dtype="u1"), [np.zeros(300), np.zeros(300)]):
        refused = protocol.read({"type": "step", "id": 1, "data": {"message": array}})
        assert isinstance(refused, RefusedRequest)
        assert "more than" in refused.error["errors"][0]["msg"]


def test_the_answer_to_very_many_mistakes_names_the_first_ones() -> None:
    from pydantic import TypeAdapter, ValidationError

    with pytest.raises(ValidationError) as caught:
        TypeAdapter(list[int]).validate_python(["x"] * 5000)
    assert len(error_list(caught.value)) == 100


@pytest.mark.parametrize("kind", [["x" * 10_000] * 1000, {"a": 1}, b"x" * 100_000, "y" * 100_000], ids=type)
def test_the_answer_to_an_unknown_type_is_short(kind: Any) -> None:
    refused = ServerProtocolV2(Say).read({"type": kind, "id": 1})
    assert isinstance(refused, RefusedRequest)
    assert len(refused.error["message"]) < 200


# -- single fields --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, 5, 1.5, True, [], ["a"], {}, {"a": 1}], ids=repr)
def test_a_resume_that_is_no_text_is_refused_and_opens_nothing(token: Any) -> None:
    refused = ServerProtocolV2(Say).read({"type": "open", "id": 1, "resume": token})
    assert isinstance(refused, RefusedRequest)
    assert refused.error["errors"][0]["loc"] == ["resume"]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("compress", {"type": "open", "compress": "5"}),
        ("compress", {"type": "open", "compress": -1}),
        ("compress", {"type": "open", "compress": True}),
        ("nonce", {"type": "open", "nonce": 5}),
        ("request", {"type": "cancel"}),
        ("request", {"type": "cancel", "request": "5"}),
        ("request", {"type": "cancel", "request": 2**63}),
        ("session", {"type": "cancel", "request": 5, "session": 5}),
        ("session", {"type": "step", "data": {}, "session": []}),
        ("timeout_s", {"type": "step", "data": {}, "timeout_s": "5"}),
        ("kwargs", {"type": "step", "data": {}, "kwargs": []}),
        ("data", {"type": "reset", "data": []}),
        ("requests", {"type": "batch", "requests": {}}),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
)
def test_a_field_of_the_wrong_kind_is_named(field: str, message: dict[str, Any]) -> None:
    refused = ServerProtocolV2(Say).read({"id": 1, **message})
    assert isinstance(refused, RefusedRequest)
    assert refused.error["code"] == "VALIDATION_ERROR"
    assert refused.error["errors"][0]["loc"] == [field]


@pytest.mark.parametrize("request_id", [2**63, -(2**63), 10**300])
def test_an_id_has_at_most_64_bits(request_id: int) -> None:
    protocol = ServerProtocolV2(Say)
    step = {"type": "step", "id": request_id, "data": {}}
    refused = protocol.read(step)
    assert isinstance(refused, RefusedRequest)
    assert (refused.id, refused.error["errors"][0]["loc"]) == (None, ["id"])
    assert protocol.parse_step(json.dumps(step).encode()) is None
    assert isinstance(protocol.read({**step, "id": 2**63 - 1}), Request)


@pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=["json", "msgpack"])
def test_a_batch_of_steps_is_read_in_one_pass_up_to_the_limit(codec: Codec) -> None:
    protocol = ServerProtocolV2(Say, max_batch=3)
    step = {"type": "step", "id": 1, "session": "a", "data": {"message": "x"}}
    for count, is_batch in ((3, True), (4, False)):
        raw = codec.encode({"type": "batch", "id": 1, "requests": [step] * count})
        parsed = protocol.parse_map(codec.decode(raw, binary=codec.is_binary))
        assert isinstance(parsed, Batch) is is_batch
        if codec is JSON:
            assert (protocol.parse_batch(raw) is not None) is is_batch


@pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=["json", "msgpack"])
def test_resets_among_steps_are_read_in_one_pass_too(codec: Codec) -> None:
    protocol = ServerProtocolV2(Say)
    step = {"type": "step", "id": 1, "session": "a", "data": {"message": "x"}}
    reset = {"type": "reset", "id": 7, "session": "b", "data": {"seed": 3}}
    for extra, is_plain in ((reset, True), ({**reset, "timeout_s": 1.0}, False), ({**reset, "data": 5}, False)):
        raw = codec.encode({"type": "batch", "id": 1, "requests": [step, extra]})
        parsed = protocol.parse_map(codec.decode(raw, binary=codec.is_binary))
        assert isinstance(parsed, Batch)
        assert (parsed.steps is not None) is is_plain
        first, second = parsed.in_full()
        assert isinstance(first, Request)
        assert first.data == Say(message="x")
        if extra["data"] == 5:
            assert not isinstance(second, Request)
        else:
            assert isinstance(second, Request)
            assert (second.type, second.id, second.session, second.data) == ("reset", 7, "b", {"seed": 3})
