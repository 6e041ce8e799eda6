"""Sessions of the capture server: one rollout each, with the session's ID as the agent's API key.

Knows settings and credentials, and nothing of files or calls: a server updates a session by `CaptureSession.attach`.
"""

# How a session is kept up to date:
#
#   session.graph  ---> refresh() ---> the attached function reads new records and adds nodes ---> the value
#   (or findings, model_calls, ...)    one thread at a time; a read inside of it returns the value as it stands
#
# So the capture of a call costs no time for the graph, and a reader always sees every recorded call.

from __future__ import annotations

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from ...tasks.model_parameters import finite_number, training_sampling
from ..encoding import Json
from .turn_graph import RolloutGraph

if TYPE_CHECKING:
    from .session_server import SessionServer

T = TypeVar("T")

LEVELS = ("tokens", "logprobs", "text")
"""The capture levels: token IDs with log-probabilities, log-probabilities, or neither."""
# purpose   capture level   the rollout is
# train     tokens          train: sampled as the trainer says, or neutrally; parameters of the agent are replaced
# train     lower           refused
# auto      tokens          train
# auto      lower           eval
# eval      any             eval: sampled as the agent asks, or as `eval_sampling` says; refused parameters are repaired
PURPOSES = ("auto", "eval", "train")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def clean_session_id(value: object) -> str | None:
    """Return a session ID without surrounding blanks; None for an invalid one."""
    text = value.strip() if isinstance(value, str) else ""
    return text if _ID.fullmatch(text) else None


def extract_api_key(headers: Mapping[str, str]) -> str | None:
    """Return the API key of a request, from the header that OpenAI's, Anthropic's or Google's clients use."""
    lower = {name.lower(): value for name, value in headers.items()}
    scheme, _, token = lower.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return lower.get("x-api-key") or lower.get("x-goog-api-key")


