"""What happens to sessions, for whoever listens: logs, metrics, tests.

Knows names and ids only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventName = Literal["opened", "ready", "failed", "closed"]


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """One event in a session's life."""

    name: EventName
    session_id: str
    reason: str | None = None


Listener = Callable[[SessionEvent], None]
