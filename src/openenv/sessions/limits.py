"""What a server allows its sessions: how many, for whom, and how long each may be unused. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How many sessions, and how long each may be unused. Times are in seconds.

    Args:
        sessions: Environments held at once.
        idle_s: Life of an unused HTTP session.
        soft_idle_s: Life of an unused soft session.
        soft_sessions: Soft sessions kept at once.
        grace_s: Life of a resumable session that nobody is attached to.
        queue: How many may wait for a slot.
        per_key: Sessions held at once for one key of the clients' choosing; None for no such limit.
        agents: Sessions held at once that agents have opened; None for no such limit.
        closing_wait_s: How long a newcomer waits for a slot whose session is already closing.
        drain_s: How long a shutdown waits for running calls.
    """

    sessions: int = 1
    idle_s: float = 900.0
    soft_idle_s: float = 60.0
    soft_sessions: int = 8
    grace_s: float = 60.0
    queue: int = 10_000
    per_key: int | None = None
    agents: int | None = None
    closing_wait_s: float = 5.0
    drain_s: float = 10.0
