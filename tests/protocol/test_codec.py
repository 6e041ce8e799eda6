"""The v2 codecs: what goes in comes out, what is no message is refused, nothing unpacks to more than allowed."""

from __future__ import annotations

import math
import sys
import zlib
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from openenv.protocol.binary_values import has_arrays, observation_message, state_message, without_arrays
from openenv.protocol.codec import (
    JSON,
    MAX_MESSAGE_BYTES,
    MSGPACK,
    SUBPROTOCOLS,
    Codec,
    choose,
)
from openenv.protocol.json_values import ValueLimit, serialize_observation
from openenv.types import Observation, State

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts
values = st.recursive(
    scalars | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
BOTH = pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)


class Screen(Observation):
    """An observation with what JSON cannot hold."""

    pixels: Any = None
    sound: bytes = b""
    note: str = ""


def there_and_back(codec: Codec, message: dict[str, Any]) -> dict[str, Any]:
    return codec.decode(codec.encode(message), binary=codec.is_binary)


@given(st.dictionaries(texts, values, max_size=5))
def test_msgpack_returns_what_it_was_given(message: dict[str, Any]) -> None:
    assert there_and_back(MSGPACK, message) == message


@given(st.dictionaries(texts, json_values, max_size=5))
def test_json_returns_what_it_was_given(message: dict[str, Any]) -> None:
    assert there_and_back(JSON, message) == message


@pytest.mark.parametrize(
    "dtype", ["|b1", "|u1", "|i1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f8", "<c8", "<c16"], ids=lambda name: name[1:]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3, 4)], ids=str)
def test_msgpack_keeps_arrays(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(max(1, math.prod(shape))).astype(dtype)[: math.prod(shape)].reshape(shape)
    back = there_and_back(MSGPACK, {"a": array})["a"]
    assert back.dtype == array.dtype
    assert back.shape == shape
    assert (back == array).all()
    assert back.flags.writeable


def test_msgpack_writes_arrays_in_c_order_whatever_their_layout() -> None:
    array = np.arange(12, dtype="<i4").reshape(3, 4).T[::2]
    assert there_and_back(MSGPACK, {"a": array})["a"].tolist() == array.tolist()


def test_arrays_are_lists_where_numpy_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {
        "flat": np.array([1.5, -2.0], "<f4"),
        "big": np.arange(24, dtype=">u2").reshape(2, 3, 4),
        "yes": np.array([True, False]),
        "one": np.array(7, "<i8"),
        "none": np.zeros((2, 0), "|u1"),
        "z": np.array([1 + 2j], "<c8"),
    }
    payload = MSGPACK.encode(arrays)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert MSGPACK.decode(payload, binary=True) == {key: value.tolist() for key, value in arrays.items()}


def test_msgpack_is_the_documented_extension() -> None:
    raw = msgpack.unpackb(MSGPACK.encode({"a": np.array([[1, 2]], "|u1")}))
    assert raw["a"].code == 1
    assert msgpack.unpackb(raw["a"].data) == ["|u1", [1, 2], b"\x01\x02"]


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536])
def test_arrays_of_every_length_are_written_as_the_packer_writes_them(size: int) -> None:
    array = np.zeros((size, 1), "<f2")
    (value,) = msgpack.unpackb(MSGPACK.encode({"a": array})).values()
    assert value.data == msgpack.packb(["<f2", [size, 1], array.tobytes()])
    assert MSGPACK.decode(MSGPACK.encode({"a": array}), binary=True)["a"].shape == (size, 1)


@pytest.mark.parametrize(
    "parts",
    [
        ["|O8", [1], b"\0" * 8],
        ["<f4", [2], b"\0" * 4],
        ["<f4", [-1], b""],
        ["<f4", [2**62, 4], b""],
        ["|u1", [1] * 33, b"\0"],
        ["|u1", [True], b"\0"],
        ["|u1", "1", b"\0"],
        ["|u1", [1], "\0"],
        ["|u1", [1]],
        {"dtype": "|u1"},
        "array",
    ],
    ids=str,
)
def test_an_array_that_does_not_fit_together_is_refused(parts: Any) -> None:
    MSGPACK.decode(MSGPACK.encode({"a": np.zeros(1, "|u1")}), binary=True)  # one that looks like it is known already
    payload = msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(parts))})
    with pytest.raises(ValueError):
        MSGPACK.decode(payload, binary=True)


@given(st.binary(max_size=200), st.booleans())
@BOTH
def test_any_bytes_are_a_map_or_a_value_error(codec: Codec, payload: bytes, binary: bool) -> None:
    try:
        assert isinstance(codec.decode(payload, binary=binary, max_bytes=1000), dict)
    except ValueError:
        pass


