"""The result of a step of many sessions, and the rules of an episode in one slot: autoreset and failure policies.

Pure rules; uses NumPy if installed. Must not know sessions or connections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar, get_args

from openenv.errors import NonFiniteReward, OpenEnvError, RequestValidationError
from openenv.protocol.columns import ColumnBlock, ColumnLayout, fields_of_step, pick, row_data, step_data
from openenv.protocol.json_values import reply_reward
from openenv.types import StepResult

ObsT = TypeVar("ObsT")

Parse = Callable[[dict[str, Any]], StepResult[Any]]


@dataclass(slots=True)
class SlotResult(Generic[ObsT]):
    """The result of one slot.

    If the slot failed, `result` is None and `error` has the reason. `final` is the last result of an episode that ended
    in this very step (`autoreset="same_step"`). `started` marks the first result of an episode. `restarted` says that
    this episode replaced a lost one, and `error` has the reason of the loss.
    """

    slot: int
    result: StepResult[ObsT] | None = None
    error: OpenEnvError | None = None
    terminated: bool = False
    truncated: bool = False
    final: StepResult[ObsT] | None = None
    started: bool = False
    restarted: bool = False

    @property
    def reward(self) -> float:
        """The reward as a number: 0 for the beginning of an episode, NaN for no reward or a failed slot."""
        last = self.result if self.final is None else self.final
        if last is None or (self.error is not None and self.final is None):
            return math.nan
        if last.reward is None:
            return 0.0 if self.started and self.final is None else math.nan
        return float(last.reward)


@dataclass(slots=True)
class VectorResult(Generic[ObsT]):
    """Results of several slots, in the order of `slots`.

    `rewards`, `terminated`, `truncated`, `dones` and `ok` are NumPy arrays where NumPy is installed, lists otherwise.
    A failed slot has no observation, the reward NaN, and its exception in `errors`: never a reward of 0. Environments
    with array spaces also have `columns`: one array per field for all slots.
    """

    by_slot: Sequence[SlotResult[ObsT]]
    columns: ColumnRows[ObsT] | None = None
    """The results as arrays, if they came as arrays; then `by_slot` is made when it is first used."""
    _arrays: dict[str, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.by_slot)

    @property
    def slots(self) -> list[int]:
        """Which slots these are."""
        return [one.slot for one in self.by_slot] if self.columns is None else list(self.columns.slots)

    @property
    def results(self) -> list[StepResult[ObsT] | None]:
        """One result per slot; None for a failed slot."""
        return [one.result for one in self.by_slot]

    @property
    def observations(self) -> list[ObsT | None]:
        """One observation per slot; None for a failed slot."""
        return [None if one.result is None else one.result.observation for one in self.by_slot]

    @property
    def infos(self) -> list[dict[str, Any]]:
        """The metadata of each slot's result."""
        return [(one.result.metadata if one.result is not None else None) or {} for one in self.by_slot]

    @property
    def finals(self) -> list[StepResult[ObsT] | None]:
        """The last result of each episode that ended and was followed by another one in the same step."""
        return [one.final for one in self.by_slot]

    @property
    def errors(self) -> dict[int, OpenEnvError]:
        """What went wrong, by slot."""
        results = self.by_slot if self.columns is None else self.columns.single.values()
        return {one.slot: one.error for one in results if one.error is not None}

    @property
    def rewards(self) -> Any:
        """A reward for each slot."""
        return self._array("rewards", lambda one: one.reward, "float64")

    @property
    def terminated(self) -> Any:
        """Whether the task itself ended each episode."""
        return self._array("terminated", lambda one: one.terminated, "bool")

    @property
    def truncated(self) -> Any:
        """Whether a limit, or a failure, ended each episode."""
        return self._array("truncated", lambda one: one.truncated, "bool")

    @property
    def dones(self) -> Any:
        """Whether each episode is over."""
        return self._array("dones", lambda one: one.terminated or one.truncated, "bool")

    @property
    def ok(self) -> Any:
        """Whether each slot answered: the mask for a batch of training data."""
        return self._array("ok", lambda one: one.error is None, "bool")

    def _array(self, name: str, value: Callable[[SlotResult[ObsT]], Any], dtype: str) -> Any:
        if name not in self._arrays:
            self._arrays[name] = _array([value(one) for one in self.by_slot], dtype)
        return self._arrays[name]


