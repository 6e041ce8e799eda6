"""The environment of the tests of hung workers: steps that block, compute, hold the interpreter, or freeze."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Any

from counting_app import Count, Counted, Counting
from openenv import create_app


class Trouble(Count):
    """A step that keeps its worker busy, or stops it."""

    compute_s: float = 0.0
    """Pure Python, which shares the interpreter with the event loop."""
    hold_lock_s: float = 0.0
    """C code that keeps the interpreter's lock: nothing else runs."""
    freezes_with_lock: bool = False
    """Stop the process while it holds the lock of all workers."""


class Hanging(Counting):
    """Counts, and makes trouble on request."""

    def step(self, action: Trouble, timeout_s: float | None = None, **kwargs: Any) -> Counted:  # type: ignore[override]
        """Make trouble, then count on."""
        if action.hold_lock_s:
            ctypes.PyDLL(None).usleep(int(action.hold_lock_s * 1_000_000))
        deadline = time.monotonic() + action.compute_s
        while time.monotonic() < deadline:
            pass
        if action.freezes_with_lock:
            fcntl.lockf(_board(), fcntl.LOCK_EX)
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().step(action, timeout_s)


def _board() -> int:
    """Return the descriptor of the memory that all workers share."""
    descriptors = Path("/proc/self/fd").iterdir()
    return next(int(fd.name) for fd in descriptors if "openenv-workers" in os.readlink(fd))


app = create_app(Hanging, Trouble, Counted, env_name="hanging", max_concurrent_envs=64)
