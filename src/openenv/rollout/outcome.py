"""The outcome of a rollout: commands, model turns, status and reward, and the rules that choose the status.

Knows values only. `CommandResult` and `RolloutTurn` are shapes that existing trainers read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["ok", "policy_failed", "truncated", "env_failed", "sandbox_failed", "grader_failed", "cancelled"]
"""`ok`: verified. `policy_failed`: the agent itself failed (crash, exit code, memory). `truncated`: a time or token
limit ended it. `env_failed`: setup, model endpoint or capture failed. `sandbox_failed`, `grader_failed`: the sandbox,
the verifier failed."""

Phase = Literal["sandbox", "setup", "agent", "collect", "verify", "store", "done"]
"""Where a rollout is, in this order."""


class CommandResult(BaseModel):
    """What a setup line, a verify line or the `judge` of a check did; a check that fails never has exit code 0."""

    cmd: str
    exit_code: int
    stdout: str = ""
    stderr: str = ""
    duration_s: float = 0.0
    run: CommandResult | None = None
    """What the `run` of a check did."""
    score: float | None = None
    """What a check's judge wrote as its reward, where it wrote one: it counts in place of the exit code."""
    note: str | None = None
    """Why a check counts otherwise than its exit code says."""


class RolloutTurn(BaseModel):
    """One model call as trainers read it.

    The three token lists have the same length; one is empty where the model server reports nothing of its kind. A
    single log-probability that is missing is None.
    """

    turn: int
    finish_reason: str | None = None
    completion_tokens: list[str] = Field(default_factory=list)
    completion_token_ids: list[int] = Field(default_factory=list)
    per_token_logps: list[float | None] = Field(default_factory=list)
    latency_s: float = 0.0
    timestamp: float = 0.0
    upstream_status: int | None = None
    upstream_error: dict[str, Any] | None = None


class Outcome(BaseModel):
    """The result of one rollout; `reward` is a number only where it can be trusted."""

    model_config = ConfigDict(extra="forbid")

    rollout_id: str
    task_id: str = ""
    status: Status
    phase: Phase = "done"
    """The phase that decided the status: `done` when all were passed."""
    reason: str | None = None
    reward: float | None = None
    agent: str = ""
    model: str = ""
    agent_exit_code: int | None = None
    agent_log_tail: str = ""
    setup_results: list[CommandResult] = Field(default_factory=list)
    verify_results: list[CommandResult] = Field(default_factory=list)
    turns: list[RolloutTurn] = Field(default_factory=list)
    files: dict[str, str] = Field(default_factory=dict)
    files_extra: list[str] = Field(default_factory=list)
    sandbox: str = ""
    sandbox_id: str = ""
    started_at: float = 0.0
    wall_s: float = 0.0
    phase_s: dict[str, float] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)


class Progress(BaseModel):
    """An event of a running rollout: a phase began, a command ended, a model call was made."""

    rollout_id: str
    phase: Phase
    message: str = ""
    turn: int | None = None
    elapsed_s: float = 0.0


_BAD_REQUESTS = frozenset({400, 413, 422})
"""Statuses that are about the request, so the agent's doing: a prompt that is too long, for example."""

_UNREACHABLE = 9
"""Attempts in a row without a connection (three per call) after which an endpoint counts as dead."""
_FAILING = 30
"""The same for an endpoint that answers with errors, which pass more often."""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What the host saw of a rollout's model calls."""

    needed: bool
    calls: int = 0
    answered: int = 0
    tokens: int = 0
    refused: str | None = None
    """Which limit made the proxy refuse a call, or None."""
    failures: int = 0
    """How often the endpoint has failed since its last good answer."""
    last_status: int | None = None
    last_error: str = ""
    unrecorded: str | None = None
    """Why records of calls are missing, or None."""


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What the host saw of the agent."""

    exit_code: int
    timed_out: bool
    limit_s: float
    failure: str | None
    """What the driver concludes from exit code and log."""


@dataclass(frozen=True, slots=True)
class Label:
    """A status other than `ok`, and why."""

    status: Status
    reason: str


def label_of(agent: AgentFacts, model: ModelUse) -> Label | None:
    """Return what is wrong with an agent's run, or None when nothing is."""
    # The order is the order of trust: what the host saw comes before what the agent reports of itself, so that a
    # broken endpoint or a limit never counts as a failing policy.
    if model.unrecorded is not None:
        return Label("env_failed", f"model calls could not be recorded: {model.unrecorded}")
    dead = _dead_endpoint(model)
    if dead is not None:
        return Label("env_failed", dead)
    if model.refused is not None:
        return Label("truncated", f"the budget is spent: {model.refused}")
    if agent.timed_out and model.calls > 0 and model.answered == 0 and model.tokens == 0:
        return Label("env_failed", f"the model endpoint failed (no answer within the agent's {agent.limit_s:g} s)")
    if agent.timed_out:
        return Label("truncated", f"agent timeout: it ran for {agent.limit_s:g} s and was killed")
    if model.needed and model.calls == 0:
        return Label("env_failed", f"the agent made no model call and exited with code {agent.exit_code}")
    if model.needed and model.answered == 0 and model.tokens == 0:
        why = model.last_error or f"the agent exited with code {agent.exit_code}"
        return Label("env_failed", f"none of the agent's model calls was answered: {why}")
    if agent.exit_code == 137:
        return Label("policy_failed", "the agent was killed (signal 9), as when memory runs out")
    if agent.failure is not None:
        return Label("policy_failed", agent.failure)
    return None


def is_hopeless(model: ModelUse) -> bool:
    """Return whether an endpoint has failed so often that it is not worth waiting for the agent to give up."""
    if model.last_status in _BAD_REQUESTS:
        return False
    return model.failures >= (_UNREACHABLE if model.last_status is None else _FAILING)


def _dead_endpoint(model: ModelUse) -> str | None:
    if model.failures == 0 or model.last_status in _BAD_REQUESTS:
        return None
    how = "no call was answered" if model.answered == 0 else f"{model.answered} calls were answered, then it failed"
    return f"the model endpoint failed ({how}): {model.last_error or model.last_status}"
