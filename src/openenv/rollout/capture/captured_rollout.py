"""The rollouts of the proxy: model, keys, budget, records and calls under way of each.

Knows nothing of sockets or of HTTP.
"""

# The token budget of a rollout, while three calls are under way:
#
#   |<------------------------- max_completion_tokens -------------------------->|
#   | sampled | unseen | call 1: sampled, unspent | call 2 | call 3 |   free    |
#
# `unseen` are the limits of whole answers that were cut off: sampled, in unknown number. A call reserves its
# limit before it is sent (`CallLedger.unspent`), so that calls at the same time cannot exceed the budget together.

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

from openenv.errors import CaptureError

from ..tasks.model_parameters import derived_seed
from ..tasks.task import Budget, Model
from .dialects.dialect import CallOptions
from .encoding import Json
from .parameter_fixes import ParamFix
from .records import Call, Recorder
from .replay import Replay
from .token_in import TokenMemory, token_memory

if TYPE_CHECKING:
    from .model_call import ProxiedCall

log = logging.getLogger("openenv.rollout.capture")

EXHAUSTED = "Step budget exhausted; stopping."
"""The answer to an agent with an exhausted budget, instead of the model's answer."""
MAX_STOPS = 1000
"""The number of these answers in a rollout's records; further ones are only counted."""


@dataclass(slots=True)
class Spending:
    """The account of one rollout."""

    budget: Budget
    clock: Callable[[], float] = time.monotonic
    calls: int = 0
    completion_tokens: int = 0
    unseen_tokens: int = 0
    """The limits of whole answers that were cut off: their tokens were sampled, but not counted."""
    refused: int = 0
    """The number of calls that the budget answered or ended."""
    skipped_s: float = 0.0
    """Seconds that an interrupted run of the agent used, and this one did not."""
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    @property
    def seconds(self) -> float:
        """Return the seconds since the rollout was opened."""
        return self.clock() - self.started_at

    # A replayed answer comes at once, and sampling it took a minute. That minute counts, once: the clock is set to the
    # time at which the answer came first. The time between the interruption and the new start does not count.
    def skip_to(self, seconds: float) -> None:
        """Count the seconds that were used up to a replayed answer."""
        skipped = max(0.0, seconds - self.seconds)
        self.skipped_s += skipped
        self.started_at -= skipped

    def exhausted(self) -> str | None:
        """Return the limit that is reached: `calls`, `completion_tokens` or `seconds`; None if budget remains."""
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
        return max(0, self.budget.max_completion_tokens - self.completion_tokens - self.unseen_tokens)

    def is_overdrawn(self) -> bool:
        """Return whether more tokens were sampled than the budget allows."""
        limit = self.budget.max_completion_tokens
        return limit is not None and self.completion_tokens > limit

    def seconds_left(self) -> float | None:
        """Return the remaining seconds; None for no limit."""
        return None if self.budget.max_seconds is None else max(0.0, self.budget.max_seconds - self.seconds)


@dataclass(frozen=True, slots=True)
class Stats:
    """The current figures of a rollout."""

    calls: int = 0
    active: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    budget_exhausted: str | None = None
    """The limit that is reached: `calls`, `completion_tokens` or `seconds`."""
    budget_stops: int = 0
    """The number of calls that the budget answered or ended, instead of the model."""
    endings: dict[str, int] = field(default_factory=dict)
    """The number of calls per ending (`Call.ended`)."""
    last_error: Json | None = None
    """The last failure of the endpoint: `status`, `kind`, `message`, `at`."""
    failures_in_a_row: int = 0
    """Attempts that failed at the endpoint since its last good answer: above 0, the endpoint is broken."""
    outage: str | None = None
    """The error of the last call if nothing listened at the endpoint: no request can cause that."""
    record_failure: str | None = None
    """The reason for missing records; None if they are complete."""
    revoked: bool = False
    replayed: int = 0
    """The number of recorded answers that the agent got again, in a resumed rollout or a branch."""
    skipped_s: float = 0.0
    """Seconds of an interrupted run that count, although the agent got its answers at once this time."""
    divergence: str | None = None
    """The first request of a resumed rollout or a branch that differs from the recorded ones."""


