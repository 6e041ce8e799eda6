"""Columns: one array per field for the steps of many sessions, instead of one message per session.

    environments with array spaces        sessions 0, 1, 2, ... of a batch
    action                                array of shape (sessions, *shape of one action)
    observation, or a part of it          array of shape (sessions, *shape of the part)
    reward, terminated, truncated         arrays of shape (sessions,)

A `ColumnLayout` lists the arrays. Client and server, or a program and its vector workers, share it. Uses NumPy, which
only environments with array spaces need; must not know sessions, sockets or shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

PathPart = str | int

_MOST_COLUMNS: Final = 64


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a batch.

    Args:
        path: The place of the value in the fields of an action or an observation: `("observation", "position")`.
        dtype: NumPy's name of the type, with its byte order: `<f4`.
        shape: The shape of one session's value.
    """

    path: tuple[PathPart, ...]
    dtype: str
    shape: tuple[int, ...]

    def batch_shape(self, count: int) -> tuple[int, ...]:
        """Return the shape of the array for a number of sessions."""
        return (count, *self.shape)


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """The arrays of an environment's actions and observations."""

    actions: tuple[Column, ...]
    observations: tuple[Column, ...]


class StepArrays(Protocol):
    """The arrays of results, with a row for each session."""

    observations: Any
    rewards: Any
    terminated: Any
    truncated: Any


@dataclass(slots=True)
class ColumnBlock:
    """The results of one step of some slots, as arrays.

    Args:
        slots: The slots, in ascending order.
        observations: One array for each column of the layout.
        rewards: Their rewards.
        terminated: Whether the task ended each episode.
        truncated: Whether a limit ended each episode.
        metadata: Metadata of results that have some, by slot.
        errors: Failures by slot; their rows in the arrays have no meaning.
        finals: Episodes that ended and were followed by the next one in the same step, by slot: the values of the last
            observation, and its metadata. The row of observations and `metadata` are the next episode's.
        unbegun: Episodes whose following one could not begin, by slot: the data of the last reply, and the error.
        begun: For each row whether it is the beginning of an episode instead of a step; None if none is.
    """

    slots: Any
    observations: list[Any]
    rewards: Any
    terminated: Any
    truncated: Any
    metadata: dict[int, dict[str, Any]]
    errors: dict[int, Any]
    finals: dict[int, tuple[list[Any], dict[str, Any]]] = field(default_factory=dict)
    unbegun: dict[int, tuple[dict[str, Any], Any]] = field(default_factory=dict)
    begun: Any = None


def nest(columns: Sequence[Column], values: Iterable[Any]) -> dict[str, Any]:
    """Put values of columns into the fields that their paths name.

    Example: the paths ("observation", "a") and ("observation", "b") make `{"observation": {"a": ..., "b": ...}}`. Parts
    of a tuple, whose names are numbers, come in order and become a list.
    """
    fields: dict[str, Any] = {}
    for column, value in zip(columns, values, strict=True):
        if len(column.path) == 1:
            fields[column.path[0]] = value  # type: ignore[index]
            continue
        place: Any = fields
        for part, following in zip(column.path, (*column.path[1:], None), strict=True):
            if following is None:
                _put(place, part, value)
            else:
                place = _put(place, part, [] if isinstance(following, int) else {})
    return fields


def _put(place: Any, part: PathPart, value: Any) -> Any:
    """Return the value at a place in a map or list; put it there first if the place is empty."""
    if isinstance(part, int):
        if part == len(place):
            place.append(value)
        return place[part]
    return place.setdefault(part, value)


def pick(columns: Sequence[Column], fields: Mapping[str, Any]) -> list[Any]:
    """Return the values of columns from fields: the reverse of `nest`.

    Raises:
        LookupError: A value is missing.
        TypeError: Another value stands where a map or list should be.
    """
    values = []
    for column in columns:
        value: Any = fields
        for part in column.path:
            value = value[part]
        values.append(value)
    return values


