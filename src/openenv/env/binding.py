"""How one environment class is called: sync or async, which keywords it takes, which models it speaks.

Everything here is found once per class and never per call. Knows `Environment`; must not know where its code runs.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

from pydantic import BaseModel

from ..types import Action, Observation, State
from .environment import Environment

# remote: Environments whose code runs in another process, as sessions see them.
#
# A stand-in takes the place of the environment. An operation is asked for together with the encoder of its result, so
# that the result is encoded where it is made and crosses once, as bytes. Knows names only; how the two talk is the
# runner's business.


RemoteOperation = Literal["reset", "step", "step_with", "state"]
Encoder = Callable[[Any], Any]


class RemoteEnvironment(ABC):
    """Stands for an environment elsewhere.

    Its methods are coroutines, so sessions call them on the event loop and no thread waits for the other process. They
    take every keyword: which of them the environment itself takes is known where it is.
    """

    served_class: type[Any]
    """The environment's own class, or one that looks like it where that cannot be imported here."""

    @abstractmethod
    async def ask(self, operation: RemoteOperation, argument: Any, encode: Encoder | None = None) -> Any:
        """Do an operation there and return its result, encoded."""

    @abstractmethod
    async def reset_async(self, **kwargs: Any) -> Any:
        """Begin an episode."""

    @abstractmethod
    async def step_async(self, action: Any, **kwargs: Any) -> Any:
        """Take an action."""

    @abstractmethod
    async def close(self) -> None:
        """Close it."""


