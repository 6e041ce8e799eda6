"""The agent `shell-chat`: a chat in which each reply of the model is a shell command.

The loop runs in this process and needs no installation; only the commands run in the sandbox. Made for small models
that cannot use tools: a few examples as chat turns show them the format.

    user: the instruction ──> assistant: `wc -l < a.txt > n.txt` ──> runs in the sandbox: exit code 0 ──> the end
                                 ▲                                          │ another code
                                 └────────── user: exit code, output ───────┘
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openenv.rollout.agents.base import Agent, AgentRun, Launch, LoopTools, ModelCallFailed
from openenv.sandboxes.base import ExecResult, Sandbox

_FENCED = re.compile(r"```[a-z]*\n(.*?)\n?```", re.DOTALL)
_MAX_OUTPUT = 16 * 1024
_END = "exit"


@dataclass(kw_only=True)
class ShellChat(Agent):
    """A model that works on a task with one shell command per reply.

    Raises:
        ValueError: a value is out of range.
    """

    name = "shell-chat"
    dialect = "openai_chat"
    is_loop = True

    system: str = "You work in a Linux shell. Answer each message with one shell command and nothing else."
    """The system message; empty for none."""
    examples: Sequence[tuple[str, str]] = ()
    """Pairs of an instruction and a command, shown as earlier turns of the chat."""
    max_turns: int = 4
    """The largest number of commands."""
    max_tokens: int = 256
    """The largest number of tokens in a reply."""
    ends_after: Literal["success", "exit"] = "exit"
    """`success` ends with the first command whose exit code is 0; `exit` with the command `exit`."""
    command_timeout_s: float = 60.0
    """The time limit of a command."""
    output_chars: int = 2000
    """How much of a command's output the model sees."""

    def __post_init__(self) -> None:
        if min(self.max_turns, self.max_tokens) < 1 or self.command_timeout_s <= 0 or self.output_chars < 0:
            raise ValueError("max_turns and max_tokens must be at least 1, command_timeout_s above 0")
        if self.ends_after not in ("success", "exit"):
            raise ValueError(f"ends_after must be 'success' or 'exit', not {self.ends_after!r}")

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Return the loop."""
        return Launch(loop=lambda tools: self._work(tools, run))

    def can_skip(self, options: Mapping[str, object]) -> bool:
        """Return True: its state is its messages."""
        return True

    def failure(self, exit_code: int, log: str) -> str | None:
        """Return the reason of a failed model call."""
        return None if exit_code == 0 else log.strip().rpartition("\n")[2] or "a model call failed"

    def _work(self, tools: LoopTools, run: AgentRun) -> int:
        messages = self._first_messages(run.task.instruction)
        for _ in range(self.max_turns):
            try:
                reply = tools.ask({"model": run.model, "messages": messages, "max_tokens": self.max_tokens})
            except ModelCallFailed as exc:
                tools.log(str(exc))
                return 1
            text = _text_of(reply)
            command = command_of(text)
            tools.log(f"$ {command}")
            if not command or command == _END:
                return 0
            done = tools.run(command, timeout_s=self.command_timeout_s, max_output=_MAX_OUTPUT)
            output = self._observation(done)
            tools.log(output)
            if self.ends_after == "success" and done.exit_code == 0:
                return 0
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": output}]
        return 0

    def _first_messages(self, instruction: str) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for example, command in self.examples:
            messages += [{"role": "user", "content": example}, {"role": "assistant", "content": command}]
        return [*messages, {"role": "user", "content": instruction}]

    def _observation(self, done: ExecResult) -> str:
        output = (done.stdout + done.stderr).strip()[: self.output_chars]
        return "\n".join(filter(None, [f"exit code {done.exit_code}", output]))


def command_of(text: str) -> str:
    """Return the shell command in a reply: the first fenced block, or the whole text."""
    fenced = _FENCED.search(text)
    # A command cannot contain NUL; the shell reads the rest as one script.
    return (fenced[1] if fenced else text).replace("\0", "").strip()


def _text_of(reply: dict[str, Any]) -> str:
    choices = reply.get("choices") or [{}]
    return str((choices[0].get("message") or {}).get("content") or "")