def extract_harness_session(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """Return the agent's name for its conversation, if it sends one."""
    lower = {name.lower(): value for name, value in headers.items()}
    values = (lower.get("x-session-id"), lower.get("proxy-x-session-id"), body.get("_session_id"), body.get("user"))
    return next((name for name in map(clean_session_id, values) if name is not None), None)


def evaluation_sampling(value: Mapping[str, Any] | None) -> Json:
    """Return the sampling parameters of an evaluation.

    Raises:
        ValueError: A parameter is not `temperature`, `top_p` or `top_k`, or a value is out of range.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or set(value) - {"temperature", "top_p", "top_k"}:
        raise ValueError("eval_sampling supports temperature, top_p, and top_k only")
    for name, number in value.items():
        if finite_number(number) is None:
            raise ValueError(f"eval_sampling values must be finite numbers: {name} is {number!r}")
    if not 0 <= value.get("temperature", 0) <= 2:
        raise ValueError("eval temperature must be between 0 and 2")
    if not 0 < value.get("top_p", 1) <= 1:
        raise ValueError("eval top_p must be in (0, 1]")
    top_k = value.get("top_k", -1)
    if not isinstance(top_k, int) or (top_k != -1 and top_k < 1):
        raise ValueError("eval top_k must be -1 or a positive integer")
    return dict(value)


def is_trainable(purpose: str, capture_level: str) -> bool:
    """Return whether rollouts of a purpose can be trained on, given the capture level of the endpoint."""
    return purpose != "eval" and capture_level == "tokens"


def rollout_type_for(purpose: str, capture_level: str) -> str:
    """Return the type of a session's rollout: `train` or `eval`.

    Raises:
        ValueError: The purpose is unknown, or the endpoint sends no token IDs to train on.
    """
    if purpose not in PURPOSES:
        raise ValueError("purpose must be auto, eval, or train")
    if purpose == "train" and capture_level != "tokens":
        raise ValueError("training requires exact engine token capture")
    return "train" if is_trainable(purpose, capture_level) else "eval"


@dataclass(frozen=True)
class UpstreamAddress:
    """The endpoint of a session's calls."""

    llm_url: str
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    auth_header: str = "Authorization"
    provider: str = "openai"

    @property
    def cache_key(self) -> tuple[str, str, str, str, str]:
        """Return a key that is equal for sessions that can share connections, with a digest of the API key."""
        credential = hashlib.sha256((self.api_key or "").encode()).hexdigest()
        return (self.llm_url.rstrip("/"), self.model, self.auth_header.lower(), credential, self.provider)


class _Live(Generic[T]):
    """A value of a session; reading it brings the session up to date first."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    @overload
    def __get__(self, session: None, owner: type) -> _Live[T]: ...
    @overload
    def __get__(self, session: CaptureSession, owner: type) -> T: ...
    def __get__(self, session: CaptureSession | None, owner: type) -> _Live[T] | T:
        if session is None:
            return self
        session.refresh()
        value: T = getattr(session, self._name)
        return value

    def __set__(self, session: CaptureSession, value: T) -> None:
        setattr(session, self._name, value)


class CaptureSession:
    """One rollout: its endpoint, its limits, and its captured calls so far."""

    graph: _Live[RolloutGraph] = _Live()
    findings: _Live[list[str]] = _Live()
    last_turn_at: _Live[float | None] = _Live()
    upstream_errors: _Live[int] = _Live()
    model_calls: _Live[int] = _Live()
    """The number of calls that were sent to the endpoint."""
    budget_stop_count: _Live[int] = _Live()
    """The number of calls that the budget answered in place of the model."""

    def __init__(
        self,
        session_id: str,
        created_at: float | None = None,
        graph: RolloutGraph | None = None,
        metadata: Json | None = None,
        findings: list[str] | None = None,
        last_turn_at: float | None = None,
        upstream_errors: int = 0,
        upstream: UpstreamAddress | None = None,
        capture_level: str = "",
        purpose: str = "auto",
        eval_sampling: Json | None = None,
        model_calls: int = 0,
        max_model_calls: int = 0,
        budget_stop_count: int = 0,
        sampling: dict[str, float | int] | None = None,
    ) -> None:
        self._update: Callable[[], None] | None = None
        self._lock = threading.RLock()
        self._is_updating = False
        self.session_id = session_id
        self.created_at = time.time() if created_at is None else created_at
        self.graph = RolloutGraph() if graph is None else graph
        self.metadata: Json = {} if metadata is None else metadata
        self.findings = [] if findings is None else findings
        self.last_turn_at = last_turn_at
        self.upstream_errors = upstream_errors
        self.upstream = upstream
        """None for the endpoint of the server."""
        self.capture_level = capture_level
        """The capture level of the endpoint; empty for the server's level."""
        self.purpose = purpose
        self.eval_sampling: Json = {} if eval_sampling is None else eval_sampling
        self.model_calls = model_calls
        self.max_model_calls = max_model_calls
        """0 for no limit."""
        self.budget_stop_count = budget_stop_count
        self.sampling: dict[str, float | int] = {} if sampling is None else sampling

    def attach(self, update: Callable[[], None]) -> None:
        """Call a function before captured values are read."""
        self._update = update

    def refresh(self) -> None:
        """Bring captured values up to date: one thread at a time, and never inside of an update."""
        if self._update is None:
            return
        with self._lock:
            if not self._is_updating:
                self._is_updating = True
                try:
                    self._update()
                finally:
                    self._is_updating = False

    @property
    def over_budget(self) -> bool:
        """Return whether the limit of calls is reached."""
        return 0 < self.max_model_calls <= self.model_calls

    @property
    def idle_seconds(self) -> float:
        """Return the seconds since the last call ended."""
        return time.time() - (self.last_turn_at or self.created_at)


# The ID of a session is its credential: with it, an agent calls the model. So random IDs have 128 bits, a chosen ID is
# taken once, and only the admin routes list IDs.


class SessionRegistry:
    """The sessions of a server. Usable from any thread.

    Args:
        require_registered: Refuse requests with an unknown key; otherwise the key creates a session.
    """

    def __init__(self, *, require_registered: bool = True) -> None:
        self.require_registered = require_registered
        self._sessions: dict[str, CaptureSession] = {}
        self._lock = threading.Lock()
        self.on_delete: Callable[[CaptureSession], None] | None = None
        """Called with each deleted session."""
        self.server: SessionServer | None = None
        """The server that proxies the sessions' calls; None for a registry without one."""

    def create(
        self,
        session_id: str | None = None,
        *,
        upstream: UpstreamAddress | None = None,
        capture_level: str = "",
        purpose: str = "auto",
        eval_sampling: Mapping[str, Any] | None = None,
        max_model_calls: int = 0,
        sampling: Mapping[str, Any] | None = None,
        **metadata: Any,
    ) -> CaptureSession:
        """Create a session.

        Args:
            session_id: Its ID and the agent's key; a random one if this is None or invalid.
            upstream: Its endpoint, in place of the server's.
            capture_level: The capture level of that endpoint.
            purpose: `train`, `eval`, or `auto`: train if the endpoint allows it.
            eval_sampling: The sampling parameters of an evaluation.
            max_model_calls: 0 for no limit.
            sampling: The sampling parameters of training, as in `training_sampling`.
            **metadata: For the session's document.

        Raises:
            ValueError: The ID is taken, or the values contradict each other.
        """
        if isinstance(max_model_calls, bool) or not isinstance(max_model_calls, int) or max_model_calls < 0:
            raise ValueError("max_model_calls must be a non-negative integer")
        rollout_type_for(purpose, capture_level or ("tokens" if purpose == "train" else "text"))
        if purpose == "eval" and sampling is not None:
            raise ValueError("eval purpose cannot apply a training sampling override")
        eval_policy = evaluation_sampling(eval_sampling)
        if eval_policy and purpose != "eval":
            raise ValueError("eval_sampling requires explicit eval purpose")
        session = CaptureSession(
            clean_session_id(session_id) or f"s{secrets.token_hex(16)}",
            metadata=metadata,
            upstream=upstream,
            capture_level=capture_level,
            purpose=purpose,
            eval_sampling=eval_policy,
            max_model_calls=max_model_calls,
            sampling=training_sampling(sampling),
        )
        with self._lock:
            # The id is a credential: a second owner must not get into the rollout of the first.
            if self._sessions.setdefault(session.session_id, session) is not session:
                raise ValueError(f"there is a session {session.session_id!r} already")
        return session

    def get(self, session_id: str | None) -> CaptureSession | None:
        """Return a session by its ID."""
        with self._lock:
            return self._sessions.get(session_id) if session_id else None

    # An agent shows one key for all its calls, also for titles and summaries.
    def resolve(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> CaptureSession | None:
        """Return the session of a request by its key; None to refuse the request.

        Args:
            headers: The request's headers.
            body: Ignored: agents write their own session names into it.
        """
        key = extract_api_key(headers)
        session = self.get(key)
        if session is not None or self.require_registered:
            return session
        return self.create(key)

    def list_ids(self) -> list[str]:
        """Return the IDs of all sessions."""
        with self._lock:
            return sorted(self._sessions)

    def delete(self, session_id: str) -> bool:
        """Forget a session; return False if the ID is unknown."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
        if session is not None and self.on_delete is not None:
            self.on_delete(session)
        return session is not None

    def summary(self) -> list[Json]:
        """Return a summary of each session."""
        with self._lock:
            sessions = list(self._sessions.values())
        lines = []
        for session in sessions:
            stats = session.graph.stats()
            lines.append(
                {
                    "session_id": session.session_id,
                    "turns": stats["n_turns"],
                    "roots": stats["n_roots"],
                    "idle_s": round(session.idle_seconds, 1),
                    "upstream_errors": session.upstream_errors,
                    **session.metadata,
                }
            )
        return lines
