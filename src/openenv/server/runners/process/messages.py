"""Messages between a server and its worker processes, and their contents: factories, results, exceptions.

    <size: 8 bytes> <kind: 1> <number of the request: 8> <payload: size>     one after the other, on a Unix socket

Payloads are pickled, classes and functions by name. Both sides run the same release, so messages need no version
number. Knows pickling, and replacements for values that cannot be pickled; must not know sockets.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import io
import pickle
import struct
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from openenv.env.tools.source import ToolSource
from openenv.errors import message_of

from ...author_frames import RemoteTraceback, author_place, author_traceback
from ...module_finder import tabled_places
from ..base import NotSendable

HEADER: Final = struct.Struct("<QBQ")
READ_BYTES: Final = 256 * 1024
MAIN_MODULE: Final = "__mp_main__"
"""The name of the program's main module in a worker, as with multiprocessing."""

_FLAGS: Final = ("SUPPORTS_CONCURRENT_SESSIONS", "REQUIRES_SINGLE_THREAD_EXECUTOR")


class MessageKind(IntEnum):
    """The kinds of messages. `number` in the header is the request's number, except as noted here."""

    # From the server.
    SETUP = 1  # a `WorkerSetup`, before anything else
    ENCODER = 2  # an encoder of results; `number` is the encoder's
    OPEN = 3  # build an environment
    ASK = 4  # run an operation on one
    CANCEL = 5  # interrupt a request
    CLOSE = 6  # close an environment
    EXIT = 7  # end
    FORK = 8  # copy an environment
    REAP = 9  # a copy of the process has ended; `number` is its process id

    # From a worker.
    READY = 16  # the factory is loaded
    FAILED = 17  # the factory could not be loaded
    BYTES = 18  # a result that is bytes already
    VALUE = 19  # a result
    ERROR = 20  # an exception instead of a result
    EVENT = 21  # progress or a log message of a running tool
    LOG = 22  # a log record
    COPIES = 23  # process ids of copies; with a socket to each, as ancillary data


class WorkerMessage(NamedTuple):
    """One message."""

    kind: int
    number: int
    payload: bytes


def encode_message(kind: MessageKind, number: int = 0, payload: bytes = b"") -> bytes:
    """Encode a message."""
    return HEADER.pack(len(payload), kind, number) + payload


class MessageReader:
    """Cuts a stream into messages."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[WorkerMessage]:
        """Add bytes, and return the messages that are complete."""
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


# -- values -------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Also pickles classes made at run time: their `__made_by__` names a function and its arguments."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            made_by = vars(obj).get("__made_by__")
            if made_by is not None:
                return made_by
        return NotImplemented


def pack(value: Any) -> bytes:
    """Pickle a value."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


unpack = pickle.loads


# -- factories ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message to a worker.

    Args:
        path: The server's `sys.path`.
        files: Files of modules that cannot be found by their names.
        main: The program's main file, if it defines the factory.
        factory: The factory, pickled.
        parent: The server's process id.
        levels: The log levels of the server, by logger; the empty name is the root logger.
        vector: For a worker of a local vector: its slots, pickled; None for a worker of sessions.
    """

    path: list[str]
    files: dict[str, str]
    main: str | None
    factory: bytes
    parent: int
    levels: dict[str, int] = field(default_factory=dict)
    vector: bytes | None = None


def pack_factory(factory: Callable[[], Any]) -> bytes:
    """Pickle a factory.

    Raises:
        NotSendable: The factory is not defined at the top level of a module.
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
    """Return the files of a factory's modules, for a process that cannot find them by name.

    The second value is the program's main file, if it defines a part of the factory.
    """
    files = tabled_places()
    main = None
    for part in _parts(factory, others):
        name = getattr(part, "__module__", None)
        module = sys.modules.get(name) if isinstance(name, str) else None
        file = getattr(module, "__file__", None)
        if module is None or name is None or file is None:
            continue
        if name == "__main__":
            main = str(Path(file).resolve())
            sys.modules.setdefault(MAIN_MODULE, module)  # results may be of its classes, under that name
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


# -- environments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EnvironmentDescription:
    """The facts about a worker's environment that the server needs.

    Args:
        cls: Its class, pickled; None if it cannot be pickled.
        name: The class's name.
        flags: The class's flags about sessions and threads.
        methods: Names of the methods that can be called.
        has_tools: Whether it defines tools itself.
        has_server: Whether its tools come from a FastMCP server only.
        instructions: The instructions of its FastMCP server.
    """

    cls: bytes | None
    name: str
    flags: dict[str, bool]
    methods: frozenset[str]
    has_tools: bool
    has_server: bool
    instructions: str | None

    def served_class(self) -> type[Any]:
        """Return the environment's class, or an equivalent one."""
        return _served_class(self.cls, self.name, tuple(self.flags.items()))


