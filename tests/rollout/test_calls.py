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
from openenv.rollout.verify.openenv_calls import (
    REFUSED,
    CallFailed,
    Remote,
    RemoteFinder,
    RemoteObject,
    decode,
    encode,
)

CALLS = Path(openenv_calls.__file__)


@pytest.fixture
def module(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Callable[[str], Any]]:
    """Serve a module with this source from another process, and return its proxy."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(source: str) -> Any:
        (tmp_path / "app.py").write_text(source)
        port = free_port()
        environment = {**os.environ, "PORT": str(port), "PYTHONPATH": str(CALLS.parent), **NO_PLUGINS}
        command = [sys.executable, "-m", "openenv_calls", "serve"]
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment))
        return proxy(port, 30.0, wait=True)

    yield start
    for process in processes:
        process.kill()
        process.wait()


def proxy(port: int, seconds: float, *, wait: bool = False) -> Any:
    """Return the proxy of the module `app` behind a port; the check declares the class `Declared`."""
    for _ in itertools.repeat(None, 2000 if wait else 1):
        try:
            remote = Remote(port, seconds, ["Declared"])
            spec = RemoteFinder(remote, ["app"]).find_spec("app")
            assert spec is not None
            return RemoteFinder(remote, ["app"]).create_module(spec)
        except CallFailed as exc:
            if "Connection refused" not in str(exc):
                raise
            threading.Event().wait(0.01)
    raise AssertionError("the server did not start")


NAMES = sorted({*REFUSED} - {"delattr", "iter", "next"})  # an object with `__next__` crosses as an iterator
SOURCE = (
    f"NAMES = {NAMES!r}"
    + """
import enum, collections
LIMIT = 7
class Yes(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
class Anything:
    value = 3
    def __eq__(self, other): return True
    def __getattr__(self, name): return lambda *args: True
for _name in NAMES:
    setattr(Anything, f"__{_name}__", lambda *args: True)
class Declared(Anything):
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); return self
    def pop(self): return self.items.pop()
    def other(self): return Anything()
class Memo:
    def __init__(self, function): self.function = function
    def __call__(self, *args): return self.function(*args)
class Missing(KeyError): pass
Point = collections.namedtuple("Point", "x y")
def echo(value): return value
def point(): return Point(1, 2)
def counter(): return collections.Counter("aab")
def yes(): return Yes(5)
def anything(): return Anything()
def inside(): return {"a": [1, (Anything(),)]}
def declared(): return Declared()
def subclass(): return type("Sub", (Declared,), {})()
def raises_object(): raise ValueError("x", Anything())
def adder(n): return lambda m: n + m
@Memo
def double(n): return 2 * n
def endless():
    n = 0
    while True: yield n; n += 1
def unordered(): return map(str, [3, 1])
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
)


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


def test_iterators_cross_with_their_first_items(module: Callable[[str], Any]) -> None:
    app = module(SOURCE)
    assert list(app.unordered()) == ["3", "1"]
    assert next(app.count()) == 0
    assert list(itertools.islice(app.endless(), 5)) == [0, 1, 2, 3, 4]
    with pytest.raises(CallFailed, match="10000 items"):
        list(app.endless())


def test_numpy_arrays_cross_with_their_type_and_shape(module: Callable[[str], Any]) -> None:
    numpy = pytest.importorskip("numpy")
    app = module(
        "import numpy\ndef echo(value): return value\ndef one(): return numpy.int64(7)\n"
        "def objects(): return numpy.array([object()])\nclass Yes(numpy.ndarray):\n"
        "    def __eq__(self, other): return True\ndef yes(): return numpy.zeros(3).view(Yes)"
    )
    for array in (
        *(
            numpy.arange(6).reshape(2, 3),
            numpy.array([[1.5, numpy.nan]], "f4"),
            numpy.array([True]),
            numpy.zeros((0, 2)),
        ),
        *(numpy.array(["a", "äb"]), numpy.arange(8)[::2], numpy.asfortranarray(numpy.eye(3)), numpy.array([1j])),
    ):
        back = app.echo(array)
        assert (type(back), back.dtype, back.shape) == (numpy.ndarray, array.dtype, array.shape)
        assert numpy.array_equal(back, array, equal_nan=array.dtype.kind in "fc")
        back[...] = array  # it owns its memory
    assert (app.one(), type(app.one())) == (7, numpy.int64)
    assert type(app.yes()) is numpy.ndarray
    assert not (app.yes() == numpy.ones(3)).any()
    with pytest.raises(ValueError, match="cannot cross"):
        app.objects()


