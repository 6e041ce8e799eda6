"""Adapters for agents that are command line programs: one process for each turn, or one for the whole conversation.

Both tell the agent where its tools are: in the variable `OPENENV_MCP_URL`, and in the file `mcp_config_path`, in the
form that most agents read: `{"mcpServers": {"environment": {"type": "http", "url": ...}}}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from openenv import settings
from openenv.errors import HarnessError, HarnessNotRunningError, HarnessStartupError
from openenv.protocol.tool_messages import Tool
from openenv.protocol.turn_messages import HarnessEvent, HarnessEventType

from .agent_process import HarnessProcess
from .turns import AgenticHarnessAdapter, HarnessConfig

MCP_URL = "OPENENV_MCP_URL"
"""The variable with the address of the environment's tools."""
MESSAGE = "{message}"
"""The placeholder for the text of a turn in a command line."""
_EXIT_S = 5.0


class ProcessAdapter(AgenticHarnessAdapter):
    """What both kinds share: the agent's variables, and the file that says where its tools are."""

    def __init__(self, config: HarnessConfig) -> None:
        super().__init__(config)
        self._bridge_url: str | None = None
        self._folder: Path | None = None
        self._key: dict[str, str] = {}
        self._process: HarnessProcess | None = None

    async def inject_tools(self, tools: list[Tool], bridge_url: str | None = None) -> None:
        """Keep the address for the agent's variables and its configuration."""
        self._bridge_url = bridge_url

    async def start(self, working_directory: str) -> None:
        """Write the configuration, and start the agent.

        Raises:
            HarnessStartupError: There is no such folder, the key is missing, or the agent does not start.
        """
        self._folder = Path(working_directory)
        if not self._folder.is_dir():
            raise HarnessStartupError(f"the working directory {working_directory!r} does not exist")
        self._key = self._model_key()
        await asyncio.to_thread(self._write_configuration, self._folder)
        await self._begin()

    def _model_key(self) -> dict[str, str]:
        name = self.config.api_key_env_var
        if name is None or name in self.config.env_vars:
            return {}
        try:
            return {name: settings.secret(name)}
        except ValueError as exc:
            raise HarnessStartupError(f"{exc}; it must contain the API key of the agent's model") from exc

    def _write_configuration(self, folder: Path) -> None:
        if self.config.mcp_config_path is None:
            return
        servers = {} if self._bridge_url is None else {"environment": {"type": "http", "url": self._bridge_url}}
        path = folder / self.config.mcp_config_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"mcpServers": servers}, indent=2), encoding="utf-8")

    @abstractmethod
    async def _begin(self) -> None:
        """Start the process that runs for the whole conversation."""

    def _variables(self) -> dict[str, str]:
        own = {} if self._bridge_url is None else {MCP_URL: self._bridge_url}
        return {**own, **self._key, **self.config.env_vars}

    def _new_process(self, command: Sequence[str]) -> HarnessProcess:
        assert self._folder is not None
        return HarnessProcess(command, str(self._folder), self._variables(), self.config.startup_timeout_s)

    async def stop(self) -> None:
        """End the agent's process, if one runs."""
        process, self._process, self._folder = self._process, None, None
        if process is not None:
            await process.stop()


class JsonLinesAdapter(ProcessAdapter):
    """An agent that runs for the whole conversation and speaks JSON in lines.

    It reads `{"type": "message", "content": TEXT}` and prints `{"type": TYPE, "data": {...}}` for each event, the last
    of a turn being `turn_complete`. Any other line is taken for text.

    Args:
        config: How it is started.
        ready_check: Tells from a line of output whether the agent is ready; None means ready at once.
    """

    def __init__(self, config: HarnessConfig, *, ready_check: Callable[[str], bool] | None = None) -> None:
        super().__init__(config)
        self._ready_check = ready_check

    async def _begin(self) -> None:
        self._process = self._new_process(self.config.command)
        await self._process.start(self._ready_check)

    async def is_alive(self) -> bool:
        """Say whether the process runs."""
        return self._process is not None and self._process.is_running()

    async def send_message_streaming(self, message: str) -> AsyncIterator[HarnessEvent]:
        """Send the message, and yield the agent's output until its turn ends.

        Raises:
            HarnessNotRunningError: The agent has ended.
        """
        process = self._process
        if process is None:
            raise HarnessNotRunningError("the agent was not started")
        # One line in, many lines out, until TURN_COMPLETE. Other lines are text that the agent prints for people.
        await process.write_line(json.dumps({"type": "message", "content": message}))
        while True:
            line = await process.read_line()
            if line is None:
                # The end of the output within a turn is a crash; the end of stderr usually names the cause.
                problem = (await process.read_errors()).strip()[-2000:]
                raise HarnessNotRunningError(f"the agent ended within its turn{f': {problem}' if problem else ''}")
            event = event_of(line)
            yield event
            if event.type is HarnessEventType.TURN_COMPLETE:
                return


