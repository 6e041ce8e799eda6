"""Retries of requests to endpoints: when, and after how long a pause. For calls of agents, clients and probes.

Knows status codes, the `retry-after` header and time; the callers send.
"""

# After an attempt that failed:
#
#   status not in RETRIED, or the last attempt -----------------> give up
#   `retry-after: 3` ------- at most `longest_wait_s` ----------> wait 3 s
#   `retry-after: 3600` ----------------------------------------> give up: agents have time limits, and retry themselves
#   no such header ---------------------------------------------> wait with exponential backoff

from __future__ import annotations

import math
from dataclasses import dataclass

from openenv.protocol.backoff import Backoff

ATTEMPTS = 3
RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
"""Statuses that a repeated request may avoid: time limits, conflicts, overload, failures of the server."""


def wanted_pause_s(retry_after: str) -> float | None:
    """Return the seconds of a `retry-after` header; None for a date, an invalid value or none at all."""
    try:
        seconds = float(retry_after)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a request is sent again, and how patiently."""

    first_pause_s: float = 0.5
    """The approximate pause before the second attempt; later pauses double."""
    longest_wait_s: float = 30.0
    """The longest pause that an endpoint may ask for."""

    # The pause has jitter: all agents of a batch meet the same overload, and must not come back at the same moment.
    def pause_s(self, attempt: int, *, status: int | None, retry_after: str = "") -> float | None:
        """Return the pause after an attempt; None to give up.

        Args:
            attempt: The number of attempts so far.
            status: The endpoint's answer; None if it refused the connection.
            retry_after: The header of the answer.
        """
        if attempt >= ATTEMPTS or (status is not None and status not in RETRIED):
            return None
        wanted = wanted_pause_s(retry_after)
        if wanted is not None:
            return wanted if wanted <= self.longest_wait_s else None
        return Backoff(first_pause_s=self.first_pause_s).pause_s(attempt - 1)
