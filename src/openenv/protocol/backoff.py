"""`Backoff`: how long to retry something and how long to pause between two attempts. Knows time only."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from attempt to attempt up to a limit, with jitter.

    Jitter matters when a server restarts: hundreds of clients lose it in the same millisecond and must not come back
    in the same millisecond. With the defaults the pauses are 25-50 ms, 50-100 ms, 100-200 ms, ... 1-2 s, 1-2 s.

    Args:
        timeout_s: How long all attempts together may take; 0 for no second attempt.
        first_pause_s: The longest pause before the second attempt.
        longest_pause_s: The longest pause of all.
        clock: Returns the time in seconds.
        jitter: Returns a number between 0 and 1.
    """

    timeout_s: float = 30.0
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random

    def pause_s(self, attempt: int) -> float:
        """Return how long to pause after an attempt; the first attempt is 0."""
        # The exponent is capped: 2.0 ** 1100 overflows, and a client may retry for days.
        longest: float = min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(attempt, 30))
        return longest * (0.5 + 0.5 * self.jitter())