class Redactor:
    """Removes the endpoint's secrets from its answers: error texts may quote the key that was sent."""

    def __init__(self, model: Model) -> None:
        secrets = sorted({secret for secret in _secrets(model) if len(secret) >= 4}, key=len, reverse=True)
        self._plain = secrets
        forms = {form for secret in secrets if len(secret) >= _KEY_LENGTH for form in _forms(secret)}
        self._forms = sorted(forms, key=len, reverse=True)

    def data(self, data: bytes) -> bytes:
        """Redact bytes of any answer: secrets that are long enough for keys, in every form that endpoints quote."""
        # A short secret, such as the `EMPTY` of a local engine, is a word that a model may say.
        for form in self._forms:
            if form in data:
                data = data.replace(form, b"***")
        return data

    def text(self, text: str) -> str:
        """Redact the text of an error."""
        text = self.data(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")
        for secret in self._plain:
            text = text.replace(secret, "***")
        return text

    def value(self, value: Any) -> Any:
        """Redact every text in the JSON of an error: its escapes may hide the key from `data`."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list) else value


# Shorter secrets are words: they are removed from the texts of errors, but not from answers of the model.
_KEY_LENGTH = 12
_SECRET_HEADERS = ("authorization", "key", "token", "secret", "cookie", "password")


# Three sources of secrets: the key, passwords in addresses, and headers with a telling name.
def _secrets(model: Model) -> Iterator[str]:
    key = model.api_key.get_secret_value()
    if key != "intercepted":  # the default
        yield key
    for base_url in model.replicas:
        with contextlib.suppress(ValueError):  # an invalid address fails when it is called
            password = urlsplit(base_url).password or ""
            yield from (password, unquote(password))
    for name, value in model.extra_headers.items():
        if any(word in name.lower() for word in _SECRET_HEADERS):
            yield from (value, value.rpartition(" ")[2])  # the second is the value without its scheme, `Bearer`


def _forms(secret: str) -> Iterator[bytes]:
    """Yield the forms in which an error may quote a secret: plain, in a URL, in JSON, hexadecimal and base64."""
    data = secret.encode()
    escaped = json.dumps(secret)[1:-1]
    percent = quote(secret, safe="")
    texts = [secret, escaped, escaped.replace("/", "\\/"), quote(secret), percent, percent.lower(), quote_plus(secret)]
    yield from (text.encode() for text in texts)
    yield from (data.hex().encode(), data.hex().upper().encode())
    # Base64 of the secret inside of something longer (`user:secret`) begins at one of three places in a group of bytes;
    # the digits that it shares with its neighbours are left out.
    for before in range(3):
        digits = base64.b64encode(b"\0" * before + data).rstrip(b"=")
        shared_end = 1 if (before + len(data)) % 3 else 0
        core = digits[math.ceil(before * 8 / 6) : len(digits) - shared_end]
        yield from (core, core.replace(b"+", b"-").replace(b"/", b"_"))


def key_digest(key: str) -> bytes:
    """Return the digest of a key, which is all that the proxy keeps of it: lookups take the same time for any key."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


@dataclass(frozen=True, slots=True)
class EndpointTraits:
    """Facts about an endpoint before a rollout's first call."""

    refused: frozenset[str] = frozenset()
    """Parameters that it refuses."""
    fixes: list[ParamFix] | None = None
    """Changes of requests that it asked for, shared by all its rollouts, which add to them; None to allow none.

    Rollouts to train on allow none: a changed temperature would be a sampling that the trainer did not ask for."""
    ends_at_context_limit: bool = False
    """Whether a conversation that exceeds the endpoint's context ends like an exhausted budget, without an error."""


@dataclass(slots=True, eq=False)
class CapturedRollout:
    """The proxy's state of one rollout."""

    rollout_id: str
    key_digest: bytes
    model: Model
    spending: Spending
    recorder: Recorder
    traits: EndpointTraits
    metadata: Json = field(default_factory=dict)
    replay: Replay | None = None
    """The recorded answers for an agent that works again."""
    before_call: Callable[[], None] | None = None
    """Called in a thread while the agent waits for a call to begin, to record its files; must not raise."""
    opened_at: float = field(default_factory=time.time)
    revoked: bool = False
    closed_at: float | None = None
    active: set[ProxiedCall] = field(default_factory=set)
    last_error: Json | None = None
    failures_in_a_row: int = 0
    outage: str | None = None
    """The error of the last call if nothing listened at the endpoint; None after a good answer."""
    refused: frozenset[str] = field(init=False)
    """Parameters that the endpoint refuses, according to `traits` or to calls of this rollout.

    Kept per rollout, because an agent's request may be the reason for a refusal."""
    no_prompt_ids: bool = False
    """Whether the endpoint lacks a route for the IDs of a prompt."""
    endings: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    """The number of calls that wait for tokens that calls under way have reserved."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a call ends or the key is revoked: waiting calls check again."""
    redactor: Redactor = field(init=False)
    tokens: TokenMemory | None = field(init=False)
    """The recorded answers that later calls continue; None if the engine takes no token IDs."""
    _replica: int = field(init=False)

    def __post_init__(self) -> None:
        self.redactor = Redactor(self.model)
        self.refused = self.traits.refused
        self.tokens = token_memory(self.model)
        # Chosen by the ID, not in turn: a rollout that is repeated under its ID finds its prompts in the cache.
        self._replica = zlib.crc32(self.rollout_id.encode()) % len(self.model.replicas)

    @property
    def base_url(self) -> str:
        """Return the replica that the rollout's calls go to."""
        return self.model.replicas[self._replica]

    # Several calls may fail at one replica at the same time: only the first of them moves the rollout on.
    def leave_replica(self, base_url: str) -> None:
        """Continue with the next replica, unless another call has switched already."""
        if base_url == self.base_url:
            self._replica = (self._replica + 1) % len(self.model.replicas)

    def tokens_free(self) -> int | None:
        """Return the number of tokens that no call under way has reserved; None for no limit."""
        left = self.spending.tokens_left()
        return None if left is None else max(0, left - sum(call.unspent for call in self.active))

    def has_room_for(self, asked: int | None) -> bool:
        """Return whether a call that asks for so many tokens may begin.

        If not, it waits: the calls under way may sample less than they reserved. A call never waits alone.
        """
        free = self.tokens_free()
        wanted = [limit for limit in (asked, self.model.max_tokens_cap) if limit is not None]
        return free is None or not self.active or (bool(wanted) and free >= min(wanted))

    def call_options(self) -> CallOptions:
        """Return the options of the next call: token limit, log-probabilities, sampling."""
        model = self.model
        caps = [cap for cap in (model.max_tokens_cap, self.tokens_free()) if cap is not None]
        return CallOptions(
            model=model.name,
            top_logprobs=model.top_logprobs,
            return_token_ids=model.return_token_ids,
            max_tokens=min(caps) if caps else None,
            disable_thinking=model.disable_thinking,
            routed_experts=model.routed_experts,
            asks_for_experts=model.routed_experts and model.engine == "sglang",
            refused=self.refused,
            sampling=model.sampling,
            agent_may_set=frozenset(model.agent_may_set),
            seed=None if model.seed is None else derived_seed(model.seed, self.spending.calls),
        )

    def recorded_answer(self, dialect: str, request: Json) -> Call | None:
        """Return the recorded call with this request; None to sample an answer.

        Raises:
            JournalFull: The request differs from the recorded ones, and that could not be recorded.
        """
        if self.replay is None:
            return None
        was_same = self.replay.divergence is None
        call = self.replay.take(dialect, request)
        if was_same and self.replay.divergence is not None:
            log.warning("rollout %s diverges from its records: %s", self.rollout_id, self.replay.divergence)
            self.recorder.note("note", what="diverged", reason=self.replay.divergence, unused=self.replay.left)
        return call

    def budget_ended(self, limit: str, dialect: str) -> None:
        """Record a call that the budget answered or ended."""
        self.spending.refused += 1
        if self.spending.refused <= MAX_STOPS:
            self.recorder.note("stop", limit=limit, dialect=dialect)

    def endpoint_failed(self, *, status: int | None, kind: str, message: str) -> None:
        """Count a failed attempt; a `refused` request is not counted, as the agent may be at fault."""
        message = self.redactor.text(message)
        self.failures_in_a_row += kind != "refused"
        self.last_error = {"status": status, "kind": kind, "message": message[:2000], "at": time.time()}

    def call_ended(self, how: str) -> None:
        """Count the ending of a call."""
        self.endings[how] = self.endings.get(how, 0) + 1
        if how == "complete":
            self.failures_in_a_row, self.outage = 0, None

    def close(self) -> None:
        """Release the memory that only an open rollout needs."""
        self.closed_at = time.time()
        self.recorder.forget()
        if self.replay is not None:
            self.replay.forget()
        if self.tokens is not None:
            self.tokens.forget()

    def stats(self) -> Stats:
        """Return the current figures."""
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
            outage=self.outage,
            record_failure=self.recorder.failure,
            revoked=self.revoked,
            replayed=0 if self.replay is None else self.replay.count,
            skipped_s=spending.skipped_s,
            divergence=None if self.replay is None else self.replay.divergence,
        )


