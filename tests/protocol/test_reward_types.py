"""A reward keeps its type: floats are looked for first, and nothing else about the field is different for that."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openenv.types import Observation


class Plain(BaseModel):
    """The same field without a short cut."""

    model_config = ConfigDict(validate_assignment=True)

    reward: bool | int | float | None = Field(default=None, description="Reward of the last action")


def outcome(model: type[BaseModel], make: str, value: Any) -> Any:
    try:
        if make == "assigned":
            made: Any = model()
            made.reward = value
        else:
            made = model.model_validate({"reward": value}, strict=True if make == "strict" else None)
    except ValidationError:
        return "refused"
    return (
        type(made.reward),
        repr(made.reward),
        made.model_dump(include={"reward"}),
        made.model_dump_json(include={"reward"}),
    )


VALUES = [True, False, 0, 1, -3, 2**70, 0.0, -0.0, 1.5, math.inf, None, "1", "1.5", "true", "x", b"1", [1], 1j]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("make", ["given", "strict", "assigned"])
def test_a_reward_is_taken_as_the_plain_union_takes_it(make: str, value: Any) -> None:
    assert outcome(Observation, make, value) == outcome(Plain, make, value)


@pytest.mark.parametrize("text", ["true", "1", "1.0", "1e400", "null", '"1"', "[]"])
def test_the_same_holds_for_json(text: str) -> None:
    def read(model: type[BaseModel]) -> Any:
        try:
            reward = getattr(model.model_validate_json(f'{{"reward": {text}}}'), "reward")  # noqa: B009
        except ValidationError:
            return "refused"
        return type(reward), repr(reward)

    assert read(Observation) == read(Plain)


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_the_schema_shows_the_plain_union(mode: Any) -> None:
    ours, plain = (model.model_json_schema(mode=mode)["properties"]["reward"] for model in (Observation, Plain))
    assert ours == plain
