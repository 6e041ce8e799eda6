"""What came of a rollout: commands, model turns, status, reward.

Knows values only. `CommandResult` and `RolloutTurn` are shapes that existing trainers read.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["ok", "policy_failed", "truncated", "env_failed", "sandbox_failed", "grader_failed", "cancelled"]
"""`ok`: verified. `policy_failed`: the agent itself failed (crash, exit code, memory). `truncated`: a time or token
limit ended it. `env_failed`: setup, model endpoint or capture failed. `sandbox_failed`, `grader_failed`: the sandbox,
the verifier failed."""

Phase = Literal["sandbox", "setup", "agent", "collect", "verify", "store", "done"]
"""Where a rollout is, in this order."""


class CommandResult(BaseModel):
    """What a setup or verify line did, or the `judge` of a check; what is not passed never has exit code 0."""

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

    The three token lists have the same length, but that a list is empty where the engine gives nothing of its kind. A
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
