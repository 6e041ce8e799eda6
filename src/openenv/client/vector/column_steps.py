"""`ColumnSteps`: a step of many sessions over the wire, with arrays instead of a message for each session.

    begin() --> expected --- row of a message, or a single reply ---> ready --- take() ---> taken
                   |
                   +--- connection lost: `single` makes the request of each unanswered slot, with the same id

Request ids of all slots are in one array, so that a step needs no work for each slot. Uses NumPy, which both sides
have where arrays travel. Must not know sockets or episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from openenv.errors import NonFiniteReward, OpenEnvError, ProtocolError
from openenv.protocol.columns import ColumnBlock, ColumnLayout, action_fields, pick
from openenv.protocol.json_values import reply_reward

from .results import ended


class ColumnSteps:
    """The steps in columns of a vector.

    Args:
        layout: The arrays.
        ids: The last request id of each slot.
    """

    def __init__(self, layout: ColumnLayout, ids: Sequence[int]) -> None:
        self.layout = layout
        self.ids: Any = np.array(ids, np.int64)
        n = len(ids)
        self.expected = np.zeros(n, bool)
        self._ready = np.zeros(n, bool)
        self.all_slots = np.arange(n)
        self.whole = np.ones(n, bool)
        self._is_partial = False  # whether some results of the step were taken already
        self._actions: list[Any] = []
        self.begins: Any = None  # the slots of the step that begin an episode; None if none does
        self.reset_kwargs: Mapping[str, Any] = {}
        self._clear(n)

    def _clear(self, n: int) -> None:
        self._observations: list[Any] = [
            np.zeros(column.batch_shape(n), column.dtype) for column in self.layout.observations
        ]
        self._rewards: Any = np.zeros(n)
        self._terminated: Any = np.zeros(n, bool)
        self._truncated: Any = np.zeros(n, bool)
        self._metadata: dict[int, dict[str, Any]] = {}
        self._failures: dict[int, OpenEnvError] = {}

    # -- the request ----------------------------------------------------------------------------------------------

    def begin(self, actions: Sequence[Any], chosen: Any, begins: Any = None) -> None:
        """Begin a step of the chosen slots, each under its next id; those in `begins` begin an episode instead."""
        self._actions = [array.copy() for array in actions]  # the caller may change them before they are sent again
        self.expected[:] = chosen
        self._ready[:] = False
        self._is_partial = False
        self.begins = begins
        self.ids[chosen] += 1
        self._clear(len(self.ids))

    def message(self, batch_id: int, slots: Any, names: list[str] | None) -> dict[str, Any]:
        """Return the request for some slots; without names for the sessions of the last one."""
        actions = [array[slots] for array in self._actions]
        message = {"type": "columns", "id": batch_id, "ids": self.ids[slots], "actions": actions}
        if self.begins is not None and (rows := self.begins[slots].nonzero()[0].tolist()):
            message |= {"resets": rows, "reset": self.reset_kwargs}
        return message if names is None else {**message, "sessions": names}

    def single(self, slot: int) -> tuple[str, Any]:
        """Return the type and the data of one slot's request, to be sent by itself."""
        if self.begins is not None and self.begins[slot]:
            return "reset", self.reset_kwargs
        return "step", action_fields(self.layout, self._actions, slot)

    def withdraw(self, slot: int) -> None:
        """Forget the step of a slot: another request replaces it."""
        self.expected[slot] = self._ready[slot] = False

    # -- results --------------------------------------------------------------------------------------------------

    def put(self, slots: Any, message: Mapping[str, Any]) -> None:
        """Take in the arrays for the slots of a message; rows of slots that wait for nothing are dropped.

        Raises:
            ProtocolError: The message does not fit.
        """
        arrays = [*message.get("observations", ()), *(message.get(name) for name in _FLAGS)]
        columns = [*((column.dtype, column.shape) for column in self.layout.observations), *_FLAGS.values()]
        count = len(slots)
        for array, (dtype, shape) in zip(arrays, columns, strict=False):
            if getattr(array, "shape", None) != (count, *shape) or array.dtype.str != dtype:
                raise ProtocolError("The server's results in columns do not fit")
        if len(arrays) != len(columns):
            raise ProtocolError("The server's results in columns are not complete")
        single = [row for row, _ in message.get("replies", ())]
        is_expected = self.expected[slots]
        is_expected[single] = False
        *observations, rewards, terminated, truncated = arrays
        if count == len(self.ids) and is_expected.all() and (slots == self.all_slots).all():
            # One message for the whole vector: its arrays are the results.
            self._observations, self._rewards = observations, rewards
            self._terminated, self._truncated = terminated, truncated
        else:
            rows: Any = slice(None) if is_expected.all() else is_expected
            places = slots[rows]
            for target, values in zip(self._observations, observations, strict=True):
                target[places] = values[rows]
            self._rewards[places], self._terminated[places], self._truncated[places] = (
                rewards[rows],
                terminated[rows],
                truncated[rows],
            )
        for row, metadata in message.get("metadata", ()):
            if is_expected[row]:
                self._metadata[int(slots[row])] = metadata
        done = slots[is_expected]
        self.expected[done] = False
        self._ready[done] = True

    def put_single(self, slot: int, data: Mapping[str, Any] | None, error: OpenEnvError | None) -> None:
        """Take in the result of one slot that came by itself."""
        self.expected[slot] = False
        self._ready[slot] = True
        if error is None and data is not None:
            try:
                self._write(slot, data)
            except NonFiniteReward as exc:
                error = exc
            except (LookupError, TypeError, ValueError) as exc:
                error = ProtocolError(f"The server's result does not fit its columns: {exc}")
        if error is not None:
            self._failures[slot] = error

    def _write(self, slot: int, data: Mapping[str, Any]) -> None:
        reward = reply_reward(data.get("reward"), data.get("metadata"))
        fields = data["observation"]
        for target, value in zip(self._observations, pick(self.layout.observations, fields), strict=True):
            target[slot] = value
        missing = 0.0 if self.begins is not None and self.begins[slot] else np.nan
        self._rewards[slot] = missing if reward is None else reward
        self._terminated[slot], self._truncated[slot] = ended(fields) if data.get("done") else (False, False)
        if data.get("metadata"):
            self._metadata[slot] = dict(data["metadata"])

    # -- taking ---------------------------------------------------------------------------------------------------

    @property
    def left(self) -> int:
        """The number of results that are still to come."""
        return int(np.count_nonzero(self.expected))

    @property
    def untaken(self) -> int:
        """The number of results that were not taken yet."""
        return int(np.count_nonzero(self.expected | self._ready))

    def has(self, slot: int) -> bool:
        """Whether a slot takes part in a step whose result was not taken yet."""
        return bool(self.expected[slot] or self._ready[slot])

    def take(self, *, whole: bool) -> ColumnBlock | None:
        """Return the results that have come since the last call; the arrays belong to the caller."""
        ready = self._ready
        if not ready.any():
            return None
        is_whole = bool(ready.all()) or (whole and not self._is_partial and not self.expected.any())
        slots = self.all_slots if is_whole else ready.nonzero()[0]
        rows: Any = slice(None) if is_whole else slots
        metadata, self._metadata = {slot: one for slot, one in self._metadata.items() if ready[slot]}, {}
        failures, self._failures = {slot: error for slot, error in self._failures.items() if ready[slot]}, {}
        self._is_partial = True
        self._ready = np.zeros(len(ready), bool)
        return ColumnBlock(
            slots,
            [array[rows] for array in self._observations],
            self._rewards[rows],
            self._terminated[rows],
            self._truncated[rows],
            metadata,
            failures,
            begun=None if self.begins is None else self.begins[rows],
        )


_FLAGS = {"rewards": ("<f8", ()), "terminated": ("|b1", ()), "truncated": ("|b1", ())}
