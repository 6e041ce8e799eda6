"""One line for who is at the terminal, when something takes long: an image is pulled, a project is set up.

Knows standard error and a timer.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

PATIENCE_S = 3.0


@contextlib.contextmanager
def told_when_slow(text: str, *, after_s: float | None = None) -> Iterator[None]:
    """Write a line to standard error if what is done inside has not ended by then, and another one when it has."""
    began = time.monotonic()
    told = threading.Event()

    def tell() -> None:
        told.set()
        _write(f"{text} ...")

    timer = threading.Timer(PATIENCE_S if after_s is None else after_s, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if told.is_set():
            _write(f"{text}: {time.monotonic() - began:.0f} s")


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody listens there
        sys.stderr.write(f"openenv: {line}\n")
        sys.stderr.flush()
