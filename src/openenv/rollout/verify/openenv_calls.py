"""Calls from a test in one sandbox to the agent's modules in another: the programs of both sides.

    python3 -m openenv_calls judge square -- -m pytest -q tests     in the judge's sandbox: `import square` is a proxy
    python3 -m openenv_calls serve                                  in the agent's: imports and calls on request
    python3 -m openenv_calls connect OUT PORT SECONDS               in the agent's: carries connections to its server

The verifier copies this file alone into both sandboxes. Standard library only: it runs on the sandbox's Python.
"""

# How values cross between the sandboxes:
#
#   data          None, bool, int, float, complex, str, bytes, and list, tuple, set, frozenset and dict of them.
#                 A subclass crosses as the builtin that it extends.
#   reference     everything else stays in its process. The test can call it, read and set attributes, index and
#                 iterate. Comparing it is an error, because the agent's `__eq__` would decide.
#   arguments     are copies, so the agent's code cannot change the values that the test compares with.
#   exceptions    cross as the nearest builtin class, with their arguments.
#
# The agent's side only answers questions, and an answer can only be right or wrong: nothing in it is executed. Its
# size, depth and digits are limited, and every violation raises `CallFailed`.
#
# A frame is its length in four bytes, and JSON:
#
#   {"op": "import", "name": "square"}                       ->  {"value": ["o", 1, "module", "square"]}
#   {"op": "get", "of": 1, "name": "square"}                 ->  {"value": ["o", 2, "call", "square"]}
#   {"op": "call", "of": 2, "args": [7], "kwargs": []}       ->  {"value": 49}
#   {"op": "call", "of": 2, "args": [["t", [1, 2]]], ...}    ->  {"error": [["TypeError", "Exception"], ["..."]]}
#   {"op": "apply", "name": "next", "args": [["o", 5]]}      ->  {"end": true}

from __future__ import annotations

import base64
import builtins
import json
import operator
import os
import socket
import struct
import sys
import threading
import time
import types

TYPE_CHECKING = False  # type checkers treat it as True; `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from typing import Any

_LENGTH = struct.Struct(">I")
MAX_FRAME = 4 * 1024 * 1024
MAX_RECEIVED = 64 * 1024 * 1024
"""Bytes that a test process accepts from the agent's side in total."""
MAX_DEPTH = 64
MAX_DIGITS = 100_000
"""Hexadecimal digits of an integer."""
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
    if isinstance(value, int):
        return _encode_int(int.__index__(value))
    if isinstance(value, float):
        return ["f", float.__repr__(value)]
    if isinstance(value, complex):
        return ["c", float.__repr__(value.real), float.__repr__(value.imag)]
    if isinstance(value, bytes):
        return ["b", base64.b64encode(value).decode()]
    for kind, mark in _SEQUENCES.items():
        if isinstance(value, kind):
            return [mark, [encode(item, refer, depth + 1) for item in kind.__iter__(value)]]  # type: ignore[attr-defined]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return ["d", [[encode(key, refer, depth + 1), encode(item, refer, depth + 1)] for key, item in pairs]]
    return refer(value)


_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_BY_MARK: dict[str, Callable[[list[Any]], object]] = {mark: kind for kind, mark in _SEQUENCES.items()}


def _encode_int(value: int) -> Any:
    if -_EXACT < value < _EXACT:
        return value
    if value.bit_length() > 4 * MAX_DIGITS:
        raise ValueError("an integer is too long to cross")
    return ["i", f"{value:x}"]


def decode(value: Any, resolve: Callable[[list[Any]], object], depth: int = 0) -> object:
    """Return a value from JSON; `resolve` returns the object of a reference.

    Raises:
        ValueError, TypeError, KeyError: the JSON is not an encoded value.
    """
    if depth > 2 * MAX_DEPTH:
        raise ValueError("a value is nested too deeply")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        if -_EXACT < value < _EXACT:
            return value
        raise ValueError("an integer is too long")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ValueError("it is not an encoded value")
    mark, *rest = value
    if mark == "o":
        return resolve(rest)
    if mark == "c":
        real, imaginary = rest
        return complex(_decode_float(real), _decode_float(imaginary))
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
    """

    def __init__(self, port: int, seconds: float) -> None:
        self._port = port
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
            CallFailed: no valid answer came.
            StopIteration: an iterator ended.
        """
        answer = self.ask(message)
        try:
            if "error" in answer:
                raise self._exception(answer["error"])
            if answer.get("end") is True and message.get("name") == "next":
                raise StopIteration
            return decode(answer["value"], self._resolve)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as exc:
            if getattr(exc, "openenv_remote", False):
                raise
            self._failure = f"the agent's side sent an invalid answer: {exc}"
            raise CallFailed(self._failure) from None

    def _resolve(self, rest: list[Any]) -> object:
        number, kind, name = rest
        if not (isinstance(number, int) and isinstance(kind, str) and isinstance(name, str)):
            raise ValueError("it is not a reference")
        return RemoteObject(self, number, kind, name[:100])

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
    """A reference to a function, a class, an instance or an iterator on the agent's side."""

    __slots__ = ("_kind", "_name", "_number", "_remote")

    def __init__(self, remote: Remote, number: int, kind: str, name: str) -> None:
        for attribute, value in (("_remote", remote), ("_number", number), ("_kind", kind), ("_name", name)):
            object.__setattr__(self, attribute, value)

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_name')} on the agent's side>"

    def __getattr__(self, name: str) -> object:
        kind = object.__getattribute__(self, "_kind")
        # pytest and mock look for these names on every import of a test module; the agent must not answer them.
        if name.startswith("__") or name == "pytestmark" or (kind != "object" and name.startswith("_")):
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

    def _compare(self, other: object) -> bool:
        raise CallFailed(f"{self!r} cannot be compared: the agent's code would decide. Compare its data")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compare
    __hash__ = object.__hash__


