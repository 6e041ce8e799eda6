"""What is to be done: a `Task`, the `Model` that the agent talks to, and the `Budget` it has.

Knows values only. Must not know sandboxes, agents or servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from openenv.sandboxes.base import Limits

Dialect = Literal["openai_chat", "openai_responses", "anthropic"]
"""How a model endpoint is spoken to."""

PROTECTED = (
    "**/sitecustomize.*",
    "**/usercustomize.*",
    "**/*.pth",
    "**/*.dist-info/**",
    "**/*.egg-info/**",
    "**/conftest.*",
    "**/pytest.*",
    "**/.pytest.*",
    "**/pytest/**",
    "**/_pytest.*",
    "**/_pytest/**",
    "**/unittest.*",
    "**/unittest/**",
    "**/pluggy.*",
    "**/pluggy/**",
    "**/iniconfig.*",
    "**/iniconfig/**",
    "**/tox.ini",
    "**/__pycache__/**",
)
"""What decides how Python and pytest start: the verifier sees these as the setup left them, not as the agent did.
Where any pattern is given, a `pyproject.toml` or `setup.cfg` that the agent changed and that names pytest counts."""


class Task(BaseModel):
    """An instruction, how to prepare for it, and how to tell whether it was done."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instruction: str
    setup: tuple[str, ...] = ()
    """Shell lines that run in the agent's sandbox, all of them before the agent starts."""
    verify: tuple[str, ...] = ()
    """Shell lines that run in a fresh sandbox with the agent's work tree; the reward is the share that exits with 0."""
    files: Mapping[str, str] = Field(default_factory=dict)
    """Text files for the agent's sandbox, before the setup; paths below the work folder or absolute."""
    verify_files: Mapping[str, str] = Field(default_factory=dict)
    """Text files for the verifier's sandbox only, laid over the agent's work tree; the agent never sees them."""
    protected: tuple[str, ...] = PROTECTED
    """Patterns below the work folder that reach the verifier as the setup left them."""
    reward_file: bool | None = None
    """Whether `logs/verifier/reward.txt` in the verifier's home is the reward. None: when a line or a file of the task,
    or what its setup left, names `reward.txt`; code of the agent that a check runs cannot decide to write one."""
    solution: tuple[str, ...] = ()
    """Shell lines that solve the task: what the `oracle` agent runs."""
    limits: Limits = Field(default_factory=Limits)
    setup_timeout_s: float = Field(default=120.0, gt=0)
    agent_timeout_s: float = Field(default=600.0, gt=0)
    verify_timeout_s: float = Field(default=120.0, gt=0)
    """Limit of each single setup or verify line; of the agent as a whole."""
    task_id: str = ""
    metadata: Mapping[str, Any] = Field(default_factory=dict)

    def texts(self) -> tuple[str, ...]:
        """Return the texts that say which files are the agent's to write."""
        return (self.instruction, *self.verify, *self.verify_files.values(), *self.solution)


class Budget(BaseModel):
    """What one rollout may spend on its model; None is no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_calls: int | None = None
    max_completion_tokens: int | None = None
    max_seconds: float | None = None


class Model(BaseModel):
    """A model endpoint, and what the capture proxy asks of it. The key stays on the host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    name: str
    """The model's full id, as the endpoint knows it."""
    api_key: SecretStr = SecretStr("intercepted")
    dialect: Dialect = "openai_chat"
    top_logprobs: int = 5
    return_token_ids: bool = True
    max_tokens_cap: int | None = 4096
    disable_thinking: bool = False
    request_timeout_s: float = 600.0
    extra_headers: Mapping[str, str] = Field(default_factory=dict)
