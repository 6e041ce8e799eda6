"""The rollouts that the proxy knows: each with its model, key, budget, records and calls under way.

Must not know sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openenv.errors import CaptureError

from ..task import Budget, Model
from .dialects.dialect import CallOptions
from .encoding import Json
from .records import Recorder

if TYPE_CHECKING:
    from .model_call import ProxiedCall

EXHAUSTED = "Step budget exhausted; stopping."
"""The answer that an agent gets from an exhausted budget, in the model's place."""


@dataclass(slots=True)
class Spending:
    """The account of one rollout. Calls that run at the same time may exceed the tokens by what they sample."""

    budget: Budget
    clock: Callable[[], float] = time.monotonic
    calls: int = 0
    completion_tokens: int = 0
    refused: int = 0
    """How many calls the budget answered."""
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    @property
    def seconds(self) -> float:
        """Return how long the rollout has been open."""
        return self.clock() - self.started_at

    def exhausted(self) -> str | None:
        """Return which limit is reached: `calls`, `completion_tokens` or `seconds`; None while there is some left."""
        limits = self.budget
        if limits.max_calls is not None and self.calls >= limits.max_calls:
            return "calls"
        if self.tokens_left() == 0:
            return "completion_tokens"
        if limits.max_seconds is not None and self.seconds >= limits.max_seconds:
            return "seconds"
        return None

    def tokens_left(self) -> int | None:
        """Return how many tokens may still be sampled; None for no limit."""
        if self.budget.max_completion_tokens is None:
            return None
        return max(0, self.budget.max_completion_tokens - self.completion_tokens)


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
    last_error: Json | None = None
    """The last failure of the endpoint: `status`, `kind`, `message`, `at`."""
    failures_in_a_row: int = 0
    """Attempts that failed at the endpoint since its last good answer: above 0, the endpoint is what is wrong."""
    record_failure: str | None = None
    """Why records are missing; None while they are whole."""
    revoked: bool = False


def key_digest(key: str) -> bytes:
    """Return what the proxy keeps of a key: a lookup by it takes the same time for any key."""
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
    active: set[ProxiedCall] = field(default_factory=set)
    last_error: Json | None = None
    failures_in_a_row: int = 0
    refused: frozenset[str] = frozenset()
    """Parameters that the endpoint has turned down; kept per rollout, as its requests may be the reason."""
    no_prompt_ids: bool = False
    """Whether the endpoint has no route that names the ids of a prompt."""
    endings: dict[str, int] = field(default_factory=dict)

    def call_options(self) -> CallOptions:
        """Return what the next call asks of the endpoint."""
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
        """Count an attempt that failed at the endpoint; a request that it `refused` may be the agent's fault."""
        self.failures_in_a_row += kind != "refused"
        self.last_error = {"status": status, "kind": kind, "message": message[:2000], "at": time.time()}

    def call_ended(self, how: str) -> None:
        """Count how a call ended."""
        self.endings[how] = self.endings.get(how, 0) + 1
        if how == "complete":
            self.failures_in_a_row = 0

    def close(self) -> None:
        """Release what only a rollout under way needs."""
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


class RolloutRegistry:
    """The rollouts that have a key, and for a while those that had one."""

    def __init__(self, closed_ttl_s: float) -> None:
        self._by_key: dict[bytes, CapturedRollout] = {}
        self._by_id: dict[str, CapturedRollout] = {}
        self._closed_ttl_s = closed_ttl_s

    def add(self, rollout: CapturedRollout) -> None:
        """Add a rollout.

        Raises:
            CaptureError: there is one of that id.
        """
        if self._by_id.setdefault(rollout.rollout_id, rollout) is not rollout:
            raise CaptureError(f"There is a rollout '{rollout.rollout_id}' already.")
        self._by_key[rollout.key_digest] = rollout

    def by_key(self, key: str) -> CapturedRollout | None:
        """Return the rollout that a key belongs to."""
        digest = key_digest(key)
        rollout = self._by_key.get(digest)
        return rollout if rollout is not None and hmac.compare_digest(rollout.key_digest, digest) else None

    def by_id(self, rollout_id: str) -> CapturedRollout | None:
        """Return a rollout by its id."""
        return self._by_id.get(rollout_id)

    def all(self) -> list[CapturedRollout]:
        """Return every rollout that is still known."""
        return list(self._by_id.values())

    def forget_key(self, rollout: CapturedRollout) -> None:
        """Refuse the rollout's key from now on."""
        self._by_key.pop(rollout.key_digest, None)

    def discard(self, rollout: CapturedRollout) -> None:
        """Forget a rollout altogether; its records stay on disk."""
        self.forget_key(rollout)
        if self._by_id.get(rollout.rollout_id) is rollout:
            del self._by_id[rollout.rollout_id]

    def sweep(self) -> None:
        """Forget rollouts that were closed long ago."""
        limit = time.time() - self._closed_ttl_s
        for rollout in self.all():
            if rollout.closed_at is not None and rollout.closed_at < limit:
                self.discard(rollout)
