"""Copies of an environment in mid-episode, within one process: by its own `snapshot` and `restore`, or by `deepcopy`.

A copy that shares state with its original would give wrong rewards without an error. So what `deepcopy` leaves in
common is looked for, and refused. Knows environments; must not know sessions, or how processes are copied.
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import sys
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final

from openenv.errors import NotForkable, message_of

from .environment import Environment

_WHAT_TO_DO: Final = (
    "Write snapshot() and restore() in it, or serve it with the process runner and one session in each process "
    "(--runner process --sessions-per-process 1), which copies the whole process."
)

# Immutable values, and objects that belong to the program and not to an episode. The search does not look into these.
_PLAIN: Final = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented), type,
    types.ModuleType, types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.GenericAlias, logging.Logger, Enum,
)  # fmt: skip
# Objects that are immutable themselves but may refer to mutable ones. The search looks into these.
_TRANSPARENT: Final = (
    tuple, frozenset, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MappingProxyType,
    types.CellType, types.MethodWrapperType, property, staticmethod, classmethod, weakref.ReferenceType,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EnvironmentCopy:
    """One copy of an environment, taken but not in use yet.

    Args:
        build: Makes an environment that continues the episode; called where its code is to run.
        put_into: Puts the episode into an environment of the same class that exists; None where only `build` can.
    """

    build: Callable[[], Any]
    put_into: Callable[[Any], None] | None = None


def writes_snapshots(env_cls: type[Any]) -> bool:
    """Return whether an environment's class has its own `snapshot` and `restore`."""
    own = (getattr(env_cls, name, None) for name in ("snapshot", "restore"))
    return all(callable(method) and method not in (Environment.snapshot, Environment.restore) for method in own)


def copies_of(env: Any, n: int, factory: Callable[[], Any]) -> list[EnvironmentCopy]:
    """Copy an environment; called where its code runs, between two calls.

    Args:
        env: The environment.
        n: How many copies.
        factory: Makes a new environment, for `restore`.

    Raises:
        NotForkable: It cannot be copied, or a copy would share state with it.
    """
    if writes_snapshots(type(env)):
        snapshot = own_snapshot(env)
        build = partial(_restored, factory, snapshot)
        return [EnvironmentCopy(build, partial(restore_into, snapshot=snapshot)) for _ in range(n)]
    require_inner_state(env)
    require_copyable(env)
    copies = [_deep_copy(env) for _ in range(n)]
    common = shared_state(env, copies[0]) if copies else None  # all copies share the same parts with the original
    if common is not None:
        raise NotForkable(f"A copy of {type(env).__name__} would share {common} with it. {_WHAT_TO_DO}")
    return [EnvironmentCopy(partial(_same, one)) for one in copies]


def require_inner_state(env: Any) -> None:
    """Return if an environment says of itself that its episodes change its own memory alone.

    Raises:
        NotForkable: It says otherwise, and has no `snapshot` and `restore`.
    """
    if getattr(type(env), "HAS_EXTERNAL_STATE", False):
        raise NotForkable(
            f"{type(env).__name__} has HAS_EXTERNAL_STATE = True, so only its own snapshot() and restore() could copy "
            "it, and it does not write both."
        )


def require_copyable(env: Any) -> None:
    """Return if `deepcopy` and `pickle` copy every part of an environment, as far as that can be seen.

    Raises:
        NotForkable: A part is Gymnasium's `EzPickle`: it would be built again, at the beginning of an episode.
    """
    for part in _parts(env):
        if any(base.__name__ == "EzPickle" for base in type(part).__mro__):
            raise NotForkable(
                f"{type(part).__name__} is constructed again when it is pickled or copied (EzPickle), so its episode "
                f"would be lost. {_WHAT_TO_DO}"
            )


def own_snapshot(env: Any) -> Any:
    """Return the result of an environment's `snapshot`, as a copy that shares nothing with the environment.

    Raises:
        NotForkable: `snapshot` raised, or its result cannot be copied.
    """
    try:
        snapshot = env.snapshot()
        if inspect.iscoroutine(snapshot):
            snapshot.close()
            raise TypeError("it must not be a coroutine")
        return copy.deepcopy(snapshot)  # it may refer to objects that later steps change
    except Exception as exc:
        raise NotForkable(f"snapshot() of {type(env).__name__}: {type(exc).__name__}: {message_of(exc)}") from exc


def restore_into(env: Any, snapshot: Any) -> None:
    """Put an environment into the state of a snapshot.

    Raises:
        NotForkable: `restore` raised.
    """
    try:
        env.restore(copy.deepcopy(snapshot))  # siblings must not share it: `restore` may keep parts of it
    except Exception as exc:
        raise NotForkable(f"restore() of {type(env).__name__}: {type(exc).__name__}: {message_of(exc)}") from exc


def _restored(factory: Callable[[], Any], snapshot: Any) -> Any:
    env = factory()
    restore_into(env, snapshot)
    return env


def _same(env: Any) -> Any:
    return env


def _deep_copy(env: Any) -> Any:
    try:
        return copy.deepcopy(env)
    except Exception as exc:  # a lock, a socket, an open file; or any error in its copy methods
        name = type(env).__name__
        raise NotForkable(f"copy.deepcopy cannot copy {name}: {message_of(exc)}. {_WHAT_TO_DO}") from exc


# -- what two environments share ----------------------------------------------------------------------------------
# `deepcopy` copies constants by reference, and some of them lead to mutable parts of the original. Examples:
#
#   self.moves = {"left": lambda: self.go(-1)}       the function's closure refers to the original's `self`
#   self.draw = self.random.random                   a method in C is kept as it is, with the original's generator
#   self.board = weakref.ref(board)                  refers to the original's board
#
# If a class copies an object by reference in its `__deepcopy__` or `__reduce__`, it shares that object on purpose.


def shared_state(original: Any, duplicate: Any) -> str | None:
    """Describe a mutable object that both objects refer to; return None if they share none."""
    known = {id(part) for part in _parts(original)}
    for part in _parts(duplicate):
        if isinstance(part, tempfile.TemporaryDirectory):
            return f"the folder {part.name}"
        if id(part) in known and not isinstance(part, _TRANSPARENT) and not _copies_to_itself(part):
            return f"a {type(part).__name__} (a function, a method in C or a weak reference leads to it)"
    return None


def _copies_to_itself(part: Any) -> bool:
    if type(part) is object:  # a mark without a state
        return True
    try:
        return copy.deepcopy(part) is part
    except Exception:
        return False


def _parts(root: Any) -> Iterator[Any]:
    """Yield every object that an object refers to, over any number of others."""
    numpy = sys.modules.get("numpy")
    plain = _PLAIN if numpy is None else (*_PLAIN, numpy.dtype)  # which arrays and their copies have in common
    seen: dict[int, Any] = {}  # with the objects: the id of one that is freed may become another's
    pending = [root]
    while pending:
        part = pending.pop()
        if isinstance(part, plain) or id(part) in seen:
            continue
        seen[id(part)] = part
        yield part
        pending += _referents(part)


def _referents(part: Any) -> list[Any]:
    if isinstance(part, types.FunctionType):
        # Its globals belong to the program; so does the closure of a function at the top level of a module.
        return [] if _is_global(part) else list(part.__closure__ or ())
    if isinstance(part, weakref.ReferenceType):
        return [part()]
    return gc.get_referents(part)


def _is_global(function: types.FunctionType) -> bool:
    place: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        place = getattr(place, name, None)
    return place is function
