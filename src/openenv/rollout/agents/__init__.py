"""Agents: drivers, one small file each, that say how an agent is installed, configured and started."""

from __future__ import annotations

from openenv._lazy import by_module, lazy_exports

_EXPORTS = by_module(
    {
        "openenv.rollout.agents.base": "Agent AgentRun Installation Launch agent agent_names",
        "openenv.rollout.agents.builtin": "Noop Oracle Shell",
        "openenv.rollout.agents.claude_code": "ClaudeCode",
        "openenv.rollout.agents.codex": "Codex",
        "openenv.rollout.agents.mini_swe_agent": "MiniSweAgent",
        "openenv.rollout.agents.opencode": "OpenCode",
        "openenv.rollout.agents.single_turn": "SingleTurn",
    }
)

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