@functools.lru_cache(maxsize=64)
def _served_class(pickled: bytes | None, name: str, flags: tuple[tuple[str, bool], ...]) -> type[Any]:
    if pickled is not None:
        try:
            cls = unpack(pickled)
        except Exception:
            cls = None
        if isinstance(cls, type):
            return cls
    return type(name, (), dict(flags))


def describe(env: Any) -> EnvironmentDescription:
    """Describe an environment; call this in its lane."""
    server = getattr(env, "mcp_server", None)
    has_tools = isinstance(getattr(env, "tools", None), ToolSource)
    own = [name for name, value in getattr(env, "__dict__", {}).items() if callable(value)]
    instructions = getattr(server, "instructions", None)
    key: Any = type(env)  # every class is hashable, but not to a type checker
    pickled, methods = _describe_class(key)
    return EnvironmentDescription(
        cls=pickled,
        name=type(env).__name__,
        flags={name: bool(getattr(type(env), name, False)) for name in _FLAGS},
        methods=methods.union(own),
        has_tools=has_tools,
        has_server=not has_tools and hasattr(server, "local_provider"),
        instructions=instructions if isinstance(instructions, str) else None,
    )


@functools.lru_cache(maxsize=64)
def _describe_class(cls: Hashable) -> tuple[bytes | None, frozenset[str]]:
    try:
        pickled: bytes | None = pack(cls)
    except Exception:
        pickled = None
    static = {name: inspect.getattr_static(cls, name) for name in dir(cls) if not name.startswith("__")}
    methods = frozenset(
        name for name, value in static.items() if callable(value) or isinstance(value, (staticmethod, classmethod))
    )
    return pickled, methods


class PackedState(NamedTuple):
    """The state of an environment on its way to another worker.

    Args:
        is_snapshot: Whether the value is the result of `snapshot`, for `restore`; else it is the environment itself.
        pickled: The pickled value.
    """

    is_snapshot: bool
    pickled: bytes


# -- exceptions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """An exception on its way from a worker.

    Args:
        pickled: The exception, if it can be pickled.
        name: The name of its class.
        message: Its text.
        base: The nearest builtin base class.
        attributes: Its picklable attributes.
        trace: The traceback from the author's first frame on.
        place: The failing line in the author's code.
    """

    pickled: bytes | None
    name: str
    message: str
    base: str
    attributes: bytes
    trace: str
    place: str | None


@dataclass(frozen=True, slots=True)
class _ExceptionParts:
    """An exception with constructor arguments that differ from its `args`."""

    cls: type[BaseException]
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]

    def build(self) -> BaseException:
        """Make the exception without calling its constructor."""
        for base in self.cls.__mro__:
            if "__new__" not in vars(base):
                continue
            try:
                error: BaseException = base.__new__(self.cls, *self.arguments)
            except TypeError:  # of two builtin bases, only one may make instances
                continue
            error.args = self.arguments
            vars(error).update(self.attributes)
            return error
        raise TypeError(f"{self.cls.__name__} cannot be made without its constructor")


def pack_error(error: BaseException) -> bytes:
    """Pickle an exception, or a description of an unpicklable one."""
    base = next(cls for cls in type(error).__mro__ if vars(builtins).get(cls.__name__) is cls)
    return pack(
        RemoteFailure(
            pickled=_pickled(error),
            name=type(error).__name__,
            message=message_of(error),
            base=base.__name__,
            attributes=_attributes(error),
            trace=author_traceback(error),
            place=author_place(error),
        )
    )


def unpack_error(data: bytes) -> BaseException:
    """Return an exception from a worker; its cause shows the traceback there."""
    try:
        failure: RemoteFailure = unpack(data)
    except Exception as exc:
        return NotSendable(f"an error of a worker process could not be read: {message_of(exc)}")
    error = _unpickled(failure)
    if error is None:
        error = _similar(failure)
    error.__cause__ = RemoteTraceback(failure.trace, failure.place)
    return error


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception by its constructor if the result is equal, else by its parts."""
    for value in (error, _ExceptionParts(type(error), error.args, vars(error))):
        try:
            data = pack(value)
            same = _rebuilt(data)
        except Exception:
            continue
        if type(same) is type(error) and message_of(same) == message_of(error):
            return data
    return None


def _rebuilt(data: bytes) -> Any:
    value = unpack(data)
    return value.build() if isinstance(value, _ExceptionParts) else value


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
        error = _rebuilt(failure.pickled)
    except Exception:  # its class may not be importable here
        return None
    return error if isinstance(error, BaseException) else None


def _similar(failure: RemoteFailure) -> BaseException:
    """Make an exception that resembles one of an unavailable class."""
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
