"""Arbitrary bytes and values on the wire: parsers answer or refuse, encoders always encode, nothing else escapes."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, RootModel, field_validator

from openenv.client.network import parse_ws_url
from openenv.client.websocket import Handshake
from openenv.errors import ConnectFailed, NonFiniteReward, ProtocolError, ServerError, SessionLost
from openenv.protocol.client_sessions import ClientSession
from openenv.protocol.frames import (
    FrameError,
    FrameReader,
    Opcode,
    WebSocketMessage,
    control_frame,
    masked_control_frame,
    masked_text_frame,
    text_head,
)
from openenv.protocol.json_values import decode, encode, observation_json
from openenv.protocol.server_v1 import Malformed, ServerProtocol, V1Request
from openenv.server.http_routes import observation_body
from openenv.types import Action, Observation, WSErrorCode

# -- requests -----------------------------------------------------------------------------------------------------


class Walk(Action):
    """A usual action with a validator that raises what validators may raise."""

    word: str = ""
    number: int = 0

    @field_validator("word")
    @classmethod
    def _known(cls, value: str) -> str:
        if value.startswith("b"):
            raise ValueError("bad")
        if value.startswith("k"):
            raise KeyError(value)
        return value


class Left(BaseModel):
    kind: Literal["left"]
    by: int


class Right(BaseModel):
    kind: Literal["right"]
    by: float


class Turn(RootModel[Left | Right]):
    """An action that is a choice."""

    root: Left | Right = Field(discriminator="kind")


@dataclass
class Jump:
    """An action that is no model."""

    height: float = 0.0


PROTOCOLS = [ServerProtocol(cls) for cls in (Walk, Action, Turn, Jump, None)]
CODES = {code.value for code in WSErrorCode}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
kinds = st.sampled_from(["step", "reset", "state", "close", "mcp", "fly", ""]) | json_values
fields = st.fixed_dictionaries(
    {},
    optional={
        "word": st.text(max_size=5) | json_values,
        "number": st.integers() | json_values,
        "kind": st.sampled_from(["left", "right", "up"]),
        "by": json_values,
        "height": json_values,
        "type": st.sampled_from(["list_tools", "call_tool"]) | json_values,
        "tool_name": json_values,
        "metadata": json_values,
    },
)
frames = st.fixed_dictionaries({}, optional={"type": kinds, "data": fields | json_values, "more": json_values})


def check_request(raw: bytes) -> None:
    """Parse a frame with every kind of action class."""
    for protocol in PROTOCOLS:
        request = protocol.parse(raw)
        if isinstance(request, Malformed):
            reply = json.loads(request.reply)
            assert reply["type"] == "error"
            assert reply["data"]["code"] in CODES
            assert isinstance(reply["data"]["message"], str)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_or_refused(raw: bytes) -> None:
    """W10: a request or an error frame, whatever comes."""
    check_request(raw)


@given(frames | json_values)
def test_arbitrary_json_is_parsed_or_refused(message: Any) -> None:
    """W3, W10: a request or an error frame, whatever the JSON says; NaN and infinities included."""
    check_request(json.dumps(message).encode())


@given(frames, st.data())
def test_damaged_frames_are_parsed_or_refused(message: Any, data: st.DataObject) -> None:
    """W10: the same with a bite taken out of the text."""
    raw = json.dumps({"type": "step", **message}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    start = data.draw(st.integers(0, len(raw)))
    stop = data.draw(st.integers(start, len(raw)))
    check_request(raw[:start] + data.draw(st.binary(max_size=4)) + raw[stop:])


@given(st.dictionaries(st.sampled_from(["word", "number"]), json_values))
def test_the_short_way_and_the_long_way_agree(data: dict[str, Any]) -> None:
    """A step frame means the same whether it is read in one pass or piece by piece."""
    protocol = PROTOCOLS[0]
    raw = json.dumps({"type": "step", "data": data}).encode()
    quick, slow = protocol.parse_step(raw), protocol.parse(raw)
    if isinstance(slow, V1Request):
        assert repr(quick) == repr(slow.data)  # by text, for a NaN equals nothing
    else:
        assert quick is None
        assert isinstance(slow, Malformed)


# -- replies ------------------------------------------------------------------------------------------------------

replies = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["observation", "state", "error", "mcp"]) | json_values,
        "data": json_values
        | st.fixed_dictionaries(
            {},
            optional={
                "code": st.sampled_from([*CODES, "SESSION_LOST", "X"]) | json_values,
                "message": json_values,
                "active_sessions": json_values,
                "max_sessions": json_values,
                "factory_name": json_values,
                "reason": json_values,
                "errors": json_values,
            },
        ),
    },
)


@given(
    st.binary(max_size=100) | (replies | json_values).map(lambda value: json.dumps(value).encode()),
    st.sampled_from(["reset", "step", "state", "mcp"]),
)
def test_an_arbitrary_reply_is_a_result_or_a_typed_error(raw: bytes, kind: str) -> None:
    """W26: a client raises errors of ours only."""
    session = ClientSession()
    session.request("reset", {})
    with contextlib.suppress(ServerError, ProtocolError, SessionLost):
        assert isinstance(session.reply(kind, raw), dict)


@given(st.lists(st.binary(max_size=60), max_size=6), st.booleans())
def test_an_arbitrary_handshake_is_refused_or_not_yet_whole(chunks: list[bytes], plausible: bool) -> None:
    """A peer that is no WebSocket server is a failed connection and nothing else."""
    handshake = Handshake(parse_ws_url("ws://127.0.0.1:1/ws"))
    if plausible:
        chunks = [b"HTTP/1.1 101 X\r\n", *chunks, b"\r\n\r\n"]
    with contextlib.suppress(ConnectFailed):
        for chunk in chunks:
            assert handshake.feed(chunk) is None


# -- frames -------------------------------------------------------------------------------------------------------

KEY = b"\x11\x22\x33\x44"


@dataclass
class Sent:
    """A message and how it travels."""

    opcode: int
    payload: bytes
    cuts: list[int]
    pings: list[bytes]


messages = st.builds(
    Sent,
    st.sampled_from([Opcode.TEXT, Opcode.BINARY]),
    st.binary(max_size=300) | st.integers(65_530, 65_550).map(bytes),
    st.lists(st.integers(0, 300), max_size=3),
    st.lists(st.binary(max_size=10), max_size=2),
)


def one_frame(opcode: int, payload: bytes, final: bool, masked: bool) -> bytes:
    """A data frame."""
    frame = bytearray(masked_text_frame(payload, KEY) if masked else text_head(len(payload)) + payload)
    frame[0] = (0x80 if final else 0) | opcode
    return bytes(frame)


def on_the_wire(sent: Sent, masked: bool) -> bytes:
    """A message as frames, with pings between its fragments."""
    cuts = sorted({min(cut, len(sent.payload)) for cut in sent.cuts})
    parts = [sent.payload[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent.payload)], strict=True)]
    pings = list(sent.pings)
    wire = b""
    for index, part in enumerate(parts):
        final = index == len(parts) - 1
        wire += one_frame(sent.opcode if index == 0 else Opcode.CONTINUATION, part, final, masked)
        if pings and not final:
            ping = pings.pop()
            wire += masked_control_frame(Opcode.PING, ping, KEY) if masked else control_frame(Opcode.PING, ping)
    return wire


def chunked(wire: bytes, sizes: list[int]) -> list[bytes]:
    """Cut bytes into chunks of the given sizes, over and over."""
    chunks, start, turn = [], 0, 0
    while start < len(wire):
        size = sizes[turn % len(sizes)]
        chunks.append(wire[start : start + size])
        start, turn = start + size, turn + 1
    return chunks


def feed_all(reader: FrameReader, chunks: list[bytes]) -> list[WebSocketMessage]:
    """Read all chunks."""
    return [message for chunk in chunks for message in reader.feed(chunk)]


@given(st.lists(messages, max_size=5), st.lists(st.integers(1, 70_000) | st.integers(1, 9), min_size=1), st.booleans())
def test_messages_come_out_as_they_went_in_however_the_bytes_are_cut(
    sent: list[Sent], sizes: list[int], masked: bool
) -> None:
    """The reader gives the same messages for every chunking of the same bytes."""
    wire = b"".join(on_the_wire(one, masked) for one in sent)
    # Byte by byte is covered by the short wires; for long ones it would only be slow.
    sizes = sizes if len(wire) < 5000 else [max(size, 500) for size in sizes]
    found = feed_all(FrameReader(1 << 20, masked=masked), chunked(wire, sizes))
    data = [(message.opcode, message.payload) for message in found if message.opcode != Opcode.PING]
    assert data == [(one.opcode, one.payload) for one in sent]
    whole = feed_all(FrameReader(1 << 20, masked=masked), [wire] if wire else [])
    assert whole == found


@given(
    st.lists(messages, min_size=1, max_size=5),
    st.lists(st.integers(1, 400), min_size=1),
    st.integers(0, 200),
    st.booleans(),
)
def test_messages_over_the_limit_are_reported_and_the_next_ones_come(
    sent: list[Sent], sizes: list[int], limit: int, masked: bool
) -> None:
    """W10: a big message is skipped as a whole, however it is cut, and nothing after it is harmed."""
    small = [Sent(one.opcode, one.payload[:300], one.cuts, one.pings) for one in sent]
    wire = b"".join(on_the_wire(one, masked) for one in small)
    found = feed_all(FrameReader(limit, masked=masked), chunked(wire, sizes))
    kept = [message for message in found if message.opcode != Opcode.PING]
    assert len(kept) == len(small)
    for one, message in zip(small, kept, strict=True):
        if len(one.payload) <= limit:
            assert (message.opcode, message.payload) == (one.opcode, one.payload)
        else:
            assert message.opcode == Opcode.OVERSIZE
            assert message.payload == b""


@given(st.lists(st.binary(max_size=40), max_size=10), st.integers(0, 1000), st.booleans())
def test_garbage_breaks_the_framing_rules_and_nothing_else(chunks: list[bytes], limit: int, masked: bool) -> None:
    """W10: arbitrary bytes are messages or a FrameError."""
    reader = FrameReader(limit, masked=masked)
    with contextlib.suppress(FrameError):
        for chunk in chunks:
            assert all(isinstance(message, WebSocketMessage) for message in reader.feed(chunk))


@given(st.lists(messages, min_size=1, max_size=3), st.data())
def test_a_damaged_stream_breaks_the_framing_rules_and_nothing_else(sent: list[Sent], data: st.DataObject) -> None:
    """W10: the same for bytes that were good before one of them was changed."""
    wire = bytearray(b"".join(on_the_wire(one, True) for one in sent)[:2000])
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FrameError):
        feed_all(FrameReader(1 << 16), chunked(bytes(wire), [data.draw(st.integers(1, 100))]))


# -- observations -------------------------------------------------------------------------------------------------


class Odd:
    """An object that JSON does not know."""


text = st.text(max_size=10) | st.just("\ud800")
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.binary(max_size=10)
    | text
    | st.just(Odd())
    | st.complex_numbers()
    | st.dates()
    | st.fractions(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(text | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=8,
)


class Anything(Observation):
    """An observation with any value."""

    value: Any = None


@given(
    anything,
    st.none() | st.booleans() | st.integers() | st.floats(),
    st.booleans(),
    st.dictionaries(text, anything, max_size=3),
)
def test_every_observation_has_an_encoding(value: Any, reward: Any, done: bool, metadata: dict[str, Any]) -> None:
    """W22: both wires encode it, and agree on everything but the type of the reward."""
    observation = Anything(value=value, reward=reward, done=done, metadata=metadata)
    frame = json.loads(observation_json(observation, null_reward=True))
    try:
        body = json.loads(observation_body(observation))
    except NonFiniteReward as exc:
        assert not math.isfinite(reward)
        body = json.loads(exc.reply)
    assert frame["done"] is body["done"] is done
    assert repr(frame["observation"]) == repr(body["observation"])
    if reward is None or not math.isfinite(reward):
        assert frame["reward"] is body["reward"] is None
    else:
        assert frame["reward"] == reward
        assert body["reward"] == float(reward)


@given(json_values)
def test_json_survives_the_codec(value: Any) -> None:
    """What JSON can say comes back as it was; what it cannot (NaN, infinity) comes back as null."""
    assert decode(encode(value)) == json.loads(json.dumps(_finite(value)))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("depth", [10, 150, 1000, 100_000])
def test_depth_is_refused_or_parsed_but_never_overflows(depth: int) -> None:
    """W10: nesting of any depth is a request or an error frame."""
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        check_request(b'{"type":"step","data":{"metadata":' + opening * depth + b"1" + closing * depth + b"}}")
        check_request(b'{"type":"step","data":{"metadata":' + opening * depth)