@given(st.binary(max_size=60), st.integers(-128, 127))
def test_any_extension_is_an_array_or_a_value_error(data: bytes, code: int) -> None:
    payload = msgpack.packb({}, use_bin_type=True)[:0] + b"\x81\xa1a\xc7" + bytes([len(data), code & 0xFF]) + data
    try:
        MSGPACK.decode(payload, binary=True)
    except ValueError:
        pass


@pytest.mark.parametrize("payload", [b"[]", b"1", b'"x"', b"null", b"{", b"", b"\xff"])
def test_what_is_no_json_object_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError):
        JSON.decode(payload, binary=False)


@pytest.mark.parametrize("value", [[], 1, "x", None], ids=str)
def test_what_is_no_msgpack_map_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="expected an object"):
        MSGPACK.decode(msgpack.packb(value), binary=True)


def test_msgpack_refuses_text_frames_and_other_extensions() -> None:
    with pytest.raises(ValueError, match="text frame"):
        MSGPACK.decode(MSGPACK.encode({}), binary=False)
    with pytest.raises(ValueError, match="extension type 5"):
        MSGPACK.decode(msgpack.packb({"a": msgpack.ExtType(5, b"")}), binary=True)
    with pytest.raises(ValueError, match="MessagePack"):
        MSGPACK.decode(msgpack.packb({1: 2}), binary=True)


@BOTH
def test_large_messages_are_compressed_and_read_again(codec: Codec) -> None:
    message = {"type": "observation", "text": "again and " * 500}
    payload = codec.encode(message)
    small, binary = codec.compressed(payload, 1000)
    assert binary
    assert len(small) < len(payload) / 10
    assert codec.decode(small, binary=True) == message


@BOTH
def test_nothing_is_compressed_below_the_threshold_or_without_gain(codec: Codec) -> None:
    payload = codec.encode({"text": "again and " * 500})
    assert codec.compressed(payload, len(payload) + 1) == (payload, codec.is_binary)
    assert codec.compressed(payload, None) == (payload, codec.is_binary)
    noise = zlib.compress(np.random.default_rng(1).bytes(5000))
    assert codec.compressed(noise, 1) == (noise, codec.is_binary)


@BOTH
def test_a_bomb_is_not_unpacked(codec: Codec) -> None:
    bomb, _ = codec.compressed(codec.encode({"zeros": "0" * 5_000_000}), 1)
    assert len(bomb) < 50_000
    with pytest.raises(ValueError, match="more than 1000000 bytes"):
        codec.decode(bomb, binary=True, max_bytes=1_000_000)
    assert len(codec.decode(bomb, binary=True, max_bytes=6_000_000)["zeros"]) == 5_000_000


@BOTH
def test_a_compressed_message_must_be_whole(codec: Codec) -> None:
    small, _ = codec.compressed(codec.encode({"text": "again and " * 500}), 1)
    for broken in (small[:-1], small + b"x", small[:1], small[:8] + b"\0" * 20):
        with pytest.raises(ValueError, match="compressed"):
            codec.decode(broken, binary=True)


@BOTH
def test_a_batch_is_made_of_replies_that_are_encoded_already(codec: Codec) -> None:
    replies = [codec.encode({"type": "observation", "id": at, "session": str(at)}) for at in range(40)]
    for batch_id in (None, 0, 70_000):
        message = codec.decode(codec.batch(replies, batch_id), binary=codec.is_binary)
        assert message.pop("id", None) == batch_id
        assert message == {
            "type": "batch",
            "replies": [{"type": "observation", "id": at, "session": str(at)} for at in range(40)],
        }
    assert codec.decode(codec.batch([]), binary=codec.is_binary) == {"type": "batch", "replies": []}


class Colour(Enum):
    """An enum."""

    RED = "red"


@dataclass
class Point:
    """A dataclass."""

    x: int
    y: Any


class Model(BaseModel):
    """A model inside a mapping."""

    raw: bytes = b"\xff"
    keys: dict[int, int] = {1: 2}


def test_msgpack_writes_other_values_as_json_does_but_bytes_and_arrays_raw() -> None:
    when = datetime(2026, 1, 2, tzinfo=timezone.utc)
    back = there_and_back(
        MSGPACK,
        {
            "model": Model(),
            "point": Point(1, [Point(2, b"\0")]),
            "enum": Colour.RED,
            "when": when,
            "set": {1},
            "tuple": (1, "2"),
            "scalar": np.float32(0.5),
            "flag": np.bool_(True),
            "long": np.longdouble(2),
            "names": np.array(["a", "b"]),
            "view": memoryview(b"ab"),
            "nan": math.nan,
            "huge": 2**70,
            "half": "\ud800x",
            7: {None: 1, Colour.RED: 2},
        },
    )
    assert math.isnan(back.pop("nan"))
    assert back == {
        "model": {"raw": b"\xff", "keys": {"1": 2}},
        "point": {"x": 1, "y": [{"x": 2, "y": b"\0"}]},
        "enum": "red",
        "when": "2026-01-02T00:00:00Z",
        "set": [1],
        "tuple": [1, "2"],
        "scalar": 0.5,
        "flag": True,
        "long": 2.0,
        "names": ["a", "b"],
        "view": b"ab",
        "huge": str(2**70),
        "half": "?x",
        "7": {"None": 1, "red": 2},
    }


