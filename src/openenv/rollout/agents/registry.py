"""Agents by name: `agent("opencode")`, `agent("opencode@1.18.33")`.

Knows where each driver lives; loads one when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from openenv.errors import AgentUnavailable
from openenv.rollout.agents.base import Agent

_DRIVERS = {
    "claude-code": "openenv.rollout.agents.claude_code:ClaudeCode",
    "codex": "openenv.rollout.agents.codex:Codex",
    "mini-swe-agent": "openenv.rollout.agents.mini_swe_agent:MiniSweAgent",
    "noop": "openenv.rollout.agents.noop:Noop",
    "opencode": "openenv.rollout.agents.opencode:OpenCode",
    "oracle": "openenv.rollout.agents.oracle:Oracle",
}


def agent_names() -> list[str]:
    """Return the names that `agent` knows."""
    return sorted(_DRIVERS)


def agent(name: str | Agent, **options: Any) -> Agent:
    """Return a driver by its name; a version may follow after `@`, options go to its constructor.

    Raises:
        AgentUnavailable: there is no agent of that name.
    """
    if isinstance(name, Agent):
        return name
    plain, _, version = name.partition("@")
    source = _DRIVERS.get(plain.replace("_", "-"))
    if source is None:
        raise AgentUnavailable(f"There is no agent '{plain}'; there are {', '.join(agent_names())}.")
    module, _, kind = source.partition(":")
    if version:
        options["version"] = version
    try:
        return cast(Agent, getattr(importlib.import_module(module), kind)(**options))
    except TypeError as exc:
        raise AgentUnavailable(f"The agent '{plain}' does not take these options: {exc}") from exc
