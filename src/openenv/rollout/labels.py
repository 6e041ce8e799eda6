"""Labels: what a rollout that went wrong is called, and whose fault it was.

Knows facts about a run, and decides. The order of the rules is the order of trust: what the host saw comes before what
the agent says of itself, so that a broken endpoint or a limit never counts as a failing policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from openenv.rollout.outcome import Status

_BAD_REQUESTS = frozenset({400, 413, 422})
"""Answers of an endpoint that are about the request: the agent's doing, such as a prompt that is too long."""

_UNREACHABLE = 9
"""So many attempts in a row without a connection, three per call, and an endpoint is given up."""
_FAILING = 30
"""The same for one that answers, but with errors: those pass more often."""


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
    """What the driver makes of exit code and log."""


@dataclass(frozen=True, slots=True)
class Label:
    """A status other than `ok`, and why."""

    status: Status
    reason: str


def judge(agent: AgentFacts, model: ModelUse) -> Label | None:
    """Return what is wrong with an agent's run, or None when nothing is."""
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
    """Say whether an endpoint has failed so often that waiting for the agent to give up is a waste."""
    if model.last_status in _BAD_REQUESTS:
        return False
    return model.failures >= (_UNREACHABLE if model.last_status is None else _FAILING)


def _dead_endpoint(model: ModelUse) -> str | None:
    if model.failures == 0 or model.last_status in _BAD_REQUESTS:
        return None
    how = "no call was answered" if model.answered == 0 else f"{model.answered} calls were answered, then it failed"
    return f"the model endpoint failed ({how}): {model.last_error or model.last_status}"
