"""The interface of agent drivers, and agents by name: `agent("opencode")`, `agent("opencode@1.18.33")`.

Knows sandboxes and paths. Must not know rewards, captures or the engine. Agents register in the entry-point group
`openenv.agents`, so that other packages can add some:

    [project.entry-points."openenv.agents"]
    my-agent = "my_package.agent:MyAgent"
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openenv._lazy import load_plugin, plugin_names
from openenv.errors import AgentUnavailable, OpenEnvError
from openenv.rollout.tasks.task import Dialect, Task
from openenv.sandboxes.base import ExecResult, Mount, Sandbox


@dataclass(frozen=True, slots=True)
class Installation:
    """An agent installed on the host: the files that a sandbox mounts, and the command inside."""

    mounts: tuple[Mount, ...] = ()
    executable: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class AgentRun:
    """One run of an agent, with paths and addresses as they are inside its sandbox."""

    task: Task
    base_url: str
    """The address of the capture proxy inside, ending in `/v1`; empty without a model or with `is_loop`."""
    api_key: str
    """The key of this rollout, which only the capture proxy accepts."""
    model: str
    home: str
    workdir: str
    installation: Installation
    options: Mapping[str, object] = field(default_factory=dict)
    skipped: Sequence[Mapping[str, Any]] = ()
    """The requests of the calls whose work the sandbox has already, and the one after them; see `Agent.can_skip`."""


class LoopTools(ABC):
    """The sandbox and the model of an agent whose loop runs in this process. Both end with the agent's time."""

    @abstractmethod
    def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a chat completion request through the capture proxy, and return the response.

        Raises:
            ModelCallFailed: The endpoint refuses the request, or does not answer.
        """

    @abstractmethod
    def run(self, command: str, *, timeout_s: float, max_output: int) -> ExecResult:
        """Run a shell line in the work folder of the sandbox."""

    @abstractmethod
    def log(self, text: str) -> None:
        """Write a line to the agent's log."""


class ModelCallFailed(OpenEnvError):
    """A model call of a loop has no usable response."""

    code = "MODEL_CALL_FAILED"


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of the agent: a command in the sandbox, or a loop in this process."""

    argv: tuple[str, ...] = ()
    envs: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    loop: Callable[[LoopTools], int] | None = None
    """Runs instead of the command, and returns an exit code. It must treat the model's replies and the output of
    commands as untrusted data, and run nothing outside of the sandbox."""


def start_with_instruction(sandbox: Sandbox, run: AgentRun, command: Sequence[str], envs: Mapping[str, str]) -> Launch:
    """Write the instruction to a file, and return a command that reads it from standard input.

    An argument could be too long, or be taken for an option because it begins with a dash.
    """
    path = f"{run.home}/task/instruction.md"
    sandbox.write_text(path, run.task.instruction)
    line = f"exec {shlex.join(command)} < {shlex.quote(path)}"
    return Launch(argv=("/bin/sh", "-c", line), envs=envs, cwd=run.workdir)


class Agent(ABC):
    """A driver for one kind of agent."""

    name: str
    dialect: Dialect | None = "openai_chat"
    """The wire format of its model calls; None if it needs no model."""
    is_loop: bool = False
    """Whether `prepare` always returns a loop. Then nothing in the sandbox reaches the model; `base_url` is empty."""

    def install(self, cache: Path, report: Callable[[str], None]) -> Installation:
        """Install the agent in `cache`, once per machine and version.

        Raises:
            AgentUnavailable: the agent is not installed and cannot be downloaded.
        """
        return Installation()

    @abstractmethod
    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Write the agent's configuration, and return the command, or the loop, that starts it."""

    def can_skip(self, options: Mapping[str, object]) -> bool:
        """Return whether a branch may start with the files before a call, without the work that led to them.

        Such an agent changes files by commands alone, and its only state is its conversation. It asks for its recorded
        answers again. A loop of this process needs nothing else: `LoopTools.run` returns the recorded results. Other
        agents find the results in `AgentRun.skipped`.
        """
        return False

    def failure(self, exit_code: int, log: str) -> str | None:
        """Return the reason if the run failed, else None; by default every exit code except 0 is a failure."""
        return None if exit_code == 0 else f"the agent exited with code {exit_code}"


AGENTS = "openenv.agents"  # entry points: subclasses of `Agent`, or functions that return one


def agent_names() -> list[str]:
    """Return the names of the installed agents, such as `opencode`."""
    return plugin_names(AGENTS)


def agent(name: str | Agent, **options: Any) -> Agent:
    """Return an agent by its registered name; a driver is returned as it is.

    Args:
        name: Such as `opencode`, or `opencode@1.18.33` to choose a version.
        options: For the driver's constructor.

    Raises:
        AgentUnavailable: no installed package registers the name, or the driver refuses the options.
    """
    if isinstance(name, Agent):
        return name
    plain, _, version = name.partition("@")
    try:
        make = load_plugin(AGENTS, plain.replace("_", "-"), kind="agent")
    except LookupError as exc:
        raise AgentUnavailable(str(exc.args[0])) from None
    except ImportError as exc:
        raise AgentUnavailable(f"the agent '{plain}' cannot be imported: {exc}") from exc
    if version:
        options["version"] = version
    try:
        driver = make(**options)
    except TypeError as exc:
        raise AgentUnavailable(f"the agent '{plain}' cannot be created with these options: {exc}") from exc
    if not isinstance(driver, Agent):
        raise AgentUnavailable(f"the entry point '{plain}' in {AGENTS} returns {type(driver).__name__}, not an Agent")
    return driver