@BOTH
def test_a_value_without_an_encoding_never_loses_the_message(codec: Codec) -> None:
    class Odd:
        def __repr__(self) -> str:
            return "odd"

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    circle: dict[str, Any] = {}
    circle["self"] = circle
    back = there_and_back(codec, {"odd": Odd(), "broken": Broken(), "circle": circle, "id": 3})
    assert back["odd"] == "odd"
    assert "could not be encoded" in back["broken"]
    assert back["id"] == 3


@pytest.mark.parametrize(
    "observation",
    [
        Screen(note="a", reward=1.5, done=True),
        Screen(reward=None),
        Screen(reward=3, metadata={"lives": 2}, terminated=False),
        Screen(reward=True, truncated=True),
        {"note": "plain", "reward": np.float64(2.5), "done": 0, "metadata": {}},
        Point(1, "two"),
    ],
    ids=repr,
)
def test_the_two_codecs_agree_on_the_fields_of_an_observation(observation: Any) -> None:
    raw = there_and_back(MSGPACK, {"data": observation_message(observation)})["data"]
    assert JSON.decode(JSON.encode(raw), binary=False) == serialize_observation(observation)


def test_observations_keep_bytes_and_arrays() -> None:
    pixels = np.arange(84 * 84 * 4, dtype="|u1").reshape(84, 84, 4)
    screen = Screen(pixels=pixels, sound=b"\x00\xff", reward=1.0)
    payload = MSGPACK.encode({"type": "observation", "id": 1, "data": observation_message(screen)})
    assert len(payload) < pixels.nbytes + 300
    data = MSGPACK.decode(payload, binary=True)["data"]
    assert (data["observation"]["pixels"] == pixels).all()
    assert data["observation"]["sound"] == b"\x00\xff"
    assert data["reward"] == 1.0
    assert data["done"] is False
    assert "metadata" not in data
    assert "terminated" not in data["observation"]


def test_what_is_no_observation_is_refused() -> None:
    for value in (None, (1, 2), "text"):
        with pytest.raises(TypeError, match="not an Observation"):
            observation_message(value)


def test_states_keep_all_their_fields() -> None:
    class Board(State):
        cells: bytes = b"\xff"

    state = Board(episode_id="e", step_count=2, extra=np.zeros(2, "|u1"))
    back = there_and_back(MSGPACK, {"data": state_message(state)})["data"]
    assert back.pop("extra").tolist() == [0, 0]
    assert back == {"episode_id": "e", "step_count": 2, "cells": b"\xff"}
    assert state_message(None) == {}


def test_arrays_become_lists_for_models_that_know_only_those() -> None:
    value = {"a": [np.arange(2), {"b": np.float32(1)}], "c": "text"}
    assert without_arrays(value) == {"a": [[0, 1], {"b": np.float32(1)}], "c": "text"}
    assert has_arrays(value)
    assert not has_arrays(without_arrays(value))


def test_the_first_offer_that_is_spoken_is_chosen() -> None:
    assert SUBPROTOCOLS == ("openenv.v2.msgpack", "openenv.v2.json")
    assert choose(["other", "openenv.v2.json", "openenv.v2.msgpack"]) is JSON
    assert choose(["openenv.v2.msgpack", "openenv.v2.json"]) is MSGPACK
    assert choose(["mcp"]) is None
    assert choose([]) is None


@BOTH
def test_random_subtrees_survive_compression(codec: Codec) -> None:
    message = {"rows": [{"n": at, "t": "x" * at} for at in range(200)]}
    small, binary = codec.compressed(codec.encode(message), 0)
    assert codec.decode(small, binary=binary) == message


@pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=repr)
def test_a_clients_compressed_message_may_not_expand_without_limit(codec: Any) -> None:
    message = {"type": "step", "data": "0" * 20_000_000}
    plain = codec.encode(message)
    bomb = codec._mark + zlib.compress(plain)
    limit = ValueLimit.within(MAX_MESSAGE_BYTES)
    with pytest.raises(ValueError, match="holds more than"):
        codec.decode(bomb, binary=True, limit=limit)
    assert codec.decode(bomb, binary=True) == message  # a server's message: clients trust their server
    small = codec.encode({"type": "step", "data": "0" * 900_000})
    assert codec.decode(codec.compressed(small, 1000).data, binary=True, limit=limit)["type"] == "step"
