"""`MCPEnvironment`: an environment with tools as actions: its methods with `@tool`, or those of a FastMCP server.

One registry serves `step`, code mode and the MCP endpoints. Knows tools; must not know the wire or its callers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from openenv.errors import ToolCallError, message_of
from openenv.protocol.tool_messages import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    ToolError,
    ToolErrorType,
)
from openenv.types import Action, Observation, State

from .binding import annotated_model, run_blocking
from .environment import Environment, Transform
from .tools.fastmcp_client import new_client
from .tools.function_tools import ServerTools
from .tools.source import ToolOutcome, ToolRequest
from .tools.tool_registry import ToolRegistry, check_names

MCP_TOOL_CALL_TIMEOUT = 30.0
"""Seconds that a tool may take when the step sets no limit."""

F = TypeVar("F", bound=Callable[..., Any])
ToolMode = Literal["production", "simulation"]


def get_server_tools(mcp_server: Any) -> dict[str, Any]:
    """Return the tools registered with a FastMCP server itself, by name."""
    return {tool.name: tool for tool in ServerTools(mcp_server).local_tools()}


def tool(function: Any = None, *, mode: ToolMode | None = None) -> Any:
    """Mark a method of an `MCPEnvironment` as a tool, of one mode only or of both.

    `@tool` and `@tool(mode="simulation")` both work. The name, the docstring and the annotations describe the tool.

    Raises:
        ValueError: There is no such mode.
    """
    _check_mode(mode)

    def mark(method: Any) -> Any:
        method.openenv_tool = mode
        return method

    return mark if function is None else mark(function)


def _check_mode(mode: str | None) -> None:
    if mode not in (None, "production", "simulation"):
        raise ValueError(f"Invalid mode {mode!r}: choose 'production', 'simulation' or None")


# An environment of tools needs `reset` and methods:
#
#   class Bank(MCPEnvironment):
#       def reset(self, seed=None): ...
#
#       @tool
#       def deposit(self, amount: int) -> int:
#           """Put money into the account."""
#           self.earn(0.1)                      the reward of the step that called the tool
class MCPEnvironment(Environment[Action, Observation, State], counts_episodes=False):
    """Base class of environments with tools: write `reset`, and methods with `@tool` or a FastMCP server.

    A step with `ListToolsAction` or `CallToolAction` reaches the tools; every other action reaches `_step_impl`, which
    an environment with further actions overrides.

    Args:
        mcp_server: A FastMCP server with tools; by default a new one. Methods with `@tool` are added to it.
        transform: Changes observations on their way out.

    Raises:
        ValueError: A tool has a reserved name: reset, step, state or close.
    """

    def __init__(self, mcp_server: Any = None, transform: Transform[Observation] | None = None) -> None:
        super().__init__(transform=transform)
        if mcp_server is None:
            from fastmcp import FastMCP

            mcp_server = FastMCP(type(self).__name__)
        self.mcp_server = mcp_server
        self._mode: str | None = None
        self.tools = ToolRegistry(mcp_server, mode=self._active_mode)
        self._earned: _Earned | None = None
        for name, mode in _marked_methods(type(self)).items():
            self.tool(mode)(getattr(self, name))
        check_names(get_server_tools(mcp_server))
        self._mcp_client: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("reset", "reset_async"):
            if name in vars(cls):
                setattr(cls, name, _forgetting(vars(cls)[name]))

    @classmethod
    def wire_models(cls) -> tuple[type[Any], type[Any]]:
        """Return the models of a step: tool calls and their results, unless `_step_impl` has its own action."""
        action = annotated_model(cls, "_step_impl", "action")
        if action in (None, Action):
            return CallToolAction, CallToolObservation
        return action, annotated_model(cls, "_step_impl", "return") or Observation

    def earn(self, reward: float, *, done: bool = False) -> None:
        """Add to the reward of the current step, and end the episode if `done`; for use in tools.

        An agent that calls a tool over MCP never sees the reward: the next step of the orchestrator carries it.
        """
        earned = self._earned or _Earned()
        self._earned = _Earned(earned.reward + reward, earned.done or done)

    def _active_mode(self) -> str | None:
        return self._mode

    @property
    def mcp_client(self) -> Any:
        """A FastMCP client for the environment's server; None once the environment is closed."""
        if self._mcp_client is None and self.mcp_server is not None:
            self._mcp_client = new_client(self.mcp_server)
        return self._mcp_client

    @mcp_client.setter
    def mcp_client(self, client: Any) -> None:
        self._mcp_client = client

    @asynccontextmanager
    async def mcp_session(self) -> AsyncIterator[Any]:
        """Open the client for the duration of a block; of nested blocks the outermost opens and closes it."""
        client = self.mcp_client
        if client is None:
            raise RuntimeError("the environment is closed")
        async with client:
            yield client

    @property
    def supports_code_mode(self) -> bool:
        """Whether `execute_code` can be used."""
        return True

    def get_callables(self) -> dict[str, Callable[..., Any]]:
        """Return the tools of the active mode as plain functions."""
        return self.tools.functions()

    def execute_code(self, code: str) -> Observation:
        """Run a program that calls the tools by name.

        Returns:
            An observation with reward 0 (a program alone earns nothing); its metadata holds the program's variable
            `result`, or the failure as `error`.
        """
        names: dict[str, Any] = {**self.get_callables(), "__name__": "__openenv_code__"}
        try:
            exec(compile(code, "<code>", "exec"), names)
        except SyntaxError as exc:
            return Observation(reward=0.0, metadata={"error": f"Syntax error: {exc}"})
        except Exception as exc:
            return Observation(reward=0.0, metadata={"error": f"{type(exc).__name__}: {message_of(exc)}"})
        return Observation(reward=0.0, metadata={"result": names.get("result")})

    def tool(self, mode: ToolMode | None = None) -> Callable[[F], F]:
        """Decorate a function as a tool, of one mode only or of both.

        Raises:
            ValueError: There is no such mode, or the name is reserved.
        """
        _check_mode(mode)

        def decorate(function: F) -> F:
            check_names([function.__name__])
            if mode is None:
                self.mcp_server.tool(function)
            else:
                self.tools.add(function, mode)
            return function

        return decorate

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """List tools, call one, or take another action."""
        if isinstance(action, ListToolsAction):
            try:
                observation: Observation = ListToolsObservation(tools=self.tools.list_tools_blocking())
            except Exception as exc:
                observation = _list_failed(exc)
        elif isinstance(action, CallToolAction):
            try:
                observation = _called(action, self.tools.call_blocking(_request(action, timeout_s)))
            except ToolCallError as exc:
                observation = _call_failed(action, exc)
            self._pay(observation)
        else:
            return self._step_impl(action, timeout_s=timeout_s, **kwargs)
        return self._apply_transform(observation)

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """List tools, call one, or take another action, without blocking the event loop."""
        if isinstance(action, ListToolsAction):
            try:
                observation: Observation = ListToolsObservation(tools=await self.tools.list_tools())
            except Exception as exc:
                observation = _list_failed(exc)
        elif isinstance(action, CallToolAction):
            try:
                observation = _called(action, await self.tools.call(_request(action, timeout_s)))
            except ToolCallError as exc:
                observation = _call_failed(action, exc)
            self._pay(observation)
        else:
            return await run_blocking(functools.partial(self._step_impl, action, timeout_s=timeout_s, **kwargs))
        return self._apply_transform(observation)

    # A subclass that overrides `step` alone is called by `step`: see `env.binding`.
    step_async.yields_to_sync = True  # type: ignore[attr-defined]

    def only_blocks(self, action: Action) -> bool:
        """Whether a step awaits nothing, so that `step` costs less than `step_async`."""
        if isinstance(action, CallToolAction):
            return self.tools.is_blocking(action.tool_name)
        return not isinstance(action, ListToolsAction)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Take an action that is not about tools; override it if there are any."""
        names = ", ".join(get_server_tools(self.mcp_server))
        raise ValueError(
            f"{type(action).__name__} is no action of {type(self).__name__}; call one of its tools: {names}"
        )

    def _pay(self, observation: Observation) -> None:
        earned, self._earned = self._earned, None
        if earned is not None:
            observation.reward, observation.done = earned.reward, earned.done

    def close(self) -> None:
        """Close the connection to the tools; a closed environment has neither server nor client."""
        self.tools.close()
        self._mcp_client = None
        self.mcp_server = None

    close.closes_tools = True  # type: ignore[attr-defined]  # and nothing else: see `server.sessions.operations`


@dataclass(frozen=True, slots=True)
class _Earned:
    """What the tools have earned since the last step."""

    reward: float = 0.0
    done: bool = False


# Weak: a reloaded or generated class must not stay alive because an instance was made once.
_MARKED: WeakKeyDictionary[type[Any], dict[str, ToolMode | None]] = WeakKeyDictionary()


def _marked_methods(cls: type[Any]) -> Mapping[str, ToolMode | None]:
    """Return the methods with `@tool`, in the order of their definition, those of base classes first."""
    found = _MARKED.get(cls)
    if found is not None:
        return found
    found = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            # A method that overrides a tool is a tool only if it is marked, too.
            if name in found or hasattr(value, "openenv_tool"):
                found.pop(name, None)
                if hasattr(value, "openenv_tool"):
                    found[name] = value.openenv_tool
    _MARKED[cls] = found
    return found


def _forgetting(reset: Any) -> Any:
    """Wrap `reset`: what the tools have earned before it belongs to no step of the new episode."""
    if inspect.iscoroutinefunction(reset):

        @functools.wraps(reset)
        async def wrapped_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._earned = None
            return await reset(self, *args, **kwargs)

        return wrapped_async

    @functools.wraps(reset)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._earned = None
        return reset(self, *args, **kwargs)

    return wrapped


def _request(action: CallToolAction, timeout_s: float | None) -> ToolRequest:
    limit = MCP_TOOL_CALL_TIMEOUT if timeout_s is None else timeout_s
    return ToolRequest(action.tool_name, action.arguments, limit)


def _list_failed(exc: Exception) -> Observation:
    return ListToolsObservation(tools=[], metadata={"error": message_of(exc), "error_type": "list_tools_failed"})


def _called(action: CallToolAction, outcome: ToolOutcome) -> Observation:
    return CallToolObservation(tool_name=action.tool_name, result=outcome)


def _call_failed(action: CallToolAction, exc: ToolCallError) -> Observation:
    error = ToolError(error_type=ToolErrorType(exc.error_type), message=str(exc))
    return CallToolObservation(tool_name=action.tool_name, error=error)