def step_argument(action: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return what `step_with` is asked with."""
    return action, dict(kwargs)


def class_of(env: Any) -> type[Any]:
    """Return the class of an environment, wherever that is."""
    return env.served_class if isinstance(env, RemoteEnvironment) else type(env)


EnvFactory = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Method:
    """One bound operation: its function's name, whether it is a coroutine, and the keywords it takes."""

    name: str
    is_async: bool
    keywords: frozenset[str] | None  # None: every keyword

    def accept(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keep what the method takes; other keys are dropped, as clients rely on."""
        if self.keywords is None:
            withheld = _withheld(self.name)
            return {key: value for key, value in kwargs.items() if key not in withheld}
        return {key: value for key, value in kwargs.items() if key in self.keywords}


@dataclass(frozen=True, slots=True)
class Binding:
    """How to call one class, and which of its operations are coroutines and run on an event loop.

    `step_is_twofold`: both kinds of `step` are a base class's and do the same; `only_blocks` tells which suits.
    """

    reset: Method
    step: Method
    async_kinds: frozenset[str]
    step_is_twofold: bool = False


@dataclass(frozen=True, slots=True)
class Models:
    """The action, observation and state classes of an environment."""

    action: type[Any]
    observation: type[Any]
    state: type[Any]


_BINDINGS: WeakKeyDictionary[type[Any], Binding] = WeakKeyDictionary()


def bind(env_cls: type[Any]) -> Binding:
    """Inspect a class once."""
    binding = _BINDINGS.get(env_cls)
    if binding is None:
        reset, step = _method(env_cls, "reset"), _method(env_cls, "step")
        close_is_async = inspect.iscoroutinefunction(getattr(env_cls, "close", None))
        kinds = {"reset": reset.is_async, "step": step.is_async, "close": close_is_async}
        kinds["state"] = issubclass(env_cls, RemoteEnvironment)
        names = frozenset(kind for kind, is_async in kinds.items() if is_async)
        base = getattr(env_cls, step.name, None)
        twofold = getattr(base, "yields_to_sync", False) and _depth(env_cls, "step") == _depth(env_cls, step.name)
        binding = _BINDINGS[env_cls] = Binding(reset, step, names, twofold)
    return binding


def _method(env_cls: type[Any], name: str) -> Method:
    async_name = f"{name}_async"
    override = getattr(env_cls, async_name, None)
    is_async = override is not None and override is not getattr(Environment, async_name)
    if is_async and getattr(override, "yields_to_sync", False):  # a base class's; the author's own method comes first
        is_async = _depth(env_cls, async_name) <= _depth(env_cls, name)
    chosen = async_name if is_async else name
    function = getattr(env_cls, chosen, None)
    if function is None:
        return Method(chosen, is_async, None)
    is_async = is_async or inspect.iscoroutinefunction(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # compiled code does not always tell
        return Method(chosen, is_async, None)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return Method(chosen, is_async, None)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return Method(chosen, is_async, frozenset(named - _withheld(chosen)))


def _depth(env_cls: type[Any], name: str) -> int:
    """How far up the class hierarchy a method comes from."""
    return next((depth for depth, cls in enumerate(env_cls.__mro__) if name in vars(cls)), len(env_cls.__mro__))


def _withheld(method: str) -> frozenset[str]:
    """What is never passed by keyword: a step gets its action in another way."""
    return frozenset({"self", "action"}) if method.startswith("step") else frozenset({"self"})


def factory_name(factory: EnvFactory) -> str:
    """Name a factory as its author would."""
    if isinstance(factory, functools.partial):
        return factory_name(factory.func)
    return getattr(factory, "__name__", type(factory).__name__)


def factory_class(factory: EnvFactory) -> type[Any] | None:
    """Find the class that a factory makes without calling it: the class itself, a partial's, or the annotation."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    if isinstance(factory, type):
        return factory
    try:
        returned = typing.get_type_hints(factory).get("return")
    except Exception:  # annotations may name what is not importable here
        return None
    returned = typing.get_origin(returned) or returned
    # `Any` is a class on some Pythons; a protocol or an abstract class says nothing about the one that is made.
    vague = returned is Environment or inspect.isabstract(returned) or getattr(returned, "_is_protocol", False)
    return returned if isinstance(returned, type) and hasattr(returned, "step") and not vague else None


def infer_models(env_cls: type[Any]) -> Models:
    """Find an environment's models from its generic parameters or, failing that, its annotations."""
    found = _generic_arguments(env_cls)
    action = _model(found.get("action")) or _annotation(env_cls, "step", "action") or Action
    observation = _model(found.get("observation")) or _annotation(env_cls, "step", "return") or Observation
    state = _model(found.get("state"))
    if state is None or state is State:  # a base class may have said no more than that
        state = _annotation(env_cls, "state", "return") or State
    return Models(action, observation, state)


def names_action(env_cls: type[Any]) -> bool:
    """Say whether an environment tells its action class, by its generic parameters or an annotation."""
    generic = _model(_generic_arguments(env_cls).get("action"))
    return generic is not None or _annotation(env_cls, "step", "action") is not None


def _generic_arguments(env_cls: type[Any]) -> dict[str, Any]:
    """Resolve `Environment[A, O, S]` through the class hierarchy."""
    names = ("action", "observation", "state")

    def search(cls: type[Any], known: dict[Any, Any]) -> dict[str, Any]:
        for base in getattr(cls, "__orig_bases__", ()):
            origin = typing.get_origin(base)
            if not isinstance(origin, type) or not issubclass(origin, Environment):
                continue
            arguments = [known.get(argument, argument) for argument in typing.get_args(base)]
            if origin is Environment:
                return dict(zip(names, arguments, strict=False))
            parameters = getattr(origin, "__parameters__", ())
            result = search(origin, dict(zip(parameters, arguments, strict=False)))
            if result:
                return result
        for parent in cls.__bases__:
            if parent is not object and (result := search(parent, {})):
                return result
        return {}

    return search(env_cls, {})


def _annotation(env_cls: type[Any], member: str, name: str) -> type[Any] | None:
    candidates = (f"{member}_async", member) if member != "state" else (member,)
    for candidate in candidates:
        function = inspect.getattr_static(env_cls, candidate, None)
        if isinstance(function, property):
            function = function.fget
        if function is None or function is vars(Environment).get(candidate):
            continue
        try:
            hints = typing.get_type_hints(function)
        except Exception:  # annotations may name what is not importable here
            continue
        if (model := _model(hints.get(name))) is not None:
            return model
    return None


def _model(candidate: Any) -> type[Any] | None:
    if isinstance(candidate, type) and issubclass(candidate, BaseModel):
        return candidate
    return None


# offload: Where a coroutine of an environment runs its blocking parts.
#
# A session sets this to its own lane, so that blocking code stays on the session's one thread; without a session it is a
# thread of asyncio's. Knows callables only.


T = TypeVar("T")
Offload = Callable[[Callable[[], Any]], Awaitable[Any]]

OFFLOAD: ContextVar[Offload] = ContextVar("openenv_offload", default=asyncio.to_thread)


async def run_blocking(function: Callable[[], T]) -> T:
    """Run blocking code away from the event loop and wait for it."""
    return cast(T, await OFFLOAD.get()(function))
