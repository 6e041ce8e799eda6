"""The shared state of the steps of one model call: `CallParts`, with account and records in `CallLedger`.

Knows the budget and the records of the rollout. Knows nothing of answers or connections.
"""

# Each step of a call adds to the ledger, and nothing else writes its records:
#
#   endpoint_sender    attempts, `tried`, `resent`
#   answer_relay       `head`, prompt, events or body, tokens (which count against the budget at once)
#   model_call         `settle`: complete | broken | failed | timeout | unreachable | budget | context | revoked |
#                      agent_gone | cancelled | record_failed

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .call_request import CallRequest, PreparedRequest
from .captured_rollout import CapturedRollout
from .encoding import Json
from .inbound import AgentReply
from .outbound import EndpointResponse, Endpoints
from .records import Call, CallRecorder, JournalFull
from .retries import RetryPolicy

PASSED_HEADERS = frozenset({"retry-after", "retry-after-ms", "x-request-id", "request-id"})
"""The endpoint's headers that the agent may see."""


@dataclass(frozen=True, slots=True)
class Services:
    """The shared objects of all calls of a capture server."""

    endpoints: Endpoints
    policy_header: str
    backoff_s: float = 0.5
    disk: ThreadPoolExecutor | None = None
    """Waits for the disk, outside of the loop."""

    @property
    def retries(self) -> RetryPolicy:
        """When a call is sent again."""
        return RetryPolicy(first_pause_s=self.backoff_s)


class CallLedger:
    """The account of one call: its tokens in the rollout's budget, its attempts, and its end in the records.

    Args:
        rollout: The rollout.
        request: The agent's request.
        prepared: The endpoint's request.
        recorded: The call whose answer the agent gets again; None to sample one.

    Raises:
        JournalFull: The request could not be recorded.
        RecordsTooLarge: The records have no room for the request.
    """

    def __init__(
        self, rollout: CapturedRollout, request: CallRequest, prepared: PreparedRequest, recorded: Call | None = None
    ) -> None:
        self._rollout = rollout
        self._prepared = prepared
        self._recorded = recorded
        self.recorder: CallRecorder
        if recorded is None:
            self.recorder = rollout.recorder.begin(prepared.facts(), request.body, prepared.body)
        else:
            self.recorder = rollout.recorder.replay(recorded.number)
        self.tokens = 0
        """The number of tokens that were sampled so far."""
        self.attempts = 0
        self.policy: str | None = None
        """The version of the policy that answered."""
        self.policy_changed = False
        """Whether the policy changed during the answer."""
        self.prompt_ids: list[int] | None = None
        self.answer: Json | None = None
        """The whole answer, for a rollout with a `TokenMemory`."""
        self.is_settled = False

    @property
    def unspent(self) -> int:
        """Return how many more tokens the call may sample; 0 if it has no limit."""
        return max(0, (self._prepared.limit or 0) - self.tokens)

    # Streams count while they arrive: the budget of a rollout must see the tokens of calls under way.
    def count(self, tokens: int) -> None:
        """Set the number of sampled tokens, in the rollout's account as well."""
        self._rollout.spending.completion_tokens += tokens - self.tokens
        self.tokens = tokens

    def settle(self, how: str, error: Json | None = None) -> None:
        """Record the call's end, before the agent can see it; only the first time counts.

        Raises:
            JournalFull: The end could not be recorded.
        """
        if self.is_settled:
            return
        self.is_settled = True
        rollout, recorded = self._rollout, self._recorded
        if recorded is not None:  # the seconds until its first answer count, not those until this one
            rollout.spending.skip_to(recorded.spent_s)
        # The endpoint was asked for a whole answer, and the call ended before it came. The number of sampled tokens is
        # unknown, so the full limit is charged: agents gain nothing if they hang up.
        is_unseen = not self._prepared.is_streamed and self.attempts and not self.tokens
        if how in ("agent_gone", "budget", "revoked") and is_unseen:
            rollout.spending.unseen_tokens += self._prepared.limit or 0
        facts: Json = {"attempts": self.attempts, "tokens": self.tokens, "seconds": round(rollout.spending.seconds, 3)}
        if error is not None and how not in ("agent_gone", "cancelled"):
            facts["error"] = error
        if self.policy is not None:
            facts["policy"] = self.policy
        if self.policy_changed:
            facts["policy_changed"] = True
        try:
            self.recorder.end(how, facts)
        except JournalFull:
            how = "record_failed"
            raise
        finally:
            rollout.call_ended(how)


@dataclass(frozen=True, slots=True)
class CallParts:
    """The parts of one call, for the steps that it passes."""

    services: Services
    rollout: CapturedRollout
    request: CallRequest
    prepared: PreparedRequest
    ledger: CallLedger
    reply: AgentReply

    def redacted(self, text: str) -> str:
        """Return a text without the endpoint's secrets."""
        return self.rollout.redactor.text(text)

    def passed_headers(self, response: EndpointResponse) -> list[tuple[str, str]]:
        """Return the headers of a response that the agent may see."""
        return [(name, self.redacted(value)) for name, value in response.headers.items() if name in PASSED_HEADERS]
