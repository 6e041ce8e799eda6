"""`PyExecutor`: code runs in a sandbox, or where none can run in a child process; its variables stay."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Iterator

import pytest

from openenv.core.tools import PyExecutor
from openenv.errors import SandboxGone, SandboxUnavailable
from openenv.sandboxes.base import Limits
from openenv.sandboxes.local import LocalSandboxes
from openenv.sandboxes.no_isolation import ProcessSandboxes


@pytest.fixture(scope="module", params=["local", "process"])
def executor(request: pytest.FixtureRequest) -> Iterator[PyExecutor]:
    backend = "local" if request.param == "local" else ProcessSandboxes(i_know_there_is_no_isolation=True)
    with PyExecutor(["json", "os", "subprocess", "sys"], sandbox=backend, timeout_s=20) as executor:
        yield executor


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("print('a'); print('b')", "a\nb\n"),
        ("1 + 1", "2"),
        ("'text'", '"text"'),
        ("value = [1, 2]", "[1, 2]"),
        ("print(1)\n2", "1\n\n2"),
        ("None", ""),
        ("{1, 2}", "{1, 2}"),
        ("safe_json_dumps({'a': {1}})", '"{\\"a\\": \\"{1}\\"}"'),
        ("import math\nmath.floor(2.5)", "2"),
        ("import json.decoder\njson.decoder.JSONDecoder.__name__", '"JSONDecoder"'),
        ("import subprocess\nsubprocess.run(['echo', 'child']).returncode", "child\n\n0"),
        ("", ""),
        ("if True:\n    pass", ""),
    ],
)
def test_a_run_has_what_was_printed_and_the_last_value(executor: PyExecutor, code: str, stdout: str) -> None:
    result = executor.run(code)
    assert (result.stdout, result.stderr, result.exit_code) == (stdout, "", 0)


def test_variables_functions_and_imports_stay(executor: PyExecutor) -> None:
    executor.run("import math\nnumber = 3\ndef square(n):\n    return n * n")
    assert executor.run("square(number) + math.floor(0.5)").stdout == "9"


def test_an_exception_has_its_traceback_and_what_was_printed_before(executor: PyExecutor) -> None:
    result = executor.run("print('before')\ndef f():\n    return 1 / 0\nf()")
    assert (result.stdout, result.exit_code) == ("before\n", 1)
    assert "return 1 / 0" in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "python_worker" not in result.stderr
    wrong = executor.run("this is no code")
    assert wrong.exit_code == 1
    assert "SyntaxError" in wrong.stderr


def test_the_code_of_an_exit_is_the_result_and_variables_stay(executor: PyExecutor) -> None:
    executor.run("kept = 1")
    assert executor.run("import sys\nsys.exit(7)").exit_code == 7
    assert executor.run("sys.exit('a reason')").model_dump() == {"stdout": "", "stderr": "a reason", "exit_code": 1}
    assert executor.run("kept").stdout == "1"


def test_only_named_modules_can_be_imported(executor: PyExecutor) -> None:
    result = executor.run("import socket")
    assert result.exit_code == 1
    assert "Import of socket is not allowed. Authorized imports are: ['collections'" in result.stderr
    assert executor.run("from os import path\npath.basename('/a/b')").stdout == '"b"'


def test_what_is_printed_between_runs_is_no_reply() -> None:
    with PyExecutor(["threading"]) as executor:
        executor.run("import threading\ndone = threading.Event()\nkept = 1")
        executor.run("import time\ndef late():\n    time.sleep(0.2)\n    print('late', flush=True)\n    done.set()")
        executor.run("threading.Thread(target=late).start()")
        time.sleep(0.4)
        assert executor.run("done.wait(10)").stdout == "true"
        assert executor.run("kept").stdout == "1"


def test_long_output_is_cut(executor: PyExecutor) -> None:
    result = executor.run("print('x' * 3_000_000)")
    assert len(result.stdout) < 1_100_000
    assert result.stdout.endswith("more bytes are left out)\n")


def test_a_process_that_dies_is_replaced(executor: PyExecutor) -> None:
    executor.run("gone = 1")
    result = executor.run("import os\nos._exit(5)")
    assert result.exit_code == 5
    assert "variables, functions and imports of earlier runs are gone" in result.stderr
    assert "NameError" in executor.run("gone").stderr


def test_code_that_takes_too_long_is_killed() -> None:
    with PyExecutor(timeout_s=0.5) as executor:
        executor.run("x = 1")
        result = executor.run("while True: pass")
        assert result.exit_code == 124
        assert "did not end within 0.5 s" in result.stderr
        assert executor.run("2").stdout == "2"


def test_the_sandbox_has_no_network_and_no_files_of_the_host() -> None:
    with PyExecutor(["*"], sandbox="local") as executor:
        refused = executor.run("import socket\nsocket.create_connection(('192.0.2.1', 80), 5)")
        assert "Network is unreachable" in refused.stderr
        assert "No such file" in executor.run("open('/etc/shadow').read()").stderr


def test_memory_is_limited_without_a_sandbox_too() -> None:
    backend = ProcessSandboxes(i_know_there_is_no_isolation=True)
    with PyExecutor(sandbox=backend, limits=Limits(memory_mb=256)) as executor:
        assert "MemoryError" in executor.run("bytes(1 << 30)").stderr


def test_installed_packages_are_visible_where_they_are_named() -> None:
    pytest.importorskip("numpy")
    with PyExecutor(["numpy"], sandbox="local") as executor:
        assert executor.run("import numpy\nnumpy.arange(3).tolist()").stdout == "[0, 1, 2]"


def test_without_bubblewrap_a_child_process_runs_the_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: LocalSandboxes) -> None:
        raise SandboxUnavailable("bubblewrap is missing")

    monkeypatch.setattr(LocalSandboxes, "check", fail)
    with caplog.at_level(logging.WARNING), PyExecutor() as executor:
        assert executor.run("1 + 1").stdout == "2"
    assert "without isolation" in caplog.text
    with pytest.raises(SandboxUnavailable):
        PyExecutor(sandbox="local")


def test_an_executor_that_is_dropped_frees_its_sandbox() -> None:
    backend = LocalSandboxes()
    executor = PyExecutor(sandbox=backend)
    executor.run("1")
    sandbox = weakref.ref(executor._session._sandbox)  # type: ignore[union-attr]
    del executor
    gc.collect()
    living = sandbox()
    if living is not None:
        with pytest.raises(SandboxGone):
            living.exec("true")
    assert backend.leftovers() == []


def test_a_closed_executor_says_so() -> None:
    executor = PyExecutor()
    executor.close()
    executor.close()
    with pytest.raises(SandboxGone):
        executor.run("1")


def test_arguments_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="list of module names"):
        PyExecutor("numpy")
    with pytest.raises(ValueError, match="timeout_s"):
        PyExecutor(timeout_s=0)
