"""The episode in one slot of a `VectorEnv`: when it is over, what follows, and what the caller is told of it.

Pure rules: autoreset modes and failure policies. Must not know sessions or connections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from ..errors import OpenEnvError, RequestValidationError
from ..types import StepResult
from .vector_result import SlotResult, ended

Autoreset = Literal["next_step", "same_step", "disabled"]
OnFailure = Literal["raise", "mask", "restart"]

Parse = Callable[[dict[str, Any]], StepResult[Any]]

AUTORESETS: Final[tuple[str, ...]] = get_args(Autoreset)
POLICIES: Final[tuple[str, ...]] = get_args(OnFailure)


@dataclass(slots=True)
class Episode:
    """What has come for one slot since the caller last looked."""

    slot: int
    autoreset: Autoreset
    on_failure: OnFailure
    is_over: bool = False
    is_asked: bool = False
    is_ready: bool = False
    masked: OpenEnvError | None = None
    _unbegun: bool = False
    _told: SlotResult[Any] | None = None
    _broken: Exception | None = None
    _final: dict[str, Any] | None = None
    _error: OpenEnvError | None = None

    def ask(self, *, stepping: bool) -> str:
        """Begin a request: return `step`, or `reset` where an episode has to begin first."""
        self.is_asked, self.is_ready = True, False
        self._told = self._broken = self._final = self._error = None
        if not stepping:
            self.masked = None
            return "reset"
        if self._unbegun and (self.autoreset != "disabled" or self.on_failure == "restart"):
            return "reset"
        return "reset" if self.is_over and self.autoreset == "next_step" else "step"

    def answered(self, kind: str, data: dict[str, Any], parse: Parse) -> bool:
        """Take in a reply; return whether an episode must be begun before the caller is told."""
        started = kind == "reset"
        self.is_over = bool(data.get("done"))
        if self.is_over and not started and self.autoreset == "same_step":
            self._final = data
            return True
        try:  # now, while other slots still step
            self._told = SlotResult(self.slot, parse(data), self._error, started=started)
        except Exception as exc:  # of the caller's own hook: he gets it when he looks
            self._broken = exc
        if self.is_over and self._error is None and self._told is not None:
            self._told.terminated, self._told.truncated = ended(data.get("observation"))
        self._unbegun = self._unbegun and not started
        self.is_ready = True
        return False

    def failed(self, kind: str, error: OpenEnvError) -> bool:
        """Take in a failure; return whether an episode must be begun before the caller is told.

        An action that was refused has changed nothing: the episode goes on.
        """
        if self._error is None:
            self._error = error
        if isinstance(error, RequestValidationError):
            self.is_ready = True
            return False
        if self.on_failure == "mask":
            self.masked = self._error
        self._unbegun = self._unbegun or kind == "reset"
        again = kind == "step" and self.on_failure == "restart"
        self.is_ready = not again
        return again

    def take(self, parse: Parse) -> SlotResult[Any]:
        """Return what there is to tell, once."""
        self.is_asked = self.is_ready = False
        if self._broken is not None:
            raise self._broken
        told = self._told or SlotResult(self.slot, None, self._error)
        if self._final is not None:
            told.final = parse(self._final)
            told.terminated, told.truncated = ended(self._final.get("observation"))
        elif self._error is not None:
            told.error = self._error
            told.restarted = told.result is not None
            told.truncated = not isinstance(self._error, RequestValidationError)
        return told