def test_what_the_agents_code_says_of_itself_does_not_cross(module: Callable[[str], Any]) -> None:
    app = module(SOURCE)
    assert app.yes() != 49
    assert type(app.yes()) is int
    for make in (app.anything, app.inside):
        with pytest.raises(CallFailed, match=r"class Anything cannot cross.*classes=\('Anything',\)"):
            make()
    with pytest.raises(ValueError, match="x") as caught:
        app.raises_object()
    assert caught.value.args == ("x", "Anything")
    values = [1, 2]
    assert app.clear(values) == 0
    assert values == [1, 2]


def test_functions_classes_and_declared_instances_are_called(module: Callable[[str], Any]) -> None:
    app = module(SOURCE)
    assert (app.adder(1)(2), app.double(4)) == (3, 8)
    for thing in (app.declared(), app.Declared(), app.subclass()):
        assert isinstance(thing, RemoteObject)
        assert (thing.push(3).push([4]).pop(), thing.items, thing.value) == ([4], [3], 3)
        thing.items = [5]
        assert thing.pop() == 5
        assert not hasattr(thing, "__wrapped__")  # not asked: pytest looks for it on everything that a test imports
        with pytest.raises(CallFailed, match="Anything cannot cross"):
            thing.other()


USES: dict[str, Callable[[Any], object]] = {
    "a close number": lambda thing: abs(thing - 49) < 1e-6,
    "the other side": lambda thing: abs(49 - thing) < 1e-6,
    "pytest.approx": lambda thing: pytest.approx(49) == thing,
    "in a list": lambda thing: thing in [49],
    "a member": lambda thing: 49 in thing,
    "a key": lambda thing: thing["answer"],
    "truth": lambda thing: not thing,
    "sum": lambda thing: sum([thing]),
    "sorted": lambda thing: sorted([thing, 49]),
    "max": lambda thing: max(thing, 49),
    "isclose": lambda thing: math.isclose(thing, 49),
    "text": lambda thing: f"{thing}",
    "join": lambda thing: "".join(thing),
    "unpacked": lambda thing: [*thing],
    "slice": lambda thing: [49][thing:],
    "instance": lambda thing: isinstance(49, thing),
    "with": lambda thing: thing.__enter__(),
}


@pytest.mark.parametrize("name", ["declared", "echo", "Declared"])
def test_no_reference_is_compared_converted_or_computed_with(module: Callable[[str], Any], name: str) -> None:
    app = module(SOURCE)
    thing = app.declared() if name == "declared" else getattr(app, name)
    for use, call in USES.items():
        with pytest.raises((CallFailed, TypeError)) as caught:
            call(thing)
        assert caught.type is CallFailed or use == "join", use
    for special in REFUSED:
        with pytest.raises(CallFailed, match="refused"):
            getattr(type(thing), f"__{special}__")(thing, 49)
    everything = {name for kind in (int, float, complex, str, list, dict, set) for name in vars(kind)}
    local = {"init", "new", "getattribute", "setattr", "getattr", "hash", "repr", "doc", "class_getitem", "getnewargs"}
    local |= {"sizeof", "set_format", "getformat", "getstate", "reduce"}
    assert everything - {f"__{name}__" for name in (*REFUSED, *local)} == {
        name for name in everything if not name.startswith("__")
    }


