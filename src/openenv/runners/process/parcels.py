"""What crosses between a server and its workers: factories, actions, results, exceptions.

Everything is pickled, classes and functions by their names. Knows what can be sent and what to do with what cannot;
must not know sockets.
"""

from __future__ import annotations

import builtins
import functools
import io
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import message_of
from ..base import NotSendable

PROTOCOL = pickle.HIGHEST_PROTOCOL
MAIN = "__mp_main__"
"""What the program's own module is called in a worker."""


class RemoteTraceback(Exception):
    """Shows, as the cause of an exception, where it was raised in a worker process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f"\n\nin a worker process:\n{self._text}"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is to know before anything else.

    Args:
        path: Where modules are looked for.
        files: Modules that are not found by their names alone, and their files.
        main: The file of the program, where the factory is defined in it.
        factory: The factory, pickled.
        parent: The server's process id.
        levels: Levels of the server's loggers, by name; the empty name is the root's.
    """

    path: list[str]
    files: dict[str, str]
    main: str | None
    factory: bytes
    parent: int
    levels: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way.

    Args:
        pickled: The exception, where it can be pickled.
        name: Its class's name.
        message: Its text.
        base: The nearest of its base classes that every Python has.
        attributes: Those of its attributes that can be pickled.
        trace: Where it was raised.
    """

    pickled: bytes | None
    name: str
    message: str
    base: str
    attributes: bytes
    trace: str


class _Pickler(pickle.Pickler):
    """Also pickles classes that say how they are made anew: `__made_by__`, a function and its arguments."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            made_by = vars(obj).get("__made_by__")
            if made_by is not None:
                return made_by
        return NotImplemented


def pack(value: Any) -> bytes:
    """Pickle a value."""
    buffer = io.BytesIO()
    _Pickler(buffer, PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Take a value out of its parcel."""
    return pickle.loads(data)


def pack_factory(factory: Callable[[], Any]) -> bytes:
    """Pickle a factory.

    Raises:
        NotSendable: It is not defined at the top level of a module.
    """
    try:
        return pack(factory)
    except Exception as exc:
        name = getattr(factory, "__qualname__", repr(factory))
        raise NotSendable(
            f"the process runner cannot send the factory {name!r} to its workers ({message_of(exc)}): pass a class or "
            "a function at the top level of a module, or functools.partial of one with arguments that can be pickled"
        ) from exc


def modules_of(factory: Callable[[], Any], others: Iterable[Any] = ()) -> tuple[dict[str, str], str | None]:
    """Return the files of the modules that a factory is made of, for a process that does not find them by their names.

    The second is the file of the program itself, where something is defined in that.
    """
    files: dict[str, str] = {}
    main = None
    for thing in _parts(factory, others):
        name = getattr(thing, "__module__", None)
        module = sys.modules.get(name) if isinstance(name, str) else None
        file = getattr(module, "__file__", None)
        if module is None or name is None or file is None:
            continue
        if name == "__main__":
            main = str(Path(file).resolve())
            sys.modules.setdefault(MAIN, module)  # as multiprocessing does: what comes back may be of its classes
        else:
            files[name] = str(Path(file).resolve())
    return files, main


def _parts(factory: Any, others: Iterable[Any]) -> Iterable[Any]:
    yield from others
    while isinstance(factory, functools.partial):
        yield from (*factory.args, *factory.keywords.values())
        factory = factory.func
    yield factory
    if isinstance(factory, type):
        yield from factory.__mro__


def pack_error(error: BaseException) -> bytes:
    """Pickle an exception, or what can be told of it."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    base = next(cls for cls in type(error).__mro__ if vars(builtins).get(cls.__name__) is cls)
    return pack(
        Failure(
            pickled=_pickled(error),
            name=type(error).__name__,
            message=message_of(error),
            base=base.__name__,
            attributes=_attributes(error),
            trace=trace,
        )
    )


def unpack_error(data: bytes) -> BaseException:
    """Return an exception that was raised in a worker; its cause shows where."""
    try:
        failure: Failure = unpack(data)
    except Exception as exc:
        return NotSendable(f"an error of a worker process could not be read: {message_of(exc)}")
    error = _unpickled(failure)
    if error is None:
        error = _likeness(failure)
    error.__cause__ = RemoteTraceback(failure.trace)
    return error


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception that comes out as it went in: by its constructor, else without calling it."""
    for parcel in (error, _Rebuilt(type(error), error.args, vars(error))):
        try:
            data = pack(parcel)
            same = _opened(data)
        except Exception:
            continue
        if type(same) is type(error) and message_of(same) == message_of(error):
            return data
    return None


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """An exception whose constructor wants other arguments than those it keeps."""

    cls: type[BaseException]
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]


def _opened(data: bytes) -> Any:
    value = unpack(data)
    if isinstance(value, _Rebuilt):
        error = _bare(value.cls, value.arguments)
        error.args = value.arguments
        vars(error).update(value.attributes)
        return error
    return value


def _bare(cls: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    """Make an exception without its constructor."""
    for base in cls.__mro__:
        if "__new__" in vars(base):
            try:
                return base.__new__(cls, *arguments)
            except TypeError:  # of two builtin bases, only one may do it
                continue
    raise TypeError(f"{cls.__name__} cannot be made without its constructor")


def _attributes(error: BaseException) -> bytes:
    kept: dict[str, Any] = {}
    for name, value in vars(error).items():
        try:
            unpack(pack(value))
        except Exception:
            continue
        kept[name] = value
    return pack(kept)


def _unpickled(failure: Failure) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        error = _opened(failure.pickled)
    except Exception:  # its class may not be importable here
        return None
    return error if isinstance(error, BaseException) else None


def _likeness(failure: Failure) -> BaseException:
    """Make an exception that looks like one that cannot be had here."""
    base = vars(builtins)[failure.base]
    message = failure.message
    cls: Any = type(failure.name, (base,), {"__str__": lambda _: message, "__module__": "openenv.worker"})
    error: BaseException = cls.__new__(cls)
    error.args = (message,)
    try:
        vars(error).update(unpack(failure.attributes))
    except Exception:
        pass
    return error
