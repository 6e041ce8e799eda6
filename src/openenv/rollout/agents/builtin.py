"""Agents without a model: `noop` and `oracle` bound the reward of a task, `shell` runs scripts in tests."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence

from openenv.errors import RolloutError
from openenv.rollout.agents.base import Agent, AgentRun, Launch
from openenv.rollout.tasks.task import Dialect, as_bytes
from openenv.sandboxes.base import Sandbox


class Noop(Agent):
    """Do nothing, and exit with 0. Its reward is the one that a task gives for no work."""

    name = "noop"
    dialect = None

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Start a command that does nothing."""
        return Launch(argv=("/bin/sh", "-c", ":"), cwd=run.workdir)


class Oracle(Agent):
    """Run the task's solution, and stop at the first failing line. Its reward shows that the task can be solved."""

    name = "oracle"
    dialect = None

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Write the files of the solution, and run each of its lines in a new shell.

        Raises:
            RolloutError: the task has no solution.
        """
        if not run.task.solution:
            raise RolloutError("The task has no solution that the oracle could run")
        for path, content in run.task.solution_files.items():
            sandbox.write_bytes(posixpath.join(run.workdir, path), as_bytes(content))
        script = "\n".join(f"/bin/sh -c {shlex.quote(line)} || exit $?" for line in run.task.solution)
        return Launch(argv=("/bin/sh", "-c", script), envs=run.task.solution_env, cwd=run.workdir)


class Shell(Agent):
    """Run shell lines like an agent: in its sandbox, in the work folder, with its environment.

    Args:
        lines: The lines. With a dialect, `$OPENAI_BASE_URL` and `$OPENAI_API_KEY` point to the model.
        name: The agent's name in outcomes.
        dialect: The wire format of the lines' model calls; None if they make no calls.
        strict: Stop at the first failing line with its exit code. If False, all lines run and the last code counts.
    """

    name = "shell"

    def __init__(
        self, lines: Sequence[str], *, name: str = "shell", dialect: Dialect | None = None, strict: bool = True
    ) -> None:
        self.lines = tuple(lines)
        self.name = name
        self.dialect = dialect
        self.strict = strict

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Start a shell with all lines. Each is evaluated alone, so a syntax error affects only its line."""
        guard = "|| exit $?" if self.strict else ";"
        script = "\n".join(f"eval {shlex.quote(line)} {guard}" for line in self.lines) or ":"
        envs = {"OPENAI_BASE_URL": run.base_url, "OPENAI_API_KEY": run.api_key, "OPENAI_MODEL": run.model}
        return Launch(argv=("/bin/sh", "-c", script), envs=envs if run.base_url else {}, cwd=run.workdir)