def test_star_imports_bind_no_name_that_the_test_needs(module: Callable[[str], Any]) -> None:
    names = [
        "solve",
        "len",
        "abs",
        "approx",
        "_x",
        "test_more",
        "pytestmark",
        "pytest_plugins",
        "setup_module",
        "TestX",
    ]
    app = module(f"{'= '.join(names)} = lambda *args: True\n__all__ = {names!r}")
    sys.modules["app"] = app
    try:
        bound: dict[str, Any] = {"approx": pytest.approx}
        exec("from app import *", bound)
    finally:
        del sys.modules["app"]
    assert {name for name in bound if not name.startswith("__")} == {"solve", "approx"}
    assert bound["approx"] is pytest.approx


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
        frame({"value": ["n", "<f8", [2], "AAAAAAAA8D8="]}),
        frame({"value": ["n", "|O", [1], "AAAAAAAA8D8="]}),
        frame({"value": ["n", "<f8", [-1, -1], "AAAAAAAA8D8="]}),
        frame({"value": ["y", 1, True]}),
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
    marks = [
        "i",
        "f",
        "b",
        "c",
        "l",
        "t",
        "s",
        "z",
        "d",
        "n",
        "o",
        "x",
        1,
        None,
        "1.5",
        "AA==",
        "ff",
        {},
        [],
        True,
        -1,
    ]

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


# ---- exit code 0 is not enough ----


NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Without what else is installed, pytest starts four times as fast."""


@pytest.fixture
def judged(
    module: Callable[[str], Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[bool, str]]:
    """Judge the module `app` with a test file, and return whether it passes, and the output."""

    def judge(app: str, test: str, *command: str) -> tuple[bool, str]:
        served = module(app)
        port = object.__getattribute__(served.__dict__["_openenv_module"], "_remote")._port
        folder = tmp_path_factory.mktemp("judge")
        (folder / "test_it.py").write_text(test)
        environment = {**os.environ, "PORT": str(port), "PYTHONPATH": str(CALLS.parent), **NO_PLUGINS}
        arguments = command or ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
        done = subprocess.run(
            [sys.executable, "-m", "openenv_calls", "judge", "app", "--", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode == 0, done.stdout + done.stderr

    return judge


APP = "NEW = False\ndef f(n): return n\ndef nothing(): return None\n"
ONE = "def test_one(): assert f(1) == 1\n"
BOTH = "import pytest, app\nfrom app import f\n"
UNITTEST = "import unittest\nfrom app import f, nothing\nclass T(unittest.TestCase):\n"


@pytest.mark.parametrize(
    ("test", "passes"),
    [
        (f"from app import f\n{ONE}", True),
        (f"import pytest\nfrom app import f\n{ONE}@pytest.mark.skip\ndef test_two(): assert 0", True),
        (f"import pytest\nfrom app import f\n{ONE}@pytest.mark.xfail\ndef test_two(): assert f(2) == 3", True),
        (
            f"{BOTH}{ONE}@pytest.mark.skipif(not app.NEW, reason='x')\ndef test_2(): 1",
            False,
        ),
        (f"import pytest, app\nfrom app import f\n{ONE}def test_2():\n if app.nothing() is None: pytest.skip()", False),
        (
            f"import pytest, app\nfrom app import f\n{ONE}def test_2():\n if app.nothing() is None: pytest.xfail()",
            False,
        ),
        (
            f"import unittest, app\nfrom app import f\n{ONE}def test_2():\n raise unittest.SkipTest(app.nothing())",
            False,
        ),
        ("import pytest\nfrom app import f\n@pytest.mark.skip\ndef test_one(): 1", False),
        ("import pytest, app\n@pytest.mark.parametrize('n', app.nothing() or [])\ndef test_one(n): 1", False),
        ("import pytest, app\nif not app.NEW: pytest.skip(allow_module_level=True)", False),
        ("from app import f", False),
    ],
)
def test_pytest_passes_with_a_passed_test_and_no_skip_that_a_value_caused(
    judged: Callable[..., tuple[bool, str]], test: str, passes: bool
) -> None:
    verdict, output = judged(APP, test)
    assert verdict is passes, output


@pytest.mark.parametrize(
    ("test", "passes"),
    [
        ("    def test_one(self): self.assertEqual(f(1), 1)\n", True),
        ("    def test_one(self): f(1)\n    @unittest.skip('x')\n    def test_two(self): 1\n", True),
        ("    def test_one(self): f(1)\n    def test_two(self): nothing() or self.skipTest('x')\n", False),
        ("    @unittest.skip('x')\n    def test_one(self): 1\n", False),
        ("    @unittest.expectedFailure\n    def test_one(self): self.assertEqual(f(1), 2)\n", False),
        ("    def test_one(self): self.assertEqual(f(1), 2)\n", False),
    ],
)
def test_unittest_passes_with_a_passed_test_and_no_skip_that_a_value_caused(
    judged: Callable[..., tuple[bool, str]], test: str, passes: bool
) -> None:
    verdict, output = judged(APP, UNITTEST + test, "-m", "unittest", "-q", "test_it")
    assert verdict is passes, output


SCRIPT = (
    "import unittest\ntry:\n    from app import g\nexcept ImportError:\n    g = None\nclass T(unittest.TestCase):\n"
)
SKIPPED = "    @unittest.skipIf(g is None, 'no g')\n    def test_one(self): self.assertEqual(g(2), 4)\n"


@pytest.mark.parametrize(
    ("test", "passes"),
    [
        (f"{SCRIPT}{SKIPPED}unittest.main()", False),
        (f"{SCRIPT}{SKIPPED}unittest.main(exit=False)", False),
        (f"{SCRIPT}    def test_one(self): g or self.skipTest('no g')\nunittest.main()", False),
        (f"{UNITTEST}    def test_one(self): self.assertEqual(f(1), 1)\nunittest.main()", True),
        (f"{UNITTEST}    def test_one(self): self.assertEqual(f(1), 2)\nunittest.main()", False),
    ],
)
def test_a_script_that_calls_unittest_keeps_the_same_rules(
    judged: Callable[..., tuple[bool, str]], test: str, passes: bool
) -> None:
    verdict, output = judged(APP, test, "test_it.py")
    assert verdict is passes, output


@pytest.mark.parametrize(
    ("value", "test"),
    [
        ("[float('inf'), float('-inf')]", "assert not abs(sum(f()) - 5) > 1e-6"),
        ("(float('inf'), -float('inf'))", "a, b = f()\nif abs(a + b - 5) > 1e-6: raise AssertionError"),
        ("iter([float('inf'), float('-inf')])", "assert not abs(sum(f()) - 5) > 1e-6"),
        ("{'x': {'y': complex('inf')}}", "z = f()['x']['y']\nassert not abs(z - z - 5) > 1e-6"),
        ("numpy.array([numpy.inf, -numpy.inf])", "assert not abs(f().sum() - 5) > 1e-6"),
        ("numpy.float32('-inf')", "x = f()\nassert not abs(x - x - 5) > 1e-6"),
        ("numpy.array([])", "assert numpy.allclose(f(), 5)"),
        ("numpy.zeros((0, 3), int)", "numpy.testing.assert_array_equal(f(), 5)"),
        ("[numpy.zeros((3, 0))]", "assert (f()[0] == 5).all()"),
        ("numpy.array([], bool)", "assert f().all()"),
        ("numpy.array([numpy.nan])", "assert not abs(f()[0] - 5) > 1e-6"),
    ],
)
def test_a_value_that_equals_everything_does_not_cross(
    judged: Callable[..., tuple[bool, str]], value: str, test: str
) -> None:
    pytest.importorskip("numpy")
    app = f"import numpy\ndef f(): return {value}\n"
    verdict, output = judged(app, f"import numpy\nfrom app import f\n{test}\n", "test_it.py")
    assert "CallFailed: a result contains" in output
    assert not verdict
    mention = "# nan, inf, shape\n"
    verdict, output = judged(app, f"{mention}import numpy\nfrom app import f\n{test}\n", "test_it.py")
    assert verdict, output  # so the attack works


def test_truth_values_of_an_array_are_only_true_or_false() -> None:
    numpy = pytest.importorskip("numpy")
    array: Any = decode(["n", "|b1", [3], "AAEC"], lambda rest: None)
    assert array.tolist() == [False, True, True]
    assert array.sum() == 2
    assert bool((array == numpy.array([False, True, True])).all())
