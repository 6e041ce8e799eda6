"""Which agents run Harbor's tasks here, and how Harbor's own wrappers of them are pointed at a capture server.

`SEAMS` lists the agents of `openenv.rollout`. A `Seam` also says what Harbor's wrapper of the same agent has to be
given, for `build_trial_config`, which needs the package `harbor`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from openenv.rollout.agents.opencode import merged

# OpenCode's configuration needs a provider's name; models are `intercepted/NAME`.
OPENCODE_PROVIDER = "intercepted"
# Agents cut off or mangle longer names.
_LONGEST = 64
_ODD = re.compile(r"[^A-Za-z0-9._-]")


def agent_facing_model(served_model: str) -> str:
    """Return a model's name for agents: without its owner, because agents interpret a slash differently.

    The capture server replaces it by the endpoint's own name.

    Raises:
        ValueError: The name is empty.
    """
    # "Qwen/Qwen3-4B" -> "Qwen3-4B"
    leaf = served_model.strip().rstrip("/").rpartition("/")[2]
    if not leaf:
        raise ValueError(f"cannot derive a harness-facing model name from {served_model!r}: it is empty")
    if len(leaf) < _LONGEST and not _ODD.search(leaf):
        return leaf
    # The hash keeps two long names apart after shortening.
    return f"{_ODD.sub('-', leaf)[:54]}-{hashlib.sha256(leaf.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Seam:
    """How one agent reaches its model.

    Args:
        name: The agent.
        dialect: The wire format of its calls.
        model_fmt: The model's name as the agent wants it.
        import_path: `module:Class` of a custom agent.
        agent_env: Variables of the agent; `{base_url}`, `{session}` and `{model}` are filled in.
        env: Variables that the agent's wrapper reads in this process.
        kwargs: Makes more arguments of the wrapper out of address, key and model.
        training_kwargs: Additional arguments for training.
        step_limit: Makes the arguments that limit its steps.
        status: `validated` where tests run it.
        notes: What else to know.
    """

    name: str
    dialect: str
    model_fmt: str = "{model}"
    import_path: str | None = None
    agent_env: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    kwargs: Callable[[str, str, str], dict[str, Any]] | None = None
    training_kwargs: Mapping[str, Any] = field(default_factory=dict)
    step_limit: Callable[[int], dict[str, Any]] | None = None
    status: str = "untested"
    notes: str = ""

    def resolve(
        self, *, base_url: str, session: str, model: str, step_limit: int | None = None, training: bool = False
    ) -> tuple[str, dict[str, Any], dict[str, str], dict[str, str]]:
        """Return the model's name, the wrapper's arguments, the agent's variables, and variables of this process.

        Raises:
            ValueError: The model is empty.
        """
        # Agents see the short name, the capture server replaces it by the endpoint's.
        model = agent_facing_model(model)
        values = {"base_url": base_url, "session": session, "model": model}
        arguments = self.kwargs(base_url, session, model) if self.kwargs is not None else {}
        if training:
            arguments = merged(arguments, self.training_kwargs)
        # A second, softer limit: the agent can end its work properly.
        if step_limit and self.step_limit is not None:  # the capture server counts calls in any case
            arguments = merged(arguments, self.step_limit(step_limit))
        # "{base_url}/v1" and so on are templates, filled in for each session.
        agent_env = {name: text.format(**values) for name, text in self.agent_env.items()}
        own_env = {name: text.format(**values) for name, text in self.env.items()}
        return self.model_fmt.format(model=model), arguments, agent_env, own_env


def acp_opencode_config(base_url: str, session: str, model: str) -> dict[str, Any]:
    """Return OpenCode's configuration for a model behind a capture server."""
    name = agent_facing_model(model)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "openenv capture",
        "options": {"baseURL": f"{base_url.rstrip('/')}/v1", "apiKey": session},
        "models": {name: {"name": name, "tool_call": True}},
    }
    return {
        "provider": {OPENCODE_PROVIDER: provider},
        "model": f"{OPENCODE_PROVIDER}/{name}",
        "small_model": f"{OPENCODE_PROVIDER}/{name}",
        # A sandbox must not upload conversations or replace its program.
        "share": "disabled",
        "autoupdate": False,
    }


# Three names, because agents and their libraries read different ones.
_OPENAI = {"OPENAI_BASE_URL": "{base_url}/v1", "OPENAI_API_BASE": "{base_url}/v1", "OPENAI_API_KEY": "{session}"}

SEAMS: Mapping[str, Seam] = {
    seam.name: seam
    for seam in (
        Seam(
            "opencode",
            "openai_chat",
            model_fmt=f"{OPENCODE_PROVIDER}/{{model}}",
            kwargs=lambda base_url, session, model: {"opencode_config": acp_opencode_config(base_url, session, model)},
            # Subagents and web access would add text that the capture cannot attribute.
            training_kwargs={"opencode_config": {"tools": {"task": False, "webfetch": False, "question": False}}},
            status="validated",
        ),
        Seam(
            "claude-code",
            "anthropic",
            agent_env={"ANTHROPIC_BASE_URL": "{base_url}", "ANTHROPIC_API_KEY": "{session}"},
            env={"ANTHROPIC_BASE_URL": "{base_url}", "ANTHROPIC_API_KEY": "{session}"},
            status="validated",
        ),
        Seam("codex", "openai_responses", model_fmt="openai/{model}", agent_env=_OPENAI, status="validated"),
        Seam(
            "mini-swe-agent",
            "openai_chat",
            model_fmt="openai/{model}",
            agent_env={**_OPENAI, "MSWEA_COST_TRACKING": "ignore_errors"},
            step_limit=lambda limit: {"config": {"agent": {"step_limit": limit}}},
            status="validated",
        ),
        Seam("nop", "none", status="validated", notes="does nothing; what it earns, a task gives away"),
        Seam("oracle", "none", status="validated", notes="runs the task's solution; what it earns, a task can pay"),
    )
}
"""The agents that run tasks here, by Harbor's names."""


def get(name: str, *, profile: str | None = None) -> Seam:
    """Return the seam of a built-in agent, or of a custom agent given as `module:Class`.

    Raises:
        ValueError: there is no such agent, or profiles are asked for, which no agent here has.
    """
    if profile is not None:
        raise ValueError(f"the agent {name!r} has no profile {profile!r}")
    # Accept spellings of Harbor and of us: noop, mini_swe_agent, opencode@1.2.3.
    plain = {"noop": "nop"}.get(name, name).replace("_", "-").partition("@")[0]
    if plain in SEAMS:
        return SEAMS[plain]
    # A custom agent is assumed to speak OpenAI's API.
    if ":" in name:
        return Seam(name, "openai_chat", import_path=name, agent_env=_OPENAI)
    raise ValueError(f"no harness {name!r}: choose from {', '.join(SEAMS)}, or give module:Class")
