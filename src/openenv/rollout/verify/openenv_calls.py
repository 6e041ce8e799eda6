"""Calls from a test in one sandbox to the agent's modules in another: the programs of both sides.

    python3 -m openenv_calls judge square -- -m pytest -q tests     in the judge's sandbox: `import square` is a proxy
    python3 -m openenv_calls judge square --classes Stack -- ...    the same; instances of Stack may be referenced
    python3 -m openenv_calls serve                                  in the agent's: imports and calls on request
    python3 -m openenv_calls connect OUT PORT SECONDS               in the agent's: carries connections to its server

The verifier copies this file alone into both sandboxes. Standard library only: it runs on the sandbox's Python.
"""

# How values cross between the sandboxes:
#
#   data          None, bool, int, float, complex, str, bytes, and list, tuple, set, frozenset and dict of them; numpy
#                 arrays of numbers or text. A subclass crosses as the builtin that it extends.
#   iterators     cross as an iterator over their first items, which are computed at once.
#   reference     modules, functions and classes stay in their process: the test can call them and get attributes.
#                 Instances do so only if the check declares their class; any other object raises `CallFailed`.
#   arguments     are copies, so the agent's code cannot change the values that the test compares with.
#   exceptions    cross as the nearest builtin class, with their arguments.
#
# Values that pass a comparison with anything cross only to a test that mentions them:
#
#   NaN           every comparison with it is false, so `not abs(f(x) - y) > 1e-6` passes
#   infinity      two of them add up to NaN: `not abs(sum(f(x)) - 1) > 1e-6`
#   empty array   numpy compares each of its items with a number: `numpy.allclose(f(x), 5)`
#
# Allow, do not deny: a reference has no operator, comparison, conversion, length, truth value or iteration. Python
# would hand the expected value to the agent's method, as in `abs(f(x) - y) < 1e-6`, and its answer would decide.
#
# The agent's side only answers questions, and an answer can only be right or wrong: nothing in it is executed. Its
# size, depth and digits are limited, and every violation raises `CallFailed`.
#
# Exit code 0 is not enough: at least one test passed, and no test was skipped because of a value of the agent.
#
# A frame is its length in four bytes, and JSON:
#
#   {"op": "import", "name": "square"}                       ->  {"value": ["o", 1, "module", "square"]}
#   {"op": "get", "of": 1, "name": "square"}                 ->  {"value": ["o", 2, "call", "square"]}
#   {"op": "call", "of": 2, "args": [7], "kwargs": []}       ->  {"value": 49}
#   {"op": "call", "of": 2, "args": [["t", [1, 2]]], ...}    ->  {"error": [["TypeError", "Exception"], ["..."]]}
#   {"op": "call", "of": 3, "args": [], "kwargs": []}        ->  {"value": ["n", "<f8", [1], "AAAAAAAA8D8="]}

from __future__ import annotations

import base64
import builtins
import functools
import json
import math
import os
import re
import socket
import struct
import sys
import threading
import time
import types

TYPE_CHECKING = False  # type checkers treat it as True; `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from typing import Any

_LENGTH = struct.Struct(">I")
MAX_FRAME = 4 * 1024 * 1024
MAX_RECEIVED = 64 * 1024 * 1024
"""Bytes that a test process accepts from the agent's side in total."""
MAX_DEPTH = 64
MAX_DIGITS = 100_000
"""Hexadecimal digits of an integer."""
MAX_ITEMS = 10_000
"""Items of an iterator that cross."""
MAX_ITERATION_S = 5.0
"""The time for computing them."""
_DTYPE = re.compile(r"[<>|=][biufc]\d{1,2}|[<>|][SU][1-9]\d{0,7}")
_MAX_DIMENSIONS = 32
_EXACT = 1 << 53
_TIME = "OPENENV_CALLS_S"
_DEFAULT_S = 60.0
_HOST = "127.0.0.1"


class CallFailed(BaseException):
    """The agent's side crashed, did not answer, or sent an invalid answer; or a value cannot cross.

    Not an `Exception`: a test that expects one must not accept a crash.
    """


