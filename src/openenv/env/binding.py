"""How to call an environment class: sync or async, its keywords, its models.

A class is inspected once, never per call. Knows `Environment`; must not know where its code runs.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import typing
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

from pydantic import BaseModel

from openenv.protocol.generics import class_path, generic_arguments
from openenv.types import Action, Observation, State

from .environment import CopiedState, Environment

T = TypeVar("T")
EnvFactory = Callable[[], Any]
Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
RemoteOperation = Literal["reset", "step", "step_with", "state"]
Encoder = Callable[[Any], Any]

# Runs the blocking parts of an environment's coroutines. A session sets this to its thread, so that blocking code
# stays on that thread; without a session it is one of asyncio's threads.
OFFLOAD: ContextVar[Offload] = ContextVar("openenv_offload", default=asyncio.to_thread)


async def run_blocking(function: Callable[[], T]) -> T:
    """Run blocking code off the event loop and wait for it."""
    return cast(T, await OFFLOAD.get()(function))


class RemoteEnvironment(ABC):
    """An environment that runs in another process, seen from a session.

    Its methods are coroutines, so sessions call them on the event loop and no thread waits for the other process. They
    take every keyword; the other process drops those that the environment does not accept. Each call also carries the
    encoder of its result, so that the result is encoded in that process and crosses the process border once, as bytes.
    """

    served_class: type[Any]
    """The environment's class, or a lookalike if this process cannot import it."""

    @abstractmethod
    async def ask(self, operation: RemoteOperation, argument: Any, encode: Encoder | None = None) -> Any:
        """Run an operation in the other process and return its encoded result."""

    @abstractmethod
    async def reset_async(self, **kwargs: Any) -> Any:
        """Begin an episode."""

    @abstractmethod
    async def step_async(self, action: Any, **kwargs: Any) -> Any:
        """Take an action."""

    @abstractmethod
    async def close(self) -> None:
        """Close the environment."""


def class_of(env: Any) -> type[Any]:
    """Return an environment's class, even if the environment runs in another process."""
    return env.served_class if isinstance(env, RemoteEnvironment) else type(env)


