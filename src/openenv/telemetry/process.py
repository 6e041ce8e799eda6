"""What a process says about itself: memory and threads. Knows `/proc` and its fallbacks."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the memory that is in use now, or the most that ever was where the system tells no more."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource  # not on every system
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def thread_count() -> int:
    """Return how many of Python's threads are alive."""
    return threading.active_count()