class CommandAdapter(ProcessAdapter):
    """An agent that is started once for each turn, such as `claude -p` or `opencode run`.

    Its output is the response. Subclasses that can parse the output override `events_of`.

    Args:
        config: How to start it. `{message}` in an argument is replaced by the text of the turn; without it, the
            agent reads the text from its standard input.
        continue_arguments: Added from the second turn on, such as `--continue`, so that the agent goes on with its
            conversation.
    """

    def __init__(self, config: HarnessConfig, *, continue_arguments: Sequence[str] = ()) -> None:
        super().__init__(config)
        self._continue_arguments = tuple(continue_arguments)
        self._turns = 0

    async def _begin(self) -> None:
        # A new conversation: the next turn must not continue the previous one.
        self._turns = 0

    async def is_alive(self) -> bool:
        """Say whether the conversation was begun. No process runs between turns."""
        return self._folder is not None

    def command(self, message: str) -> list[str]:
        """Return the command line of the next turn."""
        # Example: `claude -p TEXT` first, then `claude -p TEXT --continue`.
        extra = self._continue_arguments if self._turns else ()
        return [*(part.replace(MESSAGE, message) for part in self.config.command), *extra]

    def events_of(self, line: str) -> list[HarnessEvent]:
        """Return the events of a line that the agent has printed."""
        return [HarnessEvent(type=HarnessEventType.TEXT_OUTPUT, data={"text": line})]

    async def send_message_streaming(self, message: str) -> AsyncIterator[HarnessEvent]:
        """Run the agent once, and yield its output.

        Raises:
            HarnessNotRunningError: The conversation was not begun.
            HarnessStartupError: The agent does not start.
            HarnessError: It ended with an exit code other than 0.
        """
        if self._folder is None:
            raise HarnessNotRunningError("the agent was not started")
        # Kept in `self._process`, so that `stop` can end it while this generator waits.
        process = self._process = self._new_process(self.command(message))
        texts: list[str] = []
        feeding: asyncio.Task[None] | None = None
        try:
            await process.start()
            # Feed in parallel: if the message fills one pipe while output fills the other, both sides would hang.
            feeding = asyncio.ensure_future(self._feed(process, message))
            while (line := await process.read_line()) is not None:
                for event in self.events_of(line):
                    if event.type is HarnessEventType.TEXT_OUTPUT:
                        texts.append(str(event.data.get("text", "")))
                    yield event
            # The output has ended, but the process may still clean up.
            code = await process.wait(_EXIT_S)
        finally:
            self._process = None
            # Also if the caller leaves the generator early.
            await process.stop()
            if feeding is not None:
                await asyncio.wait({feeding})
        if code != 0:
            problem = process.drain_stderr().strip()[-2000:]
            raise HarnessError(f"the agent ended with exit code {code}{f': {problem}' if problem else ''}")
        self._turns += 1
        yield HarnessEvent(type=HarnessEventType.TURN_COMPLETE, data={"response": "\n".join(texts)})

    async def _feed(self, process: HarnessProcess, message: str) -> None:
        """Send the message while the output is read: the agent may print before it reads, or never read."""
        # An agent that reads nothing closes its input; that is not an error.
        with contextlib.suppress(HarnessNotRunningError):
            if not any(MESSAGE in part for part in self.config.command):
                await process.write_line(message)
        # The end of the input tells the agent that the message is complete.
        await process.close_input()


def event_of(line: str) -> HarnessEvent:
    """Read a line of JSON as an event; any other line is text."""
    try:
        # RecursionError: deeply nested JSON from an agent must not crash the session.
        value: Any = json.loads(line)
        return HarnessEvent.model_validate(value)
    except (ValueError, ValidationError, RecursionError):
        return HarnessEvent(type=HarnessEventType.TEXT_OUTPUT, timestamp=time.time(), data={"text": line})
