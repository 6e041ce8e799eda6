"""Stopping a function that runs in another thread.

Python can raise an exception inside a thread; it arrives at the thread's next bytecode. Code that loops or sleeps in
short naps stops at once; one long wait inside C ends when it ends. Knows threads only.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Interrupted(BaseException):
    """Raised inside a function that was stopped. No `Exception`: the function must not take it for its own."""


class Interruptible:
    """Runs one function in the calling thread; `stop` ends it from another."""

    def __init__(self) -> None:
        # Re-entrant: an interruption may arrive between taking the lock and using it.
        self._lock = threading.RLock()
        self._thread: int | None = None
        self._stopped = False
        self._raised = False

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called; a function that turns the interruption into another error was stopped too."""
        return self._stopped

    def run(self, function: Callable[[], T]) -> T:
        """Call the function.

        Raises:
            Interrupted: It was stopped, before or while it ran.
        """
        with self._lock:
            if self._stopped:
                raise Interrupted
            self._thread = threading.get_ident()
        try:
            return function()
        finally:
            self._leave()

    def stop(self) -> None:
        """End the function if it runs, or keep it from beginning; one that has ended is left alone."""
        with self._lock:
            self._stopped = True
            if self._thread is not None and not self._raised:
                self._raised = True
                _raise_in(self._thread, Interrupted)

    def _leave(self) -> None:
        """Make sure that nothing arrives once the function is over."""
        while True:
            with contextlib.suppress(Interrupted):
                with self._lock:
                    if self._thread is not None and self._raised:
                        _raise_in(self._thread, None)  # withdrawn, if it has not arrived yet
                    self._thread = None
                return


def _raise_in(thread: int, exception: type[BaseException] | None) -> None:
    argument = ctypes.py_object(exception) if exception is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)
