"""What happens to sessions, for whoever listens: logs, metrics, tests.

Knows names and ids only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

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


SessionListener = Callable[[SessionEvent], None]


# episode: What an orchestrator may know of an episode that somebody else plays. Knows numbers only.


@dataclass(slots=True)
class EpisodeStats:
    """Reward and end of a session's running episode, as its steps have told."""

    steps: int = 0
    reward: float | None = None
    total_reward: float = 0.0
    done: bool = False

    def record(self, reward: float | None, *, done: bool) -> None:
        """Take in one step."""
        self.steps += 1
        self.reward = reward
        self.total_reward += reward or 0.0
        self.done = done


# origin: `Origin`: what a requester calls its request, and the trace that it belongs to. For logs and traces only.


class RequestOrigin(NamedTuple):
    """Where a call comes from.

    Args:
        request_id: The id that the requester gave it.
        traceparent: The trace that it is part of, as in W3C Trace Context.
    """

    request_id: str | int | None = None
    traceparent: str | None = None