# ---- values ----


def encode(value: object, refer: Callable[[object], Any], depth: int = 0) -> Any:
    """Return a value as JSON; `refer` makes a reference for values that are not data.

    Raises:
        ValueError: the value is nested too deeply, or an integer is too long.
    """
    if depth > MAX_DEPTH:
        raise ValueError("a value is nested too deeply to cross")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float, complex)):
        return _encode_number(value)
    if isinstance(value, bytes):
        return ["b", base64.b64encode(value).decode()]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _encode_array(numpy.asarray(value))
    for kind, mark in _SEQUENCES.items():
        if isinstance(value, kind):
            return [mark, [encode(item, refer, depth + 1) for item in kind.__iter__(value)]]  # type: ignore[attr-defined]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return ["d", [[encode(key, refer, depth + 1), encode(item, refer, depth + 1)] for key, item in pairs]]
    if hasattr(type(value), "__next__"):
        return _encode_iterator(value, refer, depth)
    return refer(value)


_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_BY_MARK: dict[str, Callable[[list[Any]], object]] = {mark: kind for kind, mark in _SEQUENCES.items()}


def _encode_number(value: complex) -> Any:
    if isinstance(value, float):
        return ["f", float.__repr__(value)]
    if not isinstance(value, int):
        return ["c", float.__repr__(value.real), float.__repr__(value.imag)]
    value = int.__index__(value)
    if -_EXACT < value < _EXACT:
        return value
    if value.bit_length() > 4 * MAX_DIGITS:
        raise ValueError("an integer is too long to cross")
    return ["i", f"{value:x}"]


def _encode_array(array: Any) -> list[Any]:
    if not _DTYPE.fullmatch(array.dtype.str):
        raise ValueError(f"a numpy array of {array.dtype} cannot cross; return numbers, truth values or text")
    return ["n", array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _encode_iterator(value: Any, refer: Callable[[object], Any], depth: int) -> list[Any]:
    """Return the first items of an iterator, and whether they are all: an iterator may be endless."""
    items: list[Any] = []
    until = time.monotonic() + MAX_ITERATION_S
    for item in value:
        if len(items) == MAX_ITEMS or (items and time.monotonic() > until):
            return ["y", items, False]
        items.append(encode(item, refer, depth + 1))
    return ["y", items, True]


def decode(value: Any, resolve: Callable[[list[Any]], object], depth: int = 0) -> object:
    """Return a value from JSON; `resolve` returns the object of a reference.

    Raises:
        ValueError, TypeError, KeyError: the JSON is not an encoded value.
    """
    if depth > 2 * MAX_DEPTH:
        raise ValueError("a value is nested too deeply")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and -_EXACT < value < _EXACT:
        return value
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ValueError("it is not an encoded value")
    mark, *rest = value
    if mark == "o":
        return resolve(rest)
    if mark == "n":
        return _decode_array(*rest)
    if mark in ("c", "y"):
        first, second = rest
        if mark == "c":
            return complex(_decode_float(first), _decode_float(second))
        return _items(decode(["l", first], resolve, depth), second is True)
    (content,) = rest
    if isinstance(content, str):
        return _decode_text(mark, content)
    if not isinstance(content, list):
        raise ValueError("it is not an encoded value")
    if mark == "d":
        return {decode(key, resolve, depth + 1): decode(item, resolve, depth + 1) for key, item in content}
    return _BY_MARK[mark]([decode(item, resolve, depth + 1) for item in content])


def _decode_text(mark: str, text: str) -> object:
    if mark == "f":
        return _decode_float(text)
    if mark == "b":
        return base64.b64decode(text, validate=True)
    if mark == "i" and len(text) <= MAX_DIGITS + 1:
        return int(text, 16)
    raise ValueError("it is not an encoded value")


def _decode_array(dtype: object, shape: object, text: object) -> object:
    """Return a numpy array, or a scalar for an array without dimensions.

    Raises:
        CallFailed: this Python has no numpy.
    """
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype) or not isinstance(text, str):
        raise ValueError("it is not an array")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(type(each) is int for each in shape):
        raise ValueError("it is not the shape of an array")
    try:
        import numpy
    except ImportError:
        raise CallFailed("a numpy array cannot cross: the judge's Python has no numpy; return a list") from None
    content = base64.b64decode(text, validate=True)
    kind = numpy.dtype(dtype)
    if min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != len(content):
        raise ValueError("the size of an array is wrong")
    array = numpy.ndarray(tuple(shape), kind, content)
    return (array.view("u1") != 0 if kind.kind == "b" else array).copy()[()]  # a byte 2 would be neither true nor false


