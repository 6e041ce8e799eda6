"""Messages between a server and its worker processes: a header and a payload, one after the other on a stream.

Both sides run the same release, so there is no version in it. Knows bytes only.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import io
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...env.tools.source import ToolSource
from ...errors import message_of
from ..base import NotSendable

HEADER: Final = struct.Struct("<QBQ")
READ_BYTES: Final = 256 * 1024


class MessageKind(IntEnum):
    """What a message is. `number` in its header is the request's, unless said otherwise here."""

    # From the server.
    SETUP = 1  # what a worker is to know before anything else
    ENCODER = 2  # an encoder of results; `number` is its own
    OPEN = 3  # build an environment
    ASK = 4  # do something with one
    CANCEL = 5  # interrupt a request
    CLOSE = 6  # close an environment
    EXIT = 7  # end

    # From a worker.
    READY = 16  # the factory is loaded
    FAILED = 17  # it could not be
    BYTES = 18  # a result that is bytes already
    VALUE = 19  # a result
    ERROR = 20  # what was raised instead of a result
    EVENT = 21  # progress or a log message of a running tool
    LOG = 22  # a record of the worker's log


class WorkerMessage(NamedTuple):
    """One message."""

    kind: int
    number: int
    payload: bytes


def encode_message(kind: MessageKind, number: int = 0, payload: bytes = b"") -> bytes:
    """Write a message."""
    return HEADER.pack(len(payload), kind, number) + payload


class MessageReader:
    """Cuts a stream into messages."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[WorkerMessage]:
        """Take in what came, and return the messages that are whole."""
        buffer = self._buffer
        buffer += data
        place, end = 0, len(buffer)
        while end - place >= HEADER.size:
            size, kind, number = HEADER.unpack_from(buffer, place)
            start = place + HEADER.size
            if end - start < size:
                break
            yield WorkerMessage(kind, number, bytes(buffer[start : start + size]))
            place = start + size
        if place:
            del buffer[:place]


# parcels: What crosses between a server and its workers: factories, actions, results, exceptions.
#
# Everything is pickled, classes and functions by their names. Knows what can be sent and what to do with what cannot;
# must not know sockets.


PROTOCOL = pickle.HIGHEST_PROTOCOL
MAIN_MODULE = "__mp_main__"
"""What the program's own module is called in a worker."""


class RemoteTraceback(Exception):
    """Shows, as the cause of an exception, where it was raised in a worker process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f"\n\nin a worker process:\n{self._text}"


@dataclass(frozen=True, slots=True)
class WorkerSetup:
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
class RemoteFailure:
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
            sys.modules.setdefault(
                MAIN_MODULE, module
            )  # as multiprocessing does: what comes back may be of its classes
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
        RemoteFailure(
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
        failure: RemoteFailure = unpack(data)
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


def _unpickled(failure: RemoteFailure) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        error = _opened(failure.pickled)
    except Exception:  # its class may not be importable here
        return None
    return error if isinstance(error, BaseException) else None


def _likeness(failure: RemoteFailure) -> BaseException:
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


# What a server has to know of an environment that it does not hold. Made in the worker, read in the server.


_FLAGS = ("SUPPORTS_CONCURRENT_SESSIONS", "REQUIRES_SINGLE_THREAD_EXECUTOR")


@dataclass(frozen=True, slots=True)
class EnvironmentDescription:
    """An environment, described.

    Args:
        cls: Its class, pickled; None where that cannot be.
        name: The class's name.
        flags: What the class says about sessions and threads.
        methods: Names of what can be called.
        has_tools: Whether it has tools of its own.
        has_server: Whether it has a FastMCP server and no tools of its own.
        instructions: What its FastMCP server tells clients.
    """

    cls: bytes | None
    name: str
    flags: dict[str, bool]
    methods: frozenset[str]
    has_tools: bool
    has_server: bool
    instructions: str | None

    def served_class(self) -> type[Any]:
        """Return the environment's class, or one that looks like it."""
        return _served(self.cls, self.name, tuple(self.flags.items()))


@lru_cache(maxsize=64)
def _served(pickled: bytes | None, name: str, flags: tuple[tuple[str, bool], ...]) -> type[Any]:
    if pickled is not None:
        try:
            found = unpack(pickled)
        except Exception:
            found = None
        if isinstance(found, type):
            return found
    return type(name, (), dict(flags))


def describe(env: Any) -> EnvironmentDescription:
    """Describe an environment; called where its code runs."""
    server = getattr(env, "mcp_server", None)
    has_tools = isinstance(getattr(env, "tools", None), ToolSource)
    own = [name for name, value in getattr(env, "__dict__", {}).items() if callable(value)]
    instructions = getattr(server, "instructions", None)
    key: Any = type(env)  # every class is hashable, but not to a type checker
    cls, flags, methods = _class(key)
    return EnvironmentDescription(
        cls=cls,
        name=type(env).__name__,
        flags=flags,
        methods=methods.union(own),
        has_tools=has_tools,
        has_server=not has_tools and hasattr(server, "local_provider"),
        instructions=instructions if isinstance(instructions, str) else None,
    )


@lru_cache(maxsize=64)
def _class(cls: Hashable) -> tuple[bytes | None, dict[str, bool], frozenset[str]]:
    """Describe a class, once."""
    try:
        pickled: bytes | None = pack(cls)
    except Exception:
        pickled = None
    static = {name: inspect.getattr_static(cls, name) for name in dir(cls) if not name.startswith("__")}
    methods = frozenset(
        name for name, value in static.items() if callable(value) or isinstance(value, (staticmethod, classmethod))
    )
    return pickled, {name: bool(getattr(cls, name, False)) for name in _FLAGS}, methods
