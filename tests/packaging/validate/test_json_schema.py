"""JSON schemas of `openenv validate`: what pydantic takes fits, and what is made, pydantic takes."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from openenv.packaging.validate.json_schema import make, violations
from openenv.protocol.schema import Unmakeable


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    weight: float = Field(gt=0, lt=1)
    tags: list[str] = Field(default_factory=list, max_length=2)


class Move(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["move", "jump"]
    colour: Colour
    far: int = Field(ge=-5, le=-2)
    name: Annotated[str, Field(min_length=2, max_length=3)]
    where: tuple[int, int]
    inner: Inner
    maybe: int | None
    many: Annotated[list[Inner], Field(min_length=1)]
    free: dict[str, int] = Field(default_factory=dict)


class Tree(BaseModel):
    value: int
    children: list[Tree] = Field(default_factory=list)


class Endless(BaseModel):
    again: Endless


@pytest.mark.parametrize("model", [Move, Inner, Tree, int, str, bool, float, list[int], Colour, int | str])
@pytest.mark.parametrize("variant", range(4))
def test_what_is_made_fits(model: Any, variant: int) -> None:
    adapter = TypeAdapter(model)
    schema = adapter.json_schema()
    value = make(schema, variant)
    assert violations(value, schema) == []
    adapter.validate_python(value)


def test_variants_differ() -> None:
    schema = TypeAdapter(Move).json_schema()
    assert len({str(make(schema, variant)) for variant in range(4)}) == 4


@pytest.mark.parametrize("model", [Endless, Annotated[str, Field(pattern="^a+$", min_length=3)]])
def test_what_cannot_be_made_up_is_said(model: Any) -> None:
    with pytest.raises(Unmakeable):
        make(TypeAdapter(model).json_schema())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "walk"}, "kind: 'walk' is none of ['move', 'jump']"),
        ({"far": 0}, "far: 0 is too large"),
        ({"far": -9}, "far: -9 is too small"),
        ({"far": True}, "far: True is not of type integer"),
        ({"name": "x"}, "name: its length 1"),
        ({"where": [1, "2"]}, "where[1]: '2' is not of type integer"),
        ({"inner": {"weight": 1}}, "inner.weight: 1 is too large"),
        ({"inner": {}}, "inner: weight is missing"),
        ({"inner": {"weight": 0.5, "size": 1}}, "inner.size: there is no such field"),
        ({"maybe": "x"}, "maybe: 'x' fits no alternative"),
        ({"many": []}, "many: its length 0"),
        ({"many": [{"weight": 0.5, "tags": [1]}]}, "many[0].tags[0]: 1 is not of type string"),
        ({"free": {"a": "b"}}, "free.a: 'b' is not of type integer"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(change: dict[str, Any], message: str) -> None:
    schema = TypeAdapter(Move).json_schema()
    problems = violations({**make(schema), **change}, schema)
    assert len(problems) == 1
    assert problems[0].startswith(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["value", "children", "x"]), inner),
    max_leaves=8,
)


@given(JSON)
def test_what_pydantic_takes_fits(value: Any) -> None:
    for model in (Tree, Inner, int | None, list[Tree]):
        adapter: TypeAdapter[Any] = TypeAdapter(model)
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError:
            continue
        assert violations(value, adapter.json_schema()) == []
