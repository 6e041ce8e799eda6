"""Agents: drivers, one small file each, that say how an agent is installed, configured and started."""

from __future__ import annotations

from openenv._lazy import lazy_exports

_EXPORTS = {
    "Agent": "openenv.rollout.agents.base",
    "AgentRun": "openenv.rollout.agents.base",
    "ClaudeCode": "openenv.rollout.agents.claude_code",
    "Codex": "openenv.rollout.agents.codex",
    "Installation": "openenv.rollout.agents.base",
    "Launch": "openenv.rollout.agents.base",
    "MiniSweAgent": "openenv.rollout.agents.mini_swe_agent",
    "Noop": "openenv.rollout.agents.builtin",
    "OpenCode": "openenv.rollout.agents.opencode",
    "Oracle": "openenv.rollout.agents.builtin",
    "Shell": "openenv.rollout.agents.builtin",
    "agent": "openenv.rollout.agents.base",
    "agent_names": "openenv.rollout.agents.base",
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