def rows_of(fields: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the fields of each session's action from arrays by field, which may be nested.

    Raises:
        ValueError: An array has not one row for each session.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, values in fields.items():
        parts = rows_of(values, count) if isinstance(values, Mapping) else values
        if len(parts) != count:
            raise ValueError(f"actions: one for each of the {count} slots, not {len(parts)}")
        for row, value in zip(rows, parts, strict=True):
            row[name] = value
    return rows


def fit(column: Column, values: Any, count: int) -> Any:
    """Return values of that many sessions as the column's array.

    Raises:
        ValueError: They have another shape, or the column's type cannot hold them.
    """
    import numpy as np  # optional for clients

    array = np.asarray(values)
    if array.dtype.str != column.dtype:
        # Like a single action, integers of another size are accepted if they keep their values, and Python's floats.
        may_fit = array.dtype.kind in "biuf" and np.can_cast(array.dtype, column.dtype, casting="same_kind")
        converted = array.astype(column.dtype) if may_fit else None
        if converted is None or (array.dtype.kind in "biu" and not np.array_equal(converted, array)):
            raise ValueError(f"{array.dtype} where {column.dtype} was expected")
        array = converted
    if array.shape != column.batch_shape(count):
        raise ValueError(f"the shape {array.shape} where {column.batch_shape(count)} was expected")
    return array


def row_data(layout: ColumnLayout, observations: Sequence[Any], row: int, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the data of the reply to a reset: one row of observations in the form of a server's message."""
    # Copies: the arrays may be written to later.
    return _data(layout, [array[row].copy() for array in observations], metadata)


def _data(layout: ColumnLayout, values: Iterable[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    fields = nest(layout.observations, values)
    data: dict[str, Any] = {"observation": {"metadata": metadata, **fields}, "reward": None, "done": False}
    return {**data, "metadata": metadata} if metadata else data


def step_data(layout: ColumnLayout, results: StepArrays, row: int, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the data of the reply to a step: one row of the results in the form of a server's message."""
    values = [array[row].copy() for array in results.observations]
    outcome = (results.rewards[row], results.terminated[row], results.truncated[row])
    return fields_of_step(layout, values, metadata, outcome)


def fields_of_step(
    layout: ColumnLayout, values: Iterable[Any], metadata: dict[str, Any], outcome: tuple[Any, Any, Any]
) -> dict[str, Any]:
    """Return the data of the reply to a step from the values of its observation, reward, terminated and truncated."""
    reward, terminated, truncated = float(outcome[0]), bool(outcome[1]), bool(outcome[2])
    data = _data(layout, values, metadata)
    data["observation"] |= {"terminated": terminated, "truncated": truncated}
    return data | {"reward": reward, "done": terminated or truncated}


def action_fields(layout: ColumnLayout, actions: Sequence[Any], row: int) -> dict[str, Any]:
    """Return the fields of one action from the arrays."""
    values = [array[row] for array in actions]
    return nest(layout.actions, [value.item() if value.ndim == 0 else value for value in values])


def row_bytes(layout: ColumnLayout) -> int:
    """Return the bytes of one session's values in a message: its action, or its observation, reward and flags."""
    sides = (
        sum(int(column.dtype[2:]) * math.prod(column.shape) for column in columns)
        for columns in (layout.actions, layout.observations)
    )
    return max(sides) + 10


def layout_as_json(layout: ColumnLayout) -> dict[str, Any]:
    """Write a layout for the reply to `open`."""
    return {
        side: [[list(column.path), column.dtype, list(column.shape)] for column in columns]
        for side, columns in (("actions", layout.actions), ("observations", layout.observations))
    }


def layout_from_json(value: Any) -> ColumnLayout | None:
    """Read a layout; None for one that this release cannot read."""
    try:
        sides = [
            tuple(
                Column(tuple(path), str(dtype), tuple(int(size) for size in shape))
                for path, dtype, shape in value[side]
            )
            for side in ("actions", "observations")
        ]
    except (TypeError, ValueError, KeyError):
        return None
    if not all(0 < len(columns) <= _MOST_COLUMNS for columns in sides):
        return None
    return ColumnLayout(*sides)
