"""How the C library's allocator treats memory that was freed.

By default glibc hands the memory of a large message back to the system as soon as it is freed, and pays for it again,
page by page, with the next message. A server keeps a bounded amount instead. Knows glibc; elsewhere it does nothing.
"""

from __future__ import annotations

import ctypes
import sys

KEPT_BYTES = 64 * 1024 * 1024
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_MAX = 32 * 1024 * 1024


def keep_freed_memory(kept_bytes: int = KEPT_BYTES) -> bool:
    """Keep up to that many freed bytes for the next message; say whether this platform can."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    mmap_threshold = min(kept_bytes, _MMAP_THRESHOLD_MAX)
    return bool(mallopt(_M_TRIM_THRESHOLD, kept_bytes) and mallopt(_M_MMAP_THRESHOLD, mmap_threshold))
