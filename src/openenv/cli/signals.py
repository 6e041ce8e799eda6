"""Signals that end a command: it tidies up first, as after Ctrl-C. Knows processes; must not know any command."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def tidy_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end what runs meanwhile as Ctrl-C does: context managers are left, and the exit code is 143."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread, which gets no signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
