"""The reward of an observation is taken exactly as its annotation says, though floats are tried first."""

from __future__ import annotations

import copy
import pickle
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from openenv.types import Observation
from program_interpreters import Interpreter


class Plain(BaseModel):
    """The same field without anything in front."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, ser_json_bytes="base64")
    reward: bool | int | float | None = None


class PlainStrict(Plain):
    model_config = ConfigDict(strict=True)


class Strict(Observation):
    model_config = ConfigDict(strict=True)


class Points(IntEnum):
    WIN = 1


class Count(int):
    pass


class Score(float):
    pass


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -3, 10**30, 10**400, 1.5, -0.0, 2.0, float("nan"), float("inf")),
    *(Points.WIN, Count(3), Score(1.5), Score(2.0), "1", "1.5", "true", "x", "", b"1", b"1.5"),
    *(Decimal(1), Decimal("1.5"), Fraction(1, 2), np.float64(1.5), np.float64(2), np.float32(1.5), np.int64(3)),
    *(np.bool_(True), np.array(1.5), np.array([1.5, 2.5]), [], {}, object()),
]
TEXTS = ["null", "true", "0", "1", "1.5", "1.0", "-0.0", "1e3", "NaN", '"1.5"', '"1"', '"true"', '"x"', "[]", "1" * 30]


def named(value: Any) -> str:
    return f"{type(value).__name__} {value}"[:40] if isinstance(value, (int, float, str)) else type(value).__name__


PAIRS = [(Plain, Observation), (PlainStrict, Strict)]


def outcome(make: Any) -> tuple[str, str]:
    try:
        reward = make().reward
    except ValidationError:
        return "refused", ""
    return type(reward).__name__, repr(reward)


@pytest.mark.parametrize(("plain", "ours"), PAIRS)
@pytest.mark.parametrize("value", VALUES, ids=named)
def test_values_and_their_types_are_those_of_the_annotation(plain: Any, ours: Interpreter, value: Any) -> None:
    def assigned(cls: Any) -> Any:
        made = cls()
        made.reward = value
        return made

    assert outcome(lambda: ours(reward=value)) == outcome(lambda: plain(reward=value))
    assert outcome(lambda: assigned(ours)) == outcome(lambda: assigned(plain))


@pytest.mark.parametrize(("plain", "ours"), PAIRS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_is_read_as_the_annotation_says(plain: Any, ours: Interpreter, text: str) -> None:
    whole = f'{{"reward":{text}}}'
    assert outcome(lambda: ours.model_validate_json(whole)) == outcome(lambda: plain.model_validate_json(whole))
    given = {"reward": text}
    assert outcome(lambda: ours.model_validate_strings(given)) == outcome(lambda: plain.model_validate_strings(given))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("value", [value for value in VALUES if isinstance(value, (int, float, str, bytes))], ids=named)
def test_whatever_is_there_is_written_as_before(value: Any) -> None:
    plain, ours = Plain.model_construct(reward=value), Observation.model_construct(reward=value)
    assert ours.model_dump_json(include={"reward"}) == plain.model_dump_json()
    assert repr(ours.model_dump(include={"reward"})) == repr(plain.model_dump())


def test_the_schema_does_not_show_it() -> None:
    for mode in ("validation", "serialization"):
        shown = Observation.model_json_schema(mode=mode)["properties"]["reward"]  # type: ignore[arg-type]
        assert shown["anyOf"] == Plain.model_json_schema()["properties"]["reward"]["anyOf"]


def test_subclasses_may_narrow_it_and_copies_are_equal() -> None:
    class Narrow(Observation):
        reward: float = 0.0

    assert Narrow(reward=1).model_dump()["reward"] == 1.0
    assert Narrow.model_json_schema()["properties"]["reward"]["type"] == "number"
    observation = Observation(reward=1.5)
    assert pickle.loads(pickle.dumps(observation)) == copy.deepcopy(observation) == observation
