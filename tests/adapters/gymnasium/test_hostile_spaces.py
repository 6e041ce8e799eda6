"""A server may describe any spaces: clients refuse those that they cannot build, before they take memory."""

from __future__ import annotations

from typing import Any

import pytest

from openenv.adapters.gymnasium.spaces import UnsupportedSpace, derive, space_of

BOX = {"type": "Box", "dtype": "<f4", "low": 0, "high": 1}
COIN = {"type": "Discrete", "n": 2}


def nested(levels: int) -> dict[str, Any]:
    """Return tuples inside of tuples."""
    description: dict[str, Any] = COIN
    for _ in range(levels):
        description = {"type": "Tuple", "spaces": [description]}
    return description


@pytest.mark.parametrize(
    "description",
    [
        {**BOX, "shape": [10**6, 10**6]},
        {"type": "Tuple", "spaces": [{**BOX, "shape": [2**24]}] * 3},
        {**BOX, "shape": [-1]},
        {**BOX, "shape": None},
        {**BOX, "shape": [2], "dtype": "V1000000000"},
        {"type": "MultiBinary", "n": [10**6, 10**6]},
        {"type": "Discrete", "n": 10**40},
        {"type": "Tuple", "spaces": [COIN] * 20_000},
        {"type": "Dict", "spaces": [1]},
        None,
    ],
    ids=lambda description: str(description)[:40],
)
def test_descriptions_that_make_no_reasonable_space_are_refused(description: Any) -> None:
    with pytest.raises(UnsupportedSpace):
        space_of(description)


def test_spaces_may_be_nested_but_not_without_end() -> None:
    assert space_of(nested(50)) is not None
    with pytest.raises(UnsupportedSpace, match="recursion"):
        space_of(nested(3000))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"properties": {"a": {"type": "array", "minItems": 10**12, "maxItems": 10**12, "items": {"type": "number"}}}},
        {"properties": {"a": {"type": "integer", "minimum": 0, "maximum": 10**400}}},
        {"properties": {"a": 5}},
        {"properties": [1]},
    ],
    ids=["circle", "large", "bounds", "field", "list"],
)
def test_schemas_without_a_reasonable_space_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSpace):
        derive(schema)
