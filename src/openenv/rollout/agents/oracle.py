"""`oracle`: an agent that runs the task's own solution. What it earns is what the task can pay."""

from __future__ import annotations

import shlex

from openenv.errors import RolloutError
from openenv.rollout.agents.base import Agent, AgentRun, Launch
from openenv.sandboxes.base import Sandbox


class Oracle(Agent):
    """Run the solution that comes with the task, and stop at the first line that fails."""

    name = "oracle"
    dialect = None

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Start the lines of the solution, each in a shell of its own.

        Raises:
            RolloutError: the task has no solution.
        """
        if not run.task.solution:
            raise RolloutError("The task has no solution that the oracle could run")
        script = "\n".join(f"/bin/sh -c {shlex.quote(line)} || exit $?" for line in run.task.solution)
        return Launch(argv=("/bin/sh", "-c", script), cwd=run.workdir)
