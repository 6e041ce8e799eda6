"""A turn-based agent as its environment sees it: configuration, events, and the adapter that an author writes.

Light to import. Knows nothing of processes, MCP servers or sockets; errors are in `openenv.errors`.

    start ──> send_message_streaming ──> event, event, ... TURN_COMPLETE ──┐
                        ^                                                  │ next turn
                        └──────────────────────────────────────────────────┘     ... ──> stop
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from enum import Enum
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from openenv.errors import HarnessError
from openenv.protocol.tool_messages import Tool
from openenv.protocol.turn_messages import HarnessEvent, HarnessEventType


# Values are published: configurations contain them as texts.
class HarnessTransport(str, Enum):
    """How an adapter talks to its agent."""

    STDIO = "stdio"
    STREAMABLE_HTTP = "http"
    MCP = "mcp"


class HarnessConfig(BaseModel):
    """How an agent is started and how long it may take.

    Args:
        name: What clients see as the agent's name.
        command: Its command line.
        working_directory: The agent's working directory.
        env_vars: Variables to add to the server's for its process.
        transport: How the adapter talks to it.
        mcp_config_path: The file for the address of the environment's tools, within the working directory.
        startup_timeout_s: How long its start may take.
        session_timeout_s: How long a turn may take.
        model: The model that it should use.
        api_key_env_var: The variable that holds the model's key.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    command: list[str]
    working_directory: str = "/workspace"
    env_vars: dict[str, str] = Field(default_factory=dict)
    transport: HarnessTransport = HarnessTransport.STDIO
    mcp_config_path: str | None = None
    startup_timeout_s: float = Field(default=30.0, gt=0)
    session_timeout_s: float = Field(default=600.0, gt=0)
    model: str | None = None
    api_key_env_var: str | None = None

    # An empty command would fail much later, in the operating system, with an unclear message.
    @field_validator("command")
    @classmethod
    def _has_a_program(cls, command: list[str]) -> list[str]:
        if not command or not command[0]:
            raise ValueError("command must contain at least one element: the program")
        return command


class HarnessResponse(BaseModel):
    """A whole turn: the agent's answer and the events that led to it."""

    response: str
    events: list[HarnessEvent] = Field(default_factory=list)
    done: bool = False


def events_to_metadata(events: Sequence[HarnessEvent]) -> list[dict[str, Any]]:
    """Return events as plain values, as observations carry them."""
    return [event.model_dump(mode="json") for event in events]


class AgenticHarnessAdapter(ABC):
    """Connects one kind of agent: starts it, points it to its tools, and converts its output to events.

    One adapter is for one agent at a time. `stop` may come at any time and more than once, before the first start too.
    """

    BUILTIN_TOOL_NAMES: ClassVar[frozenset[str]] = frozenset()
    """Built-in tools of the agent. An environment's tool with one of these names gets another name."""

    def __init__(self, config: HarnessConfig) -> None:
        self.config = config

    @abstractmethod
    async def start(self, working_directory: str) -> None:
        """Start the agent with an empty conversation.

        Raises:
            HarnessStartupError: It does not start.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the agent and free its resources."""

    @abstractmethod
    async def inject_tools(self, tools: list[Tool], bridge_url: str | None = None) -> None:
        """Make the environment's tools known to the agent; called before `start`.

        Args:
            tools: The tools, under the names that the agent has to use.
            bridge_url: The MCP server of the tools; None without tools.
        """

    @abstractmethod
    def send_message_streaming(self, message: str) -> AsyncIterator[HarnessEvent]:
        """Begin a turn; the last event is `TURN_COMPLETE`. Usually an `async def` with `yield`."""

    @abstractmethod
    async def is_alive(self) -> bool:
        """Say whether the agent can take a message."""

    async def send_message(self, message: str) -> HarnessResponse:
        """Take a whole turn.

        Raises:
            HarnessError: The events ended without `TURN_COMPLETE`.
        """
        events: list[HarnessEvent] = []
        async for event in turn_events(self, message):
            events.append(event)
        return response_of(events)


async def turn_events(adapter: AgenticHarnessAdapter, message: str) -> AsyncGenerator[HarnessEvent, None]:
    """Yield the events of a turn up to `TURN_COMPLETE`; the adapter's stream is closed on every path.

    Raises:
        HarnessError: The stream ended early, or yielded an object that is not an event.
    """
    stream = adapter.send_message_streaming(message)
    # Close the stream on every path: an abandoned generator would keep the agent's output pipe open.
    try:
        async for item in stream:
            event = _checked(item)
            yield event
            if event.type is HarnessEventType.TURN_COMPLETE:
                return
    finally:
        close = getattr(stream, "aclose", None)  # only generators must have it
        # Adapters may also return a plain iterator.
        if close is not None:
            await close()
    raise HarnessError("harness event stream ended without a TURN_COMPLETE event")


def _checked(item: Any) -> HarnessEvent:
    if isinstance(item, HarnessEvent):
        # Adapters of other packages may yield dicts of the same shape.
        return item
    try:
        return HarnessEvent.model_validate(item)
    except ValidationError as exc:
        raise HarnessError(f"the adapter yielded {type(item).__name__}; yield HarnessEvent objects") from exc


def response_of(events: list[HarnessEvent]) -> HarnessResponse:
    """Return the turn that ends with `TURN_COMPLETE`."""
    data = events[-1].data
    return HarnessResponse(response=str(data.get("response", "")), events=events, done=bool(data.get("done", False)))


def resolve_tool_conflicts(
    env_tools: Sequence[Tool], harness_builtin_tools: Collection[str], prefix: str = "env_"
) -> list[Tool]:
    """Return the environment's tools under names that the agent does not use itself.

    Args:
        env_tools: The environment's tools.
        harness_builtin_tools: Names that the agent uses.
        prefix: Put before a name that both use.

    Raises:
        ValueError: Two tools of the environment have one name, or the name with the prefix is taken too.
    """
    # Duplicates are refused before renaming: their calls could not be told apart.
    names = [tool.name for tool in env_tools]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ValueError(f"Duplicate environment tool name: {duplicate}")
    # Example: tools bash, add; the agent has bash. Result: env_bash, add.
    taken = {*names, *harness_builtin_tools}
    resolved: list[Tool] = []
    for tool in env_tools:
        if tool.name not in harness_builtin_tools:
            resolved.append(tool)
            continue
        name = f"{prefix}{tool.name}"
        if name in taken:
            text = f"the agent has a tool '{tool.name}' itself, and '{name}' is taken too"
            raise ValueError(f"Cannot resolve tool name conflict: {text}")
        taken.add(name)
        resolved.append(tool.model_copy(update={"name": name}))
    # The order of the tools stays: agents list them to the model in this order.
    return resolved
