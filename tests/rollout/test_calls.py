"""Calls from a test to the agent's modules, over a socket: values cross, and nothing that crosses can do harm.

Both sides run as they do in sandboxes, here in processes of this machine; `test_checks.py` has the sandboxes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout.verify import openenv_calls
from openenv.rollout.verify.openenv_calls import CallFailed, Remote, RemoteFinder, RemoteObject, decode, encode

CALLS = Path(openenv_calls.__file__)


@pytest.fixture
def module(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Callable[[str], Any]]:
    """Serve a module with this source from another process, and return its proxy."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(source: str) -> Any:
        (tmp_path / "app.py").write_text(source)
        port = free_port()
        environment = {**os.environ, "PORT": str(port), "PYTHONPATH": str(CALLS.parent)}
        command = [sys.executable, "-m", "openenv_calls", "serve"]
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment))
        return proxy(port, 30.0, wait=True)

    yield start
    for process in processes:
        process.kill()
        process.wait()


def proxy(port: int, seconds: float, *, wait: bool = False) -> Any:
    """Return the proxy of the module `app` behind a port."""
    for _ in itertools.repeat(None, 2000 if wait else 1):
        try:
            remote = Remote(port, seconds)
            spec = RemoteFinder(remote, ["app"]).find_spec("app")
            assert spec is not None
            return RemoteFinder(remote, ["app"]).create_module(spec)
        except CallFailed as exc:
            if "Connection refused" not in str(exc):
                raise
            threading.Event().wait(0.01)
    raise AssertionError("the server did not start")


SOURCE = """
import enum, collections
LIMIT = 7
class Yes(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
class Anything:
    value = 3
    def __eq__(self, other): return True
    def __len__(self): return "long"
    def __contains__(self, item): return item == 3
    def __call__(self): return 1
class Missing(KeyError): pass
Point = collections.namedtuple("Point", "x y")
def echo(value): return value
def point(): return Point(1, 2)
def counter(): return collections.Counter("aab")
def yes(): return Yes(5)
def anything(): return Anything()
def raises(name, *args): raise getattr(__import__("builtins"), name)(*args)
def missing(): raise Missing("x")
def clear(values): values.clear(); return len(values)
def count(): yield from range(3)
def deep():
    value = []
    for _ in range(5000): value = [value]
    return value
def huge(): return 1 << 1_000_000
def large(): return "x" * 5_000_000
def circle():
    value = []
    value.append(value)
    return value
def leave():
    import os
    os._exit(0)
"""


def shown(value: Any) -> Any:
    """How a value is written: the items of a set in a fixed order, since two equal sets may have different ones."""
    return sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else repr(value)


def test_values_cross_and_are_of_the_same_type(module: Callable[[str], Any]) -> None:
    app = module(SOURCE)
    for value in [
        *(None, True, 0, -1, 1 << 53, -(1 << 200), 1.5, -0.0, math.inf, 1e308, 2j, "", "ä\0\ud800😀", b"\0\xff"),
        *([], (), {}, set(), frozenset({1}), [1, (2, [3])], {(1, "a"): {"b": None}, 1.5: [b""]}, {1, "a", (2,)}),
    ]:
        back = app.echo(value)
        assert (back, type(back), shown(back)) == (value, type(value), shown(value))
    assert math.isnan(app.echo(math.nan))
    assert app.LIMIT == 7
    assert (app.point(), app.counter()) == ((1, 2), {"a": 2, "b": 1})
    assert list(app.count()) == [0, 1, 2]


def test_what_the_agents_code_says_of_itself_does_not_cross(module: Callable[[str], Any]) -> None:
    app = module(SOURCE)
    assert app.yes() != 49
    assert type(app.yes()) is int
    thing = app.anything()
    assert isinstance(thing, RemoteObject)
    for compare in (lambda: thing == 49, lambda: thing != 49, lambda: thing < 3, lambda: [thing] == [49]):
        with pytest.raises(CallFailed, match="compared"):
            compare()
    with pytest.raises(TypeError):
        len(thing)
    assert 3 in thing
    assert thing.value == 3
    assert not hasattr(thing, "other")
    assert not hasattr(thing, "__wrapped__")  # not asked: pytest looks for it on everything that a test imports
    values = [1, 2]
    assert app.clear(values) == 0
    assert values == [1, 2]


def test_exceptions_cross_by_their_builtin_class(module: Callable[[str], Any]) -> None:
    app = module(SOURCE)
    with pytest.raises(ValueError, match="text 3"):
        app.raises("ValueError", "text 3")
    with pytest.raises(KeyError) as caught:
        app.missing()
    assert (type(caught.value), caught.value.args) == (KeyError, ("x",))
    with pytest.raises(TypeError):
        app.echo()
    with pytest.raises(OSError, match="no such"):
        app.raises("OSError", 2, "no such")