# Rollouts are found by the digests of their keys. The lookup takes the same time for any key, so response times reveal
# nothing about keys.
#
#   add ---> by key and by ID ---> forget_key (revoked): by ID only ---> sweep, `closed_ttl_s` after the end: forgotten


class RolloutRegistry:
    """The open rollouts, and for some time the closed ones."""

    def __init__(self, closed_ttl_s: float) -> None:
        self._by_key: dict[bytes, CapturedRollout] = {}
        self._by_id: dict[str, CapturedRollout] = {}
        self._closed_ttl_s = closed_ttl_s

    def add(self, rollout: CapturedRollout) -> None:
        """Add a rollout.

        Raises:
            CaptureError: An open rollout has its ID.
        """
        # A closed one makes room: an engine repeats a rollout under its ID if the sandbox failed.
        present = self._by_id.setdefault(rollout.rollout_id, rollout)
        if present is not rollout:
            if present.closed_at is None:
                raise CaptureError(f"There is a rollout '{rollout.rollout_id}' already.")
            self._by_id[rollout.rollout_id] = rollout
        self._by_key[rollout.key_digest] = rollout

    def by_key(self, key: str) -> CapturedRollout | None:
        """Return the rollout with this key."""
        digest = key_digest(key)
        rollout = self._by_key.get(digest)
        return rollout if rollout is not None and hmac.compare_digest(rollout.key_digest, digest) else None

    def by_id(self, rollout_id: str) -> CapturedRollout | None:
        """Return a rollout by its id."""
        return self._by_id.get(rollout_id)

    def all(self) -> list[CapturedRollout]:
        """Return every rollout, the closed ones included."""
        return list(self._by_id.values())

    def forget_key(self, rollout: CapturedRollout) -> None:
        """Refuse the rollout's key from now on."""
        # A key that was chosen (the ID of a session) may belong to a later rollout by now.
        if self._by_key.get(rollout.key_digest) is rollout:
            del self._by_key[rollout.key_digest]

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
