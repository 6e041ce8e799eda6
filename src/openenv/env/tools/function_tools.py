"""Function tools of a FastMCP server, called without FastMCP's transports: finding them, arguments, context, results.

A direct call costs a fraction of one through FastMCP's client. Knows FastMCP; must not know modes or environments.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import typing
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary

from fastmcp import Context
from fastmcp.server.context import _current_context
from fastmcp.server.middleware.dereference import DereferenceRefsMiddleware
from fastmcp.server.server import default_lifespan
from fastmcp.tools.function_tool import FunctionTool
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json
from typing_extensions import Self

from openenv.errors import ToolArgumentsError
from openenv.protocol.schema import problems_of

from .execution import TOOL_LOOP, blocking, cancellable
from .fastmcp_caches import LOCAL, SharedByCode, find_shared, is_plain_annotation, keep_shared, same_values
from .source import ToolEvents, ToolOutcome

T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Validator = Callable[[Any], Arguments]

_NAP_S = 0.05
_REPORTS = 16  # after which a tool that reports without a pause lets others run
_MAX_VARIANTS = 8  # of one function: annotations that every constructor makes again must not pile up


class EnvContext(Context):
    """FastMCP's `Context` of one direct call, with the session id and the listeners of the environment."""

    def __init__(self, server: Any, session_id: str, events: ToolEvents | None) -> None:
        super().__init__(server)
        self._env_session_id = session_id
        self._env_events = events
        self._env_token: Token[Any] | None = None
        self._env_request_id: str | None = None
        self._env_reports = 0

    def __enter__(self) -> Self:
        """Become the current context. `async with` also prepares FastMCP's injections, and costs more."""
        self._env_token = _current_context.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._env_token is not None:
            _current_context.reset(self._env_token)
            self._env_token = None

    @property
    def session_id(self) -> str:
        """The id of the environment's session, which is the same for all its calls."""
        return self._env_session_id

    @property
    def request_id(self) -> str:
        """The id of this call."""
        if self._env_request_id is None:
            self._env_request_id = uuid.uuid4().hex
        return self._env_request_id

    async def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Report progress to the caller."""
        if self._env_events is not None:
            self._env_events.progress(progress, total, message)
            await self._let_others_run()

    async def log(
        self, message: str, level: Any = None, logger_name: str | None = None, extra: Any = None, **_: Any
    ) -> None:
        """Send a log message to the caller."""
        if self._env_events is not None:
            self._env_events.log(level or "info", logger_name, {"msg": message, "extra": extra})
            await self._let_others_run()

    async def _let_others_run(self) -> None:
        """Leave the loop now and then: a report waits for nothing, so a tool that only reports would block it."""
        self._env_reports += 1
        if not self._env_reports % _REPORTS:
            await asyncio.sleep(0)


class PreparedTool:
    """One function tool. `is_plain`: it can be called directly, with nothing injected but its context."""

    def __init__(self, tool: Any) -> None:
        self.tool = tool
        self.name: str = tool.name
        self._cancellable: Any = None
        function = blocking(tool.fn)
        self._call: Callable[..., Any] = function
        self.timeout_s: float | None = getattr(tool, "timeout", None)
        self.wraps_result = wraps_result(tool.output_schema)
        self._returns_text = (
            self.wraps_result
            and tool.output_schema.get("properties") == {"result": {"type": "string"}}
            and vars(tool).get("serializer") is None  # `getattr` of a model's missing field is slow
        )
        self._calling = _calling_of(function, frozenset(tool.parameters.get("properties", {})))
        self.is_plain, self.is_async = self._calling.is_plain, self._calling.is_async

    def functions(self) -> list[Callable[..., Any]]:
        """Return the functions that FastMCP has been given of this tool."""
        tools = [self.tool] if self._cancellable is None else [self.tool, self._cancellable]
        return [function for tool in tools for function in (tool.fn, blocking(tool.fn))]

    def check(self, arguments: Mapping[str, Any]) -> Arguments:
        """Validate arguments.

        Raises:
            ToolArgumentsError: They do not fit the tool's schema.
        """
        try:
            return self._calling.validate(dict(arguments))
        except ValidationError as exc:
            raise ToolArgumentsError(self.name, f"Invalid arguments: {problems_of(exc)}") from exc

    def run(self, arguments: Arguments, context: Context) -> ToolOutcome:
        """Call a synchronous tool."""
        value = self._begin(arguments, context)
        if inspect.isgenerator(value):
            value = list(value)
        elif inspect.isawaitable(value):
            value = _settle(value)
        return self.convert(value)

    async def run_injected(self, arguments: Mapping[str, Any], context: Context) -> ToolOutcome:
        """Let FastMCP call the tool and inject its arguments."""
        if self._cancellable is None:
            self._cancellable = self.tool.model_copy(update={"fn": cancellable(self.tool.fn)})
        async with context:
            result = await self._cancellable.run(dict(arguments))
        return ToolOutcome.from_result(result, wraps_result=self.wraps_result)

    async def run_async(self, arguments: Arguments, context: Context) -> ToolOutcome:
        """Call an asynchronous tool."""
        value = self._begin(arguments, context)
        if inspect.isasyncgen(value):
            return self.convert([item async for item in value])
        return self.convert(await value)

    def _begin(self, arguments: Arguments, context: Context) -> Any:
        args, kwargs = arguments
        if self._calling.context_name is not None:
            kwargs = {**kwargs, self._calling.context_name: context}
        return self._call(*args, **kwargs)

    def convert(self, value: Any) -> ToolOutcome:
        """Convert the function's return value to a result.

        Raises:
            TypeError: It cannot be written as JSON.
        """
        if self._returns_text and type(value) is str:  # the same result as FastMCP's, fifteen times faster
            return ToolOutcome.of_text(value)
        result = self.tool.convert_result(value)
        if result.structured_content is None:
            _check_sendable(value, result.content)
        return ToolOutcome.from_result(result, wraps_result=self.wraps_result)


def wraps_result(output_schema: Mapping[str, Any] | None) -> bool:
    """Whether FastMCP wraps this tool's plain values as `{"result": value}`."""
    return bool(output_schema and output_schema.get("x-fastmcp-wrap-result"))


