"""`noop`: an agent that does nothing. What it earns is what a task gives away for free."""

from __future__ import annotations

from openenv.rollout.agents.base import Agent, AgentRun, Launch
from openenv.sandboxes.base import Sandbox


class Noop(Agent):
    """Do nothing, and end well."""

    name = "noop"
    dialect = None

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Start a command that does nothing."""
        return Launch(argv=("/bin/sh", "-c", ":"), cwd=run.workdir)
