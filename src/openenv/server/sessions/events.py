"""Session data for logs, metrics and orchestrators: events, request origins, and episode statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

EventName = Literal["opened", "ready", "failed", "abandoned", "closed", "error"]


class SessionEvent(NamedTuple):
    """One event in a session's life.

    Args:
        name: The event. `error` is an error reply to a request. `abandoned` is an ending session that hangs and has
            lost its slot; `closed` may still follow.
        session_id: The session; empty for a request without one.
        reason: The close reason, or the code of an error.
        steps: The number of steps; set in `closed`.
        repeats: The number of repeated requests answered from the ledger; set in `closed`.
    """

    name: EventName
    session_id: str
    reason: str | None = None
    steps: int = 0
    repeats: int = 0


SessionListener = Callable[[SessionEvent], None]


class RequestOrigin(NamedTuple):
    """The origin of a call.

    Args:
        request_id: The requester's id.
        traceparent: The trace of the request, as in W3C Trace Context.
    """

    request_id: str | int | None = None
    traceparent: str | None = None


@dataclass(slots=True)
class EpisodeStats:
    """Reward and end of a running episode, for an orchestrator that watches its agent."""

    steps: int = 0
    reward: float | None = None
    total_reward: float = 0.0
    done: bool = False
    error: str | None = None
    """The code of the error that made the episode's reward worthless, such as NON_FINITE_REWARD."""

    def fields(self) -> dict[str, Any]:
        """Return the fields for a reply; `error` only if there is one."""
        values = asdict(self)
        if self.error is None:
            del values["error"]
        return values

    def fail(self, code: str) -> None:
        """Count a step without a usable reward."""
        self.steps += 1
        self.reward, self.error = None, code

    def record(self, reward: float | None, *, done: bool) -> None:
        """Add one step."""
        self.steps += 1
        self.reward = reward
        self.total_reward += reward or 0.0
        self.done = done
