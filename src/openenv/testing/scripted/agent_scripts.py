"""Ready scripts ("write a file, then finish") with the tool names and arguments of each coding agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from shlex import quote

from .script import Script, ScriptedCall, Turn

BINARY_SEARCH = '''\
def binary_search(items, target):
    """Return the index of target in sorted items, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1
'''


@dataclass(frozen=True, slots=True)
class AgentTools:
    """The tool calls of one agent."""

    write: Callable[[str, str], ScriptedCall]
    """Writes a file below the agent's folder: path and content."""
    shell: Callable[[str], ScriptedCall]
    """Runs a command; Claude Code needs permission for it."""
    ending: tuple[ScriptedCall, ...] = ()
    """The call that ends the run, if a text without calls does not end it."""


def _tool(name: str, **arguments: str) -> ScriptedCall:
    return ScriptedCall(name=name, arguments=arguments)


def _here_document(path: str, content: str) -> str:
    folder = "" if "/" not in path else f"mkdir -p {quote(path.rpartition('/')[0])} && "
    end = "" if content.endswith("\n") else "\n"
    return f"{folder}cat > {quote(path)} <<'END_OF_FILE'\n{content}{end}END_OF_FILE\n"


AGENTS: Mapping[str, AgentTools] = {
    "opencode": AgentTools(
        write=lambda path, content: _tool("write", filePath=f"${{cwd}}/{path}", content=content),
        shell=lambda command: _tool("bash", command=command, description="Run a command"),
    ),
    "claude-code": AgentTools(
        write=lambda path, content: _tool("Write", file_path=f"${{cwd}}/{path}", content=content),
        shell=lambda command: _tool("Bash", command=command, description="Run a command"),
    ),
    # These two agents have no tool for writing files.
    "codex": AgentTools(
        write=lambda path, content: _tool("exec_command", cmd=_here_document(path, content)),
        shell=lambda command: _tool("exec_command", cmd=command),
    ),
    "mini-swe-agent": AgentTools(
        write=lambda path, content: _tool("bash", command=_here_document(path, content)),
        shell=lambda command: _tool("bash", command=command),
        ending=(_tool("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),),
    ),
}
"""The agents with ready scripts."""


def write_file(
    agent: str, path: str, content: str, *, name: str = "write_file", key: str | None = None, then: str = "Done."
) -> Script:
    """Return a script in which an agent writes one file and says that it is done.

    Args:
        agent: `opencode`, `claude-code`, `codex` or `mini-swe-agent`.
        path: The file, below the agent's folder.
        content: The content of the file; may contain placeholders.
        name: The script's name.
        key: Text in the task that selects the script.
        then: The text of the last turn.

    Raises:
        KeyError: The agent is unknown.
    """
    tools = AGENTS[agent]
    return Script(name=name, key=key, turns=_turns(tools, tools.write(path, content), then))


def run_command(
    agent: str, command: str, *, name: str = "run_command", key: str | None = None, then: str = "Done."
) -> Script:
    """Return a script in which an agent runs one shell command and says that it is done.

    Raises:
        KeyError: The agent is unknown.
    """
    tools = AGENTS[agent]
    return Script(name=name, key=key, turns=_turns(tools, tools.shell(command), then))


def binary_search(agent: str = "opencode", *, name: str = "binary_search") -> Script:
    """Return a script in which an agent writes a correct `binary_search.py`.

    Raises:
        KeyError: The agent is unknown.
    """
    return write_file(agent, "binary_search.py", BINARY_SEARCH, name=name, then="binary_search.py is written.")


def _turns(tools: AgentTools, call: ScriptedCall, then: str) -> tuple[Turn, ...]:
    return (Turn(calls=(call,)), Turn(text=then, calls=tools.ending))