async def _later(call: Callable[[], object]) -> object:
    return call()


def _applied(name: str, kind: type = object) -> Callable[..., object]:
    """Return a special method that runs on the agent's side and returns a `kind`."""

    def method(self: RemoteObject, *args: object) -> object:
        remote = object.__getattribute__(self, "_remote")
        value = remote.evaluate({"op": "apply", "name": name, "args": _encoded((self, *args))})
        if not isinstance(value, kind):
            raise CallFailed(f"{name} of {self!r} did not return a {kind.__name__}")
        return value

    return method


_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "neg",
    "abs",
    "getitem",
    "setitem",
    "delitem",
)
_APPLIED: dict[str, Callable[..., object]] = {
    "len": len,
    "str": str,
    "bool": bool,
    "iter": iter,
    "next": next,
    "contains": operator.contains,
    **{name: getattr(operator, name) for name in _OPERATORS},
}
for _name in _APPLIED:
    _kind = {"len": int, "str": str, "bool": bool, "contains": bool}.get(_name, object)
    setattr(RemoteObject, f"__{_name}__", _applied(_name, _kind))


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
        message = {"op": "get", "of": object.__getattribute__(module, "_number"), "name": name}
        return object.__getattribute__(module, "_remote").evaluate(message)

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


def judge(modules: Sequence[str], command: Sequence[str]) -> None:
    """Run Python with a command line (`-m NAME`, `-c CODE` or a file), and with proxies for some modules."""
    import runpy

    remote = Remote(int(os.environ["PORT"]), float(os.environ.get(_TIME, _DEFAULT_S)))
    sys.meta_path.insert(0, RemoteFinder(remote, modules))
    for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
        del sys.modules[name]
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": builtins})
    else:
        sys.argv = list(command)
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")


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
            return {"value": encode(self._value(message, arguments), self._refer)}
        except StopIteration as exc:
            return {"end": True} if message.get("name") == "next" else self._error(exc)
        except BaseException as exc:  # the test decides about every exception, even SystemExit
            return self._error(exc)

    def _value(self, message: dict[str, Any], arguments: list[Any]) -> object:
        kind = message["op"]
        if kind == "import":
            __import__(message["name"])
            return sys.modules[message["name"]]
        if kind == "apply":
            return _APPLIED[message["name"]](*arguments)
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
            arguments = [encode(each, self._refer) for each in exc.args]
        except Exception:
            arguments = [f"{type(exc).__name__}"]
        return {"error": [names, arguments]}

    def _resolve(self, rest: list[Any]) -> object:
        return self._objects[rest[0]]

    def _refer(self, value: object) -> Any:
        with self._lock:
            number = self._numbers.setdefault(id(value), len(self._objects))
            if number == len(self._objects):
                self._objects.append(value)  # keep it alive, so that its id stays unique
        if isinstance(value, types.ModuleType):
            kind = "module"
        elif callable(value):
            flags = getattr(getattr(value, "__code__", None), "co_flags", 0)
            kind = "async" if isinstance(flags, int) and flags & 0x80 else "call"
        else:
            kind = "object"
        return ["o", number, kind, str(getattr(value, "__name__", type(value).__name__))]


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
        judge(rest[:split], rest[split + 1 :])
    elif program == "connect":
        Connector(int(rest[0]), int(rest[1]), float(rest[2])).run(4)
    else:
        sys.path[:0] = [os.path.abspath(folder) for folder in rest]
        sys.argv = sys.argv[:1]
        Server().run(int(os.environ["PORT"]))


if __name__ == "__main__":
    import openenv_calls  # type: ignore[import-not-found]  # under its own name: tests import from it

    openenv_calls.main(sys.argv[1:])