@dataclass(frozen=True, slots=True)
class Method:
    """One bound operation: its function's name, whether it is a coroutine, and the keywords it takes."""

    name: str
    is_async: bool
    keywords: frozenset[str] | None  # None: every keyword

    def accept(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the keywords that the method takes; clients rely on the others being dropped."""
        if self.keywords is None:
            reserved = _reserved(self.name)
            return {key: value for key, value in kwargs.items() if key not in reserved}
        return {key: value for key, value in kwargs.items() if key in self.keywords}


@dataclass(frozen=True, slots=True)
class Binding:
    """How to call one class, and which of its operations are coroutines and run on an event loop.

    Args:
        step_is_twofold: `step` and `step_async` come from the same base class and do the same; `only_blocks` of the
            environment says for each action which of them costs less.
    """

    reset: Method
    step: Method
    async_kinds: frozenset[str]  # of "reset", "step", "state", "close"
    step_is_twofold: bool = False


@dataclass(frozen=True, slots=True)
class Models:
    """The action, observation and state classes of an environment."""

    action: type[Any]
    observation: type[Any]
    state: type[Any]
    reset_observation: type[Any] | None = None  # if a reset returns another class than a step


# Weak: a reloaded or generated class must not stay alive because it was served once.
_BINDINGS: WeakKeyDictionary[type[Any], Binding] = WeakKeyDictionary()
_OVERRIDABLE = frozenset({"reset", "reset_async", "step", "step_async"})


def bind(env_cls: type[Any]) -> Binding:
    """Inspect a class once."""
    binding = _BINDINGS.get(env_cls)
    if binding is None:
        reset, step = _method(env_cls, "reset"), _method(env_cls, "step")
        close_is_async = inspect.iscoroutinefunction(getattr(env_cls, "close", None))
        kinds = {"reset": reset.is_async, "step": step.is_async, "close": close_is_async}
        kinds["state"] = issubclass(env_cls, RemoteEnvironment)  # a property otherwise, which cannot be awaited
        names = frozenset(kind for kind, is_async in kinds.items() if is_async)
        base = getattr(env_cls, step.name, None)
        twofold = getattr(base, "yields_to_sync", False) and _depth(env_cls, "step") == _depth(env_cls, step.name)
        binding = _BINDINGS[env_cls] = Binding(reset, step, names, twofold)
    return binding


def bind_instance(env: Any) -> Binding:
    """Return how to call an environment: as its class, unless methods were set on the instance.

    Example: `self.step_async = functools.partial(...)` in a constructor.
    """
    own = getattr(env, "__dict__", None)
    if not own or own.keys().isdisjoint(_OVERRIDABLE):  # four look-ups, however many attributes there are
        return bind(type(env))
    of_class = bind(type(env))
    reset, step = _own_method(own, "reset", of_class.reset), _own_method(own, "step", of_class.step)
    kinds = of_class.async_kinds - {"reset", "step"}
    kinds |= {kind for kind, method in (("reset", reset), ("step", step)) if method.is_async}
    return Binding(reset, step, kinds, of_class.step_is_twofold and step is of_class.step)


def _own_method(own: Mapping[str, Any], name: str, of_class: Method) -> Method:
    async_name = f"{name}_async"
    if async_name in own:
        return Method(async_name, True, _keywords(own[async_name], async_name))
    if name in own and of_class.name == name:
        return Method(name, inspect.iscoroutinefunction(own[name]), _keywords(own[name], name))
    return of_class


def _method(env_cls: type[Any], name: str) -> Method:
    async_name = f"{name}_async"
    # `Environment` defines both forms. A class is asynchronous if it, or a base below `Environment`, writes its own
    # `reset_async` or `step_async`; that one is then called even if there is a `reset` or `step` as well.
    override = getattr(env_cls, async_name, None)
    is_async = override is not None and override is not getattr(Environment, async_name)
    if is_async and getattr(override, "yields_to_sync", False):
        # `MCPEnvironment.step_async` must not hide a `step` that the author of a subclass has written.
        is_async = _depth(env_cls, async_name) <= _depth(env_cls, name)
    chosen = async_name if is_async else name
    function = getattr(env_cls, chosen, None)
    if function is None:
        return Method(chosen, is_async, None)
    is_async = is_async or inspect.iscoroutinefunction(function)  # `async def step` needs no suffix
    return Method(chosen, is_async, _keywords(function, chosen))


def _keywords(function: Any, method: str) -> frozenset[str] | None:
    """Return the keywords that a function takes; None for every one."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # compiled code may have no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return frozenset(named - _reserved(method))


def _depth(env_cls: type[Any], name: str) -> int:
    """Count the classes between a class and the base that defines a method."""
    return next((depth for depth, cls in enumerate(env_cls.__mro__) if name in vars(cls)), len(env_cls.__mro__))


def _reserved(method: str) -> frozenset[str]:
    """Return the parameters that are never passed by keyword: a step gets its action by position."""
    return frozenset({"self", "action"}) if method.startswith("step") else frozenset({"self"})


def factory_name(factory: EnvFactory) -> str:
    """Return the name of a factory: its function's or class's own."""
    if isinstance(factory, functools.partial):
        return factory_name(factory.func)
    return getattr(factory, "__name__", type(factory).__name__)


def factory_class(factory: EnvFactory) -> type[Any] | None:
    """Find the class that a factory makes without calling it: the class itself, a partial's, or the return type."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    if isinstance(factory, type):
        return factory
    try:
        returned = typing.get_type_hints(factory).get("return")
    except Exception:  # an annotation may name something that this process cannot import
        return None
    returned = typing.get_origin(returned) or returned
    # `Any` is a class on some Pythons; a protocol or an abstract class does not name the class of the instance.
    vague = returned is Environment or inspect.isabstract(returned) or getattr(returned, "_is_protocol", False)
    return returned if isinstance(returned, type) and hasattr(returned, "step") and not vague else None


def declared_concurrency(env_cls: type[Any]) -> bool | None:
    """Return a class's value of `SUPPORTS_CONCURRENT_SESSIONS`; None if only `Environment` has one."""
    for cls in env_cls.__mro__:
        if cls is Environment:
            return None
        if "SUPPORTS_CONCURRENT_SESSIONS" in vars(cls):
            return bool(vars(cls)["SUPPORTS_CONCURRENT_SESSIONS"])
    return bool(getattr(env_cls, "SUPPORTS_CONCURRENT_SESSIONS", False))  # no `Environment`


def shared_attributes(env_cls: type[Any]) -> list[str]:
    """Name the attributes of a class that can change and that all its instances share.

    Names in capitals are constants. A `state` is copied for each instance (`CopiedState`).
    """
    own = [cls for cls in env_cls.__mro__ if cls is not object and not issubclass(Environment, cls)]
    own = [cls for cls in own if cls.__module__.partition(".")[0] != __name__.partition(".")[0]]
    return sorted(
        {
            name
            for cls in own
            for name, value in vars(cls).items()
            if not name.startswith("__") and not name.isupper() and _can_change(value)
        }
    )


def _can_change(value: Any) -> bool:
    if isinstance(value, (list, dict, set, bytearray, deque, random.Random, BaseModel)):
        return True
    return class_path(type(value)) == "numpy.ndarray"


def infer_models(env_cls: type[Any]) -> Models:
    """Find an environment's models from its generic parameters or, failing that, its annotations."""
    generic = _generic_arguments(env_cls)
    action = declared_action(env_cls) or Action
    observation = _model(generic.get("observation")) or annotated_model(env_cls, "step", "return") or Observation
    first = None
    # An environment of tools names the plain models: its actions are tool calls.
    if action is Action and hasattr(env_cls, "wire_models"):
        action, observation = env_cls.wire_models()
        first = annotated_model(env_cls, "reset", "return") or Observation
    state = _model(generic.get("state"))
    if state is None or state is State:  # a base class may name `State` and the annotation a subclass of it
        state = annotated_model(env_cls, "state", "return") or State
    return Models(action, observation, state, None if first is observation else first)


def declared_action(env_cls: type[Any]) -> type[Any] | None:
    """Return the action model that a class declares, by its generic parameters or an annotation."""
    return _model(_generic_arguments(env_cls).get("action")) or annotated_model(env_cls, "step", "action")


def _generic_arguments(env_cls: type[Any]) -> dict[str, Any]:
    """Return the arguments of `Environment[A, O, S]` by role."""
    return dict(zip(("action", "observation", "state"), generic_arguments(env_cls, Environment), strict=False))


def annotated_model(env_cls: type[Any], member: str, name: str) -> type[Any] | None:
    """Return the model that annotates a parameter of a method, or its `return`; None without one."""
    candidates = (f"{member}_async", member) if member != "state" else (member,)
    for candidate in candidates:
        function = inspect.getattr_static(env_cls, candidate, None)
        if isinstance(function, property):
            function = function.fget
        if isinstance(function, CopiedState):
            return _model(type(function.template))
        if function is None or function is vars(Environment).get(candidate):
            continue
        try:
            hints = typing.get_type_hints(function)
        except Exception:  # an annotation may name something that this process cannot import
            continue
        if (model := _model(hints.get(name))) is not None:
            return model
    return None


def _model(candidate: Any) -> type[Any] | None:
    if isinstance(candidate, type) and issubclass(candidate, BaseModel):
        return candidate
    return None
