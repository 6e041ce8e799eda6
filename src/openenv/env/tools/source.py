"""The interface of an environment's tools, for every surface: listing, calling, a call's events and its outcome.

Light to import: environments load FastMCP, this module does not.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

MOST_WAITING: Final = 1024
"""How many reports of one call wait for the loop to listen."""


@dataclass(slots=True)
class ToolEvents:
    """Listeners to the progress and log messages of one call, called on the loop that created this object.

    A tool may report faster than the loop can listen: then the oldest reports are dropped.

    Args:
        on_progress: Called with progress, total and message.
        on_log: Called with level, logger and data.
    """

    on_progress: Callable[[float, float | None, str | None], None]
    on_log: Callable[[str, str | None, Any], None] | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = field(
        default_factory=lambda: deque(maxlen=MOST_WAITING), init=False
    )
    _is_scheduled: bool = field(default=False, init=False)

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Report progress, from any thread."""
        self._post(self.on_progress, progress, total, message)

    def log(self, level: str, logger: str | None, data: Any) -> None:
        """Report a log message, from any thread."""
        if self.on_log is not None:
            self._post(self.on_log, level, logger, data)

    def _post(self, listener: Callable[..., None], *arguments: Any) -> None:
        """Call a listener soon; one callback of the loop is for all that wait."""
        self._waiting.append((listener, arguments))
        if not self._is_scheduled:
            self._is_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the call's client with it
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False  # first, because another callback delivers reports posted after this
        while self._waiting:
            listener, arguments = self._waiting.popleft()
            listener(*arguments)


EVENTS: ContextVar[ToolEvents | None] = ContextVar("openenv_tool_events", default=None)
"""The listeners of the running call, for calls that pass through an environment's `step`."""


@dataclass(slots=True)
class ToolRequest:
    """A call of a tool: its name, arguments and time limit, and the listeners to its progress and log.

    The listeners are by default those of the running call: an environment's `step` may call a tool.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    events: ToolEvents | None = field(default_factory=EVENTS.get)


class ToolSource(ABC):
    """The tools of an environment."""

    @abstractmethod
    async def describe(self) -> list[dict[str, Any]]:
        """List the tools as MCP's `tools/list` does."""

    @abstractmethod
    async def call(self, request: ToolRequest) -> Any:
        """Call a tool; raises `ToolCallError` and its subclasses."""

    def is_blocking(self, name: str) -> bool:
        """Whether a call awaits nothing, so that `call_blocking` costs less than `call`."""
        return False

    def call_blocking(self, request: ToolRequest) -> Any:
        """Call a tool from synchronous code; raises as `call` does."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Stop the running blocking call, as far as that is possible."""
        return

    def close(self) -> None:
        """Free the tools' resources after the environment is closed."""
        return

    @property
    def closes_at_once(self) -> bool:
        """Whether `close` waits for nothing."""
        return False

    @abstractmethod
    async def ask_server(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run a coroutine with FastMCP's client of the server behind the tools."""


# The attribute of an environment with a FastMCP server but no registry of its own. A table by server would keep both
# alive for ever: the registry refers to the server, and its tools to the environment.
_REGISTRY: Final = "_openenv_tools"


def tools_to_close(env: Any) -> ToolSource | None:
    """Return the tools that end with an environment; looks at its attributes alone, and at no property of its class."""
    attributes = getattr(env, "__dict__", {})
    own = attributes.get("tools")
    if isinstance(own, ToolSource):
        return own
    has_server = hasattr(attributes.get("mcp_server"), "local_provider")
    return find_tools(env) if has_server else attributes.get(_REGISTRY)  # its `mcp_server` may be gone already


def find_tools(env: Any) -> ToolSource | None:
    """Return an environment's tools, or those of the FastMCP server in its attribute `mcp_server`."""
    own = getattr(env, "tools", None)
    if isinstance(own, ToolSource):
        return own
    server = getattr(env, "mcp_server", None)
    if isinstance(server, ToolSource):  # the stub of a server in another process
        return server
    if server is None or not hasattr(server, "local_provider"):
        return None
    holder = env if hasattr(env, "__dict__") else server
    registry: ToolSource | None = getattr(holder, _REGISTRY, None)
    if registry is None or getattr(registry, "server", server) is not server:
        from .tool_registry import ToolRegistry  # loads FastMCP, which this environment has loaded already

        registry = ToolRegistry(server)
        setattr(holder, _REGISTRY, registry)
    return registry


class ContentBlock(dict[str, Any]):
    """One block of content, as a dict; its keys are readable as attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    @classmethod
    def read(cls, block: Any) -> ContentBlock:
        """Convert a FastMCP block; the keys are the same for every release of FastMCP."""
        if type(block).__name__ == "TextContent" and block.annotations is None and block.meta is None:
            return cls(type="text", text=block.text, annotations=None, meta=None)
        fields = block.model_dump(mode="json", by_alias=True, exclude_none=True)
        meta = fields.pop("_meta", None)
        return cls({**fields, "annotations": fields.get("annotations"), "meta": meta})

    def as_mcp(self) -> dict[str, Any]:
        """Return the block as MCP writes it."""
        shown = {key: value for key, value in self.items() if value is not None and key != "meta"}
        return {**shown, "_meta": self["meta"]} if self.get("meta") else shown


@dataclass(slots=True)
class ToolOutcome:
    """A tool's result. Its fields are the OpenEnv wire shape.

    Args:
        content: Text, images and other blocks.
        structured_content: The result as an object, if it is one or is wrapped as one.
        meta: The tool's own remarks about the call.
        data: The tool's return value, as JSON.
        is_error: Whether the tool itself reports a failure.
    """

    content: list[ContentBlock]
    structured_content: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None
    data: Any = None
    is_error: bool = False

    @classmethod
    def from_result(cls, result: Any, *, wraps_result: bool) -> ToolOutcome:
        """Convert a `ToolResult` of FastMCP's server or client.

        Args:
            wraps_result: Whether the tool's schema wraps plain values as `{"result": value}`.
        """
        structured = result.structured_content
        data = structured
        if structured is not None and wraps_result:
            data = structured.get("result")
        content = [ContentBlock.read(block) for block in result.content]
        return cls(content, structured, result.meta, data, bool(getattr(result, "is_error", False)))

    @classmethod
    def of_text(cls, text: str) -> ToolOutcome:
        """Build the result of a tool that is declared to return text, as FastMCP builds it."""
        block = ContentBlock(type="text", text=text, annotations=None, meta=None)
        return cls([block], {"result": text}, {"fastmcp": {"wrap_result": True}}, text)

    def text(self) -> str:
        """Join the text blocks."""
        return "\n".join(block["text"] for block in self.content if block.get("type") == "text")

    def as_mcp(self) -> dict[str, Any]:
        """Return the result as MCP's `tools/call` sends it."""
        result: dict[str, Any] = {"content": [block.as_mcp() for block in self.content], "isError": self.is_error}
        if self.structured_content is not None:
            result["structuredContent"] = self.structured_content
        if self.meta:
            result["_meta"] = self.meta
        return result
