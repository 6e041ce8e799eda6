"""Progress of rollouts: a `Reporter` sends events to callbacks, a `ProgressBar` shows them.

Knows callbacks, clocks and a terminal only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from openenv.rollout.store.outcome import Outcome, Phase, Progress

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

OnProgress = Callable[[Progress], None]
_BAR_TEXT = 120


class Reporter:
    """Sends the events of one rollout, one at a time, and measures its phases.

    Args:
        rollout_id: The rollout.
        callbacks: Receive each event in the rollout's threads, one call at a time. Their exceptions are logged.
        lock: Shared by rollouts with the same callbacks.
    """

    def __init__(self, rollout_id: str, *callbacks: OnProgress | None, lock: threading.Lock | None = None) -> None:
        self._rollout_id = rollout_id
        self._callbacks = [callback for callback in callbacks if callback is not None]
        self._lock = lock or threading.Lock()
        self._began = time.monotonic()
        self.phase: Phase = "sandbox"
        self.phase_s: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        """The seconds since the rollout started."""
        return time.monotonic() - self._began

    @contextmanager
    def during(self, phase: Phase, message: str = "") -> Iterator[None]:
        """Report the start of a phase, and measure the block."""
        self.phase = phase
        began = time.monotonic()
        self.say(message)
        try:
            yield
        finally:
            self.phase_s[phase] = self.phase_s.get(phase, 0.0) + time.monotonic() - began

    def say(self, message: str, *, turn: int | None = None) -> None:
        """Send an event of the current phase."""
        if not self._callbacks:
            return
        event = Progress(
            rollout_id=self._rollout_id, phase=self.phase, message=message, turn=turn, elapsed_s=self.elapsed_s
        )
        with self._lock:
            for callback in self._callbacks:
                try:
                    callback(event)
                except Exception:  # the caller's code must not end the rollout
                    logger.exception("a progress callback failed")


class ProgressBar:
    """Shows the number of finished rollouts, their mean reward and the latest event in a terminal or a notebook.

    A context manager with callbacks as methods. It shows nothing elsewhere, for example in a log file.

    Args:
        count: The number of rollouts; None if unknown.
        console: The output; by default standard error, or the output of the notebook.
    """

    def __init__(self, count: int | None, *, console: Console | None = None) -> None:
        from rich.console import Console  # most rollouts show no bar
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        if console is None:
            console = Console()
            console = console if console.is_jupyter else Console(stderr=True)
        text = TextColumn("{task.description}", markup=False)
        visible = console.is_terminal or console.is_jupyter
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
        self._bar = RichProgress(*columns, console=console, disable=not visible)
        self._task = self._bar.add_task("", total=count)
        self._done = 0
        self._rewards: list[float] = []

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def on_install(self, message: str) -> None:
        """Show the installation of an agent, which can take minutes."""
        self._describe(message)

    def on_progress(self, event: Progress) -> None:
        """Show the latest event."""
        self._describe(f"{event.phase}: {event.message}")

    def on_outcome(self, number: int, outcome: Outcome) -> None:
        """Count a rollout."""
        self._done += 1
        if outcome.reward is not None:
            self._rewards.append(outcome.reward)
        self._describe(outcome.status)
        self._bar.update(self._task, completed=self._done)

    def _describe(self, text: str) -> None:
        mean = f"mean reward {sum(self._rewards) / len(self._rewards):.2f}, " if self._rewards else ""
        # An agent or an endpoint wrote some of the text: it must not contain control codes for the terminal.
        shown = "".join(char if char.isprintable() else " " for char in text[:_BAR_TEXT])
        self._bar.update(self._task, description=f"{mean}{shown}")