def test_an_exception_that_would_end_the_test_early_is_a_failure(module: Callable[[str], Any]) -> None:
    app = module(SOURCE)
    for name in ("SystemExit", "KeyboardInterrupt", "GeneratorExit"):
        with pytest.raises(CallFailed):
            app.raises(name, 0)
    for name in ("StopIteration", "StopAsyncIteration"):
        with pytest.raises(Exception, match="end") as caught:  # `map` would take it for the end of what it goes over
            all(map(lambda n: app.raises(name, "end"), range(3)))
        assert type(caught.value) is Exception
    assert not issubclass(CallFailed, Exception)


def test_values_that_are_too_much_are_an_exception_and_the_next_call_works(module: Callable[[str], Any]) -> None:
    app = module(SOURCE)
    for name in ("deep", "huge", "large", "circle"):
        with pytest.raises((ValueError, OverflowError)):
            getattr(app, name)()
    for argument in (lambda: 1, object(), 1 << 1_000_000, Path()):
        with pytest.raises(CallFailed):
            app.echo(argument)
    assert app.echo(1) == 1


def test_a_crash_fails_this_call_and_every_later_one(module: Callable[[str], Any]) -> None:
    app = module(SOURCE)
    echo = app.echo
    with pytest.raises(CallFailed, match="ended"):
        app.leave()
    with pytest.raises(CallFailed, match="ended"):
        echo(1)


def test_a_module_that_cannot_be_imported_is_a_failure_and_no_import_error(module: Callable[[str], Any]) -> None:
    with pytest.raises(CallFailed, match="ImportError: no"):
        module("raise ImportError('no')")


# ---- an agent's side that does not keep to the protocol ----


@pytest.fixture
def hostile(free_port: Callable[[], int]) -> Iterator[Callable[..., int]]:
    """Answer every question on a port with these bytes, then wait or close."""
    stop = threading.Event()
    threads = []

    def start(answer: bytes, *, close: bool = True) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(0.05)

        def serve() -> None:
            with listener:
                while not stop.is_set():
                    try:
                        connection, _ = listener.accept()
                    except TimeoutError:
                        continue
                    with connection:
                        connection.settimeout(5)
                        connection.recv(65536)
                        try:
                            connection.sendall(answer)
                            if not close:
                                stop.wait(30)
                        except OSError:
                            pass

        thread = threading.Thread(target=serve)
        thread.start()
        threads.append(thread)
        return int(listener.getsockname()[1])

    yield start
    stop.set()
    for thread in threads:
        thread.join()


def frame(message: object) -> bytes:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0\0",
        b"\xff\xff\xff\xff" + b"x" * 100_000,
        frame(b"x"),
        frame(b"[" * 200_000),
        frame(b'{"value": ' + b"9" * 100_000 + b"}"),
        frame(b'{"value": ' + b"[" * 90 + b"1" + b"]" * 90 + b"}"),
        frame(b'{"value": 1e999}'),
        frame(b'{"value": NaN}'),
        frame([]),
        frame({}),
        frame({"value": {"a": 1}}),
        frame({"value": ["i", "f" * 200_000]}),
        frame({"value": ["i", "xyz"]}),
        frame({"value": ["f", "1" * 100]}),
        frame({"value": ["b", "*"]}),
        frame({"value": ["s", [["l", []]]]}),
        frame({"value": ["d", [[1]]]}),
        frame({"value": ["o"]}),
        frame({"value": ["o", "1", 2, 3]}),
        frame({"value": ["x", []]}),
        frame({"value": 1}),
        frame({"end": True}),
        frame({"error": 1}),
        frame({"error": [["SystemExit"], [0]]}),
        frame({"error": [["exit"], []]}),
        frame({"error": [["CallFailed"], []]}),
        frame({"error": [["ValueError"], [["x"]]]}),
        frame({"error": [["SyntaxError"], ["a", ["t", []]]]}),
        frame({"error": [[["ValueError"]], []]}),
    ],
)
def test_what_is_no_answer_is_a_failure(hostile: Callable[..., int], answer: bytes) -> None:
    with pytest.raises(CallFailed):
        proxy(hostile(answer), 20.0)


def test_an_answer_that_does_not_come_is_a_failure(hostile: Callable[..., int]) -> None:
    with pytest.raises(CallFailed, match="in time"):
        proxy(hostile(b"\0", close=False), 0.3)


def test_random_values_are_decoded_or_refused_and_nothing_else() -> None:
    chance = random.Random(7)
    marks = ["i", "f", "b", "c", "l", "t", "s", "z", "d", "o", "x", 1, None, "1.5", "AA==", "ff", {}, [], True, -1]

    def make(depth: int) -> object:
        if depth == 0 or chance.random() < 0.4:
            return chance.choice(marks)
        return [make(depth - 1) for _ in range(chance.randrange(4))]

    decoded = 0
    for _ in range(20_000):
        value = make(5)
        try:
            result = decode(value, lambda rest: None)
        except (ValueError, TypeError, KeyError):
            continue
        decoded += 1
        assert encode(result, lambda value: pytest.fail("it is no data")) is not NotImplemented
    assert decoded > 1000