class ColumnRows(Sequence[SlotResult[ObsT]]):
    """Results of a step that came as arrays; as a sequence, one `SlotResult` for each row.

    Args:
        layout: The columns.
        block: The arrays; a row for each slot.
        single: Results that did not come in the arrays, by row: beginnings of episodes and failures. Their values are
            written into the arrays, too.
        parse: Makes the result of a row from a reply's data.
    """

    def __init__(
        self, layout: ColumnLayout, block: ColumnBlock, single: dict[int, SlotResult[ObsT]], parse: Parse
    ) -> None:
        self.layout = layout
        self.observations: list[Any] = block.observations
        self.rewards: Any = block.rewards
        self.terminated: Any = block.terminated
        self.truncated: Any = block.truncated
        self.single = single
        self.metadata: dict[int, dict[str, Any]] = block.metadata  # by slot
        self.finals: dict[int, tuple[list[Any], dict[str, Any]]] = block.finals  # by slot
        self._slots = block.slots
        self._parse = parse
        self.begun: Any = block.begun  # for each row whether an episode began; None if none did
        self._rows = dict(single)
        for row, result in single.items():
            self._write(row, result)

    @property
    def slots(self) -> list[int]:
        """The slot of each row."""
        slots: list[int] = self._slots.tolist()
        return slots

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays under the names that `VectorResult` has for them."""
        ok = self.rewards == self.rewards
        for row, result in self.single.items():
            ok[row] = result.error is None
        ends = {"terminated": self.terminated, "truncated": self.truncated, "dones": self.terminated | self.truncated}
        return {"rewards": self.rewards, "ok": ok, **ends}

    def __len__(self) -> int:
        return len(self.rewards)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[place] for place in range(*row.indices(len(self)))]
        place = range(len(self))[row]
        result = self._rows.get(place)
        if result is None:
            result = self._rows[place] = self._made(place)
        return result

    def _made(self, row: int) -> SlotResult[ObsT]:
        terminated, truncated = bool(self.terminated[row]), bool(self.truncated[row])
        slot = int(self._slots[row])
        metadata, final = self.metadata.get(slot, {}), self.finals.get(slot)
        if final is None and (self.begun is None or not self.begun[row]):
            data = step_data(self.layout, self, row, metadata)
            return SlotResult(slot, self._parse(data), terminated=terminated, truncated=truncated)
        result = SlotResult(slot, self._parse(row_data(self.layout, self.observations, row, metadata)), started=True)
        if final is not None:
            values, metadata = final
            ended = fields_of_step(self.layout, values, metadata, (self.rewards[row], terminated, truncated))
            result.final, result.terminated, result.truncated = self._parse(ended), terminated, truncated
        return result

    def _write(self, row: int, result: SlotResult[ObsT]) -> None:
        self.rewards[row] = result.reward
        self.terminated[row], self.truncated[row] = result.terminated, result.truncated
        if result.result is None:
            values: list[Any] = [0] * len(self.observations)
        else:
            fields: Any = result.result.observation
            values = pick(self.layout.observations, fields)
        for array, value in zip(self.observations, values, strict=True):
            array[row] = value


def _array(values: list[Any], dtype: str) -> Any:
    try:
        import numpy as np  # an optional dependency
    except ImportError:
        return values
    return np.asarray(values, dtype=dtype)


def ended(observation: Any) -> tuple[bool, bool]:
    """Return terminated and truncated of a finished episode; terminated if its observation sets neither."""
    terminated = truncated = None
    if isinstance(observation, Mapping):
        terminated, truncated = observation.get("terminated"), observation.get("truncated")
    if not terminated and not truncated:
        only_not_terminated = terminated is not None and truncated is None
        return not only_not_terminated, only_not_terminated
    return bool(terminated), bool(truncated)


Autoreset = Literal["next_step", "same_step", "disabled"]
OnFailure = Literal["raise", "mask", "restart"]

AUTORESETS: Final[tuple[str, ...]] = get_args(Autoreset)
POLICIES: Final[tuple[str, ...]] = get_args(OnFailure)


@dataclass(slots=True)
class SlotEpisode:
    """The episode of one slot, and its results since the caller last took one.

        idle --- ask() ---> asked --- answered(), failed() ---> ready --- take() ---> idle
                              ^             |
                              +-- True: the caller begins an episode first (a reset) --+

    Example, `autoreset="same_step"`: the reply to a step says `done`; `answered` keeps it as the final result and
    returns True; the reply to the reset makes the slot ready, and `take` returns both.
    """

    slot: int
    autoreset: Autoreset
    on_failure: OnFailure
    over: bytearray
    is_asked: bool = False
    is_ready: bool = False
    masked: OpenEnvError | None = None
    _needs_reset: bool = False
    _result: SlotResult[Any] | None = None
    _hook_error: Exception | None = None
    _final: dict[str, Any] | None = None
    _error: OpenEnvError | None = None

    @property
    def is_over(self) -> bool:
        """Whether the episode has ended; in `over`, which has a byte for each slot: a step in columns looks there."""
        return bool(self.over[self.slot])

    @is_over.setter
    def is_over(self, is_over: bool) -> None:
        self.over[self.slot] = is_over

    @property
    def has_failed(self) -> bool:
        """Whether a failure decides what the next step is."""
        return self.masked is not None or self._needs_reset

    @property
    def is_plain(self) -> bool:
        """Whether the next step is a step of the environment, and not the beginning of an episode or a failure."""
        return not self.has_failed and not (self.is_over and self.autoreset == "next_step")

    def ask(self, *, stepping: bool) -> str:
        """Begin a request: return `step`, or `reset` if an episode has to begin first."""
        self.is_asked, self.is_ready = True, False
        self._result = self._hook_error = self._final = self._error = None
        if not stepping:
            self.masked = None
            return "reset"
        if self._needs_reset and (self.autoreset != "disabled" or self.on_failure == "restart"):
            return "reset"
        return "reset" if self.is_over and self.autoreset == "next_step" else "step"

    def answered(self, kind: str, data: dict[str, Any], parse: Parse) -> bool:
        """Take in a reply; return whether an episode must begin before the slot is ready."""
        try:
            reply_reward(data.get("reward"), data.get("metadata"))
        except NonFiniteReward as exc:
            self.is_over = self.is_over or bool(data.get("done"))
            return self.failed(kind, exc)
        started = kind == "reset"
        self.is_over = bool(data.get("done"))
        if self.is_over and not started and self.autoreset == "same_step":
            self._final = data
            return True
        try:  # now, while other slots still step
            self._result = SlotResult(self.slot, parse(data), self._error, started=started)
        except Exception as exc:  # from the caller's hook: `take` raises it
            self._hook_error = exc
        if self.is_over and self._error is None and self._result is not None:
            self._result.terminated, self._result.truncated = ended(data.get("observation"))
        self._needs_reset = self._needs_reset and not started
        self.is_ready = True
        return False

    def failed(self, kind: str, error: OpenEnvError) -> bool:
        """Take in a failure; return whether an episode must begin before the slot is ready.

        An action that was refused has changed nothing: the episode goes on.
        """
        if self._error is None:
            self._error = error
        if isinstance(error, RequestValidationError):
            self.is_ready = True
            return False
        if self.on_failure == "mask":
            self.masked = self._error
        self._needs_reset = self._needs_reset or kind == "reset"
        again = kind == "step" and self.on_failure == "restart"
        self.is_ready = not again
        return again

    def take(self, parse: Parse) -> SlotResult[Any]:
        """Return the slot's result, once."""
        self.is_asked = self.is_ready = False
        if self._hook_error is not None:
            raise self._hook_error
        result = self._result or SlotResult(self.slot, None, self._error)
        if self._final is not None:
            result.final = parse(self._final)
            result.terminated, result.truncated = ended(self._final.get("observation"))
        elif self._error is not None:
            result.error = self._error
            result.restarted = result.result is not None
            result.truncated = not isinstance(self._error, RequestValidationError)
        return result
