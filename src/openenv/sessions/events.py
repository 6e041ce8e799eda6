"""What happens to sessions, for whoever listens: logs, metrics, tests.

Knows names and ids only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventName = Literal["opened", "ready", "failed", "closed", "error"]


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """One event in a session's life.

    Args:
        name: What happened; `error` means that a request was answered with an error.
        session_id: Whose life; empty for a request that reached no session.
        reason: Why; the code of an error.
        steps: Steps taken, once it is closed.
        repeats: Repeated requests that were answered from its ledger, once it is closed.
    """

    name: EventName
    session_id: str
    reason: str | None = None
    steps: int = 0
    repeats: int = 0


Listener = Callable[[SessionEvent], None]
