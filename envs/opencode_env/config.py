"""How an OpenCode agent is set up: its model, its tools, its limits.

Knows values only; must not know sandboxes or servers.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

Provider = Literal["openai_compatible", "openai", "anthropic"]
"""How OpenCode speaks to the model."""

_PACKAGES: dict[str, str] = {
    "openai_compatible": "@ai-sdk/openai-compatible",
    "openai": "@ai-sdk/openai",
    "anthropic": "@ai-sdk/anthropic",
}


class OpenCodeConfig(BaseModel):
    """The setup of one kind of rollout."""

    provider: Provider = Field(default="openai_compatible", description="How OpenCode speaks to the model")
    base_url: str = Field(description="Where the model answers")
    api_key: str = Field(default="intercepted", repr=False, description="The key of the model's endpoint")
    model: str = Field(default="intercepted/model", description="The model's id, as its endpoint knows it")
    request_timeout_ms: int = Field(default=600_000, description="How long OpenCode waits for the model")
    opencode_version: str = Field(default="latest", description="The version to install where there is none")
    disabled_tools: list[str] = Field(default_factory=lambda: ["webfetch", "question"], description="Tools to turn off")
    enabled_tools: list[str] | None = Field(default=None, description="Tools to turn on")
    system_prompt: str | None = Field(default=None, description="Instructions beside OpenCode's own")
    extra_opencode_json: dict[str, Any] = Field(default_factory=dict, description="Laid over opencode.json")
    run_format: Literal["default", "json"] = Field(default="json", description="The form of the agent's log")
    agent_timeout_s: float = Field(default=900.0, description="How long the agent may take")
    extra_env: dict[str, str] = Field(default_factory=dict, description="More variables for the agent")
    extra_setup_shell: str | None = Field(default=None, description="Runs before the task's own setup")
    sandbox_home: str = Field(default="/home/user", description="Where the agent is at home")
    proxy_max_tokens_cap: int | None = Field(default=16_384, description="The most tokens of one completion")
    proxy_top_logprobs: int = Field(default=5, description="Alternatives recorded for each token")
    proxy_disable_thinking: bool = Field(default=False, description="Whether the model is asked not to think")
    proxy_sampling: dict[str, Any] | None = Field(
        default=None,
        description="How answers are sampled, completed by the values of `Sampling()`; the agent does not decide it. "
        "`{}` leaves all parameters to the endpoint, and such answers are excluded from training",
    )

    def provider_npm_package(self) -> str:
        """Return the package through which OpenCode speaks to the model."""
        return _PACKAGES[self.provider]
