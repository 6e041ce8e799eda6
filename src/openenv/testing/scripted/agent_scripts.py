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


def opencode_write(path: str, content: str) -> ScriptedCall:
    """Return OpenCode's call that writes a file below its folder."""
    return ScriptedCall(name="write", arguments={"filePath": f"${{cwd}}/{path}", "content": content})


def opencode_shell(command: str) -> ScriptedCall:
    """Return OpenCode's call that runs a command."""
    return ScriptedCall(name="bash", arguments={"command": command, "description": "Run a command"})


def claude_code_write(path: str, content: str) -> ScriptedCall:
    """Return Claude Code's call that writes a new file below its folder."""
    return ScriptedCall(name="Write", arguments={"file_path": f"${{cwd}}/{path}", "content": content})


def claude_code_shell(command: str) -> ScriptedCall:
    """Return Claude Code's call that runs a command; it has to be allowed to."""
    return ScriptedCall(name="Bash", arguments={"command": command, "description": "Run a command"})


def codex_write(path: str, content: str) -> ScriptedCall:
    """Return Codex's call that writes a file below its folder: a shell command, it has no tool for that."""
    return codex_shell(_here_document(path, content))


def codex_shell(command: str) -> ScriptedCall:
    """Return Codex's call that runs a command."""
    return ScriptedCall(name="exec_command", arguments={"cmd": command})


def mini_swe_agent_write(path: str, content: str) -> ScriptedCall:
    """Return mini-swe-agent's call that writes a file below its folder: a shell command, it has no other tool."""
    return mini_swe_agent_shell(_here_document(path, content))


def mini_swe_agent_shell(command: str) -> ScriptedCall:
    """Return mini-swe-agent's call that runs a command."""
    return ScriptedCall(name="bash", arguments={"command": command})


def _here_document(path: str, content: str) -> str:
    folder = "" if "/" not in path else f"mkdir -p {quote(path.rpartition('/')[0])} && "
    end = "" if content.endswith("\n") else "\n"
    return f"{folder}cat > {quote(path)} <<'END_OF_FILE'\n{content}{end}END_OF_FILE\n"


@dataclass(frozen=True, slots=True)
class AgentTools:
    """The tool calls of one agent."""

    write: Callable[[str, str], ScriptedCall]
    shell: Callable[[str], ScriptedCall]
    ending: tuple[ScriptedCall, ...] = ()
    """The call that ends the run, for an agent that does not end by saying something."""


AGENTS: Mapping[str, AgentTools] = {
    "opencode": AgentTools(opencode_write, opencode_shell),
    "claude-code": AgentTools(claude_code_write, claude_code_shell),
    "codex": AgentTools(codex_write, codex_shell),
    "mini-swe-agent": AgentTools(
        mini_swe_agent_write,
        mini_swe_agent_shell,
        (mini_swe_agent_shell("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),),
    ),
}
"""The agents that there are ready scripts for."""


def write_file(
    agent: str, path: str, content: str, *, name: str = "write_file", key: str | None = None, then: str = "Done."
) -> Script:
    """Return a script in which an agent writes one file and says that it is done.

    Args:
        agent: `opencode`, `claude-code`, `codex` or `mini-swe-agent`.
        path: The file, below the agent's folder.
        content: What is written; may hold placeholders.
        name: The script's name.
        key: Text in the task that selects the script.
        then: The text of the last turn.

    Raises:
        KeyError: There is no such agent.
    """
    tools = AGENTS[agent]
    return Script(name=name, key=key, turns=_turns(tools, tools.write(path, content), then))


def run_command(
    agent: str, command: str, *, name: str = "run_command", key: str | None = None, then: str = "Done."
) -> Script:
    """Return a script in which an agent runs one shell command and says that it is done.

    Raises:
        KeyError: There is no such agent.
    """
    tools = AGENTS[agent]
    return Script(name=name, key=key, turns=_turns(tools, tools.shell(command), then))


def binary_search(agent: str = "opencode", *, name: str = "binary_search") -> Script:
    """Return a script in which an agent writes a correct `binary_search.py`.

    Raises:
        KeyError: There is no such agent.
    """
    return write_file(agent, "binary_search.py", BINARY_SEARCH, name=name, then="binary_search.py is written.")


def _turns(tools: AgentTools, call: ScriptedCall, then: str) -> tuple[Turn, ...]:
    return (Turn(calls=(call,)), Turn(text=then, calls=tools.ending))
