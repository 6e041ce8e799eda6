"""Messages that are made to harm: small ones that would grow, and names that would end the text they are put into."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import numpy as np
import pytest

from openenv.protocol import binary_values as arrays
from openenv.protocol.codec import JSON, MSGPACK
from openenv.protocol.server_v2 import WRITERS, RefusedRequest, ServerProtocolV2
from openenv.types import Action


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
