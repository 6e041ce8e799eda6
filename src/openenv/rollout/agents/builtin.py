"""`noop`: an agent that does nothing. What it earns is what a task gives away for free."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from openenv.errors import RolloutError
from openenv.rollout.agents.base import Agent, AgentRun, Launch
from openenv.rollout.task import Dialect
from openenv.sandboxes.base import Sandbox


class Noop(Agent):
    """Do nothing, and end well."""

    name = "noop"
    dialect = None

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Start a command that does nothing."""
        return Launch(argv=("/bin/sh", "-c", ":"), cwd=run.workdir)


# oracle: `oracle`: an agent that runs the task's own solution. What it earns is what the task can pay.


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


# shell: `Shell`: an agent that is a list of shell lines. The cheat suite and tests are made of it.


class Shell(Agent):
    """Run shell lines as the agent would: in its sandbox, in the work folder, with its environment.

    Args:
        lines: The lines. `$OPENAI_BASE_URL` and `$OPENAI_API_KEY` lead to the model when a dialect is given.
        name: How the agent is called in outcomes.
        dialect: How the lines speak to a model, or None when they need none.
        strict: Stop at the first line that fails, with its exit code; otherwise all run and the last one's counts.
    """

    name = "shell"

    def __init__(
        self, lines: Sequence[str], *, name: str = "shell", dialect: Dialect | None = None, strict: bool = True
    ) -> None:
        self.lines = tuple(lines)
        self.name = name  # each list of lines is an agent of its own
        self.dialect = dialect
        self.strict = strict

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Start a shell with all lines; each is a command of its own, so an unfinished one breaks no other."""
        guard = "|| exit $?" if self.strict else ";"
        script = "\n".join(f"eval {shlex.quote(line)} {guard}" for line in self.lines) or ":"
        envs = {"OPENAI_BASE_URL": run.base_url, "OPENAI_API_KEY": run.api_key, "OPENAI_MODEL": run.model}
        return Launch(argv=("/bin/sh", "-c", script), envs=envs if run.base_url else {}, cwd=run.workdir)