def _is_context(fn: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    """Whether FastMCP would inject the call's context into a parameter, and nothing else."""
    try:
        hint = typing.get_type_hints(fn).get(parameter.name)
    except Exception:  # an annotation may be one that only FastMCP can resolve
        hint = parameter.annotation
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    return parameter.kind is not parameter.POSITIONAL_ONLY and kinds == [Context]


def _settle(value: Awaitable[Any]) -> Any:
    """Await the return value of a synchronous wrapper of an asynchronous tool, in naps that can be interrupted."""
    future = TOOL_LOOP.submit(_awaited(value))
    try:
        while not future.done():
            concurrent.futures.wait((future,), timeout=_NAP_S)
        return future.result()
    finally:
        future.cancel()


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _check_sendable(value: Any, content: list[Any]) -> None:
    """Raise for a value that cannot be encoded: FastMCP would send its `repr`, which hides that the tool is broken."""
    if value is None or isinstance(value, (str, bytes)) or any(block is value for block in content):
        return
    if any(type(block).__name__ != "TextContent" for block in content):
        return
    if isinstance(value, (list, tuple)) and any(item is block for item in value for block in content):
        return
    try:
        to_json(value)
    except (PydanticSerializationError, ValueError) as exc:
        raise TypeError(f"the tool returned something that cannot be sent: {exc}") from exc


@dataclass(frozen=True, slots=True)
class _Calling:
    """How to call a function directly: whether that is possible, with which arguments, and where its context goes."""

    is_plain: bool
    is_async: bool
    context_name: str | None
    validate: Validator


# Environments define their tools in the constructor, so each session has new functions with the same code. To inspect
# one costs more than a call.
_CALLINGS: Final[SharedByCode[_Calling]] = WeakKeyDictionary()


def _calling_of(fn: Callable[..., Any], offered: frozenset[str]) -> _Calling:
    calling = find_shared(_CALLINGS, fn, offered)
    if calling is None:
        signature = inspect.signature(fn)
        injected = [parameter for name, parameter in signature.parameters.items() if name not in offered]
        is_plain = not injected or (len(injected) == 1 and _is_context(fn, injected[0]))
        context_name = injected[0].name if injected and is_plain else None
        is_async = inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)
        calling = _Calling(is_plain, is_async, context_name, _validator(fn, signature, offered))
        keep_shared(_CALLINGS, fn, calling, offered)
    return calling


@dataclass(frozen=True, slots=True)
class _Built:
    """A validator and the signature it was built from."""

    hints: dict[str, Any]
    defaults: tuple[Any, ...]
    validate: Validator


