"""What the OpenCode environment answers and keeps.

Knows values only, so that clients need no server. A reward is a number only where it can be trusted.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from openenv.core.env_server.types import State
from openenv.rollout.capture.training_trace import RolloutTurn
from openenv.rollout.tasks.task import CommandResult

__all__ = ["CommandResult", "OpenCodeState", "RolloutResult", "RolloutTurn", "TrainingSequence"]


class TrainingSequence(BaseModel):
    """A path of model calls as a training example: the three lists have the same length."""

    role: str = Field(description="`agent`, `auxiliary` or `discarded`")
    calls: list[int] = Field(default_factory=list, description="The turns that it is made of, oldest first")
    prompt_len: int = Field(default=0, description="How many tokens come before the first that was sampled")
    input_ids: list[int] = Field(default_factory=list)
    loss_mask: list[int] = Field(default_factory=list, description="1 where a token was sampled")
    logprobs: list[float] = Field(default_factory=list)
    is_trainable: bool = False


class RolloutResult(BaseModel):
    """What came of a rollout."""

    task_id: str = ""
    sandbox_id: str = ""
    reward: float | None = Field(default=None, description="None where it could not be trusted")
    trust: str | None = Field(default=None, description="How far the reward can be trusted: judged, isolated, shared")
    agent_exit_code: int | None = None
    wall_s: float = 0.0
    mode: str = "transparent_proxy"
    setup_results: list[CommandResult] = Field(default_factory=list)
    verify_results: list[CommandResult] = Field(default_factory=list)
    proxy_turns: list[RolloutTurn] = Field(default_factory=list)
    files: dict[str, str] = Field(default_factory=dict, description="The work folder's text files")
    files_extra: list[str] = Field(default_factory=list, description="Files that are not shown")
    agent_log_tail: str = ""
    proxy_log_tail: str = ""
    error: str | None = Field(default=None, description="What went wrong, if anything")
    status: str | None = Field(default=None, description="`ok`, or what kind of failure it was")
    phase: str | None = Field(default=None, description="The phase that decided the status")
    rollout_id: str = Field(default="", description="The name under which it is stored")
    sandbox: str = Field(default="", description="The kind of sandbox")
    model: str = Field(default="", description="The model that was asked")
    is_scripted: bool = Field(default=False, description="Whether the model played a script")
    sequences: list[TrainingSequence] = Field(default_factory=list, description="Only where they were asked for")
    phase_s: dict[str, float] = Field(default_factory=dict, description="Seconds that each phase took")
    metadata: dict[str, Any] = Field(default_factory=dict)


class OpenCodeState(State):
    """The rollouts of one session."""

    rollouts_completed: int = Field(default=0, description="Rollouts that have ended, whatever came of them")
    last_reward: float | None = Field(default=None, description="Reward of the last one")
    last_task_id: str | None = Field(default=None, description="Task of the last one")
    last_sandbox_id: str | None = Field(default=None, description="Sandbox of the last one")
