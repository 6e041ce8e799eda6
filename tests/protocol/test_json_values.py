"""Values to JSON: the table of encodings, rewards, states, and values that have no encoding."""

from __future__ import annotations

import base64
import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel, ConfigDict

from openenv.errors import NonFiniteReward
from openenv.protocol.binary_values import observation_message
from openenv.protocol.json_values import (
    NONFINITE_REWARD_KEY,
    decode,
    encode,
    encode_state,
    jsonable,
    observation_json,
    serialize_observation,
    split_observation,
)
from openenv.types import Observation, State


class Anything(Observation):
    value: Any = None


class Loose(BaseModel):
    """An observation that is no `Observation`: neither its reward nor its fields are checked."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    text: str = ""
    reward: Any = None
    done: bool = False
    metadata: Any = None


class Level(enum.IntEnum):
    HIGH = 3


class Opaque:
    def __repr__(self) -> str:
        return "<opaque>"


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no repr either")

    def tolist(self) -> list[int]:
        raise RuntimeError("no list either")


def observed(value: Any) -> Any:
    return serialize_observation(Anything(value=value))["observation"]["value"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (float("inf"), None),
        (-float("inf"), None),
        (b"\xff\xfe", base64.urlsafe_b64encode(b"\xff\xfe").decode()),
        (bytearray(b"abc"), "YWJj"),
        (memoryview(b"abc"), "YWJj"),
        (np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
        (np.array([1.5, 2.5], dtype=np.float32), [1.5, 2.5]),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array([True, False]), [True, False]),
        ((1, 2), [1, 2]),
        ({3}, [3]),
        (Path("a") / "b", "a/b"),
        (Level.HIGH, 3),
        (Opaque(), "<opaque>"),
        ({"deep": [{"er": np.int8(1)}]}, {"deep": [{"er": 1}]}),
        ("ünïcode 🌍", "ünïcode 🌍"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_value_of_the_table_has_its_encoding(value: Any, expected: Any) -> None:
    assert observed(value) == expected


def test_an_image_becomes_a_png_data_url() -> None:
    text = observed(Image.new("RGB", (2, 2), "red"))
    head, _, body = text.partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(body).startswith(b"\x89PNG")


def test_a_value_that_cannot_be_encoded_is_replaced_and_the_rest_is_kept() -> None:
    payload = serialize_observation(Loose(text="kept", metadata={"bad": Hostile(), "good": 1}))
    assert payload["observation"]["text"] == "kept"
    assert payload["metadata"]["good"] == 1
    assert "could not be encoded" in payload["metadata"]["bad"]


def test_a_broken_field_does_not_take_reward_and_done_with_it() -> None:
    payload = serialize_observation(Anything(value=Hostile(), reward=2.5, done=True))
    assert (payload["reward"], payload["done"]) == (2.5, True)
    assert "could not be encoded" in payload["observation"]["value"]
    assert "reward" not in payload["observation"]


def test_a_cycle_is_replaced() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "could not be encoded" in observed(loop)


@pytest.mark.parametrize("reward", [None, True, False, 0, -3, 0.25, 1e300, 10**20])
def test_a_good_reward_travels_as_it_is(reward: Any) -> None:
    found = serialize_observation(Anything(reward=reward))["reward"]
    assert found == reward
    assert type(found) is type(reward)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [(np.float32(0.5), 0.5), (np.int64(2), 2), (np.bool_(True), True), (np.array([1.5]), 1.5), (Level.HIGH, 3)],
    ids=["float32", "int64", "bool_", "array", "IntEnum"],
)
def test_number_like_rewards_become_numbers(reward: Any, expected: Any) -> None:
    assert serialize_observation(Loose(reward=reward))["reward"] == expected


@pytest.mark.parametrize(
    "reward", [float("nan"), float("inf"), "much", np.array([1, 2]), np.datetime64("NaT"), Opaque()], ids=str
)
def test_a_reward_that_is_no_number_is_null_and_leaves_a_note(reward: Any) -> None:
    payload = serialize_observation(Loose(reward=reward))
    assert payload["reward"] is None
    assert payload["metadata"][NONFINITE_REWARD_KEY] == repr(reward)


def test_the_note_about_a_reward_stands_beside_other_metadata() -> None:
    payload = serialize_observation(Anything(reward=math.nan, metadata={"a": 1}))
    assert payload["metadata"] == {"a": 1, NONFINITE_REWARD_KEY: "nan"}


def test_metadata_is_nested_and_repeated_at_the_top_only_when_there_is_some() -> None:
    assert serialize_observation(Anything(value=1)) == {
        "observation": {"value": 1, "metadata": {}},
        "reward": None,
        "done": False,
    }
    payload = serialize_observation(Anything(metadata={"k": 1}))
    assert payload["metadata"] == payload["observation"]["metadata"] == {"k": 1}


def test_terminated_and_truncated_are_on_the_wire_only_when_set() -> None:
    fields = serialize_observation(Anything(terminated=True, truncated=False))["observation"]
    assert fields["terminated"] is True
    assert fields["truncated"] is False
    assert not {"terminated", "truncated"} & set(serialize_observation(Anything())["observation"])


def test_unset_end_flags_stay_off_the_wire_on_the_field_by_field_path_too() -> None:
    assert not {"terminated", "truncated"} & set(serialize_observation(Anything(value=Hostile()))["observation"])


@pytest.mark.parametrize("reward", [math.nan, math.inf, np.float32("nan"), np.float64("-inf"), np.array(math.inf)])
@pytest.mark.parametrize("encode", [observation_json, observation_message, split_observation])
def test_a_reward_that_is_not_finite_is_an_error_in_both_encodings(encode: Any, reward: Any) -> None:
    with pytest.raises(NonFiniteReward) as caught:
        encode({"reward": reward, "done": False})
    assert not math.isfinite(float(caught.value.details["value"]))


def test_a_nan_deep_inside_an_observation_is_null_and_not_invalid_json() -> None:
    raw = observation_json(Anything(value={"x": [math.nan]}, metadata={"y": math.inf}))
    assert b"NaN" not in raw
    assert b"Inf" not in raw
    assert json.loads(raw)["observation"]["value"] == {"x": [None]}


@dataclass
class PlainObservation:
    text: str
    reward: float = 0.5
    done: bool = True


@pytest.mark.parametrize(
    "observation",
    [PlainObservation("hi"), {"text": "hi", "reward": 0.5, "done": True}, Loose(text="hi", reward=0.5, done=True)],
    ids=["dataclass", "dict", "model"],
)
def test_observations_need_not_be_pydantic_observations(observation: Any) -> None:
    payload = serialize_observation(observation)
    assert payload["observation"]["text"] == "hi"
    assert (payload["reward"], payload["done"]) == (0.5, True)
    assert not {"reward", "done"} & set(payload["observation"])


def test_parts_hold_encoded_fields_and_a_plain_reward() -> None:
    parts = split_observation(Anything(value=1, reward=1, metadata={"a": 1}))
    assert json.loads(parts.fields) == {"value": 1, "metadata": {"a": 1}}
    assert (parts.reward, parts.done) == (1, False)
    assert parts.metadata == b'{"a":1}'


def test_a_state_is_encoded_with_all_fields_of_its_own_class() -> None:
    class Rich(State):
        board: Any = None

    found = json.loads(encode_state(Rich(episode_id="e", board=np.eye(2), extra_field="x")))
    expected = {"episode_id": "e", "step_count": 0, "board": [[1.0, 0.0], [0.0, 1.0]], "extra_field": "x"}
    assert found == expected


def test_no_state_is_an_empty_object_and_a_dict_is_itself() -> None:
    assert encode_state(None) == b"{}"
    assert json.loads(encode_state({"a": np.int64(1)})) == {"a": 1}


def test_decode_accepts_every_kind_of_buffer_and_refuses_what_is_not_json() -> None:
    for raw in (b'{"a":1}', bytearray(b'{"a":1}'), memoryview(b'{"a":1}'), '{"a":1}'):
        assert decode(raw) == {"a": 1}
    for bad in (b"", b"{", b"\xff\xff", "[" * 100_000):
        with pytest.raises(ValueError):
            decode(bad)


def test_encode_and_jsonable_agree_about_bytes() -> None:
    assert encode(b"\xfb\xff") == b'"' + jsonable(b"\xfb\xff").encode() + b'"' == b'"-_8="'
