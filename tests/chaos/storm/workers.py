"""Episodes whose environments are in worker processes that are killed in the middle of a step."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .books import FileBook, filed_counting
from .environment import Move
from .server import Mishaps, Server, ours, serving

KILLED = "worker killed (SIGKILL)"
_KILLS_OF_SEEDS = 0.3
_PROCESSES = 2
_LONGEST_DELAY_S = 0.06


class Killer(Mishaps):
    """Kills the worker that holds an episode, now and then.

    Args:
        book: Tells which process holds whose environment.
        workers: Tells which processes are workers.
        share: How many of the episodes kill theirs.
    """

    def __init__(self, book: FileBook, workers: Callable[[], list[int]], share: float = _KILLS_OF_SEEDS) -> None:
        self._book = book
        self._workers = workers
        self._share = share
        self._lock = threading.Lock()
        self.killed: set[int] = set()
        self._hit: dict[int, int] = {}  # how many were killed when an episode began

    def player(self, player: Any, seed: int, owner: int) -> Any:
        """Return one that kills its own worker in a step that the seed decides, or never."""
        dice = random.Random(f"kills {seed}")
        if dice.random() > self._share:
            return player
        return _Doomed(player, dice.randint(1, 8), dice.random() * _LONGEST_DELAY_S, lambda: self._kill(owner))

    def begin(self, seed: int) -> None:
        """Remember what has happened so far."""
        self._hit[seed] = len(self.killed)

    def end(self, seed: int) -> list[str]:
        """Say whether the episode's own worker was killed."""
        return [KILLED] if set(self._book.holders(seed)) & self.killed else []

    def _kill(self, owner: int) -> None:
        with self._lock:
            for pid in self._book.holders(owner)[-1:]:
                if pid in self._workers():  # and not some other process that has its number now
                    os.kill(pid, signal.SIGKILL)
                    self.killed.add(pid)


class _Doomed:
    """Plays as another does, and has something happen during one of the steps."""

    def __init__(self, player: Any, at: int, delay_s: float, happen: Callable[[], None]) -> None:
        self._player = player
        self._at = at
        self._delay_s = delay_s
        self._happen = happen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._player, name)

    def step(self, action: Move) -> Any:
        """Take a step; it may be the last."""
        if action.number != self._at:
            return self._player.step(action)
        timer = threading.Timer(self._delay_s, self._happen)
        timer.start()
        try:
            return self._player.step(action)
        finally:
            timer.join()


@contextlib.contextmanager
def running_in_processes(*, coroutine: bool) -> Iterator[Server]:
    """Serve the counting environment from worker processes."""
    with tempfile.TemporaryDirectory(prefix="storm") as folder:
        book = FileBook(folder)
        prepared = ours(filed_counting(Path(folder), coroutine=coroutine), runner="process", env_processes=_PROCESSES)
        runner = prepared[0].state.openenv_server.manager.runner
        killer = Killer(book, lambda: [worker.pid for worker in runner.workers])
        with serving(*prepared) as (port, sessions):
            yield Server(port, book.deeds, sessions, lambda: unclosed(book, killer), killer)


def unclosed(book: FileBook, killer: Killer) -> int:
    """Count environments that should have been closed: what was killed could not close its own."""
    return sum(pid not in killer.killed for pid in book.unclosed())