def _items(items: Any, is_complete: bool) -> Iterator[object]:
    """Iterate over items that crossed.

    Raises:
        CallFailed: the test asks for more items than crossed.
    """
    yield from items
    if not is_complete:
        raise CallFailed(f"an iterator crosses with {MAX_ITEMS} items and {MAX_ITERATION_S:g} s at most; return a list")


def _decode_float(text: object) -> float:
    if not isinstance(text, str) or len(text) > 32:
        raise ValueError("it is not a number")
    return float(text)


def _parse(frame: bytes) -> dict[str, Any]:
    """Return the message of a frame.

    Raises:
        ValueError: the frame is not a message.
    """
    try:
        message = json.loads(frame)
    except RecursionError:
        raise ValueError("a frame is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a frame is not a message")
    return message


def _receive(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        chunk = connection.recv(min(1 << 16, length - len(received)))
        if not chunk:
            raise ConnectionError("the connection was closed")
        received += chunk
    return bytes(received)


# ---- the test's side ----


class Remote:
    """The agent's side, as a test process sees it. One connection per thread.

    After a failure every call fails at once: a late answer could belong to another question.

    Args:
        port: The port of the agent's side.
        seconds: The time limit of all calls together.
        classes: The classes whose instances may be referenced.
    """

    def __init__(self, port: int, seconds: float, classes: Iterable[str] = ()) -> None:
        self.values = 0
        """The values and exceptions of the agent that the test has received."""
        self._port, self._classes = port, frozenset(classes)
        self._until = time.monotonic() + seconds
        self._local = threading.local()
        self._received = 0
        self._failure: str | None = None

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a question and return the answer.

        Raises:
            CallFailed: no valid answer came.
        """
        if self._failure is not None:
            raise CallFailed(self._failure)
        try:
            return self._ask(json.dumps(message).encode())
        except TimeoutError:
            self._failure = "the agent's code did not answer in time"
        except OSError as exc:
            self._failure = f"the agent's code ended, or its connection broke: {exc}"
        except (ValueError, TypeError) as exc:
            self._failure = f"the agent's side sent an invalid answer: {exc}"
        raise CallFailed(self._failure)

    def _ask(self, frame: bytes) -> dict[str, Any]:
        if len(frame) > MAX_FRAME:
            raise CallFailed(f"arguments of {len(frame)} bytes are too large to cross")
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = socket.create_connection((_HOST, self._port), timeout=self._left())
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._local.connection = connection
        connection.settimeout(self._left())
        connection.sendall(_LENGTH.pack(len(frame)) + frame)
        (length,) = _LENGTH.unpack(self._take(connection, _LENGTH.size))
        if length > MAX_FRAME:
            raise ValueError(f"a frame of {length} bytes")
        return _parse(self._take(connection, length))

    def _take(self, connection: socket.socket, length: int) -> bytes:
        self._received += length
        if self._received > MAX_RECEIVED:
            raise ValueError("it sent too many bytes in total")
        received = bytearray()
        while len(received) < length:  # one limit for the whole answer: sent byte by byte, it would never end
            connection.settimeout(self._left())
            chunk = connection.recv(min(1 << 16, length - len(received)))
            if not chunk:
                raise ConnectionError("the agent's side closed it")
            received += chunk
        return bytes(received)

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def evaluate(self, message: dict[str, Any]) -> object:
        """Ask for a value; raise the exception that the agent's code raised.

        Raises:
            CallFailed: no valid answer came, or the value is an object of a class that the check does not declare.
        """
        answer = self.ask(message)
        try:
            if "error" in answer:
                self.values += 1
                raise self._exception(answer["error"])
            value = decode(answer["value"], self._resolve)
            passing = _passing(answer["value"])
            if passing is not None and not _mentions(_PASSING[passing]):
                raise CallFailed(
                    f"a result contains {passing}, which passes some comparisons with any value; "
                    f"a test that expects it mentions it (`{_PASSING[passing].pattern}`)"
                )
            self.values += not isinstance(value, RemoteObject)
            return value
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as exc:
            if getattr(exc, "openenv_remote", False):
                raise
            self._failure = f"the agent's side sent an invalid answer: {exc}"
            raise CallFailed(self._failure) from None

    def _resolve(self, rest: list[Any]) -> object:
        number, kind, name = rest
        if not (isinstance(number, int) and isinstance(kind, str) and isinstance(name, str)):
            raise ValueError("it is not a reference")
        names = name[:1000].split() or ["object"]  # of an instance: its class, then the base classes
        if kind not in ("module", "call", "async") and self._classes.isdisjoint(names):
            raise CallFailed(
                f"an object of the class {names[0][:100]} cannot cross. Return data (numbers, text, lists, dicts, "
                f"numpy arrays), or declare the class in the check: classes=({names[0][:100]!r},)"
            )
        return RemoteObject(self, number, kind, names[0][:100])

    def _exception(self, error: Any) -> BaseException:
        names, arguments = error
        for name in names:
            kind = getattr(builtins, str(name), None)
            if isinstance(kind, type) and issubclass(kind, Exception) and name not in _NOT_RAISED:
                values = [decode(each, self._resolve) for each in arguments]
                try:
                    exception = kind(*values)
                except TypeError:  # UnicodeDecodeError and others take special arguments
                    exception = Exception(*values)
                exception.openenv_remote = True  # type: ignore[attr-defined]
                return exception
        return CallFailed(f"the agent's code ended with {str(names[:1])[:100]}")


_PASSING = {
    "NaN": re.compile(r"(?i)\b(is_?|equal_|allow_)?nan|isfinite"),
    "infinity": re.compile(r"(?i)\b(is_?)?inf|\b(is_?|allow_)?nan|isfinite"),
    "an empty array": re.compile(r"\b(len|size|shape|empty|ndim)\b"),
}
"""Values that pass a comparison with any value, and the words of a test that expects them."""


def _passing(value: Any) -> str | None:
    """Return the first key of `_PASSING` that an encoded value contains, which was decoded before."""
    if not isinstance(value, list):
        return None
    mark, *rest = value
    kinds: Sequence[str | None] = ()
    if mark in ("f", "c"):
        numbers = [_decode_float(text) for text in rest]
        kinds = ["NaN"] * any(map(math.isnan, numbers)) + ["infinity"] * any(map(math.isinf, numbers))
    elif mark == "n":
        array: Any = _decode_array(*rest)
        kinds = ["an empty array"] if array.size == 0 else []
        if array.dtype.kind in "fc":
            numpy: Any = sys.modules["numpy"]
            kinds = [*kinds, *["NaN"] * bool(numpy.isnan(array).any()), *["infinity"] * bool(numpy.isinf(array).any())]
    elif mark == "d":
        kinds = [_passing(each) for pair in rest[0] for each in pair]
    elif mark in _BY_MARK or mark == "y":
        kinds = [_passing(each) for each in rest[0]]
    return next((kind for kind in _PASSING if kind in kinds), None)


def _mentions(words: re.Pattern[str]) -> bool:
    """Return whether the test code, which lies in the work folder, contains a word."""
    root = os.path.realpath(os.curdir) + os.sep
    texts = [*sys.argv, *getattr(sys, "orig_argv", ())]  # for `-c`
    for module in list(sys.modules.values()):
        file = module.__dict__.get("__file__")
        if isinstance(file, str) and os.path.realpath(file).startswith(root) and file.endswith(".py"):
            texts.append(_source(file))
    return any(words.search(text) for text in texts)


_NOT_RAISED = frozenset({"StopIteration", "StopAsyncIteration", "ExceptionGroup"})
"""The first two would silently end a loop of the test."""


def _refer(value: object) -> Any:
    if isinstance(value, RemoteObject):
        return ["o", object.__getattribute__(value, "_number")]
    raise CallFailed(
        f"{type(value).__name__} cannot cross to the agent's side; numbers, text, bytes, lists, tuples, sets, dicts can"
    )


def _encoded(values: Iterable[object]) -> list[Any]:
    try:
        return [encode(value, _refer) for value in values]
    except ValueError as exc:
        raise CallFailed(str(exc)) from None


class RemoteObject:
    """A reference to a function, a class or a declared instance on the agent's side: calls and attributes only."""

    __slots__ = ("_kind", "_name", "_number", "_remote")

    def __init__(self, remote: Remote, number: int, kind: str, name: str) -> None:
        for attribute, value in (("_remote", remote), ("_number", number), ("_kind", kind), ("_name", name)):
            object.__setattr__(self, attribute, value)

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_name')} on the agent's side>"

    def __getattr__(self, name: str) -> object:
        kind = object.__getattribute__(self, "_kind")
        # pytest and mock look for these names on every import of a test module; the agent must not answer them.
        if name.startswith(("__", "_pytest", "pytest")) or (kind != "object" and name.startswith("_")):
            raise AttributeError(name)
        message = {"op": "get", "of": object.__getattribute__(self, "_number"), "name": name}
        return object.__getattribute__(self, "_remote").evaluate(message)

    def __setattr__(self, name: str, value: object) -> None:
        number = object.__getattribute__(self, "_number")
        message = {"op": "set", "of": number, "name": name, "args": _encoded([value])}
        object.__getattribute__(self, "_remote").evaluate(message)

    def __call__(self, *args: object, **kwargs: object) -> object:
        message = {
            "op": "call",
            "of": object.__getattribute__(self, "_number"),
            "args": _encoded(args),
            "kwargs": list(zip(kwargs, _encoded(kwargs.values()))),  # noqa: B905 (Python 3.9)
        }
        remote = object.__getattribute__(self, "_remote")
        if object.__getattribute__(self, "_kind") == "async":
            return _later(lambda: remote.evaluate(message))
        return remote.evaluate(message)

    __hash__ = object.__hash__


async def _later(call: Callable[[], object]) -> object:
    return call()


def _refused(name: str) -> Callable[..., object]:
    def method(self: RemoteObject, *args: object) -> object:
        raise CallFailed(
            f"{name} of {self!r} is refused, because the agent's code would decide. "
            "Call a function or a method that returns data"
        )

    return method


_ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow")
_BITS = ("lshift", "rshift", "and", "xor", "or")
REFUSED = (
    *("lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil"),
    *("bool", "int", "float", "complex", "index", "str", "bytes", "format", "fspath"),
    *("len", "length_hint", "iter", "next", "reversed", "contains", "getitem", "setitem", "delitem", "delattr"),
    *("enter", "exit", "aenter", "aexit", "await", "aiter", "anext", "instancecheck", "subclasscheck"),
    *(f"{prefix}{name}" for prefix in ("", "r", "i") for name in (*_ARITHMETIC, *_BITS)),
)
"""Special methods of a reference, without their underscores: each would let the agent's code decide."""
for _name in REFUSED:
    setattr(RemoteObject, f"__{_name}__", _refused(f"__{_name}__"))


_SPECIAL = re.compile(r"_|pytest|[Tt]est|set_?[Uu]p|tear_?[Dd]own|load_tests")
"""Names that pytest and unittest look up in a test module."""


class RemoteModule(types.ModuleType):
    """A proxy of a module on the agent's side."""

    def __init__(self, name: str, module: RemoteObject) -> None:
        super().__init__(name)
        self.__dict__["_openenv_module"] = module
        self.__dict__["__path__"] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(name)
        module: RemoteObject = self.__dict__["_openenv_module"]
        if name == "__all__":
            importing = sys._getframe(1)
            return self._exported(module, {**importing.f_globals, **importing.f_locals})
        message = {"op": "get", "of": object.__getattribute__(module, "_number"), "name": name}
        return object.__getattribute__(module, "_remote").evaluate(message)

    def _exported(self, module: RemoteObject, taken: dict[str, Any]) -> list[str]:
        """Return the names that `from app import *` binds.

        An agent's `len`, `approx` or `test_more` would decide in the place of the test's own.

        Args:
            module: The module.
            taken: The names that the importing module has already.
        """
        remote = object.__getattribute__(module, "_remote")
        number = object.__getattribute__(module, "_number")
        before = remote.values  # the names themselves are no values that a test could skip for
        names = remote.evaluate({"op": "get", "of": number, "name": "__all__"})
        remote.values = before
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise CallFailed(f"__all__ of the agent's module {self.__name__} is not a list of names")
        return [name for name in names if not (name in taken or hasattr(builtins, name) or _SPECIAL.match(name))]

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("__") and not isinstance(value, RemoteModule):
            raise CallFailed(f"{self.__name__}.{name} is on the agent's side and cannot be replaced")
        super().__setattr__(name, value)


class RemoteFinder:
    """Finds the agent's modules and packages on its side; first in `sys.meta_path`."""

    def __init__(self, remote: Remote, modules: Sequence[str]) -> None:
        self._remote, self._modules = remote, tuple(modules)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a spec for a module of the agent."""
        from importlib.machinery import ModuleSpec  # loaded by now; `serve` and `connect` do not need it

        if name not in self._modules and not name.startswith(tuple(f"{module}." for module in self._modules)):
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> RemoteModule:
        """Import the module on the agent's side."""
        try:
            module = self._remote.evaluate({"op": "import", "name": spec.name})
        except Exception as exc:  # the agent could raise an ImportError to make a test skip itself
            raise CallFailed(
                f"the agent's module {spec.name} cannot be imported: {type(exc).__name__}: {exc}"
            ) from None
        if not isinstance(module, RemoteObject):
            raise CallFailed(f"the agent's side has no module {spec.name}")
        return RemoteModule(spec.name, module)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module runs on the agent's side."""


def judge(modules: Sequence[str], classes: Sequence[str], command: Sequence[str]) -> None:
    """Run Python with a command line (`-m NAME`, `-c CODE` or a file), and with proxies for some modules."""
    import runpy

    remote = Remote(int(os.environ["PORT"]), float(os.environ.get(_TIME, _DEFAULT_S)), classes)
    sys.meta_path.insert(0, RemoteFinder(remote, modules))
    for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
        del sys.modules[name]
    if command[0] != "-m" and "unittest" in (command[1] if command[0] == "-c" else _source(command[0])):
        _guard_unittest(remote)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        if command[1] == "pytest":
            _judge_pytest(remote, command[2:])
        elif command[1] == "unittest":
            _judge_unittest(remote, command[2:])
        else:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": builtins})
    else:
        sys.argv = list(command)
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")


def _source(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _judge_pytest(remote: Remote, arguments: Sequence[str]) -> None:
    """Run pytest, and end with its exit code; with 1 if it is 0 and `TestCounts` complains."""
    import pytest

    counts = TestCounts(remote)
    pytest.hookimpl(hookwrapper=True)(TestCounts.pytest_runtest_makereport)
    _leave(int(pytest.main(list(arguments), plugins=[counts])), counts.complaint())


def _judge_unittest(remote: Remote, arguments: Sequence[str]) -> None:
    """Run unittest, and end as `_judge_pytest` does."""
    _guard_unittest(remote)(module=None, argv=["python -m unittest", *arguments])


def _guard_unittest(remote: Remote) -> Any:
    """Let `unittest.main` end with 1 if no test passed, or one was skipped because of a value of the agent."""
    import unittest

    class Program(unittest.TestProgram):
        def runTests(self) -> None:
            before, leaves = remote.values, bool(getattr(self, "exit", True))
            self.exit = False
            super().runTests()
            result, complaint = self.result, None
            for test, _ in result.skipped:
                method = getattr(test, getattr(test, "_testMethodName", ""), None)
                is_marked = getattr(method, "__unittest_skip__", False) or getattr(test, "__unittest_skip__", False)
                if before if is_marked else remote.values:
                    complaint = f"{test} was skipped, perhaps because of a value of the agent"
            if result.testsRun <= len(result.skipped) + len(result.expectedFailures):
                complaint = "no test passed"
            if leaves or (complaint is not None and result.wasSuccessful()):
                _leave(int(not result.wasSuccessful()), complaint)

    setattr(unittest, "TestProgram", Program)  # noqa: B010 (mypy refuses to assign to a type)
    setattr(unittest, "main", Program)  # noqa: B010
    return Program


def _leave(status: int, complaint: str | None) -> None:
    if status == 0 and complaint is not None:
        sys.stderr.write(f"not passed: {complaint}\n")
        status = 1
    raise SystemExit(status)


class TestCounts:
    """A pytest plug-in that counts passed tests, and looks at skipped ones.

    A skip mark is decided when the test module is imported, `pytest.skip()` while tests run. A skip counts against the
    agent if a value of it had crossed before that.
    """

    __test__ = False

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._collected = 0
        self._passed = 0
        self._skip: str | None = None

    def pytest_collection_finish(self, session: object) -> None:
        """Remember the values that crossed while test modules were imported."""
        self._collected = self._remote.values

    def pytest_collectreport(self, report: Any) -> None:
        """Look at a skipped test module."""
        if report.skipped and self._remote.values:
            self._skip = self._skip or report.nodeid

    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, None]:
        """Look at a skipped test, or one that fails as expected."""
        before = self._remote.values
        outcome = yield
        report = outcome.get_result()
        self._passed += report.when == "call" and report.passed
        if report.skipped:
            is_marked = call.excinfo is not None and call.excinfo.traceback[-1].path.name == "skipping.py"
            is_marked = is_marked or (hasattr(report, "wasxfail") and call.excinfo.typename != "XFailed")
            if self._collected if is_marked else before:
                self._skip = self._skip or item.nodeid

    def complaint(self) -> str | None:
        """Return why exit code 0 does not count, or None."""
        if self._skip is not None:
            return f"{self._skip} was skipped, perhaps because of a value of the agent"
        return None if self._passed else "no test passed"


# ---- the agent's side ----


class Server:
    """Answers questions about modules, functions and objects of this process."""

    def __init__(self) -> None:
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}
        self._lock = threading.Lock()

    def run(self, port: int) -> None:
        """Serve connections; the first one in the main thread, which some code requires."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port))
        listener.listen(16)
        first, _ = listener.accept()
        others = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        others.start()
        self._serve(first)
        others.join()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
                frame = self._frame(_parse(_receive(connection, length)))
                connection.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError:
            connection.close()

    def _frame(self, message: dict[str, Any]) -> bytes:
        frame = json.dumps(self._answer(message)).encode()
        if len(frame) > MAX_FRAME:
            problem = f"a result of {len(frame)} bytes is too large to cross"
            frame = json.dumps({"error": [["OverflowError", "Exception"], [problem]]}).encode()
        return frame

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            arguments = [decode(each, self._resolve) for each in message.get("args", [])]
            # A module may have a callable object in the place of a function, such as a class-based decorator.
            refer = self._refer_callable if message["op"] == "get" else self._refer
            return {"value": encode(self._value(message, arguments), refer)}
        except BaseException as exc:  # the test decides about every exception, even SystemExit
            return self._error(exc)

    def _value(self, message: dict[str, Any], arguments: list[Any]) -> object:
        kind = message["op"]
        if kind == "import":
            __import__(message["name"])
            return sys.modules[message["name"]]
        target = self._objects[message["of"]]
        if kind == "get":
            if message["name"] == "__all__" and not hasattr(target, "__all__"):
                return [name for name in vars(target) if not name.startswith("_")]
            return getattr(target, message["name"])
        if kind == "set":
            setattr(target, message["name"], arguments[0])
            return None
        keywords = {name: decode(each, self._resolve) for name, each in message["kwargs"]}
        value = target(*arguments, **keywords)
        return _run_coroutine(value) if isinstance(value, types.CoroutineType) else value

    def _error(self, exc: BaseException) -> dict[str, Any]:
        names = [each.__name__ for each in type(exc).__mro__ if each.__module__ == "builtins"]
        try:
            arguments = [encode(each, lambda value: type(value).__name__) for each in exc.args]
        except Exception:
            arguments = [f"{type(exc).__name__}"]
        return {"error": [names, arguments]}

    def _resolve(self, rest: list[Any]) -> object:
        return self._objects[rest[0]]

    def _refer(self, value: object) -> Any:
        if isinstance(value, (types.ModuleType, type, *_FUNCTIONS)):
            return self._refer_callable(value)
        classes = [each.__name__ for each in type(value).__mro__ if each is not object]
        return ["o", self._number(value), "object", " ".join(classes)]

    def _refer_callable(self, value: object) -> Any:
        kind = "module" if isinstance(value, types.ModuleType) else "call"
        if kind == "call" and not callable(value):
            return self._refer(value)
        flags = getattr(getattr(value, "__code__", None), "co_flags", 0)
        if isinstance(flags, int) and flags & 0x80:
            kind = "async"
        return ["o", self._number(value), kind, str(getattr(value, "__name__", type(value).__name__))]

    def _number(self, value: object) -> int:
        with self._lock:
            number = self._numbers.setdefault(id(value), len(self._objects))
            if number == len(self._objects):
                self._objects.append(value)  # keep it alive, so that its id stays unique
        return number


_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    functools.partial,
    type(functools.lru_cache(len)),
)


def _run_coroutine(value: Coroutine[Any, Any, object]) -> object:
    import asyncio

    return asyncio.run(value)


# ---- connections of the judge to a server on the agent's side ----


class Connector:
    """Keeps connections to the host open, and joins one to the local server for each connection of the judge.

    The host announces the judge with a byte; the connector returns the byte once the server has accepted.
    """

    def __init__(self, out: int, port: int, seconds: float) -> None:
        self._out, self._port = out, port
        self._until = time.monotonic() + seconds
        """The deadline for the start of the server."""
        self._ready = threading.Event()

    def run(self, spare: int) -> None:
        """Serve until the host ends it."""
        threads = [threading.Thread(target=self._wait) for _ in range(spare)]
        for thread in threads:
            thread.start()

    def _wait(self) -> None:
        try:
            host = socket.create_connection((_HOST, self._out))
            if not self._ready.is_set():
                self._ready.set()
                os.write(1, b"ready\n")
            if host.recv(1) == b"":
                return
        except OSError:
            return
        threading.Thread(target=self._wait).start()
        server = self._connect()
        if server is None:
            host.close()
            return
        host.sendall(b"\1")
        for end in (host, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_pass_on, args=(server, host)).start()
        _pass_on(host, server)

    def _connect(self) -> socket.socket | None:
        while True:
            try:
                return socket.create_connection((_HOST, self._port))
            except OSError:
                if time.monotonic() > self._until:
                    return None
                time.sleep(0.02)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until the sender closes."""
    try:
        while True:
            data = source.recv(1 << 16)
            if not data:
                break
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            end.close()


def main(arguments: list[str]) -> None:
    """Run one of the three programs."""
    program, *rest = arguments
    if program == "judge":
        split = rest.index("--")
        modules, classes = rest[:split], ""
        if modules[-2:-1] == ["--classes"]:
            classes, modules = modules[-1], modules[:-2]
        judge(modules, classes.split(","), rest[split + 1 :])
    elif program == "connect":
        Connector(int(rest[0]), int(rest[1]), float(rest[2])).run(4)
    else:
        sys.path[:0] = [os.path.abspath(folder) for folder in rest]
        sys.argv = sys.argv[:1]
        Server().run(int(os.environ["PORT"]))


if __name__ == "__main__":
    import openenv_calls  # type: ignore[import-not-found]  # under its own name: tests import from it

    openenv_calls.main(sys.argv[1:])
