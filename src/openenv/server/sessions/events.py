"""What logs, metrics and orchestrators learn of sessions: events, request origins, and figures of the episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

EventName = Literal["opened", "ready", "failed", "abandoned", "closed", "error"]


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """One event in a session's life.

    Args:
        name: What happened; `error` means that a request was answered with an error, `abandoned` that a session that
            is to end hangs and has lost its slot. `closed` may still follow that.
        session_id: Of the session; empty for a request that reached none.
        reason: Why; the code of an error.
        steps: Steps taken, once the session is closed.
        repeats: Repeated requests that were answered from its ledger, once the session is closed.
    """

    name: EventName
    session_id: str
    reason: str | None = None
    steps: int = 0
    repeats: int = 0


SessionListener = Callable[[SessionEvent], None]


class RequestOrigin(NamedTuple):
    """Where a call comes from.

    Args:
        request_id: The id that the requester chose.
        traceparent: The trace that it is part of, as in W3C Trace Context.
    """

    request_id: str | int | None = None
    traceparent: str | None = None


@dataclass(slots=True)
class EpisodeStats:
    """Reward and end of a session's running episode, for an orchestrator whose agent plays it."""

    steps: int = 0
    reward: float | None = None
    total_reward: float = 0.0
    done: bool = False

    def record(self, reward: float | None, *, done: bool) -> None:
        """Add one step."""
        self.steps += 1
        self.reward = reward
        self.total_reward += reward or 0.0
        self.done = done
