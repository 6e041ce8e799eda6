"""The way from a rollout to its model: a key of the capture proxy, or nothing at all.

Knows the capture proxy's interface. Turns what the proxy saw into the facts that labels are made of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from openenv.rollout.outcome import ModelUse, RolloutTurn, is_hopeless
from openenv.rollout.progress import Reporter

if TYPE_CHECKING:
    from openenv.rollout.capture.capture_server import Capture, CaptureServer

_POLL_S = 0.25


class ModelAccess(Protocol):
    """What a rollout needs of its model."""

    @property
    def socket(self) -> Path | None:
        """Return the unix socket that the agent's sandbox may reach, or None."""
        ...

    @property
    def key(self) -> str:
        """Return the key of this rollout."""
        ...

    def use(self) -> ModelUse:
        """Return what the host saw of the calls so far."""
        ...

    def turns(self) -> list[RolloutTurn]:
        """Return the calls as trainers read them."""
        ...

    def revoke(self) -> None:
        """Let no call through any more."""
        ...


class NoModel:
    """The way of an agent that needs no model."""

    socket: Path | None = None
    key = ""

    def use(self) -> ModelUse:
        """Return that no model was needed."""
        return ModelUse(needed=False)

    def turns(self) -> list[RolloutTurn]:
        """Return no calls."""
        return []

    def revoke(self) -> None:
        """Do nothing."""


NO_MODEL = NoModel()


class CapturedModel:
    """The way through the capture proxy."""

    def __init__(self, server: CaptureServer, capture: Capture) -> None:
        self._capture = capture
        self._revoked = False
        self._lost: str | None = None
        self.socket: Path | None = server.socket
        self.key = capture.key

    def use(self) -> ModelUse:
        """Return what the proxy saw."""
        stats = self._capture.stats()
        error = stats.last_error or {}
        return ModelUse(
            needed=True,
            calls=stats.calls,
            answered=stats.endings.get("complete", 0),
            tokens=stats.completion_tokens,
            refused=(stats.budget_exhausted or "calls") if stats.budget_stops else None,
            failures=stats.failures_in_a_row,
            last_status=error.get("status"),
            last_error=str(error.get("message", "")),
            unrecorded=stats.record_failure or self._lost,
        )

    def turns(self) -> list[RolloutTurn]:
        """Return the recorded calls."""
        return self._capture.turns()

    def revoke(self) -> None:
        """Revoke the key; calls under way are ended and recorded."""
        if not self._revoked:
            self._revoked = True
            if self._capture.stats().revoked:  # not by us: the agent had no model any more
                self._lost = "the capture proxy was stopped while the agent ran"
        self._capture.revoke()


@contextmanager
def watch_turns(model: ModelAccess, reporter: Reporter, *, give_up: Callable[[], None]) -> Iterator[None]:
    """Report each model call while the block runs; call `give_up` when the endpoint is dead: agents try for ever."""
    if model.socket is None:
        yield
        return
    stop = threading.Event()

    def watch() -> None:
        seen, over = 0, False
        while not over:
            over = stop.wait(_POLL_S)  # once more after the end, for the last calls
            use = model.use()
            if not over and is_hopeless(use):
                reporter.say(f"giving up: {use.last_error}")
                give_up()
                return
            while seen < use.calls:
                seen += 1
                reporter.say(f"model call {seen}", turn=seen)

    thread = threading.Thread(target=watch, name="openenv-turns", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
