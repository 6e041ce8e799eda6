"""Settings of a process that serves: freed memory, garbage collection, file descriptors.

Every way of serving uses them: `openenv serve`, its workers, the gateway, and plain uvicorn. Must not know the
application.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from openenv.sandboxes.host import file_limit

logger = logging.getLogger(__name__)

# By default glibc returns the memory of a large message to the system as soon as it is freed, and pays for it again,
# page by page, with the next message. A server keeps a bounded amount instead. Without glibc this does nothing.
KEPT_BYTES: Final = 64 * 1024 * 1024
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLD_MAX: Final = 32 * 1024 * 1024

# A session consists of many long-lived objects. With Python's default of 700, collecting garbage took an eighth of the
# time for opening one.
_GARBAGE_THRESHOLD: Final = 10_000

_NO_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
_REPORT_S: Final = 30.0
_LOOK_S: Final = 1.0


def keep_freed_memory(kept_bytes: int = KEPT_BYTES) -> bool:
    """Keep up to this many freed bytes for the next message; return whether the platform supports it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    mmap_threshold = min(kept_bytes, _MMAP_THRESHOLD_MAX)
    return bool(mallopt(_M_TRIM_THRESHOLD, kept_bytes) and mallopt(_M_MMAP_THRESHOLD, mmap_threshold))


def tune_garbage_collection() -> None:
    """Exclude the loaded modules from garbage collection, and collect rarely."""
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD, *gc.get_threshold()[1:])
    gc.enable()


@contextlib.contextmanager
def tuned_garbage_collection() -> Iterator[None]:
    """Tune garbage collection for the duration of a block, unless the process has done it already."""
    threshold = gc.get_threshold()
    if threshold[0] == _GARBAGE_THRESHOLD:  # the number of frozen objects says nothing: Python 3.12 starts with some
        yield
        return
    gc.collect()  # garbage that is frozen stays
    tune_garbage_collection()
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


class FileWatch:
    """Reports that a process has no file descriptors left, in one line per half minute, and that it has some again.

    The server keeps serving its connections meanwhile. uvloop closes new ones without a word. asyncio logs a traceback
    for each attempt to accept one, thousands per second, so its lines become the same report:

        every second: can a file be opened? -- no --> reported        accept fails (asyncio) --> reported
                                            -- yes, after no --> reported

    Args:
        loop: The server's event loop.
        clock: Returns seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._reported_at: float | None = None
        self._is_exhausted = False
        self._timer: asyncio.TimerHandle | None = None
        self._handler_before: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch for the duration of a block."""
        self._handler_before = self._loop.get_exception_handler()
        self._loop.set_exception_handler(self._handle)
        self._look()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._loop.set_exception_handler(self._handler_before)

    def note(self, exc: BaseException | None) -> bool:
        """Report an error if it says that no file descriptor is left; return whether it does."""
        if not isinstance(exc, OSError) or exc.errno not in _NO_FILES:
            return False
        self._is_exhausted = True
        now = self._clock()
        if self._reported_at is None or now - self._reported_at >= _REPORT_S:
            self._reported_at = now
            if exc.errno == errno.ENFILE:
                logger.error("The machine has no file descriptors left (see fs.file-max): new connections fail.")
            else:
                logger.error(
                    "No file descriptors left (limit %d): new connections fail until others close. Raise the limit "
                    "(ulimit -n, LimitNOFILE=, --ulimit nofile=) or allow fewer sessions.",
                    file_limit(),
                )
        return True

    def _look(self) -> None:
        self._timer = self._loop.call_later(_LOOK_S, self._look)
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as exc:
            self.note(exc)
        else:
            if self._is_exhausted:
                self._is_exhausted = False
                logger.warning("File descriptors are available again; new connections are accepted.")

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.note(context.get("exception")):
            return
        if self._handler_before is None:
            loop.default_exception_handler(context)
        else:
            self._handler_before(loop, context)