# Building a validator takes longer than all the rest, so functions that `_CALLINGS` refuses share theirs as well: it
# is kept per code object, for the types that the annotations mean.
_VALIDATORS: WeakKeyDictionary[CodeType, list[_Built]] = WeakKeyDictionary()


def _validator(fn: Callable[..., Any], signature: inspect.Signature, offered: frozenset[str]) -> Validator:
    try:
        hints = typing.get_type_hints(fn, include_extras=True)
    except Exception:  # an annotation may be one that only FastMCP, or nothing, can resolve
        hints = dict(getattr(fn, "__annotations__", {}))
    parameters = [parameter for name, parameter in signature.parameters.items() if name in offered]
    hints = {p.name: hints.get(p.name, Any) for p in parameters}
    defaults = tuple(parameter.default for parameter in parameters)
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None or _may_hold_environment(fn, hints, defaults):
        return _build(parameters, hints)
    known = _VALIDATORS.setdefault(code, [])
    for built in tuple(known):
        if built.hints == hints and same_values(built.defaults, defaults):
            return built.validate
    validate = _build(parameters, hints)
    known.append(_Built(hints, defaults, validate))
    del known[:-_MAX_VARIANTS]
    return validate


def _may_hold_environment(fn: Callable[..., Any], hints: dict[str, Any], defaults: tuple[Any, ...]) -> bool:
    """Whether a function that a constructor makes has a class or a default that was made there, too."""
    if LOCAL not in getattr(inspect.unwrap(fn), "__qualname__", LOCAL):
        return False  # of a class or a module: made before there was an environment
    plain = (None, inspect.Parameter.empty)
    return not all(map(is_plain_annotation, hints.values())) or not all(
        isinstance(default, (str, int, float)) or any(default is value for value in plain) for default in defaults
    )


def _build(parameters: list[inspect.Parameter], hints: dict[str, Any]) -> Validator:
    def take(*args: Any, **kwargs: Any) -> Arguments:
        return args, kwargs

    take.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    take.__annotations__ = hints
    adapter: TypeAdapter[Arguments] = TypeAdapter(cast(Any, take))
    return adapter.validator.validate_python


class ServerTools:
    """Looks tools up in a FastMCP server, which may change while it is served.

    A server is plain when its tools are its own functions, with no middleware, mount, transform or lifespan in between.
    Only then may a tool be called directly.
    """

    def __init__(self, server: Any) -> None:
        self.server = server
        self._prepared: dict[str, PreparedTool] = {}

    @property
    def is_plain(self) -> bool:
        """Whether tools may be called without the server."""
        server = self.server
        local = server.local_provider
        return (
            list(server.providers) == [local]
            and not server.transforms
            and not local.transforms
            and getattr(server, "_lifespan", None) is default_lifespan
            and not server.strict_input_validation
            and all(type(middleware) is DereferenceRefsMiddleware for middleware in server.middleware)
        )

    def find(self, name: str) -> PreparedTool | None:
        """Return a function tool registered with the server itself, whether or not it may be called directly."""
        tool = _finish(self.server.local_provider.get_tool(name))
        if not isinstance(tool, FunctionTool):
            return None
        prepared = self._prepared.get(name)
        if prepared is None or prepared.tool is not tool:
            prepared = self._prepared[name] = PreparedTool(tool)
        return prepared

    def prepared(self) -> list[PreparedTool]:
        """List the tools that were found so far."""
        return list(self._prepared.values())

    def has(self, name: str) -> bool:
        """Whether a tool of any kind is registered with the server itself."""
        return _finish(self.server.local_provider.get_tool(name)) is not None

    def local_tools(self) -> Sequence[Any]:
        """List the tools registered with the server itself, without an event loop."""
        tools: Sequence[Any] = _finish(self.server.local_provider.list_tools())
        return tools

    async def all_tools(self) -> Sequence[Any]:
        """List every tool, as FastMCP would, middleware and mounted servers included."""
        tools: Sequence[Any] = await self.server.list_tools()
        return tools


def is_unguarded(tool: PreparedTool) -> bool:
    """Whether a tool needs neither an access check nor a background task."""
    background = getattr(getattr(tool.tool, "task_config", None), "mode", "forbidden")
    return getattr(tool.tool, "auth", None) is None and background == "forbidden"


def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("FastMCP's local provider waits for something; it cannot be used without an event loop")
