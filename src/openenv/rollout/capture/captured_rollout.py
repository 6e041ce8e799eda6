"""The state of one rollout while its calls go through the proxy.

Knows its model, key, budget, records and the calls under way. Must not know sockets.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..task import Budget, Model
from .dialects.dialect import CallOptions
from .encoding import Json
from .records import Recorder

# budget: What a rollout has spent on its model, and whether it may spend more.
#
# Knows numbers and a clock.


EXHAUSTED = "Step budget exhausted; stopping."
"""What the agent is told in place of an answer."""


@dataclass(slots=True)
class Spending:
    """The account of one rollout. Calls that run at the same time may exceed the tokens by what they sample."""

    budget: Budget
    clock: Callable[[], float] = time.monotonic
    calls: int = 0
    completion_tokens: int = 0
    started_at: float | None = None
    refused: int = 0
    """How many calls were answered by the budget."""

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    @property
    def seconds(self) -> float:
        """Return how long the rollout has been open."""
        return self.clock() - (self.started_at or 0.0)

    def exhausted(self) -> str | None:
        """Return which limit is reached: `calls`, `completion_tokens` or `seconds`; None while there is some left."""
        limits = self.budget
        if limits.max_calls is not None and self.calls >= limits.max_calls:
            return "calls"
        if limits.max_completion_tokens is not None and self.completion_tokens >= limits.max_completion_tokens:
            return "completion_tokens"
        if limits.max_seconds is not None and self.seconds >= limits.max_seconds:
            return "seconds"
        return None

    def tokens_left(self) -> int | None:
        """Return how many tokens may still be sampled; None for no limit."""
        if self.budget.max_completion_tokens is None:
            return None
        return max(0, self.budget.max_completion_tokens - self.completion_tokens)


class Stoppable(Protocol):
    """A call under way."""

    over: asyncio.Event

    def stop(self, how: str) -> None:
        """End it, and say why."""


def digest(key: str) -> bytes:
    """Return what is kept of a key: looking it up takes the same time for any key."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


@dataclass(slots=True, eq=False)
class CapturedRollout:
    """One rollout as the proxy knows it."""

    rollout_id: str
    key_digest: bytes
    model: Model
    spending: Spending
    recorder: Recorder
    metadata: Json = field(default_factory=dict)
    policy_url: str | None = None
    opened_at: float = field(default_factory=time.time)
    revoked: bool = False
    closed_at: float | None = None
    active: set[Stoppable] = field(default_factory=set)
    last_error: Json | None = None
    """The last time the endpoint failed: status, kind, message, at."""
    failures_in_a_row: int = 0
    refused: frozenset[str] = frozenset()
    """Parameters that the endpoint has turned down; of this rollout only, as a request may be why."""
    no_prompt_ids: bool = False
    """Whether the endpoint was asked for the ids of a prompt, and did not know them."""
    endings: dict[str, int] = field(default_factory=dict)

    def call_options(self) -> CallOptions:
        """Return what is asked of the endpoint in the next call."""
        model = self.model
        caps = [cap for cap in (model.max_tokens_cap, self.spending.tokens_left()) if cap is not None]
        return CallOptions(
            model=model.name,
            top_logprobs=model.top_logprobs,
            return_token_ids=model.return_token_ids,
            max_tokens=min(caps) if caps else None,
            disable_thinking=model.disable_thinking,
            refused=self.refused,
        )

    def endpoint_failed(self, *, status: int | None, kind: str, message: str) -> None:
        """Take note that an attempt failed at the endpoint; a request that it `refused` may be the agent's fault."""
        self.failures_in_a_row += kind != "refused"
        self.last_error = {"status": status, "kind": kind, "message": message[:2000], "at": time.time()}

    def call_ended(self, how: str) -> None:
        """Count how a call ended."""
        self.endings[how] = self.endings.get(how, 0) + 1
        if how == "complete":
            self.failures_in_a_row = 0

    def close(self) -> None:
        """Let go of what only a rollout under way needs."""
        self.closed_at = time.time()
        self.recorder.forget()

    def stats(self) -> Stats:
        """Return the figures as they stand."""
        spending = self.spending
        return Stats(
            calls=spending.calls,
            active=len(self.active),
            completion_tokens=spending.completion_tokens,
            seconds=spending.seconds,
            budget_exhausted=spending.exhausted(),
            budget_stops=spending.refused,
            endings=dict(self.endings),
            last_error=self.last_error,
            failures_in_a_row=self.failures_in_a_row,
            record_failure=self.recorder.failure,
            revoked=self.revoked,
        )


@dataclass(frozen=True, slots=True)
class Stats:
    """Where a rollout stands."""

    calls: int = 0
    active: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    budget_exhausted: str | None = None
    """The limit that is reached: `calls`, `completion_tokens` or `seconds`."""
    budget_stops: int = 0
    """How many calls were answered by the budget and not by the model."""
    endings: dict[str, int] = field(default_factory=dict)
    """How calls ended, as in `Call.ended`, and how many of each."""
    last_error: dict[str, Any] | None = None
    """The last failure of the endpoint: `status`, `kind`, `message`, `at`."""
    failures_in_a_row: int = 0
    """Attempts that failed at the endpoint since its last good answer: above 0, the endpoint is what is wrong."""
    record_failure: str | None = None
    """Why records are missing; None while they are whole."""
    revoked: bool = False
