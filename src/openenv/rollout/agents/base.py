"""What an agent driver is, and drivers by name: `agent("opencode")`, `agent("opencode@1.18.33")`.

Knows sandboxes and paths. Must not know rewards, captures or the engine. To add an agent, write a file like `codex.py`
and a line in `_DRIVERS`.
"""

from __future__ import annotations

import importlib
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from openenv.errors import AgentUnavailable
from openenv.rollout.tasks.task import Dialect, Task
from openenv.sandboxes.base import Mount, Sandbox


@dataclass(frozen=True, slots=True)
class Installation:
    """An agent that is ready on the host: what a sandbox must mount of it, and its command inside."""

    mounts: tuple[Mount, ...] = ()
    executable: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class AgentRun:
    """One run of an agent, as seen from inside its sandbox."""

    task: Task
    base_url: str
    """Where the capture proxy answers inside, ending in `/v1`."""
    api_key: str
    """The key of this rollout; worth nothing elsewhere."""
    model: str
    home: str
    workdir: str
    installation: Installation
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """The command that starts the agent."""

    argv: tuple[str, ...]
    envs: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None


def start_with_instruction(sandbox: Sandbox, run: AgentRun, command: Sequence[str], envs: Mapping[str, str]) -> Launch:
    """Write the instruction to a file, and return a command that reads it from standard input.

    As an argument it could be too long, or begin with a dash.
    """
    path = f"{run.home}/task/instruction.md"
    sandbox.write_text(path, run.task.instruction)
    line = f"exec {shlex.join(command)} < {shlex.quote(path)}"
    return Launch(argv=("/bin/sh", "-c", line), envs=envs, cwd=run.workdir)


class Agent(ABC):
    """A driver for one kind of agent."""

    name: str
    dialect: Dialect | None = "openai_chat"
    """The wire format of its model calls; None when it needs no model."""

    def install(self, cache: Path, report: Callable[[str], None]) -> Installation:
        """Install the agent in `cache`, once per machine and version.

        Raises:
            AgentUnavailable: it is not installed and cannot be fetched.
        """
        return Installation()

    @abstractmethod
    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Write the agent's configuration, and return the command that starts it."""

    def failure(self, exit_code: int, log: str) -> str | None:
        """Return why the run counts as failed, or None; by default, any exit code but 0 is a failure."""
        return None if exit_code == 0 else f"the agent exited with code {exit_code}"


_DRIVERS = {
    "claude-code": "openenv.rollout.agents.claude_code:ClaudeCode",
    "codex": "openenv.rollout.agents.codex:Codex",
    "mini-swe-agent": "openenv.rollout.agents.mini_swe_agent:MiniSweAgent",
    "noop": "openenv.rollout.agents.builtin:Noop",
    "opencode": "openenv.rollout.agents.opencode:OpenCode",
    "oracle": "openenv.rollout.agents.builtin:Oracle",
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
